"""Whether a row's bits are those of full depth under every rule that runs all loops, alone and among others.

A text is written under each rule; then every loop's K/V of every layer, which tell the states of that loop, and the
logits of every token are compared, bit by bit. A prompt is read by other kernels than a token: what a batch does to a
pass alone is seen where one prompt, read by itself, is continued by many rows.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from sigma0.bench.speed.shapes import SEED, random_model
from sigma0.config import ExitConfig
from sigma0.decode.lockstep import catch_up
from sigma0.kernels.row_product import launch_options

ROWS, PROMPT, NEW_TOKENS = 16, 24, 12
# Which need not be equal: a prompt's products are torch's, which takes another kernel for more rows.
TOGETHER = "prompts read together and alone"
# Rows of several tokens, each at a loop of its own, in one pass.
FINISH = ExitConfig(mode="qexit", q=0.5)
# Passes of one text with and without programmatic dependent launch, and the compute capability that has it.
PASSES, PDL_CAPABILITY = 1000, (9, 0)


def rules(loops: int) -> dict[str, ExitConfig]:
    """The rules that write full depth's text, by name."""
    return {
        "full": ExitConfig(mode="full"),
        "never": ExitConfig(mode="qexit", q=1.0),
        "fixed": ExitConfig(mode="fixed", depth=loops),
        "margin": ExitConfig(mode="margin", theta=1.0),
        "verify": ExitConfig(mode="qexit", q=0.5, after_exit="verify"),
    }


@dataclass(frozen=True)
class Written:
    """What a run wrote for one sequence."""

    tokens: Tensor  # New ids `[new]`
    logits: Tensor  # That each was chosen from, `[new, V]`; the tokens where they were not kept
    keys: Tensor  # Of every loop, layer and position that was fed, `[T, L, positions, H_kv, d]`
    values: Tensor  # As `keys`
    runner: str = "eager"  # What called the step

    def first_difference(self, other: "Written") -> dict[str, Any] | None:
        """Where the bits of two runs differ first, by position, then loop, then layer; None where they do not."""
        for name in ("keys", "values"):
            differs = (getattr(self, name) != getattr(other, name)).flatten(3).any(-1)  # [T, L, positions]
            if differs.any():
                position, loop, layer = differs.permute(2, 0, 1).nonzero()[0].tolist()
                return {"what": name, "loop": loop + 1, "layer": layer, "position": position}
        for name in ("tokens", "logits"):
            differs = (getattr(self, name) != getattr(other, name)).reshape(len(getattr(self, name)), -1).any(-1)
            if differs.any():
                return {"what": name, "token": int(differs.nonzero()[0])}
        return None


def write(model: Any, ids: Tensor, config: ExitConfig, new_tokens: int, copies: int = 0) -> Written:
    """What a run writes for the first of its sequences `[B, S]`, or of copies of one whose prompt is read by itself."""
    # whoever keeps logits has every step looked at by Python, which no graph is
    logits = model.runner == "eager"
    cache = model.new_cache()
    if copies:
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=cache, exit_config=ExitConfig(mode="full"), logits_to_keep=1)
        cache.batch_repeat_interleave(copies)
        ids = ids.expand(copies, -1)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        exit_config=config,
        return_dict_in_generate=True,
        output_logits=logits,
    )
    with torch.no_grad():
        catch_up(model, cache)
    # the last new token is not fed
    kept = slice(0, ids.shape[1] + new_tokens - 1)
    keys, values = (
        torch.stack([getattr(layer, name)[:, 0, :, kept].transpose(1, 2) for layer in cache.planes], 1)
        for name in ("keys", "values")
    )
    tokens = out.sequences[0, ids.shape[1] :]
    output = torch.stack([item[0] for item in out.logits]) if logits else tokens[:, None]
    return Written(tokens, output, keys, values, out.runner.name)


def compare(
    device: str | torch.device, shapes: Sequence[str] = ("tiny",), passes: int = PASSES, new_tokens: int = NEW_TOKENS
) -> list[dict[str, Any]]:
    """Compares every rule with full depth, alone and among 16 rows, one row with its likes; dependent launch with none.

    Kernels run on CUDA, plain torch elsewhere, with random weights of some shapes in bfloat16, which have four loops.
    With dependent launch and without, one text has so many passes.

    Returns:
        For each pair: `shape`, the runner that was `asked` for, the `runner` that ran, `pair`, `rows`, `passes`,
        `equal` and `first`, where bits differ first.
    """
    place = torch.device(device)
    result: list[dict[str, Any]] = []
    for shape in shapes:
        model = random_model(shape, str(place), "bfloat16")
        generator = torch.Generator().manual_seed(SEED)
        ids = torch.randint(3, model.config.vocab_size, (ROWS, PROMPT), generator=generator).to(place)
        for runner in ("cudagraph", "eager") if place.type == "cuda" else ("eager",):
            model.runner = runner
            ran = model.num_loops * (new_tokens - 1)
            full = rules(model.num_loops)["full"]
            alone, among = (write(model, ids[:rows], full, new_tokens) for rows in (1, ROWS))
            output = {"shape": shape, "asked": runner, "runner": alone.runner}

            def tell(pair: str, rows: int, ours: Written, theirs: Written, passes: int) -> None:
                first = ours.first_difference(theirs)
                row = {"pair": pair, "rows": rows, "passes": passes, "equal": first is None, "first": first}
                result.append({**output, **row})  # noqa: B023

            for rows, expected in ((1, alone), (ROWS, among)):
                for name, config in rules(model.num_loops).items():
                    tell(f"{name} and full", rows, write(model, ids[:rows], config, new_tokens), expected, ran)
            one, many = (write(model, ids[:1], full, new_tokens, copies=copies) for copies in (1, ROWS))
            tell("copies and alone", ROWS, many, one, ran)
            tell(TOGETHER, ROWS, among, alone, ran)
            if runner != "eager" and torch.cuda.get_device_capability(place) >= PDL_CAPABILITY:
                long = passes // model.num_loops + 1
                for rows, (name, config) in product((1, ROWS), {"full": full, "finish": FINISH}.items()):
                    without, dependent = (_with_pdl(item, model, ids[:rows], config, long) for item in ("0", "1"))
                    tell(f"SIGMA0_PDL=1 and 0, {name}", rows, dependent, without, model.num_loops * (long - 1))
    return result


def _with_pdl(switch: str, model: Any, ids: Tensor, config: ExitConfig, new_tokens: int) -> Written:
    """What is written with dependent launch switched by the environment, which launches read once."""
    launch_options.cache_clear()
    try:
        with patch.dict(os.environ, {"SIGMA0_PDL": switch}):
            return write(model, ids, config, new_tokens)
    finally:
        launch_options.cache_clear()


def equality(device: str, shapes: Sequence[str], passes: int, out: Path) -> None:
    """Writes what `compare` finds as JSON; an AssertionError names the pairs whose bits differ and must not."""
    result = compare(device, shapes, passes)
    out.write_text(json.dumps(result, indent=1) + "\n")
    differ = [
        f"{row['shape']}, {row['runner']}, {row['rows']} rows: {row['pair']}"
        for row in result
        if not row["equal"] and row["pair"] != TOGETHER
    ]
    if differ:
        raise AssertionError(f"{len(differ)} of {len(result)} pairs differ, {out} says where: {'; '.join(differ)}")
