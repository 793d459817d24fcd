"""Quantised weights: int8 and int4 of torchao as a model is loaded, and checkpoints that are stored quantised.

A looped model reads the weights of its block once a loop, so only these are quantised: the block's linear layers.
Embeddings are looked up, a row a token; norms and gate are vectors, and the gate's one logit decides on depths; the
head is read once a token under most rules, and all comparisons are between its logits. All of these stay floats.

Only weights are rounded. Of a row of int8, w = s q with s = max |w| / 127; of a group of int4, w = s (q - 8) + z.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, TorchAoConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from sigma0.decode.logits import stored_parts
from sigma0.errors import first_line, needs_extra

QuantizationName = Literal["int8", "int4"]
QUANTIZATIONS: tuple[QuantizationName, ...] = get_args(QuantizationName)
# Linear layers outside of the block, as transformers matches names.
KEPT = ("lm_head", "model.early_exit_gate")
# Tensors of a checkpoint that a quantiser may have stored as something else than floats: those of linear layers.
_QUANTIZABLE = re.compile(r"(proj|lm_head|Wqkv|fc|adapter)\.")
# Weights of int4 that share a scale, from the fewest bytes to the closest fit; of other sizes no kernel knows.
GROUP_SIZES = (128, 64, 32)
# Columns that the CPU's kernels take at once.
_COLUMNS = 16
# Rows from which on making floats of all weights first is faster than the CPU's kernel, which reads rows one by one.
_MANY_ROWS = 16
# Bytes: the CPU's kernel for int8 ends the process (torch 2.13) where weights start between them, as stored ones do.
_ALIGNMENT = 64


def check_name(quantization: str | None) -> None:
    """Refuses a name that stands for no quantisation.

    Raises:
        ValueError: Naming it.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"no such quantization: {quantization!r}; there are {', '.join(QUANTIZATIONS)}")


def loading_options(
    quantization: str | None, config: PreTrainedConfig, device: torch.device, dtype: str | torch.dtype
) -> dict[str, Any]:
    """What `from_pretrained` takes for a model that is to be quantised, or is stored so.

    Args:
        quantization: One of `QUANTIZATIONS`, or None for a model as it is stored.
        config: Of the checkpoint.
        device: Where the model is to run; kernels lay weights out for it, so they are put there at once.
        dtype: Of everything that is not quantised; `auto` is bfloat16, which the kernels are made for.

    Raises:
        ValueError: If the checkpoint is quantised already, or library, device, dtype or sizes do not allow it.
    """
    method = stored_method(config)
    if quantization is None:
        return {} if method is None or device.type != "cuda" else {"device_map": {"": device}}
    if method is not None:
        raise ValueError(
            f"the checkpoint is stored quantized ({method}): load it without quantization={quantization!r}"
        )
    wanted = torch.bfloat16 if dtype == "auto" else dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    if quantization == "int4" and wanted is not torch.bfloat16:
        raise ValueError(f"quantization='int4' has kernels for bfloat16 alone, got dtype {str(dtype)!r}")
    settings = weight_settings(quantization, config, device)
    return {
        "quantization_config": TorchAoConfig(settings, modules_to_not_convert=list(KEPT)),
        "dtype": wanted,
        **({"device_map": {"": device}} if device.type == "cuda" else {}),
    }


def weight_settings(quantization: str, config: PreTrainedConfig, device: torch.device) -> Any:
    """Settings of torchao for the weights of a model on a device.

    Raises:
        ValueError: If torchao is not installed, or there is no kernel for the device or the sizes.
    """
    with needs_extra("quantization"):
        import torchao.quantization as torchao
    # torchao would otherwise change settings of inductor for the whole process
    if quantization == "int8":
        return torchao.Int8WeightOnlyConfig(set_inductor_config=False)
    group = group_size(config)
    if device.type == "cpu":
        # the layout of torch's kernel for a CPU, which torchao counts among its prototypes
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False)
    if device.type == "cuda":
        return torchao.Int4WeightOnlyConfig(
            group_size=group, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )
    raise ValueError(f"quantization='int4' is for models on a CPU or on CUDA, not on {device.type!r}: take int8")


def group_size(config: PreTrainedConfig) -> int:
    """The largest group that every row of the block's weights is a multiple of: torchao would leave others as they are.

    Raises:
        ValueError: If there is none.
    """
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    widths = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size, "heads": queries}
    for size in GROUP_SIZES:
        if all(width % size == 0 for width in widths.values()) and keys % _COLUMNS == 0:
            return size
    named = ", ".join(f"{name} {width}" for name, width in {**widths, "key heads": keys}.items())
    raise ValueError(
        f"quantization='int4' takes widths that are multiples of {GROUP_SIZES[-1]}, this model has {named}: take int8"
    )


