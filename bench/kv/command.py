"""`python -m sigma0.bench kv`: K/V in few bits beside K/V as computed."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer

from sigma0.bench.core.conditions import describe
from sigma0.bench.core.ledger import append_row, check_ledger
from sigma0.bench.core.options import OWN, AsJsonLines, LedgerFile
from sigma0.bench.core.output import measuring, step_bar, tell_rows
from sigma0.bench.kv.measure import as_computed, at_context, compare, side_by_side, times
from sigma0.bench.kv.table import print_rows
from sigma0.bench.pocket.prompts import micro_world
from sigma0.calibrate.kv import codecs_of
from sigma0.calibrate.prompts import encode_prompts, read_prompts
from sigma0.commands.options import Device, ModelArgument, StatedDtype, Threads
from sigma0.config import KVConfig
from sigma0.models.load import load

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
        asked = named or codecs_of(looped.num_loops, segment)
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
