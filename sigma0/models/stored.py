"""Checks of a checkpoint's files by their headers, before the model is built."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from sigma0.models.quantization import may_be_integers

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file.

    Attributes:
        dtype: As safetensors names it.
        shape: Its sizes.
    """

    dtype: str
    shape: tuple[int, ...]


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """The tensors in a folder's safetensors files by name; their data are not read.

    Raises:
        ValueError: For a truncated file or another format.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    part = file.get_slice(name)
                    tensors[name] = StoredTensor(part.get_dtype(), tuple(part.get_shape()))
        except SafetensorError as error:
            raise ValueError(f"{str(path)!r} could not be loaded: no whole safetensors file: {error}") from error
    return tensors


def check_dtypes(tensors: Mapping[str, StoredTensor], quantized: bool = False) -> None:
    """Checks that the weights are floats: torch would silently load integers in their place.

    Args:
        tensors: Of a checkpoint.
        quantized: Its config says that linear layers are stored quantised; a library that knows how reads these.

    Raises:
        ValueError: Naming the first such tensor.
    """
    for name, tensor in tensors.items():
        if tensor.dtype in FLOATS or (quantized and may_be_integers(name)):
            continue
        raise ValueError(
            f"{name} is stored as {tensor.dtype}, which is no floating-point dtype"
            + (
                ", and no quantizer that config.json could mean stores it so: get the weights anew"
                if quantized
                else ": a quantized checkpoint has a quantization_config in its config.json; else get or make one in "
                "float32, bfloat16 or float16"
            )
        )


def check_shapes(config: Any, tensors: Mapping[str, StoredTensor]) -> None:
    """Compares the sizes of a config with the tensors, before memory is allocated for them.

    Missing tensors are left to transformers, whose error names them.

    Raises:
        ValueError: Naming the field.
    """
    assert config.head_dim is not None and config.num_key_value_heads is not None
    named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    layer = "layers.0.self_attn"
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    for field, size, name, axis in (
        ("vocab_size", config.vocab_size, "embed_tokens.weight", 0),
        ("hidden_size", config.hidden_size, "embed_tokens.weight", 1),
        ("num_attention_heads * head_dim", queries, f"{layer}.q_proj.weight", 0),
        ("num_key_value_heads * head_dim", keys, f"{layer}.k_proj.weight", 0),
        ("intermediate_size", config.intermediate_size, "layers.0.mlp.gate_proj.weight", 0),
    ):
        tensor = named.get(name)
        if tensor is not None and tensor.dtype in FLOATS and len(tensor.shape) == 2 and tensor.shape[axis] != size:
            raise ValueError(
                f"config.json has {field} = {size}, but {name} has shape {list(tensor.shape)}: use the config.json "
                "that belongs to these weights"
            )
    layers = {int(match[1]) for name in named if (match := re.match(r"layers\.(\d+)\.", name))}
    if layers and config.num_hidden_layers > max(layers) + 1:
        raise ValueError(
            f"config.json has num_hidden_layers = {config.num_hidden_layers}, but the weights are missing from "
            f"layers.{max(layers) + 1} on: use the config.json that belongs to them"
        )
    if layers and config.num_hidden_layers <= max(layers):
        raise ValueError(
            f"config.json has num_hidden_layers = {config.num_hidden_layers}, but the weights have {max(layers) + 1} "
            "layers: use the config.json that belongs to them"
        )


def check_generation_config(folder: Path) -> None:
    """Checks that transformers can read `generation_config.json` and that its special ids are integers.

    Raises:
        ValueError: Naming the field.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"generation_config.json is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError("generation_config.json holds no JSON object")
    for name in SPECIAL_IDS:
        value = values.get(name)
        ids = value if isinstance(value, list) else [value]
        if value is not None and not all(type(token_id) is int for token_id in ids):
            raise ValueError(f"generation_config.json has {name} = {value!r}, which is no token id: write its number")
