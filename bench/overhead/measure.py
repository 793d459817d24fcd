"""Host time of a pass whose block is empty, and the operations that it dispatches.

The rows of a pass are those of sequences that have one token in flight each (`full`), or T each (`qexit`, where every
token stops after its first loop and fills its planes beside the next ones).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

from sigma0.config import ExitConfig
from sigma0.decode.attention import PassRows
from sigma0.models.cache_name import given_cache, named_cache
from sigma0.models.ouro import OuroForCausalLM
from sigma0.models.ouro_config import OuroConfig
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest

WAYS = ("library", "engine", "transformers")
RUNNERS = ("eager", "compile")
_PROMPT = 4
_ONE, _ALL = ExitConfig(mode="full"), ExitConfig(q=0.5)
# The id that is written all the time: a word of the tokenizer of `pocket`, with a space ahead.
WRITTEN = 300
_SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    "eos_token_id": None,
}


class EmptyLoopedModel(OuroForCausalLM):
    """A looped model of which a loop returns its input, and the head the same logits for every row.

    Its gate is open: under `qexit` a token stops after its first loop, and its other loops follow beside later tokens.
    """

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        logits = torch.zeros(1, config.vocab_size)
        logits[0, WRITTEN] = 1.0
        self.register_buffer("logits", logits, persistent=False)
        with torch.no_grad():
            self.model.early_exit_gate.weight.zero_()
            self.model.early_exit_gate.bias.fill_(20.0)

    def loop(self, hidden: Tensor, rows: PassRows) -> Tensor:
        """The input."""
        return hidden

    def read(self, hidden: Tensor, rows: PassRows | None = None) -> Tensor:
        """The same logits for every row, `[R, V]`."""
        logits: Tensor = self.logits
        return logits.expand(len(hidden), -1)


class EmptyModel(LlamaForCausalLM):  # type: ignore[misc]
    """A model of transformers that does nothing but keep its cache as long as its text."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        logits = torch.zeros(1, 1, config.vocab_size)
        logits[..., WRITTEN] = 1.0
        self.register_buffer("logits", logits, persistent=False)
        self.one = nn.Parameter(torch.zeros(1))

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: DynamicCache | None = None,
        cache: DynamicCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """The same logits for every row, `[B, 1, V]`."""
        batch, length = input_ids.shape
        cache = given_cache(past_key_values, cache)
        if cache is not None:
            new = self.one.expand(batch, 1, length, 1)
            cache.update(new, new, 0)
        return CausalLMOutputWithPast(logits=self.logits.expand(batch, 1, -1), **named_cache(cache))


def empty_looped(vocabulary: int, loops: int, positions: int) -> EmptyLoopedModel:
    """An empty looped model of T loops."""
    torch.manual_seed(0)
    sizes = _SIZES | {"vocab_size": vocabulary, "max_position_embeddings": positions}
    config = OuroConfig(**sizes, num_key_value_heads=2, total_ut_steps=loops)
    model: EmptyLoopedModel = EmptyLoopedModel(config).eval()
    model.generation_config.pad_token_id = 0
    return model


def empty_plain(vocabulary: int, positions: int) -> EmptyModel:
    """An empty model of transformers."""
    sizes = _SIZES | {"vocab_size": vocabulary, "max_position_embeddings": positions}
    model: EmptyModel = EmptyModel(LlamaConfig(**sizes, bos_token_id=None, pad_token_id=0)).eval()
    return model


class Case(NamedTuple):
    """What is timed."""

    way: str  # One of `WAYS`
    runner: Any  # What calls the step; None for transformers
    telemetry: bool  # Whether statistics are computed
    sequences: int  # How many
    lanes: int  # Tokens of each in flight: 1, or T
    passes: int  # To be timed in a round, about

    @property
    def config(self) -> ExitConfig:
        """When tokens stop."""
        return _ONE if self.lanes == 1 else _ALL

    def tokens(self, loops: int) -> int:
        """New tokens of each sequence that take so many passes."""
        return max(3, self.passes // (loops if self.lanes == 1 else 1)) + 1


class Sample(NamedTuple):
    """A round of a case: passes and rows in them; seconds of the thread that runs them; operations, where counted.

    It is the thread's own time, which others on the machine do not disturb.
    """

    passes: int
    rows: int
    seconds: float
    operations: int


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


def cases(ways: Sequence[str], runners: Sequence[str], rows: Sequence[int], loops: int, passes: int) -> Iterator[Case]:
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
    """Times cases over one empty model of T loops; the tokenizer is for the texts of the engine."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, loops: int, positions: int) -> None:
        self.tokenizer = tokenizer
        self.looped = empty_looped(len(tokenizer), loops, positions)
        self.plain = empty_plain(len(tokenizer), positions)
        self._loops = loops

    def run(self, case: Case, counted: bool = False) -> Sample:
        """A round: the passes of some new tokens, after prompts that are not timed."""
        ways = {"library": self._library, "engine": self._engine, "transformers": self._transformers}
        passes = ways[case.way](case)
        if counted:
            with OperationCount() as operations:
                return Sample(*passes(), 0.0, operations.count)
        start = time.thread_time()
        return Sample(*passes(), time.thread_time() - start, 0)

    def _library(self, case: Case) -> Callable[[], tuple[int, int]]:
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

        def passes() -> tuple[int, int]:
            for _ in loop.run(first):
                pass
            return loop.cache.counts.passes, loop.cache.counts.rows

        return passes

    def _engine(self, case: Case) -> Callable[[], tuple[int, int]]:
        self.looped.runner = case.runner
        limits = EngineLimits(max_running=case.sequences, max_waiting=case.sequences, pass_rows=4096)
        engine = Engine(self.looped, self.tokenizer, "empty", limits, watch=case.telemetry)
        most = case.tokens(self._loops) + self._loops + 2
        for _ in range(case.sequences):
            engine.submit(EngineRequest((WRITTEN,) * _PROMPT, most, case.config, on_collapse="ignore"))
        # the prompts, and as many passes as fill the lanes
        for _ in range(2 * self._loops + 2):
            engine.step()
        before = engine.status()

        def passes() -> tuple[int, int]:
            for _ in range(case.passes):
                engine.step()
            after = engine.status()
            return after.passes - before.passes, after.rows - before.rows

        return passes

    def _transformers(self, case: Case) -> Callable[[], tuple[int, int]]:
        ids = torch.full((case.sequences, _PROMPT), WRITTEN)

        def tokens() -> tuple[int, int]:
            self.plain.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=case.passes, do_sample=False, eos_token_id=None
            )
            return case.passes, case.passes * case.sequences

        return tokens
