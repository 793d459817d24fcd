"""Host time of a pass whose block is empty, and the operations that it dispatches.

The rows of a pass are those of sequences that have one token in flight each (`full`), or T each (`qexit`, where every
token stops after its first loop and fills its planes beside the next ones).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

from sigma0.bench.overhead.empty import WRITTEN, empty_looped, empty_plain
from sigma0.config import ExitConfig
from sigma0.decode.runners import RunnerName
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest

Way = Literal["library", "engine", "transformers"]
Runner = Literal["eager", "compile"]
WAYS: tuple[Way, ...] = get_args(Way)
RUNNERS: tuple[Runner, ...] = get_args(Runner)
_PROMPT = 4
_EXITS = {"one": ExitConfig(mode="full"), "all": ExitConfig(q=0.5)}


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        way: One of `WAYS`.
        runner: What calls the step; None for transformers.
        telemetry: Whether statistics are computed.
        sequences: How many.
        lanes: Tokens of each in flight: 1, or T.
        passes: To be timed in a round, about.
    """

    way: Way
    runner: Runner | None
    telemetry: bool
    sequences: int
    lanes: int
    passes: int

    @property
    def config(self) -> ExitConfig:
        """When tokens stop."""
        return _EXITS["one" if self.lanes == 1 else "all"]

    def tokens(self, loops: int) -> int:
        """New tokens of each sequence that take so many passes."""
        return max(3, self.passes // (loops if self.lanes == 1 else 1)) + 1


@dataclass(frozen=True)
class Sample:
    """A round of a case.

    Attributes:
        seconds: Of the thread that runs the passes; its own time, which others on the machine do not disturb.
        passes: How many.
        rows: Rows in them.
        operations: Dispatched operations; None where they were not counted.
    """

    seconds: float
    passes: int
    rows: int
    operations: int | None = None


class OperationCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch dispatches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def cases(
    ways: tuple[Way, ...], runners: tuple[Runner, ...], rows: tuple[int, ...], loops: int, passes: int
) -> Iterator[Case]:
    """Every way at every number of rows."""
    for count in rows:
        for way in ways:
            if way == "transformers":
                yield Case(way, None, False, count, 1, passes)
                continue
            for lanes in (1, loops):
                if count % lanes:
                    continue
                for runner in runners:
                    for telemetry in (False, True):
                        yield Case(way, runner, telemetry, count // lanes, lanes, passes)


class Bench:
    """Times cases over one empty model.

    Args:
        tokenizer: For the texts of the engine.
        loops: T.
        positions: Longest sequence.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, loops: int, positions: int) -> None:
        self.tokenizer = tokenizer
        self.looped = empty_looped(len(tokenizer), loops, positions)
        self.plain = empty_plain(len(tokenizer), positions)
        self._loops = loops

    def run(self, case: Case, counted: bool = False) -> Sample:
        """A round: the passes of some new tokens, behind prompts that are not timed."""
        run = {"library": self._library, "engine": self._engine, "transformers": self._transformers}[case.way]
        return run(case, counted)

    def _library(self, case: Case, counted: bool) -> Sample:
        ids = torch.full((case.sequences, _PROMPT), WRITTEN)
        loop, first = self.looped.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=case.tokens(self._loops),
            do_sample=False,
            exit_config=case.config,
            runner=case.runner,
            output_statistics=case.telemetry,
            custom_generate=type(self.looped).open_token_loop,
        )
        counts = loop.cache.counts

        def passes() -> tuple[int, int]:
            for _ in loop.run(first):
                pass
            return counts.passes, counts.rows

        return _timed(passes, counted)

    def _engine(self, case: Case, counted: bool) -> Sample:
        self.looped.runner = cast(RunnerName, case.runner)
        limits = EngineLimits(max_running=case.sequences, max_waiting=case.sequences, pass_rows=4096)
        engine = Engine(self.looped, self.tokenizer, "empty", limits, watch=case.telemetry)
        for _ in range(case.sequences):
            request = EngineRequest(
                (WRITTEN,) * _PROMPT, case.tokens(self._loops) + self._loops + 2, case.config, on_collapse="ignore"
            )
            engine.submit(request)
        # the prompts, and as many passes as fill the lanes
        for _ in range(2 * self._loops + 2):
            engine.step()
        before = engine.status()

        def passes() -> tuple[int, int]:
            for _ in range(case.passes):
                engine.step()
            after = engine.status()
            return after.passes - before.passes, after.rows - before.rows

        return _timed(passes, counted)

    def _transformers(self, case: Case, counted: bool) -> Sample:
        ids = torch.full((case.sequences, _PROMPT), WRITTEN)

        def tokens() -> tuple[int, int]:
            self.plain.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=case.passes, do_sample=False, eos_token_id=None
            )
            return case.passes, case.passes * case.sequences

        return _timed(tokens, counted)


def _timed(run: Callable[[], tuple[int, int]], counted: bool) -> Sample:
    if counted:
        with OperationCount() as operations:
            passes, rows = run()
        return Sample(0.0, passes, rows, operations.count)
    start = time.thread_time()
    passes, rows = run()
    return Sample(time.thread_time() - start, passes, rows)
