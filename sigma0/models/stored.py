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
FORCED_IDS = ("forced_bos_token_id", "forced_eos_token_id")
# Settings of generation that a call may ask for, where anything follows them, but no file for every call.
OF_CALLS = (
    "assistant_early_exit", "cache_config", "cache_implementation", "compile_config", "constraints", "dola_layers",
    "force_words_ids", "guidance_scale", "is_assistant", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_attentions", "output_hidden_states", "penalty_alpha", "prefill_chunk_size", "prompt_lookup_num_tokens",
    "speculation_type", "token_healing", "use_mtp", "watermarking_config",
)  # fmt: skip
NUMBERS = ("max_length", "max_new_tokens", "max_time", "min_length", "min_new_tokens", "no_repeat_ngram_size")
# Labels of a classifier, which a config counts and names one by one.
MAX_LABELS = 100_000


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file."""

    dtype: str  # As safetensors names it
    shape: tuple[int, ...]  # Its sizes


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


def check_config(values: Mapping[str, Any]) -> None:
    """Checks that a `config.json` names no code to be downloaded, nor asks for what would break later.

    Raises:
        ValueError: Naming the field.
    """
    for name, value in values.items():
        if "_implementation" in name and "/" in str(value):
            raise ValueError(f"config.json has {name} = {value!r}, which is code from the hub: leave it out")
    for name in ("distributed_config", "is_encoder_decoder"):
        if values.get(name):
            raise ValueError(f"config.json has {name} = {values[name]!r}, which no looped model has: leave it out")
    if not values.get("return_dict", True):
        raise ValueError("config.json has return_dict = false, which is for a call to ask: leave it out")
    labels = values.get("num_labels", 0)
    if not isinstance(labels, int) or labels > MAX_LABELS:
        raise ValueError(f"config.json has num_labels = {labels!r}, which continue no text: leave it out")


def check_index(folder: Path) -> None:
    """Checks that `model.safetensors.index.json`, where it is read, names files of its own folder alone.

    Raises:
        ValueError: Naming the entry.
    """
    path = folder / "model.safetensors.index.json"
    if not path.is_file() or (folder / "model.safetensors").is_file():
        return
    index = _json_object(path)
    files = index.get("weight_map")
    if not isinstance(files, dict) or not isinstance(index.get("metadata"), dict):
        raise ValueError(f"{path.name} holds no weight_map, or no metadata: get the checkpoint anew")
    for tensor, file in files.items():
        if not isinstance(file, str) or Path(file).name != file or file == ".." or "\\" in file:
            raise ValueError(f"{path.name} puts {tensor} into {file!r}, which is no file of its folder")
        if not (folder / file).is_file():
            raise ValueError(f"{path.name} puts {tensor} into {file!r}, which is missing: get the checkpoint anew")


def _json_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return values


def check_generation_config(folder: Path) -> None:
    """Checks that transformers can read `generation_config.json` and its values, as `check_generation` does.

    Raises:
        ValueError: Naming the field.
    """
    path = folder / "generation_config.json"
    if path.is_file():
        check_generation(_json_object(path))


def check_generation(values: Mapping[str, Any], vocabulary: int | None = None) -> None:
    """Checks settings of generation that a checkpoint stores.

    Args:
        values: By name.
        vocabulary: Size of the vocabulary, where it is known.

    Raises:
        ValueError: Naming the field, for an id that is none and a setting that cannot be followed at every call.
    """
    here = "generation_config.json has"
    for name in SPECIAL_IDS + FORCED_IDS:
        value = values.get(name)
        ids = value if isinstance(value, list) else [value]
        if value is None:
            continue
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise ValueError(f"{here} {name} = {value!r}, which is no token id: write its number")
        if vocabulary is not None and name in FORCED_IDS and max(ids) >= vocabulary:
            raise ValueError(f"{here} {name} = {value!r}, outside of the model's vocabulary of {vocabulary}")
    for name in OF_CALLS:
        value = values.get(name)
        if value and not (type(value) in (int, float) and value == 1):
            raise ValueError(
                f"{here} {name} = {value!r}, which is for a call to ask, not for a checkpoint: leave it out"
            )
    for name in NUMBERS:
        value = values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{here} {name} = {value!r}, which is no number")
    if not isinstance(values.get("do_sample"), bool | None):
        raise ValueError(f"{here} do_sample = {values['do_sample']!r}, which is neither true nor false")