class RowKernelLinear(nn.Linear):
    """A linear layer whose quantised weight is multiplied by the CPU's kernel for few rows.

    torchao's own product makes floats of the whole weight for every call, which reads and writes more than the weight
    would have been; torch's kernels (those that inductor puts in its place) read the integers alone.
    """

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`, `[..., in]` to `[..., out]`."""
        weight: Any = self.weight
        rows = input.reshape(-1, input.shape[-1])  # [R, in]
        product: Tensor
        if not input.is_cpu or input.dtype is not torch.bfloat16:
            return F.linear(input, weight, self.bias)
        if hasattr(weight, "scale_and_zero"):
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(
                rows.contiguous(), weight.qdata, weight.block_size[1], weight.scale_and_zero
            )
        elif len(rows) < _MANY_ROWS:
            product = torch._weight_int8pack_mm(rows.contiguous(), weight.qdata, weight.scale.flatten())
        else:
            return F.linear(input, weight, self.bias)
        output = product.view(*input.shape[:-1], -1)
        return output if self.bias is None else output + self.bias


def use_row_kernels(model: nn.Module) -> None:
    """Lets quantised linear layers use the CPU's kernels; layers of other kinds stay as they are."""
    for module in model.modules():
        weight: Any = module.weight if type(module) is nn.Linear else None
        if weight is None or weight.dtype is not torch.bfloat16 or not _has_row_kernel(weight):
            continue
        module.__class__ = RowKernelLinear
        if hasattr(weight, "scale"):
            # products take scales of their own dtype; kept so, they are not rounded in every call
            weight.scale = weight.scale.to(weight.dtype)
        if weight.qdata.data_ptr() % _ALIGNMENT:
            weight.qdata = weight.qdata.clone()


def _has_row_kernel(weight: Any) -> bool:
    """Whether a weight is int8 with a scale a row, or int4 laid out for a CPU; activations are left alone in both."""
    kind = type(weight).__name__
    if kind == "Int8Tensor":
        plain = weight.act_quant_kwargs is None and weight.act_pre_scale is None
        # torch's kernel reads past the end of shorter rows, and may end the process
        plain = plain and weight.shape[1] % _COLUMNS == 0
        return bool(plain and tuple(weight.scale.shape) == (weight.shape[0], 1))
    return bool(kind == "Int4OpaqueTensor" and weight.act_mapping_type is None and weight.act_pre_scale is None)


def weight_bytes(module: nn.Module) -> int:
    """Bytes in which the parameters of a module are held."""
    return sum(part.nbytes for weight in module.parameters() for part in stored_parts(weight.detach()))


def stored_method(config: Any) -> str | None:
    """With what a checkpoint is stored quantised, as its config.json says; None for one of floats.

    Args:
        config: Of transformers, or the values of a config.json; None where it is not known.

    Raises:
        ValueError: If transformers does not know the method, and would take the integers for weights.
    """
    values = (
        config.get("quantization_config") if isinstance(config, dict) else getattr(config, "quantization_config", None)
    )
    if values is None:
        return None
    settings = values.to_dict() if hasattr(values, "to_dict") else values
    if not isinstance(settings, dict):
        raise ValueError(f"config.json has quantization_config = {settings!r}, which is no JSON object")
    method = settings.get("quant_method")
    method = getattr(method, "value", method)
    bits = "_4bit" if settings.get("load_in_4bit") else "_8bit" if settings.get("load_in_8bit") else ""
    if (f"bitsandbytes{bits}" if bits else method) not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ValueError(
            f"config.json has quantization_config.quant_method = {method!r}, which transformers does not know"
        )
    return str(method or "bitsandbytes")


def may_be_integers(name: str) -> bool:
    """Whether a quantiser may have stored a tensor of this name as something else than floats."""
    return bool(_QUANTIZABLE.search(name))


@contextmanager
def named_library(method: str | None) -> Iterator[None]:
    """Turns the failed import of a quantiser's library into a ValueError that names it.

    Args:
        method: Of `stored_method`.
    """
    try:
        yield
    except ImportError as error:
        if method is None:
            raise
        raise ValueError(f"the checkpoint is stored quantized ({method}): {first_line(error)}") from error


def quantize(model: Any, quantization: str) -> None:
    """Quantises a looped model that is in memory, in place, as loading it would.

    Raises:
        ValueError: As `loading_options` does.
    """
    check_name(quantization)
    with needs_extra("quantization"):
        from torchao.quantization import quantize_

    settings = weight_settings(quantization, model.config, model.device)
    quantize_(model, settings, filter_fn=lambda module, name: type(module) is nn.Linear and name not in KEPT)
    use_row_kernels(model)
    model.quantization = quantization
