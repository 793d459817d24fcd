"""Fails every single call of points of `tests.serve.faults`, each in a process that forks from the mixed run there.

`python -m tests.serve.sweep POINT...`; without points, of all of them, which takes an hour or more.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence

import torch

from tests.serve.faults import POINTS, Fault
from tests.serve.mixed_run import LIMIT, Bench, Report, problems

# Seconds for the run that waits for its thousands of children, and for its requests.
LONG = 86400.0


class Branches:
    """A child of this process for each call of a point: the run so far is shared, and that call fails in the child."""

    def __init__(self, at_once: int) -> None:
        # calls in threads, from which no child can go on
        self.apart: list[int] = []
        self.is_child = False
        self._at_once, self._open, self._bad = at_once, 0, 0

    def __call__(self, call: int) -> bool:
        """Forks; whether this is the child, in which the call fails."""
        if self.is_child:
            return False
        if threading.current_thread() is not threading.main_thread():
            self.apart.append(call)
            return False
        if self._open == self._at_once:
            self._wait()
        if call % 500 == 0:
            print(f"call {call}", file=sys.stderr, flush=True)
        # asyncio takes the loop of another process for none
        loop = asyncio.get_running_loop()
        self.is_child = os.fork() == 0
        if self.is_child:
            asyncio._set_running_loop(loop)
            # a child that hangs is ended, and counts as one with something wrong
            signal.alarm(int(LIMIT))
        else:
            self._open += 1
        return self.is_child

    def _wait(self) -> None:
        self._bad += os.waitstatus_to_exitcode(os.wait()[1]) != 0
        self._open -= 1

    def wait(self) -> int:
        """For all children; how many found something wrong, or broke."""
        while self._open:
            self._wait()
        return self._bad


def sweep(bench: Bench, point: str, clean: Report) -> int:
    """Fails every call of a point, each in a run of its own; the number of runs with something wrong."""
    branches = Branches(os.cpu_count() or 1)
    fault = Fault(point, branch=branches)
    is_bad = True
    try:
        is_bad = _is_bad(fault, bench.run(fault, limit=LONG), clean)
    except BaseException:
        # a child ends below, where nobody would see it
        traceback.print_exc()
        raise
    finally:
        # a child never goes on with the work of its parent
        if branches.is_child:
            sys.stdout.flush()
            os._exit(is_bad)
    bad = is_bad + branches.wait()
    for call in branches.apart:
        alone = Fault(point, call)
        bad += _is_bad(alone, bench.run(alone), clean)
    print(f"{point}: {fault.calls} calls failed, each in a run of its own; wrong: {bad}", flush=True)
    return bad


def _is_bad(fault: Fault, report: Report, clean: Report) -> bool:
    if wrong := problems(fault, report, clean):
        print(fault.point, fault.at, wrong, flush=True)
    return bool(wrong)


def main(points: Sequence[str]) -> int:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    bench = Bench()
    clean, _ = bench.count()
    return sum(sweep(bench, point, clean) for point in points)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:] or list(POINTS))))
