"""transformers' own decoding with a static cache under `torch.compile`, as its documentation recommends to users.

`generate(cache_implementation="static")` reads the prompt with the plain forward and calls the compiled one for every
token after the first. On accelerators it compiles by itself; elsewhere only where the compile settings say so.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache, StoppingCriteriaList
from transformers.generation import CompileConfig

from sigma0.bench.speed.decoders import Decoded, Stopwatch, now, whole_depth
from sigma0.bench.speed.peer import StockLoopedModel
from sigma0.decode.kv_store import BlockShape
from sigma0.models.cache_name import named_cache


class StaticStock:
    """That way at full depth; the first run compiles.

    Args:
        model: The looped model.
        ids: The prompt, `[B, S]`.
        new_tokens: New tokens.
        backend: Of `torch.compile`.
    """

    def __init__(self, model: Any, ids: Tensor, new_tokens: int, backend: str = "inductor") -> None:
        self._model = StockLoopedModel(model)
        self._ids = ids
        self._new_tokens = new_tokens
        self._loops = model.num_loops
        self._position_bytes = BlockShape.of(model, 1).bytes_with(model.dtype)
        # other modes than the default are transformers' own choice
        self._compile = CompileConfig(fullgraph=True, dynamic=False, backend=backend)
        self._compile._compile_all_devices = True

    @torch.no_grad()
    def prompt(self) -> float:
        """Reads the prompt but for its last token, from nothing; seconds."""
        ids = self._ids[:, :-1]
        cache = StaticCache(config=self._model.config, max_cache_len=self._ids.shape[1] + self._new_tokens)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        start = now(ids)
        self._model(ids, position_ids=positions, **named_cache(cache), logits_to_keep=1)
        return now(ids) - start

    def decode(self) -> Decoded:
        """Reads the prompt anew and continues it; timed from the first new token on."""
        marks: list[float] = []
        (batch, length), later = self._ids.shape, self._new_tokens - 1
        sequences = self._model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            cache_implementation="static",
            compile_config=self._compile,
            max_new_tokens=self._new_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([Stopwatch(marks, self._ids)]),
        )
        in_use, allocated = (batch * (length + new) * self._position_bytes for new in (later, self._new_tokens))
        return whole_depth(marks, self._loops, sequences[:, length:], in_use, allocated, "compile")
