"""Loading a looped model and its tokenizer by shipped name, folder or hub id."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import get_session
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from sigma0.checkpoints import resolve_model, shipped_models
from sigma0.config import KVConfig
from sigma0.decode.logits import check_weights
from sigma0.decode.ops import Backend, operations
from sigma0.decode.parallel import init_tensor_parallel
from sigma0.decode.runners import RUNNERS, RunnerName
from sigma0.errors import first_line, one_line
from sigma0.models import FAMILIES, family_class
from sigma0.models.hf_generate import DepthGenerationMixin
from sigma0.models.loop_settings import set_loops
from sigma0.models.quantization import check_name, loading_options, stored_method, use_row_kernels
from sigma0.models.stored import check_config, check_dtypes, check_generation, check_index, read_headers
from sigma0.signals.verdict import DoorRule

# Looped models that passes over rows cannot run, and why.
REFUSED = {
    "hrm_text": "its prompts attend in both directions (prefix_lm), and rows of a pass see only what lies before them; "
    "transformers itself runs it: transformers.AutoModelForCausalLM.from_pretrained",
}
# In which the hub has to answer.
HUB_SECONDS = 3.0
DTYPES = ("auto", "float32", "bfloat16", "float16")


def hub_options(source: str) -> dict[str, bool]:
    """How transformers is to look a checkpoint up: in the cache alone where the hub does not answer.

    transformers asks again for half a minute before it does so itself.

    Args:
        source: A folder or hub id.

    Raises:
        ValueError: If neither the hub nor the cache has it, after `HUB_SECONDS` at most.
    """
    if Path(source).is_dir() or constants.HF_HUB_OFFLINE:
        return {}
    answered = Event()

    def ask() -> None:
        with suppress(Exception):  # whichever the client has for no network
            get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
            answered.set()

    # in a thread, since nothing bounds how long a name may take to be resolved
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_SECONDS)
    if answered.is_set():
        return {}
    if not isinstance(try_to_load_from_cache(source, "config.json"), str):
        raise ValueError(
            f"{source!r} could not be loaded: {constants.ENDPOINT} does not answer, and the cache does not hold it; "
            f"give a folder, or a shipped name ({', '.join(shipped_models())})"
        )
    return {"local_files_only": True}


def checkpoint_folder(name: str) -> Path:
    """The folder with a loaded model's files: its own, or the hub cache's."""
    source = resolve_model(name)
    return Path(source) if Path(source).is_dir() else Path(snapshot_download(source, local_files_only=True))


def resolve_device(device: str | torch.device) -> torch.device:
    """The device to run on; `auto` is CUDA where there is one.

    Raises:
        ValueError: For a device that torch does not know or that is not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used: {first_line(error)}") from error
    return resolved


