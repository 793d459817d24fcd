"""Texts written in batches, each token as deep as its exit rule says; rows of different depth share their passes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from sigma0.bench.harness.telemetry import BatchCost, Reading
from sigma0.config import ExitConfig
from sigma0.decode.detokenizer import truncate_at_stop


@dataclass(frozen=True)
class WriteSettings:
    """How texts are written."""

    exit_config: ExitConfig  # When tokens stop
    max_new_tokens: int  # New tokens at most, >= 1
    until: tuple[str, ...]  # Strings that end a text and are cut off
    sampling: Mapping[str, Any]  # For transformers' `generate`, `do_sample` among them


class WrittenBatch(NamedTuple):
    """The new texts in order, where their tokens were read, and what that took."""

    texts: tuple[str, ...]
    readings: tuple[Reading, ...]
    cost: BatchCost


def write(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], settings: WriteSettings) -> WrittenBatch:
    """Continues prompts, given as ids, all at once; what the context cannot hold is left out at their beginning.

    Raises:
        ValueError: If `max_new_tokens` leaves no room for a prompt.
    """
    room = model.config.max_position_embeddings - settings.max_new_tokens
    if room < 1:
        raise ValueError(
            f"max_gen_toks={settings.max_new_tokens} leaves no room for a prompt in a context of "
            f"{model.config.max_position_embeddings}"
        )
    kept = [list(ids)[-room:] for ids in prompts]
    width = max(len(ids) for ids in kept)
    pad = model.generation_config.pad_token_id or 0
    ids = torch.tensor([[pad] * (width - len(each)) + each for each in kept], device=model.device)
    seen = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in kept], device=model.device)
    criteria = [StopStringCriteria(tokenizer, list(settings.until))] if settings.until else []
    out = model.generate(
        ids,
        attention_mask=seen,
        max_new_tokens=settings.max_new_tokens,
        exit_config=settings.exit_config,
        stopping_criteria=StoppingCriteriaList(criteria),
        return_dict_in_generate=True,
        **settings.sampling,
    )
    new, depths = out.sequences[:, width:].tolist(), out.exit_depths.tolist()
    texts, readings = [], []
    for row, loops, reasons, prompt in zip(new, depths, out.exit_reasons, prompts, strict=True):
        end = len(reasons)
        text = str(tokenizer.decode(row[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False))
        texts.append(truncate_at_stop(text, settings.until))
        readings.append(Reading(tuple(loops[:end]), tuple(reasons), max(0, len(prompt) - room)))
    return WrittenBatch(tuple(texts), tuple(readings), BatchCost(out.loop_passes, out.loop_rows, out.prompt_rows))
