"""Ways to decode one and the same prompt: what they share, and ours with each setting."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigma0.bench.core.conditions import Figure
from sigma0.bench.core.replay import Trace, replaying
from sigma0.calibrate.bootstrap import bootstrap
from sigma0.config import ExitConfig
from sigma0.decode.kv_store import BlockShape

T = TypeVar("T")
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
    """One run after the prompt, over the tokens after each first."""

    seconds: float  # From the first new token to the last
    passes: int  # Calls of the shared block
    rows: int  # Rows in them
    head_rows: int  # Rows that the head read
    tokens: Tensor  # The new tokens, int64 `[B, new]`, on the host
    kv_in_use: int  # Bytes of K/V that hold tokens
    kv_allocated: int  # Bytes of K/V that are reserved
    tail_passes: int = 0  # How many of the passes only checked the tail
    runner: str = "eager"  # What called the step
    captured: bool = False  # Whether it was launched as a graph
    timed: int | None = None  # New tokens of all sequences in that time; None for those after each first

    @property
    def later(self) -> float:
        """New tokens of a sequence in that time."""
        batch, new = self.tokens.shape
        return new - 1 if self.timed is None else self.timed / batch


class Decoder(ABC):
    """A way to decode; reads the prompt `[B, S]` once and continues it as often as it is asked."""

    def __init__(self, model: Any, ids: Tensor, new_tokens: int) -> None:
        self.model, self.ids, self.new_tokens = model, ids, new_tokens
        self.position_bytes = BlockShape.of(model, 1).bytes_with(model.dtype)
        self.is_read = False

    @torch.no_grad()
    def prompt(self) -> float:
        """Reads the prompt but for its last token, from nothing; seconds."""
        start = now(self.ids)
        self.read()
        self.is_read = True
        return now(self.ids) - start

    def read(self) -> None:  # noqa: B027
        """What `prompt` times; nothing where a way has a `prompt` of its own."""

    @abstractmethod
    def decode(self) -> Decoded:
        """New tokens after the prompt, timed from the first on."""

    def whole_depth(self, seconds: float, tokens: Tensor, spare: int = 0, runner: str = "eager") -> Decoded:
        """A run of every loop of every token; `spare` positions are reserved beside those that hold tokens."""
        (batch, length), later, loops = self.ids.shape, self.new_tokens - 1, self.model.num_loops
        return Decoded(
            seconds=seconds,
            passes=loops * later,
            rows=loops * later * batch,
            head_rows=later * batch,
            tokens=tokens.cpu(),
            kv_in_use=batch * (length + later) * self.position_bytes,
            kv_allocated=batch * (length + later + spare) * self.position_bytes,
            runner=runner,
        )


class PromptedCache:
    """Our cache with a prompt `[B, S]` in it but for its last token, shared by all settings."""

    def __init__(self, model: Any, ids: Tensor, new_tokens: int) -> None:
        self.model, self.ids, self.new_tokens = model, ids, new_tokens
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


class Ours(Decoder):
    """sigma0's decoder with one setting, or with a course in its place; judged: with every token's statistics."""

    def __init__(self, prompted: PromptedCache, config: ExitConfig, trace: Trace | None, judged: bool = False) -> None:
        super().__init__(prompted.model, prompted.ids, prompted.new_tokens)
        self._prompted, self._config, self._trace, self._judged = prompted, config, trace, judged

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


def turns(ways: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Every way in each round, beside its number; round 0 warms up.

    Another way begins each round, so that none always follows the same neighbour's caches.
    """
    for number in range(rounds + 1):
        for place in range(len(ways)):
            yield number, ways[(place + number) % len(ways)]


def now(like: Tensor) -> float:
    """The time, once the device of a tensor has done what it was asked."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter()


def median_figure(values: NDArray[np.float64]) -> Figure:
    """A median over the rounds and its interval."""
    return Figure.known(bootstrap(lambda drawn: float(np.median(values[drawn])), len(values)))