def load_tokenizer(source: str, **options: Any) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder or hub id, just as its `tokenizer.json` says.

    Not through `AutoTokenizer`, which replaces the stored pre-tokenizer by that of a named class.

    Raises:
        ValueError: If `tokenizer.json` cannot be read.
    """
    try:
        return PreTrainedTokenizerFast.from_pretrained(source, **options)
    except OSError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for a malformed file
        raise ValueError(f"{source!r} has no usable tokenizer.json: {first_line(error)}") from error


def load(
    name: str,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    backend: Backend = "auto",
    runner: RunnerName = "auto",
    quantization: str | None = None,
    recurrence: int | None = None,
    stride: int | None = None,
    kv: KVConfig | Mapping[str, Any] | str | None = None,
    door_rule: DoorRule | None = None,
    deterministic: bool = True,
    tensor_parallel: bool = False,
    check: bool = True,
) -> tuple[DepthGenerationMixin, PreTrainedTokenizerFast]:
    """Loads a looped model, ready to generate, and its tokenizer; safetensors only, no remote code.

    Args:
        name: A shipped name, a folder, or a hub id.
        device: Where to put it; `auto` is CUDA where there is one.
        dtype: `auto` (as stored), `float32`, `bfloat16`, `float16`, or a torch dtype.
        backend: What runs a pass: `torch`, `triton`, or `auto`: the kernels on CUDA, plain torch elsewhere.
        runner: What calls the step, where a call does not say it: `eager`, `compile` (half a minute at the first pass
            on a machine, seconds later on; on CUDA in graphs), `cudagraph` (a step is one launch), or `auto`:
            `cudagraph` on CUDA, elsewhere eager.
        quantization: `int8` or `int4` for the weights of the block, rounded as they are loaded (extra `quantization`);
            the rest is then bfloat16 where `dtype` is `auto`.
        recurrence: T, loops at full depth; by default the checkpoint's own. Raven was trained for any number; others
            get worse away from theirs.
        stride: Loops of a Raven that a pass runs, a divisor of T; depths are then counted in passes.
        kv: How K/V are stored: `full`, `bf16`, `int8`, `int4`, `residual`, or a `KVConfig`; None for the checkpoint's
            own way.
        door_rule: What opens the door of a verdict: `confidence` or `certificate` (`sigma0.DoorPolicy`); None for the
            checkpoint's own rule.
        deterministic: With the kernels, whether a row of a pass has the same bits whatever rows come along; False takes
            the products of torch's libraries.
        tensor_parallel: Load this process's shard; `torchrun` starts the processes, and all of them make the same calls
            (`sigma0.decode.parallel`).
        check: Refuse weights that are NaN or infinite, which takes one pass over them.

    Returns:
        The model in eval mode and a left-padding tokenizer.

    Raises:
        ValueError: If there is no such model, it is not looped, its tensors do not fit or are not finite, or device,
            dtype, backend, runner, quantization, recurrence, stride, kv or door_rule is bad.
    """
    if runner not in RUNNERS:
        raise ValueError(f"no such runner: {runner!r}; there are {', '.join(RUNNERS)}")
    model, tokenizer = _load(
        name,
        device,
        dtype,
        backend,
        True,
        quantization=quantization,
        loops=(recurrence, stride),
        tensor_parallel=tensor_parallel,
        check=check,
    )
    model.runner, model.quantization, model.deterministic = runner, quantization, deterministic
    if kv is not None:
        model.generation_config.kv_config = KVConfig.parse(kv)
        _ = model.kv_config
    if door_rule is not None:
        model.generation_config.door_policy = replace(model.door_policy, rule=door_rule)
    return model, tokenizer


def load_causal(
    name: str,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    backend: Backend = "auto",
    check: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """As `load`, for any causal model of transformers; one without loops runs as transformers implements it."""
    return _load(name, device, dtype, backend, looped_only=False, check=check)


@contextmanager
def without_bars() -> Iterator[None]:
    """Hides transformers' loading bars for as long as it lasts."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@without_bars()
