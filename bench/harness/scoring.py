"""Log-probabilities of given texts, every token read at the loop where its exit rule stops, and texts written so.

A text is read like a prompt: all loops run for all its positions, so that every later token sees what full depth would
have left behind, and each position's distribution is the one at its own exit. That is what decoding with
`after_exit="finish"` would have seen of the same tokens. Under `verify`, whose text is full depth's, full depth is
read. Under `drop`, where decoding sees less of earlier tokens, this is the probability before anything was dropped.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from sigma0.bench.harness.telemetry import BatchCost, Reading
from sigma0.config import ExitConfig
from sigma0.decode.detokenizer import truncate_at_stop
from sigma0.decode.exits import exit_reason


@dataclass(frozen=True)
class Pair:
    """A continuation to score."""

    context: tuple[int, ...]  # Ids ahead of it, at least one
    continuation: tuple[int, ...]  # Its ids, at least one

    def __post_init__(self) -> None:
        if not self.context or not self.continuation:
            raise ValueError(f"a context of {len(self.context)} ids and a continuation of {len(self.continuation)}")


class Score(NamedTuple):
    """The sum of a continuation's log-probabilities in nats, whether each id is the likeliest, and its loops."""

    logprob: float
    is_greedy: bool
    reading: Reading


def read_exit(exit_config: ExitConfig) -> ExitConfig:
    """The setting that given texts are read with: what `verify` writes is full depth's."""
    return ExitConfig(mode="full") if exit_config.after_exit == "verify" else exit_config


def score(model: Any, pairs: Sequence[Pair], exit_config: ExitConfig, batch_size: int) -> Iterator[tuple[int, Score]]:
    """Scores continuations, long ones first; those with the same ids ahead of the last are read once.

    Ids that the context cannot hold are left out at the beginning.

    Yields:
        The number of a pair, and its score.
    """
    limit = model.config.max_position_embeddings
    shared: dict[tuple[int, ...], list[int]] = {}
    for number, pair in enumerate(pairs):
        if len(pair.continuation) > limit:
            raise ValueError(
                f"a continuation of {len(pair.continuation)} tokens exceeds the model's context of {limit}"
            )
        # the last id is predicted, and never read
        shared.setdefault((pair.context + pair.continuation)[:-1][-limit:], []).append(number)
    texts = sorted(shared, key=lambda ids: (-len(ids), ids))
    for start in range(0, len(texts), batch_size):
        group = texts[start : start + batch_size]
        longest = max(len(pairs[number].continuation) for ids in group for number in shared[ids])
        for ids, read in zip(group, _read(model, group, longest, read_exit(exit_config)), strict=True):
            for number in shared[ids]:
                yield number, _score(read, pairs[number], limit)


_Read = tuple[Tensor, tuple[int, ...], tuple[str, ...]]


@torch.no_grad()
def _read(model: Any, texts: Sequence[tuple[int, ...]], last: int, exit_config: ExitConfig) -> Iterator[_Read]:
    """The last positions of each text: log-probabilities `[n, V]`, depth and reason of each."""
    # pads stand on the right, where no real token sees them
    ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(model.device)
    first = max(0, min(len(text) for text in texts) - last)
    output = model(ids, use_cache=False, exit_config=exit_config, logits_to_keep=ids.shape[1] - first)
    depths, met, broken = (item.tolist() for item in (output.exit_depths, output.exit_met, output.exit_diverged))
    for row, text in enumerate(texts):
        end = len(text) - first
        reasons = (exit_reason(exit_config.mode, *flags) for flags in zip(met[row], broken[row], strict=True))
        logprobs = torch.log_softmax(output.logits[row, :end].float(), -1)
        yield logprobs, tuple(depths[row][:end]), tuple(reasons)[:end]


def _score(read: _Read, pair: Pair, limit: int) -> Score:
    n = len(pair.continuation)
    logprobs, depths, reasons = read[0][-n:], read[1][-n:], read[2][-n:]
    targets = torch.tensor(pair.continuation, device=logprobs.device)
    left_out = max(0, len(pair.context) + n - 1 - limit)
    return Score(
        logprob=float(logprobs.gather(1, targets[:, None]).sum()),
        is_greedy=bool((logprobs.argmax(-1) == targets).all()),
        reading=Reading(depths, reasons, left_out),
    )


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
    """Continues prompts, given as ids, all at once; what the context cannot hold is left out at their beginning."""
    room = model.config.max_position_embeddings - settings.max_new_tokens
    if room < 1:
        raise ValueError(
            f"max_gen_toks={settings.max_new_tokens} leaves no room for a prompt in a context of "
            f"{model.config.max_position_embeddings}"
        )
    kept = [list(ids)[-room:] for ids in prompts]
    width = max(len(ids) for ids in kept)
    pad = model.generation_config.pad_token_id or 0
    ids = torch.tensor([[pad] * (width - len(item)) + item for item in kept], device=model.device)
    seen = torch.tensor([[0] * (width - len(item)) + [1] * len(item) for item in kept], device=model.device)
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
