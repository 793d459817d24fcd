"""A model with K/V in few bits beside the same model with K/V as it computes them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sigma0.bench.core.ledger import Conditions, Figure, KVRow
from sigma0.bench.speed.decoders import Ours, PromptedCache
from sigma0.calibrate.agreement import continue_alone, continue_in_full
from sigma0.calibrate.bootstrap import bootstrap, clustered_share, ratio
from sigma0.calibrate.kv import coded_share
from sigma0.calibrate.teacher_forcing import ForcedText, check_finite, divergence
from sigma0.config import FULL_KV, ExitConfig, KVConfig
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.planes import plane_codec
from sigma0.models.limits import kv_bytes

_FULL = ExitConfig(mode="full")


def at_context(prompts: Sequence[tuple[int, ...]], context: int, n: int) -> list[tuple[int, ...]]:
    """`n` prompts of `context` ids, each the last ids of some prompts in a row; 0 leaves every prompt as it is.

    Raises:
        ValueError: If there are too few.
    """
    if not context:
        return list(prompts[:n])
    rows = [tuple(chain(*prompts[row::n]))[-context:] for row in range(n)]
    short = [len(row) for row in rows if len(row) < context]
    if short:
        raise ValueError(f"{len(prompts)} prompts make no {n} of {context} ids: the shortest has {min(short)}")
    return rows


@contextmanager
def stored_in(model: Any, kv: KVConfig) -> Iterator[None]:
    """Stores K/V of new caches in a codec."""
    known = getattr(model.generation_config, "kv_config", None)
    model.generation_config.kv_config = kv
    try:
        yield
    finally:
        model.generation_config.kv_config = known


@dataclass(frozen=True)
class Computed:
    """What a model says with K/V as it computes them.

    Attributes:
        texts: Prompts with its own greedy continuations at full depth.
        log_probs: At full depth, of each continuation, float32 `[new, V]`.
        depths: Loop at which the model's own rule reads each new token, `[new]`.
        config: That rule.
    """

    texts: list[ForcedText]
    log_probs: list[Tensor]
    depths: list[Tensor]
    config: ExitConfig

    @classmethod
    def of(cls, model: Any, prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> "Computed":
        """Continues prompts, and reads what it wrote."""
        config = model.resolve_exit_config(None)
        texts = continue_in_full(model, prompts, max_new_tokens)
        log_probs, depths = zip(*(read_both(model, text, FULL_KV, config) for text in texts), strict=True)
        return cls(texts, list(log_probs), list(depths), config)


@torch.no_grad()
def read_both(model: Any, text: ForcedText, kv: KVConfig, config: ExitConfig) -> tuple[Tensor, Tensor]:
    """Log-probabilities at full depth, float32 `[new, V]`, and the loops at which a rule reads, int64 `[new]`."""
    cache = DepthCache(model.num_block_layers, model.num_loops, len(text.ids), model.stages, kv)
    ids = torch.tensor([text.ids[:-1]], device=model.device)
    read = model(ids, past_key_values=cache, exit_config=config, logits_to_keep=text.new, output_loop_states=True)
    logits = check_finite(read.loop_logits[-1, 0], model.num_loops)
    return torch.log_softmax(logits.float(), -1), read.exit_depths[0]


def compare(
    model: Any,
    computed: Computed,
    kv: KVConfig,
    conditions: Conditions,
    context: int,
    free: int,
    max_new_tokens: int,
    on_text: Callable[[], None] = lambda: None,
) -> KVRow:
    """The row of a codec, without times.

    Args:
        model: The looped model.
        computed: What it says without the codec.
        kv: The codec.
        conditions: What the row says of the run.
        context: Ids of each prompt; 0 where each has its own length.
        free: Prompts that are continued freely too.
        max_new_tokens: New tokens of those at most.
        on_text: Told of each text that was read.
    """
    same, kl, moved, sizes = [], [], [], [text.new for text in computed.texts]
    for text, reference, depths in zip(computed.texts, computed.log_probs, computed.depths, strict=True):
        found, own = read_both(model, text, kv, computed.config)
        same.append(int((reference.argmax(-1) == found.argmax(-1)).sum()))
        kl.append(float(divergence(reference, found).sum()))
        moved.append(int((own != depths).sum()))
        on_text()
    equal = []
    with stored_in(model, kv):
        for text in computed.texts[:free]:
            prompt = text.ids[: -text.new]
            told = continue_alone(model, prompt, _FULL, max_new_tokens).sequences[0, len(prompt) :]
            equal.append(tuple(told.tolist()) == text.ids[-text.new :])
    codec = plane_codec(kv, model.num_loops)
    computed_bytes = kv_bytes(model, 1, 1, model.num_loops)
    return KVRow.model_validate(
        {
            **conditions.model_dump(),
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "codec": kv.codec,
            "bits": codec.bits,
            "group": kv.group,
            "segment": kv.segment,
            "number_bits": codec.number_bits,
            "token_bytes": round(computed_bytes * codec.number_bits / (8 * model.dtype.itemsize)),
            "token_bytes_computed": computed_bytes,
            "context": context,
            "coded_share": float(np.mean([coded_share(text, kv.segment) for text in computed.texts])),
            "tokens": sum(sizes),
            "agreement": Figure.of(clustered_share(same, sizes)),
            "kl": Figure.of(ratio(np.array(kl), np.array(sizes))),
            "depths_changed": Figure.of(clustered_share(moved, sizes)),
            "same_text": Figure.of(clustered_share(equal, np.ones(len(equal)))) if equal else None,
        }
    )


def times(
    model: Any, ids: Tensor, codecs: Sequence[KVConfig], new_tokens: int, rounds: int, on_round: Callable[[], None]
) -> list[dict[str, Any]]:
    """Fields about time of each codec's row: a prompt `[1, S]` is continued under the model's own rule, in turn."""
    config = model.resolve_exit_config(None)
    ways = [FULL_KV, *codecs]
    seconds: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 1):
        for place in range(len(ways)):
            way = (place + number) % len(ways)
            with stored_in(model, ways[way]):
                taken = Ours(PromptedCache(model, ids, new_tokens), config, None).decode().seconds
            if number:  # the first round warms up
                seconds[way].append(taken)
            on_round()
    return [_time_fields(own, seconds[0], new_tokens - 1, ids.shape[1], rounds) for own in seconds[1:]]


def _time_fields(own: list[float], plain: list[float], tokens: int, context: int, rounds: int) -> dict[str, Any]:
    ratios = np.array(plain) / np.array(own)
    return {
        "timed_context": context,
        "rounds": rounds,
        "milliseconds_per_token": 1000 * min(own) / tokens,
        "milliseconds_per_token_computed": 1000 * min(plain) / tokens,
        "speed_ratio": Figure.of(bootstrap(lambda drawn: float(np.median(ratios[drawn])), len(ratios))),
    }
