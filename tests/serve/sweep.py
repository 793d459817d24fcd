"""Fails every single call of points of `tests.serve.faults`, each in a run of its own.

`python -m tests.serve.sweep POINT...`; without points, of all of them, which takes hours.
"""

import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from functools import partial

import torch

from tests.serve.faults import POINTS, Fault
from tests.serve.mixed_run import Bench, Report, problems

# Bench and clean report, which the processes that make the runs have from the one that they fork from.
_SHARED: list[tuple[Bench, Report]] = []


def sweep(bench: Bench, point: str, clean: Report, calls: int) -> int:
    """Fails every call of a point; the number of runs with something wrong."""
    _SHARED[:] = [(bench, clean)]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        bad = sum(pool.imap_unordered(partial(_is_bad, point), range(1, calls + 1)))
    print(f"{point}: {calls} calls failed, each in a run of its own; wrong: {bad}", flush=True)
    return bad


def _is_bad(point: str, at: int) -> bool:
    ((bench, clean),) = _SHARED
    fault = Fault(point, at)
    if wrong := problems(fault, bench.run(fault), clean):
        print(point, at, wrong, flush=True)
    return bool(wrong)


def main(points: Sequence[str]) -> int:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    bench = Bench()
    clean, faults = bench.count()
    return sum(sweep(bench, point, clean, faults[point].calls) for point in points)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:] or list(POINTS))))
