"""Loading and saving of every looped family: safetensors only, and what does not fit is named."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from sigma0.decode.logits import check_weights as check_finite
from sigma0.decode.parallel import tp_group
from sigma0.models.cache_name import CACHE_NAMES
from sigma0.models.quantization import named_library, stored_method
from sigma0.models.stored import (
    StoredTensor,
    check_config,
    check_dtypes,
    check_generation_config,
    check_index,
    check_shapes,
    read_headers,
)


class LoopedPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Loading and saving for the families; each sets `config_class` and names its layers."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = list(CACHE_NAMES)  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = False

    @classmethod
    def check_shapes(cls, config: Any, tensors: Mapping[str, StoredTensor]) -> None:
        """Compares the sizes of the family's config with the tensors of a checkpoint, before memory is allocated.

        Raises:
            ValueError: Naming the field.
        """
        check_shapes(config, tensors)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Does nothing: `save_pretrained` would copy this package's source into the checkpoint."""

    @classmethod
    def from_pretrained(
        cls, *args: Any, output_loading_info: bool = False, check_weights: bool = True, **kwargs: Any
    ) -> Any:
        """As transformers' own, but with safetensors only, and a missing or unexpected tensor is an error.

        Args:
            *args: For transformers.
            output_loading_info: For transformers.
            check_weights: Refuse weights that are NaN or infinite, for one pass over them.
            **kwargs: For transformers.

        Raises:
            ValueError: Naming the tensors that do not fit or are no numbers, or the field of the config.
        """
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False would unpickle the checkpoint; convert it to safetensors")
        kwargs["use_safetensors"] = True
        folder = checkpoint_path(*args, **kwargs)
        values = PreTrainedConfig.get_config_dict(folder)[0] if folder else None
        stored = stored_method(kwargs.get("config") or values)
        if folder is not None:
            check_config(values or {})
            cls._check_files(folder, None if kwargs.get("ignore_mismatched_sizes") else kwargs.get("config"), stored)
        checked = ["missing_keys", "unexpected_keys"]
        if not kwargs.get("ignore_mismatched_sizes"):
            # transformers' own error names no tensor, so it is suppressed and ours is raised
            checked.append("mismatched_keys")
            kwargs["ignore_mismatched_sizes"] = True
        with named_library(stored):
            model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        wrong = {name: sorted(map(str, info[name])) for name in checked if info.get(name)}
        if wrong:
            problems = "; ".join(
                f"{name.replace('_keys', '')}: {', '.join(tensors)}" for name, tensors in wrong.items()
            )
            raise ValueError(f"the checkpoint does not fit {cls.__name__}: {problems}")
        if check_weights:
            check_finite(model)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args: Any, state_dict: dict[str, Tensor] | None = None, **kwargs: Any) -> None:
        """As transformers' own; processes that share a model all call it, and the first one writes."""
        if state_dict is None and tp_group(self) is not None:
            state_dict = self.whole_state()
        super().save_pretrained(*args, state_dict=state_dict, **kwargs)

    def whole_state(self) -> dict[str, Tensor]:
        """The state dict of a model that is shared among processes, as it is saved; every process calls it.

        Tied weights are left out: once transformers has put them together it takes them for two tensors.
        """
        tied = self.all_tied_weights_keys
        return {name: tensor for name, tensor in self.state_dict().items() if name not in tied}

    @classmethod
    def _check_files(cls, folder: Path, config: PreTrainedConfig | None, quantization: str | None) -> None:
        """Checks that the files of a folder fit together, before any memory is allocated."""
        check_index(folder)
        tensors = read_headers(folder)
        check_dtypes(tensors, quantization is not None)
        if isinstance(config, cls.config_class):
            cls.check_shapes(config, tensors)
        check_generation_config(folder)


def checkpoint_path(name: Any = None, *_: Any, subfolder: str = "", **__: Any) -> Path | None:
    """The folder given to `from_pretrained`; None for a hub id, whose files may not be downloaded yet."""
    folder = Path(name, subfolder) if isinstance(name, str | Path) else None
    return folder if folder is not None and folder.is_dir() else None
