"""The rows of a run: each setting beside full depth, on the same prompts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from sigma0.bench.core.conditions import Conditions, Figure, utc_now
from sigma0.bench.core.replay import Trace
from sigma0.bench.core.rows import DepthRow, DepthSample, FidelityRow
from sigma0.bench.fidelity.grid import Setting, threshold
from sigma0.bench.fidelity.runs import FULL, FreeJob, FreeRun, Work, run_job
from sigma0.calibrate.bootstrap import Estimate, bootstrap, clustered_share, ratio, saved_share
from sigma0.calibrate.teacher_forcing import ForcedText, LoopReadings
from sigma0.config import ExitConfig

TIMED = 6
ROUNDS = 3
SAMPLES = 8
_FULL_SETTING = Setting("full", FULL)
_BY_DEPTH = ("random", "oracle", "settled")


@dataclass(frozen=True)
class Bench:
    """A model, its prompts, and what full depth does with them; see `open_bench`."""

    model: Any
    tokenizer: PreTrainedTokenizerFast
    conditions: Conditions
    prompts: Sequence[tuple[int, ...]]
    answers: Sequence[str | None]
    texts: Sequence[ForcedText]  # Full depth's own greedy continuations
    readings: LoopReadings  # Their tokens at every loop, and where each rule stops
    full: Sequence[FreeRun]  # Free runs at full depth
    work: Work  # Who does everything but what is timed, which is done in this process

    def measure(self, setting: Setting) -> FidelityRow:
        """One row."""
        depths = self._depths(setting)
        runs = self._runs(setting)
        same = self.readings.same_at(depths).astype(np.float64)
        kl = self.readings.kl_at(depths).astype(np.float64)
        if setting.config.after_exit == "drop":
            same[self.readings.is_new], kl[self.readings.is_new] = self.work.forced(self.texts, setting.config)
        speed, speed_ratio = self._speed(setting)
        reasons = Counter() if setting.mode in _BY_DEPTH else Counter(why for run in runs for why in run.reasons)
        return FidelityRow.model_validate(
            {
                **self.conditions.model_dump(),
                "time": utc_now("seconds"),
                "mode": setting.mode,
                "after_exit": setting.config.after_exit,
                "settings": setting.parameters,
                "promise": setting.promise,
                **self._forced_figures(same, kl),
                **self._free_figures(runs),
                "prompt_rows": sum(run.prompt_rows for run in runs),
                "head_rows": sum(run.head_rows for run in runs),
                "new_tokens": sum(len(run.ids) for run in runs),
                "reasons": dict(reasons),
                "tokens_per_second": speed,
                "speed_ratio": speed_ratio,
                "timed": min(TIMED, len(self.prompts)),
            }
        )

    def sample(self, config: ExitConfig) -> DepthRow:
        """The depth of every new token after the first prompts."""
        samples = []
        prompts = self.prompts[:SAMPLES]
        runs = self.work.free([FreeJob(prompt, config, self.conditions.max_new_tokens) for prompt in prompts])
        for prompt, run in zip(prompts, runs, strict=True):
            tokens = [(self.tokenizer.decode([token]), depth) for token, depth in zip(run.ids, run.depths, strict=True)]
            samples.append(DepthSample(prompt=self.tokenizer.decode(list(prompt)), tokens=tuple(tokens)))
        return DepthRow(
            **self.conditions.model_dump(),
            time=utc_now("seconds"),
            mode=config.mode,
            after_exit=config.after_exit,
            settings=threshold(config),
            samples=tuple(samples),
        )

    def _depths(self, setting: Setting) -> NDArray[np.int64]:
        """Depth at which every forced token is read: under `verify` it is told at loop T, wherever it was proposed."""
        if setting.config.after_exit == "verify":
            return np.full(len(self.readings.text), self.conditions.total_loops)
        if setting.mode == "oracle":
            return self.readings.oracle
        if setting.mode == "settled":
            return self.readings.settled
        depths: NDArray[np.int64] = self.readings.exits[setting.key]
        if setting.mode != "random":
            return depths
        shuffled: NDArray[np.int64] = depths.copy()
        rng = np.random.default_rng(0)
        for marks in (self._first, self.readings.is_new & ~self._first, ~self.readings.is_new):
            shuffled[marks] = rng.permutation(depths[marks])
        return shuffled

    @property
    def _first(self) -> NDArray[np.bool_]:
        """Which forced tokens are the first new one of their text; the savings leave these out."""
        new = self.readings.is_new
        first: NDArray[np.bool_] = new & ~np.concatenate([[False], new[:-1]])
        return first

    def _runs(self, setting: Setting) -> Sequence[FreeRun]:
        if setting.mode == "full":
            return self.full
        return self.work.free([self._job(setting, number) for number in range(len(self.prompts))])

    def _job(self, setting: Setting, number: int) -> FreeJob:
        trace = self._replayed(setting, number) if setting.mode in _BY_DEPTH else None
        return FreeJob(self.prompts[number], setting.config, self.conditions.max_new_tokens, trace)

    def _replayed(self, setting: Setting, number: int) -> Trace:
        """Depths for a free run: the oracle's own, or as many drawn by lot as there may be tokens."""
        new, total = self.readings.is_new, self.conditions.total_loops
        if setting.mode == "random":
            drawn, depths = Random(f"{setting.config.q}/{number}"), self.readings.exits[setting.key]
            later = depths[new & ~self._first].tolist() or [total]
            more = drawn.choices(later, k=self.conditions.max_new_tokens - 1)
            return Trace(total, (*more, total), prompt=drawn.choice(depths[self._first].tolist()))
        mine = new & (self.readings.text == number)
        first, *later = self._depths(setting)[mine].tolist()
        return Trace(total, (*later, total), prompt=first)

    def _forced_figures(self, same: NDArray[np.float64], kl: NDArray[np.float64]) -> dict[str, Figure | None]:
        text, new, n = self.readings.text, self.readings.is_new, len(self.texts)

        def mean(
            estimate: Callable[..., Estimate | None], values: NDArray[np.float64], marks: NDArray[np.bool_]
        ) -> Figure | None:
            sums = np.bincount(text[marks], values[marks], minlength=n)
            return Figure.of(estimate(sums, np.bincount(text[marks], minlength=n)))

        everything = np.ones(len(text), dtype=np.bool_)
        return {
            "agreement": mean(clustered_share, same, everything),
            "agreement_on_answers": mean(clustered_share, same, new),
            "kl": mean(ratio, kl, everything),
            "kl_on_answers": mean(ratio, kl, new),
        }

    def _free_figures(self, runs: Sequence[FreeRun]) -> dict[str, Figure | None]:
        equal = [run.ids == full.ids for run, full in zip(runs, self.full, strict=True)]
        until = [common(run.ids, full.ids) for run, full in zip(runs, self.full, strict=True)]
        parted = [not same for same in equal]
        later = np.array([len(run.ids) - 1 for run in runs])
        most = self.conditions.total_loops * later
        ones = np.ones(len(runs))
        known = all(answer is not None for answer in self.answers)
        depths = np.array([sum(run.depths[1:]) for run in runs])
        return {
            "exact_match": Figure.of(clustered_share(equal, ones)),
            "first_divergence": Figure.of(ratio(np.array(until) * parted, parted)),
            "accuracy": Figure.of(clustered_share(self._right(runs), ones)) if known else None,
            "mean_depth": Figure.of(ratio(depths, later)),
            "depth_saved": Figure.of(saved_share(depths, most)),
            "passes_saved": Figure.of(saved_share([run.passes for run in runs], most)),
            "rows_saved": Figure.of(saved_share([run.rows for run in runs], most)),
        }

    def _right(self, runs: Sequence[FreeRun]) -> list[bool]:
        texts = self.tokenizer.batch_decode([list(run.ids) for run in runs], skip_special_tokens=True)
        known = [None if answer is None else answer.strip() for answer in self.answers]
        return [text.strip() == answer for text, answer in zip(texts, known, strict=True)]

    def _speed(self, setting: Setting) -> tuple[float, Figure | None]:
        """Tokens a second, and that over full depth's: the same prompts in turn, each taking its median time."""
        theirs, ours = [], []
        for number in range(min(TIMED, len(self.prompts))):
            full: list[FreeRun] = []
            mine: list[FreeRun] = []
            for turn in range(ROUNDS):
                # Whoever comes first may find the caches cold: they take turns.
                for is_full in (True, False) if turn % 2 == 0 else (False, True):
                    job = self._job(_FULL_SETTING if is_full else setting, number)
                    (full if is_full else mine).append(run_job(self.model, job))
            theirs.append((len(full[0].ids), median(run.seconds for run in full)))
            ours.append((len(mine[0].ids), median(run.seconds for run in mine)))
        speeds = np.array(ours)  # [N, tokens and seconds]
        others = np.array(theirs)

        def rate(timed: NDArray[np.float64]) -> float:
            tokens, seconds = timed.sum(0)
            return float(tokens / seconds)

        if setting.mode == "full":
            return rate(speeds), None
        ratio_of = bootstrap(lambda drawn: rate(speeds[drawn]) / rate(others[drawn]), len(ours))
        return rate(speeds), Figure.of(ratio_of)


def open_bench(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    conditions: Conditions,
    prompts: Sequence[tuple[int, ...]],
    answers: Sequence[str | None],
    settings: Sequence[Setting],
    spread: Callable[[list[Any]], list[Any]] | None = None,
) -> Bench:
    """Continues the prompts at full depth, and reads the texts at every loop, once for the rules of all settings."""
    doing = Work(model, spread)
    full = doing.free([FreeJob(prompt, FULL, conditions.max_new_tokens) for prompt in prompts])
    texts = [ForcedText((*prompt, *run.ids), len(run.ids)) for prompt, run in zip(prompts, full, strict=True)]
    readings = doing.read(texts, {item.key: replace(item.config, after_exit="finish") for item in settings})
    return Bench(model, tokenizer, conditions, prompts, answers, texts, readings, full, doing)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids two sequences have in common at the start."""
    for place, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return place
    return min(len(first), len(second))
