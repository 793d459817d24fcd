"""Decoding by the server's engine, in this process: every sequence is a request, and all are under way at once."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sigma0.bench.core.replay import Trace, replaying
from sigma0.bench.speed.decoders import FULL, Decoded, Decoder, now
from sigma0.config import ExitConfig
from sigma0.decode.kv_store import BlockShape
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, RequestFailed, TokenOutput


def open_engine(model: Any, ids: Tensor, new_tokens: int) -> Engine:
    """An engine with room for all prompts `[B, S]` of a bench at once, so that none waits and none is preempted."""
    page, batch = EngineLimits.page_size, ids.shape[0]
    # requests may write twice what is wanted, with a draft in each lane; and a block of each is begun
    blocks = -(-(ids.shape[1] + 2 * new_tokens + model.num_loops) // page) + 1
    limits = EngineLimits(
        max_running=batch,
        max_waiting=batch,
        # what a prompt's blocks leave of it, of all sequences in one pass
        pass_rows=max(EngineLimits.pass_rows, 2 * batch * page),
        kv_bytes=batch * blocks * BlockShape.of(model, page).bytes_with(model.dtype),
    )
    # every id is a word: random weights have no tokenizer, and their text means nothing
    words = {f"w{number}": number for number in range(model.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")))
    return Engine(model, tokenizer, "bench", limits, watch=False)


class Engined(Decoder):
    """The engine, shared by all settings, with one of them, or with a course in its place."""

    def __init__(self, engine: Engine, ids: Tensor, new_tokens: int, config: ExitConfig, trace: Trace | None) -> None:
        super().__init__(engine.model, ids, new_tokens)
        self._engine, self._config, self._trace = engine, config, trace
        self._salts = count()

    def prompt(self) -> float:
        """Reads the prompts from nothing, up to a token of each; seconds."""
        # nobody else shares blocks under this salt
        request = EngineRequest((0,), 1, FULL, on_collapse="ignore", cache_salt=f"{id(self)} {next(self._salts)}")
        with self._under_way(request) as tokens:
            start = now(self.ids)
            self._run_until(tokens, 1)
            return now(self.ids) - start

    def decode(self) -> Decoded:
        """New tokens, timed while all requests are under way: from the last one's first token on."""
        request = EngineRequest((0,), 2 * self.new_tokens, self._config, on_collapse="ignore")
        engine, batch = self._engine, len(self.ids)
        replayed = nullcontext() if self._trace is None else replaying(engine.model, self._trace)
        with replayed, self._under_way(request) as tokens:
            self._run_until(tokens, 1)
            before, early = replace(engine.counts), _sum(tokens)
            start = now(self.ids)
            while _sum(tokens) < early + batch * (self.new_tokens - 1):
                self._step(tokens)
            seconds = now(self.ids) - start
            after, timed = replace(engine.counts), _sum(tokens) - early
            block = BlockShape.of(engine.model, engine.pool.size).bytes_with(engine.model.dtype)
            used = engine.pool.used * block
            self._run_until(tokens, self.new_tokens)
            written = [item[: self.new_tokens] for item in tokens.values()]
        return Decoded(
            seconds=seconds,
            passes=after.passes - before.passes,
            rows=after.rows - before.rows,
            head_rows=after.head_rows - before.head_rows,
            tokens=torch.tensor(written),
            kv_in_use=used,
            kv_allocated=engine.pool.total * block,
            runner=engine.runner.name,
            captured=engine.runner.captured,
            timed=timed,
        )

    @contextmanager
    def _under_way(self, request: EngineRequest) -> Iterator[dict[int, list[int]]]:
        """Requests for all prompts; yields the tokens of each, and ends what is left of them."""
        keys = [self._engine.submit(replace(request, prompt_ids=tuple(prompt))) for prompt in self.ids.tolist()]
        try:
            yield {key: [] for key in keys}
        finally:
            for key in keys:
                self._engine.cancel(key)

    def _run_until(self, tokens: dict[int, list[int]], length: int) -> None:
        while min(map(len, tokens.values())) < length:
            self._step(tokens)

    def _step(self, tokens: dict[int, list[int]]) -> None:
        for key, event in self._engine.step():
            if isinstance(event, RequestFailed):
                raise event
            if isinstance(event, TokenOutput):
                tokens[key].append(event.id)


def _sum(tokens: dict[int, list[int]]) -> int:
    return sum(map(len, tokens.values()))
