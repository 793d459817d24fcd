"""A model with K/V in few bits beside the same model with K/V as it computes them.

Their agreement, their time, and how many sequences an engine runs side by side in a given memory before it has to
preempt one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sigma0.bench.core.conditions import Conditions, Figure, utc_now
from sigma0.bench.core.rows import KVRow
from sigma0.bench.speed.decoders import FULL, Ours, PromptedCache, median_figure, turns
from sigma0.calibrate.agreement import continue_alone, continue_in_full
from sigma0.calibrate.bootstrap import clustered_share, ratio
from sigma0.calibrate.kv import coded_share
from sigma0.calibrate.teacher_forcing import ForcedText, check_finite, divergence
from sigma0.config import FULL_KV, KVConfig
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.kv_store import BlockShape
from sigma0.decode.planes import plane_codec
from sigma0.models.limits import kv_bytes
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, RequestOutput

# Sequences that the engines' memory is made for, with K/V as computed; their answers, and how many are compared with
# those given alone.
COMPUTED, NEW_TOKENS, COMPARED = 4, 16, 4


def at_context(prompts: Sequence[tuple[int, ...]], context: int, n: int) -> list[tuple[int, ...]]:
    """`n` prompts of `context` ids, each the last ids of some prompts in a row; 0 leaves every prompt as it is."""
    if not context:
        return list(prompts[:n])
    rows = [tuple(chain(*prompts[row::n]))[-context:] for row in range(n)]
    if (shortest := min(map(len, rows))) < context:
        raise ValueError(f"{len(prompts)} prompts make no {n} of {context} ids: the shortest has {shortest}")
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


class Computed(NamedTuple):
    """A text that a model wrote at full depth, and what it says of it with K/V as it computes them."""

    text: ForcedText  # Prompt and continuation
    log_probs: Tensor  # At full depth, of the continuation, float32 `[new, V]`
    depths: Tensor  # Loop at which the model's own rule reads each new token, `[new]`


def as_computed(model: Any, prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> list[Computed]:
    """Continues prompts, and reads what it wrote."""
    texts = continue_in_full(model, prompts, max_new_tokens)
    return [Computed(text, *_read(model, text, FULL_KV)) for text in texts]


@torch.no_grad()
def _read(model: Any, text: ForcedText, kv: KVConfig) -> tuple[Tensor, Tensor]:
    """Log-probabilities at full depth, float32 `[new, V]`, and the loops at which the model's rule reads, `[new]`."""
    cache = DepthCache(model.num_block_layers, model.num_loops, len(text.ids), model.stages, kv)
    ids, config = torch.tensor([text.ids[:-1]], device=model.device), model.resolve_exit_config(None)
    read = model(ids, past_key_values=cache, exit_config=config, logits_to_keep=text.new, output_loop_states=True)
    logits = check_finite(read.loop_logits[-1, 0], model.num_loops)
    return torch.log_softmax(logits.float(), -1), read.exit_depths[0]


def compare(
    model: Any,
    computed: Sequence[Computed],
    kv: KVConfig,
    conditions: Conditions,
    context: int,
    free: int,
    on_text: Callable[[], None],
) -> KVRow:
    """The row of a codec, without times: over what a model says without it, and over some prompts continued freely."""
    same, kl, moved, sizes = [], [], [], [text.new for text, _, _ in computed]
    for text, reference, depths in computed:
        result, current = _read(model, text, kv)
        same.append(int((reference.argmax(-1) == result.argmax(-1)).sum()))
        kl.append(float(divergence(reference, result).sum()))
        moved.append(int((current != depths).sum()))
        on_text()
    equal = []
    with stored_in(model, kv):
        for text, _, _ in computed[:free]:
            prompt = text.ids[: -text.new]
            output = continue_alone(model, prompt, FULL, conditions.max_new_tokens).sequences[0, len(prompt) :]
            equal.append(tuple(output.tolist()) == text.ids[-text.new :])
    codec = plane_codec(kv, model.num_loops)
    computed_bytes = kv_bytes(model, 1, 1, model.num_loops)
    return KVRow.model_validate(
        {
            **conditions.model_dump(),
            "time": utc_now("seconds"),
            "codec": kv.codec,
            "bits": codec.bits,
            "group": kv.group,
            "segment": kv.segment,
            "number_bits": codec.number_bits,
            "token_bytes": round(computed_bytes * codec.number_bits / (8 * model.dtype.itemsize)),
            "token_bytes_computed": computed_bytes,
            "context": context,
            "coded_share": float(np.mean([coded_share(text, kv.segment) for text, _, _ in computed])),
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
    seconds = np.zeros((len(ways), rounds + 1))
    for number, way in turns(range(len(ways)), rounds):
        with stored_in(model, ways[way]):
            seconds[way, number] = Ours(PromptedCache(model, ids, new_tokens), config, None).decode().seconds
        on_round()
    plain, *others = seconds[:, 1:]
    return [
        {
            "timed_context": ids.shape[1],
            "rounds": rounds,
            "milliseconds_per_token": 1000 * min(current) / (new_tokens - 1),
            "milliseconds_per_token_computed": 1000 * min(plain) / (new_tokens - 1),
            "speed_ratio": median_figure(plain / current),
        }
        for current in others
    ]


def side_by_side(
    model: Any, tokenizer: Any, codecs: Sequence[KVConfig], prompts: Sequence[tuple[int, ...]]
) -> list[dict[str, int]]:
    """Fields about an engine of each codec's row: all share one memory, which holds `COMPUTED` prompts as computed."""
    config, longest = model.resolve_exit_config(None), max(map(len, prompts)) + NEW_TOKENS
    requests = [EngineRequest(prompt, NEW_TOKENS, config, on_collapse="ignore") for prompt in prompts]
    shape = BlockShape.of(model, EngineLimits().page_size)
    # a token to come has its block before it is fed, and each other sequence one to spare
    memory = COMPUTED * (-(-(longest + 1) // shape.size) + 1) * shape.bytes_with(model.dtype)
    computed, _ = _run_engine(model, tokenizer, FULL_KV, requests, memory)
    result = []
    for kv in codecs:
        most, answers = _run_engine(model, tokenizer, kv, requests, memory)
        alone = [_run_engine(model, tokenizer, kv, [item], memory)[1][0] for item in requests[:COMPARED]]
        result.append(
            {
                "kv_memory": memory,
                "concurrent_tokens": longest,
                "concurrent": most,
                "concurrent_computed": computed,
                "compared_alone": len(alone),
                "same_alone": sum(current == other for current, other in zip(alone, answers, strict=False)),
            }
        )
    return result


def _run_engine(
    model: Any, tokenizer: Any, kv: KVConfig, requests: Sequence[EngineRequest], memory: int
) -> tuple[int, list[tuple[int, ...]]]:
    """Most sequences that ran at once before the first preemption, and the answer of each request."""
    with stored_in(model, kv):
        engine = Engine(model, tokenizer, "kv", EngineLimits(len(requests), len(requests), kv_bytes=memory))
        keys = [engine.submit(request) for request in requests]
        most, answers = 0, {}
        while engine.has_work:
            for key, event in engine.step():
                if isinstance(event, RequestOutput):
                    answers[key] = tuple(token.id for token in event.tokens)
            if not engine.status().preemptions:
                most = max(most, engine.status().running)
    return most, [answers[key] for key in keys]