def _load(
    name: str,
    device: str | torch.device,
    dtype: str | torch.dtype,
    backend: Backend,
    looped_only: bool,
    quantization: str | None = None,
    loops: tuple[int | None, int | None] = (None, None),
    tensor_parallel: bool = False,
    check: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    check_name(quantization)
    if quantization is not None and tensor_parallel:
        raise ValueError(f"quantization={quantization!r} goes with one process: leave tensor_parallel out")
    source, target = resolve_model(name), resolve_device(device)
    operations(backend, target)
    spread = None
    if tensor_parallel:
        from transformers.distributed import DistributedConfig

        spread = DistributedConfig(tp_size=init_tensor_parallel(target))
    try:
        local = hub_options(source)
        check_index(Path(source))
        config = read_config(name, source, local)
        looped = config.model_type in FAMILIES
        model_class = _causal_class(config)
        if model_class is None:
            raise ValueError(f"{name!r} is a {config.model_type!r} model, which continues no text")
        if looped_only and config.model_type in REFUSED:
            raise ValueError(f"{name!r} is a {config.model_type!r} model: {REFUSED[config.model_type]}")
        if looped_only and not looped:
            raise ValueError(f"{name!r} is a {config.model_type!r} model, which has no loops to skip")
        set_loops(name, config, *loops)
        model = model_class.from_pretrained(
            source,
            config=config,
            **local,
            use_safetensors=True,
            distributed_config=spread,
            # looped models are checked below, once the weights are on their device
            **({"check_weights": False} if looped else {}),
            **{"dtype": dtype, **loading_options(quantization, config, target, dtype)},
        )
        tokenizer = load_tokenizer(source, **local)
    except (OSError, HFValidationError, ImportError, StrictDataclassError, SafetensorError, RecursionError) as error:
        in_config = isinstance(error, StrictDataclassError)
        message = first_line(error.__cause__ if in_config and error.__cause__ else error)
        where = " (in its config.json)" if in_config else ""
        raise ValueError(f"{name!r} could not be loaded: {message}{where}") from error
    tokenizer.padding_side = "left"
    model = model.to(target).eval()
    if looped:
        model.backend = backend
        use_row_kernels(model)
        _check_tokenizer(name, tokenizer, model.config.vocab_size)
        _check_settings(model)
        if not Path(source).is_dir():
            # a folder's dtypes were checked before the model was built
            check_dtypes(read_headers(checkpoint_folder(name)), stored_method(config) is not None and not quantization)
    if check:
        check_weights(model)
    if looped:
        model.pack_weights()
    return model, tokenizer


def read_config(name: str, source: str, options: Mapping[str, Any]) -> Any:
    """The config of a folder or hub id.

    Raises:
        ValueError: In place of transformers' own errors of other kinds, or of several lines.
    """
    try:
        values = PreTrainedConfig.get_config_dict(source, **options)[0]
        check_config(values)
        if values.get("model_type") in FAMILIES:
            return family_class(values["model_type"], "config").from_pretrained(source, **options)
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
    except KeyError as error:  # of the checks of rope_parameters
        raise ValueError(f"{name!r} could not be loaded: {error.args[0]} (in its config.json)") from error
    except (AttributeError, TypeError) as error:  # of values of another kind
        raise ValueError(f"{name!r} could not be loaded: {first_line(error)} (in its config.json)") from error
    except ValueError as error:
        if "\n" not in str(error):
            raise
        raise ValueError(f"{name!r} could not be loaded: {first_line(error)}") from error


def _causal_class(config: Any) -> Any:
    """The class of a model with a head: of our families the one in question alone is imported; None for none."""
    if config.model_type in FAMILIES:
        return family_class(config.model_type, "causal")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def _check_settings(model: DepthGenerationMixin) -> None:
    """Checks the settings in `generation_config.json`, ours and those of sampling.

    Raises:
        ValueError: Naming the field.
    """
    check_generation(model.generation_config.to_dict(), model.config.vocab_size)
    try:
        model.resolve_exit_config(None).stops_at(model.num_loops)
        _ = model.fate_config, model.door_policy, model.confidence_model, model.exit_thresholds.configs()
        _ = model.kv_config
        settings, _ = model._prepare_generation_config(None, do_sample=True)
        # on a CPU, since a model may have no weights; some look at their settings only when they are called
        model._prepare_special_tokens(settings, device="cpu")
        ids = torch.zeros((1, 1), dtype=torch.int64)
        model._get_logits_processor(settings, 1, ids, device="cpu")(ids, torch.zeros((1, model.config.vocab_size)))
    except (ValueError, TypeError) as error:
        raise ValueError(f"generation_config.json: {one_line(error)}") from error


def _check_tokenizer(name: str, tokenizer: PreTrainedTokenizerFast, vocabulary: int) -> None:
    """Checks that the model has an embedding for every id of the tokenizer.

    Raises:
        ValueError: Naming both sizes.
    """
    most = max(tokenizer.get_vocab().values(), default=-1)
    if most >= vocabulary:
        raise ValueError(
            f"the tokenizer of {name!r} has ids up to {most}, but its config.json has vocab_size = {vocabulary}: use "
            "the tokenizer.json that belongs to these weights"
        )
