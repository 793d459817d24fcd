"""Prompts of a warm model, ours beside transformers' own forward: tokens a second, and the time to the first token."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from sigma0.bench.core.conditions import device_name, git_commit
from sigma0.bench.speed.decoders import FULL, now
from sigma0.bench.speed.opened import open_model, prompt_ids
from sigma0.bench.speed.peer import StockLoopedModel
from sigma0.models.cache_name import named_cache


def prompts(device: str, dtype: str, shape: str, contexts: tuple[int, ...], rounds: int, out: Path) -> None:
    """Writes a row for each context and reader as JSON, medians over the rounds behind one that warms up."""
    model, _ = open_model("", shape, device, dtype)
    stock = StockLoopedModel(model)
    told = {"shape": shape, "dtype": dtype, "device": device_name(model.device), "torch": torch.__version__}
    rows: list[dict[str, Any]] = []
    for context in contexts:
        ids, _ = prompt_ids(model, None, "", 1, context, 2)
        mask = torch.ones_like(ids)
        positions = torch.arange(context, device=ids.device)[None]

        def read() -> None:
            model(ids, past_key_values=model.new_cache(context), exit_config=FULL, logits_to_keep=1)  # noqa: B023

        def read_stock() -> None:
            stock(ids, position_ids=positions, **named_cache(DynamicCache()), logits_to_keep=1)  # noqa: B023

        def first(reader: Any = model) -> None:
            settings = {"exit_config": FULL} if reader is model else {}
            reader.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, **settings)  # noqa: B023

        readers = (("sigma0", read, first), ("huggingface", read_stock, lambda: first(stock)))
        with torch.no_grad():
            for reader, forward, token in readers:
                seconds, until = (_seconds(call, ids, rounds) for call in (forward, token))
                row = {"reader": reader, "context": context, "rounds": rounds, "tokens_per_second": context / seconds}
                rows.append({**told, "commit": git_commit(), **row, "milliseconds_to_first_token": 1e3 * until})
        out.write_text(json.dumps(rows, indent=1) + "\n")


def _seconds(call: Callable[[], None], like: torch.Tensor, rounds: int) -> float:
    call()
    taken = []
    for _ in range(rounds):
        start = now(like)
        call()
        taken.append(now(like) - start)
    return median(taken)
