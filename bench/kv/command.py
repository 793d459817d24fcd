"""`python -m sigma0.bench kv`: a model with K/V in few bits beside the same model with K/V as it computes them.

Their agreement, their time, and how many sequences an engine runs side by side in a given memory before it has to
preempt one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch import Tensor

from sigma0.bench.core.conditions import Conditions, Figure, describe, utc_now
from sigma0.bench.core.ledger import append_row, check_ledger
from sigma0.bench.core.options import OWN, AsJsonLines, LedgerFile
from sigma0.bench.core.output import measuring, step_bar, tell_rows
from sigma0.bench.core.rows import KVRow
from sigma0.bench.kv.table import print_rows
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.speed.decoders import FULL, Ours, PromptedCache, median_figure, turns
from sigma0.calibrate.agreement import continue_alone, continue_in_full
from sigma0.calibrate.bootstrap import clustered_share, ratio
from sigma0.calibrate.kv import codecs_of, coded_share
from sigma0.calibrate.prompts import encode_prompts, read_prompts
from sigma0.calibrate.teacher_forcing import ForcedText, check_finite, divergence
from sigma0.commands.options import Device, ModelArgument, StatedDtype, Threads
from sigma0.config import FULL_KV, ExitConfig, KVConfig
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.kv_store import BlockShape
from sigma0.models.limits import kv_bytes
from sigma0.models.load import load
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, RequestOutput

# Ids of the shortest questions, of which several make a longer prompt.
_SHORTEST = 24


def kv(
    model: ModelArgument = "pocket-large",
    prompts: Annotated[
        str, typer.Option(help="pocket (questions about held-out stories), or a file: JSON lines or paragraphs.")
    ] = "pocket",
    n: Annotated[int, typer.Option("-n", "--n", min=2, help="Prompts.")] = 100,
    codecs: Annotated[
        list[str] | None,
        typer.Option("--kv", help="A codec, or a kv_config as JSON; may be given again; by default a range of them."),
    ] = None,
    contexts: Annotated[
        str, typer.Option(help="Ids of each prompt, separated by commas: several in a row; 0 for their own length.")
    ] = "0",
    segment: Annotated[int, typer.Option(help="Cache positions that are encoded together.")] = KVConfig().segment,
    free: Annotated[int, typer.Option(min=0, help="Prompts that are continued freely too.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each prompt at most.")] = 32,
    rounds: Annotated[int, typer.Option(min=0, help="Interleaved rounds of timing; 0 for none.")] = 3,
    concurrency: Annotated[
        bool, typer.Option(help="Also run an engine whose K/V hold four sequences as computed, with each codec.")
    ] = False,
    device: Device = "auto",
    dtype: StatedDtype = "float32",
    threads: Threads = 1,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Agreement, depths, bytes and time with K/V in few bits, beside K/V as computed, at several contexts.

    Tokens are compared along the model's own greedy text at full depth. Rows are appended as they are measured.
    """
    with measuring(threads):
        check_ledger(out)
        looped, tokenizer = load(model, device=device, dtype=dtype)
        named = [replace(KVConfig.parse(item), segment=segment) for item in codecs or ()]
        asked = named or codecs_of(BlockShape.of(looped, 1), segment)
        if any(not item.is_coded for item in asked):
            raise ValueError("--kv takes codecs of few bits: int8, int4, residual; what is computed stands beside them")
        lengths = _contexts(contexts, looped.config.max_position_embeddings - max_new_tokens)
        rows = []
        for context in lengths:
            needed = n * (context // _SHORTEST + 1)
            if prompts == "pocket":
                chosen, source = list(micro_world(needed)), "pocket, test split, seed 0"
            else:
                chosen, source = list(islice(read_prompts(Path(prompts)), needed)), Path(prompts).name
            ids = at_context(encode_prompts(looped, tokenizer, chosen, max_new_tokens), context, n)
            answers = [prompt.answer for prompt in chosen] if not context else [None] * len(ids)
            output = describe(looped, model, source, ids, answers[: len(ids)], max_new_tokens)
            total = len(asked) * len(ids) + (rounds + 1) * (len(asked) + 1) * bool(rounds)
            with step_bar(f"context {context or 'own'}", total, hidden=as_json) as step:
                computed = as_computed(looped, ids, max_new_tokens)
                timed = torch.tensor([max(ids, key=len)], device=looped.device)
                taken = times(looped, timed, asked, max_new_tokens, rounds, step) if rounds else [{} for _ in asked]
                engines = side_by_side(looped, tokenizer, asked, ids) if concurrency else [{} for _ in asked]
                for codec, fields, engine in zip(asked, taken, engines, strict=True):
                    row = compare(looped, computed, codec, output, context, free, step)
                    rows.append(row.model_copy(update={**fields, **engine}))
                    append_row(out, rows[-1])
    closing = f"{len(rows)} rows in {out}; python -m sigma0.bench report draws them"
    tell_rows(rows, as_json, lambda: print_rows(rows), closing)


def _contexts(text: str, most: int) -> list[int]:
    result = []
    for part in dict.fromkeys(text.split(",")):
        if not part.strip().isdigit() or not 0 <= int(part) <= most:
            raise ValueError(f"--contexts takes numbers from 0 to {most}, separated by commas, got {part!r}")
        result.append(int(part))
    return result


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
    ids, config = torch.tensor([text.ids[:-1]], device=model.device), model.resolve_exit_config(None)

    def new_cache() -> DepthCache:
        return DepthCache(model.num_block_layers, model.num_loops, len(text.ids), model.stages, kv)

    def read(config: ExitConfig) -> Any:
        return model(ids, past_key_values=new_cache(), exit_config=config, logits_to_keep=text.new)

    full = read(FULL)
    logits = check_finite(full.logits[0], model.num_loops)
    if config.mode in ("full", "fixed") or not model.stages[1]:
        depths = (full if config.mode == "full" else read(config)).exit_depths[0]
    else:
        # one after the other: the next ones read the K/V that a coda has left at these exits
        cache, start = new_cache(), ids.shape[1] - text.new
        spans = [ids[:, : start + 1], *ids[0, start + 1 :, None, None]]
        steps = [model(span, past_key_values=cache, exit_config=config, logits_to_keep=1) for span in spans]
        depths = torch.cat([step.exit_depths[0] for step in steps])
    return torch.log_softmax(logits.float(), -1), depths


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
    shape = BlockShape.of(model, 1)
    computed_bytes = kv_bytes(model, 1, 1, model.num_loops)
    return KVRow.model_validate(
        {
            **conditions.model_dump(),
            "time": utc_now("seconds"),
            "codec": kv.codec,
            "bits": kv.bits_of(model.num_loops),
            "group": kv.group,
            "segment": kv.segment,
            "number_bits": shape.number_bits(kv),
            "token_bytes": shape.bytes_with(model.dtype, shape.codecs(kv)),
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
