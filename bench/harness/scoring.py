"""Log-probabilities of given texts, every token read at the loop where its exit rule stops.

A text is read like a prompt: all loops run for all its positions, so that every later token sees what full depth would
have left behind, and each position's distribution is the one at its own exit. That is what decoding with
`after_exit="finish"` would have seen of the same tokens. Under `verify`, whose text is full depth's, full depth is
read. Under `drop`, where decoding sees less of earlier tokens, this is the probability before anything was dropped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sigma0.bench.harness.telemetry import Reading
from sigma0.config import ExitConfig
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

    Raises:
        ValueError: If a continuation alone exceeds the model's context.
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
    depths, met, broken = (each.tolist() for each in (output.exit_depths, output.exit_met, output.exit_diverged))
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
