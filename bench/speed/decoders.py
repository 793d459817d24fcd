"""Ways to decode one and the same prompt: ours with each setting, and transformers' own."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from sigma0.bench.core.ledger import Figure
from sigma0.bench.core.replay import Trace, replaying
from sigma0.bench.speed.peer import StockLoopedModel
from sigma0.calibrate.bootstrap import bootstrap
from sigma0.config import ExitConfig
from sigma0.models.cache_name import named_cache

FULL = ExitConfig(mode="full")
# Ways whose tokens stop early.
ADAPTIVE = ("finish", "drop", "verify")
# A way of its own, which takes the code and a Python that runs it.
PUBLISHED = "published"
# Plain loops over the same layers that decode as others propose to; for one sequence.
PLAIN = ("self-speculation", "one-branch", "two-branches")
# Ways that are not sigma0's, and read the prompt themselves.
OTHERS = ("huggingface", "huggingface-static", *PLAIN, PUBLISHED)


@dataclass(frozen=True)
class Decoded:
    """One run behind the prompt, over the tokens after each first.

    Attributes:
        seconds: From the first new token to the last.
        passes: Calls of the shared block.
        rows: Rows in them.
        head_rows: Rows that the head read.
        tail_passes: How many of the passes only checked the tail.
        tokens: The new tokens, int64 `[B, new]`, on the host.
        kv_in_use: Bytes of K/V that hold tokens.
        kv_allocated: Bytes of K/V that are reserved.
        runner: What called the step.
        captured: Whether it was launched as a graph.
        timed: New tokens of all sequences in that time; None for those after each first.
    """

    seconds: float
    passes: int
    rows: int
    head_rows: int
    tail_passes: int
    tokens: Tensor
    kv_in_use: int
    kv_allocated: int
    runner: str = "eager"
    captured: bool = False
    timed: int | None = None


class Decoder(Protocol):
    """A way to decode; reads the prompt once and continues it as often as it is asked."""

    def prompt(self) -> float:
        """Reads the prompt but for its last token, from nothing; seconds."""

    def decode(self) -> Decoded:
        """New tokens behind the prompt."""


class PromptedCache:
    """Our cache with a prompt in it but for its last token, shared by all settings.

    Args:
        model: The looped model.
        ids: The prompt, `[B, S]`.
        new_tokens: Tokens to make room for.
    """

    def __init__(self, model: Any, ids: Tensor, new_tokens: int) -> None:
        self.model = model
        self.ids = ids
        self.new_tokens = new_tokens
        self.cache = model.new_cache()

    @torch.no_grad()
    def read(self) -> float:
        """Reads the prompt from nothing; seconds."""
        self.cache = self.model.new_cache(self.ids.shape[1] + self.new_tokens)
        start = now(self.ids)
        self.model(self.ids[:, :-1], past_key_values=self.cache, exit_config=FULL, logits_to_keep=1)
        return now(self.ids) - start

    def rewind(self) -> None:
        """Back to the end of the prompt."""
        if not self.cache.length:
            self.read()
        self.cache.crop(self.ids.shape[1] - 1 - self.cache.length)


class Ours:
    """sigma0's decoder with one setting.

    Args:
        prompted: The prompt.
        config: When tokens stop, and what follows.
        trace: A course to replay in place of the rule, or None.
        judged: Whether every token's statistics are told, as a verdict needs them.
    """

    def __init__(self, prompted: PromptedCache, config: ExitConfig, trace: Trace | None, judged: bool = False) -> None:
        self._prompted = prompted
        self._config = config
        self._trace = trace
        self._judged = judged

    def prompt(self) -> float:
        """Reads the prompt; seconds."""
        return self._prompted.read()

    def decode(self) -> Decoded:
        """New tokens, timed from the first on."""
        prompted, model = self._prompted, self._prompted.model
        prompted.rewind()
        with nullcontext() if self._trace is None else replaying(model, self._trace):
            loop, first = model.generate(
                prompted.ids,
                attention_mask=torch.ones_like(prompted.ids),
                past_key_values=prompted.cache,
                max_new_tokens=prompted.new_tokens,
                do_sample=False,
                eos_token_id=None,
                exit_config=self._config,
                custom_generate=type(model).open_token_loop,
                output_statistics=self._judged,
            )
            start = now(prompted.ids)
            for _ in loop.run(first):
                pass
            seconds = now(prompted.ids) - start
        cache, chosen = prompted.cache, loop.runner.chosen
        return Decoded(
            seconds=seconds,
            passes=cache.counts.passes,
            rows=cache.counts.rows,
            head_rows=cache.counts.head_rows,
            tail_passes=getattr(loop, "tail_passes", 0),
            tokens=loop.sequences[:, prompted.ids.shape[1] :].cpu(),
            kv_in_use=cache.bytes_in_use,
            kv_allocated=cache.bytes_allocated,
            runner=chosen.name,
            captured=chosen.captured,
        )


class Stock:
    """transformers' own decoding at full depth.

    Args:
        model: The looped model.
        ids: The prompt, `[B, S]`.
        new_tokens: New tokens.
    """

    def __init__(self, model: Any, ids: Tensor, new_tokens: int) -> None:
        self._model = StockLoopedModel(model)
        self._ids = ids
        self._new_tokens = new_tokens
        self._loops = model.num_loops
        self._cache: DynamicCache | None = None

    @torch.no_grad()
    def prompt(self) -> float:
        """Reads the prompt but for its last token, from nothing; seconds."""
        self._cache = DynamicCache()
        ids = self._ids[:, :-1]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        start = now(ids)
        self._model(ids, position_ids=positions, past_key_values=self._cache, logits_to_keep=1)
        return now(ids) - start

    def decode(self) -> Decoded:
        """New tokens, timed from the first on."""
        if self._cache is None:
            self.prompt()
        cache = self._cache
        assert cache is not None
        cache.crop(-(cache.get_seq_length() - (self._ids.shape[1] - 1)))
        marks: list[float] = []
        sequences = self._model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            **named_cache(cache),
            max_new_tokens=self._new_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([Stopwatch(marks, self._ids)]),
        )
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return whole_depth(marks, self._loops, sequences[:, self._ids.shape[1] :], held, held)


def whole_depth(
    marks: list[float], loops: int, tokens: Tensor, kv_in_use: int, kv_allocated: int, runner: str = "eager"
) -> Decoded:
    """A run of transformers' `generate`, every loop of every token.

    Args:
        marks: A `Stopwatch`'s.
        loops: T.
        tokens: The new ones, int64 `[B, new]`.
        kv_in_use: As `Decoded` says, like the two behind it.
        kv_allocated: The same.
        runner: The same.
    """
    batch, new = tokens.shape
    return Decoded(
        seconds=marks[-1] - marks[0],
        passes=loops * (new - 1),
        rows=loops * (new - 1) * batch,
        head_rows=(new - 1) * batch,
        tail_passes=0,
        tokens=tokens.cpu(),
        kv_in_use=kv_in_use,
        kv_allocated=kv_allocated,
        runner=runner,
    )


class Stopwatch(StoppingCriteria):  # type: ignore[misc]
    """Notes the time of every token; stops nothing."""

    def __init__(self, marks: list[float], like: Tensor) -> None:
        self._marks = marks
        self._like = like

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Stops nobody, bool `[B]`."""
        self._marks.append(now(self._like))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def now(like: Tensor) -> float:
    """The time, once the device of a tensor has done what it was asked."""
    wait: Callable[[], None] = torch.cuda.synchronize if like.is_cuda else lambda: None
    wait()
    return time.perf_counter()


def median_figure(values: NDArray[np.float64]) -> Figure:
    """A median over the rounds and its interval."""
    figure = Figure.of(bootstrap(lambda drawn: float(np.median(values[drawn])), len(values)))
    assert figure is not None
    return figure
