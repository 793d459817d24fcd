"""`sigma0 size`: the sequences that fit into a memory, computed from a model's configuration."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from sigma0.checkpoints import CHECKPOINTS, resolve_model, shipped_models
from sigma0.commands.console import one_line_errors
from sigma0.commands.options import KV, AsJson, Recurrence, StatedDtype, Stride
from sigma0.errors import first_line
from sigma0.serve.command import parse_bytes
from sigma0.serve.sizing import MemoryFit, ModelShape, Serving, fit, parameters, stored_bytes, weight_bytes

# The published models, so that no checkpoint is needed: what their config.json says of sizes.
_OURO = {
    "model_type": "ouro",
    "vocab_size": 49_152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 65_536,
    "tie_word_embeddings": False,
    "total_ut_steps": 4,
}
HUGINN, NANBEIGE = "huginn-0125", "nanbeige4.2-3b"
# Of Nanbeige4.2-3B's config.json these are not known here. The vocabulary is its predecessor's, and with it the width
# gives the 4.17 B parameters that are told of the model.
ASSUMED = {"vocab_size": 166_144, "intermediate_size": 10_752, "max_position_embeddings": 262_144}
PUBLISHED: dict[str, dict[str, Any]] = {
    "ouro-1.4b": {**_OURO, "num_hidden_layers": 24},
    "ouro-2.6b": {**_OURO, "num_hidden_layers": 48},
    HUGINN: {
        "model_type": "huginn_raven",
        "padded_vocab_size": 65_536,
        "n_embd": 5280,
        "intermediate_size": 17_920,
        "n_layers_in_prelude": 2,
        "n_layers_in_recurrent_block": 4,
        "n_layers_in_coda": 2,
        "n_heads": 55,
        "num_key_value_heads": 55,
        "head_dim": 96,
        "max_position_embeddings": 4096,
        "block_layout": "sandwich",
        "qk_bias": True,
        "tie_embeddings": True,
        "tie_word_embeddings": True,
        "mean_recurrence": 32,
        "recurrence": None,
        "stride": 1,
    },
    NANBEIGE: {
        "model_type": "nanbeige",
        "hidden_size": 3072,
        "num_hidden_layers": 22,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "num_loops": 2,
        **ASSUMED,
    },
}
OWNERS = ("", "bytedance", "tomg-group-umd")
# Bytes of a number.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


def size(
    model: Annotated[
        str,
        typer.Argument(help=f"{', '.join(PUBLISHED)}; a shipped name, folder (a retrofit's, say), or hub id."),
    ],
    context: Annotated[
        str,
        typer.Option(
            help="Tokens of a sequence, prompt and answer; comma-separated. By default 4096 or all that the model has."
        ),
    ] = "",
    memory: Annotated[str, typer.Option(help="Of the device: 24GB (10^9 bytes) or 24GiB; comma-separated.")] = "24GB",
    dtype: StatedDtype = "bfloat16",
    page_size: Annotated[int, typer.Option(help="Tokens of a block of K/V.")] = 16,
    max_running: Annotated[int, typer.Option(help="Requests that run at most.")] = 16,
    pass_rows: Annotated[int, typer.Option(help="Rows up to which prefill may fill a pass.")] = 256,
    spare: Annotated[float, typer.Option(help="Share of the memory that is left free.")] = 0.1,
    kv: KV = None,
    recurrence: Recurrence = None,
    stride: Stride = None,
    as_json: AsJson = False,
) -> None:
    """Compute how many sequences fit into a memory beside the weights; nothing is loaded or measured."""
    from sigma0.config import KVConfig

    with one_line_errors():
        if dtype not in DTYPES:
            raise ValueError(f"--dtype {dtype!r} is none of {', '.join(DTYPES)}")
        stored = None if kv is None else KVConfig.parse(kv)
        serving = Serving(DTYPES[dtype], page_size, max_running, pass_rows, spare, stored)
        shape = shape_of(model, recurrence, stride)
        memories = [_memory(amount) for amount in memory.split(",")]
        fits = [
            fit(shape, serving, device_bytes, tokens)
            for device_bytes in memories
            for tokens in _counts(context or str(min(4096, shape.positions)))
        ]
        result = as_dict(model, dtype, shape, serving, fits)
    if model.lower() == NANBEIGE:
        output = ", ".join(f"{name} {value:,}" for name, value in ASSUMED.items())
        typer.echo(
            f"note: assumed of {model}, not read: {output}; its hub id reads them from its config.json", err=True
        )
    typer.echo(json.dumps(result, indent=1) if as_json else size_table(model, dtype, shape, serving, fits))


def shape_of(model: str, recurrence: int | None = None, stride: int | None = None) -> ModelShape:
    """The shape of a published model by name, or of a checkpoint by its configuration.

    Args:
        model: Name, folder or hub id.
        recurrence: T; None for the model's own.
        stride: Loops of a Raven that a pass runs.

    Raises:
        ValueError: If it is neither, or has no loops.
    """
    owner, _, name = model.lower().rpartition("/")
    name = name.removesuffix("-thinking") if owner in OWNERS and not Path(model).is_dir() else ""
    source = "" if name in PUBLISHED else resolve_model(model)
    values = PUBLISHED.get(name)
    if model in shipped_models():
        values = json.loads((CHECKPOINTS / model / "config.json").read_text())
    if values is not None and recurrence is None and stride is None:
        # known to be complete and right, so that what checks and fills in others need not be imported
        return ModelShape.of(SimpleNamespace(**_DERIVED[values["model_type"]](values), **values))

    from sigma0.models import family_class
    from sigma0.models.loop_settings import set_loops

    if values is not None:
        config = family_class(values["model_type"], "config")(**values)
    else:
        from huggingface_hub.errors import HFValidationError

        from sigma0.models.load import hub_options, read_config

        try:
            config = read_config(model, source, hub_options(source))
        except (OSError, HFValidationError) as error:
            raise ValueError(f"{model!r} could not be loaded: {first_line(error)}") from error
    set_loops(model, config, recurrence, stride)
    return ModelShape.of(config)


# What the configurations compute of their fields.
_DERIVED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ouro": lambda values: {"num_loops": values["total_ut_steps"]},
    "nanbeige": lambda values: {},
    "huginn_raven": lambda values: {
        "layout": values["block_layout"],
        "loops": values["recurrence"] or values["mean_recurrence"],
    },
}


def _memory(text: str) -> int:
    count = parse_bytes(text, "--memory")
    if count < 2**20:
        raise ValueError(f"--memory {text!r} is {count} bytes: give a unit, such as 24GB or 24GiB")
    return count


def _counts(text: str) -> list[int]:
    try:
        return [int(tokens) for tokens in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--context {text!r} is no list of whole numbers such as 4096,32768") from error


def as_dict(model: str, dtype: str, shape: ModelShape, serving: Serving, fits: Sequence[MemoryFit]) -> dict[str, Any]:
    """All values as JSON; amounts are bytes."""
    return {
        "kind": "computed",
        "model": model,
        "dtype": dtype,
        "shape": asdict(shape),
        "serving": asdict(serving),
        "parameters": parameters(shape),
        "weights": weight_bytes(shape, serving.number_bytes),
        "token": stored_bytes(shape, serving),
        "fits": [asdict(row) for row in fits],
    }


def size_table(model: str, dtype: str, shape: ModelShape, serving: Serving, fits: Sequence[MemoryFit]) -> str:
    """The same as Markdown; GB are 10^9 bytes."""
    weights, token = weight_bytes(shape, serving.number_bytes), stored_bytes(shape, serving)
    few_bits = ""
    if serving.kv is not None and serving.kv.is_coded:
        few_bits = (
            f" as {serving.kv.codec}, and {amount(fits[0].under_way)} for the segments under way of {serving.running} "
            "sequences"
        )
    lines = [
        f"Computed, not measured: {model}, {loops_of(shape)}, {shape.kv_heads} K/V heads of "
        f"{shape.head_dim}, {dtype}. Weights {amount(weights)} ({parameters(shape) / 1e6:,.1f} M numbers); K/V of a "
        f"token {token / 1024:,g} KiB{few_bits} in pages of {serving.page_size}; {serving.spare:.0%} of the memory "
        "left alone.",
        "",
        "| memory | context | a pass, at most | K/V of one sequence | sequences that fit | tokens of K/V in all |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in fits:
        cells = (
            amount(row.memory),
            f"{row.context:,}",
            amount(row.a_pass),
            amount(row.sequence),
            f"{row.sequences:,}",
            f"{row.tokens:,}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def loops_of(shape: ModelShape) -> str:
    """Layers and how often they run, in words."""
    core = f"{shape.layers} layers x {shape.loops * shape.stride} loops"
    once = f"{core} between {shape.prelude} and {shape.coda} that run once"
    return once if shape.prelude + shape.coda else core


def amount(count: int) -> str:
    """Bytes in three digits; 1 GB is 10^9 of them."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} bytes"
