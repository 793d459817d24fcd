"""The models inside this package, and what else a model's name may stand for."""

import os
from pathlib import Path

CHECKPOINTS = Path(__file__).parent
LOADABLE = "a folder with config.json, tokenizer.json and safetensors, or a hub id such as ByteDance/Ouro-1.4B"
# what `sigma0 get` writes, and where the package does not hold it
FETCHED = ("smol-loop", "smollm2")
OTHER_WEIGHTS = (".bin", ".gguf", ".pt", ".pth", ".onnx")


def shipped_models() -> tuple[str, ...]:
    """Names of the models inside this package."""
    return tuple(sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json")))


def fetched_folder(name: str) -> Path:
    """Where `sigma0 get` writes a model, unless it is told another place."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # one that is not absolute does not count, says the standard
    return (cache if cache.is_absolute() else Path("~/.cache").expanduser()) / "sigma0" / name


def resolve_model(name: str) -> str:
    """The folder or hub id that `name` stands for.

    Args:
        name: A shipped name, one that `sigma0 get` has written, a folder, or a hub id such as `ByteDance/Ouro-1.4B`.

    Raises:
        ValueError: If it is none of these.
    """
    if name in shipped_models():
        return str(CHECKPOINTS / name)
    if name in FETCHED and not Path(name).exists():
        if not (fetched_folder(name) / "config.json").is_file():
            raise ValueError(f"{name} does not ship with the package: sigma0 get {name}")
        return str(fetched_folder(name))
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf" or (name and path.is_file()):
        format = "a GGUF file, which no looped model can be loaded from" if path.suffix.lower() == ".gguf" else "a file"
        raise ValueError(f"{name!r} is {format}: give {LOADABLE}")
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"the folder {name!r} holds no config.json, so it is no checkpoint")
        if not (path / "tokenizer.json").is_file():
            raise ValueError(f"the folder {name!r} holds no tokenizer.json; save the checkpoint's tokenizer there")
        if not any(path.glob("*.safetensors*")):
            others = ", ".join(sorted(file.name for file in path.iterdir() if file.suffix in OTHER_WEIGHTS))
            raise ValueError(f"{name!r} could not be loaded: it holds no safetensors{others and ', only '}{others}")
        return str(path)
    if name.count("/") == 1 and not path.is_absolute() and not name.startswith("."):
        return name
    raise ValueError(
        f"no such model: {name!r}; give a shipped name ({', '.join(shipped_models())}), what sigma0 get writes "
        f"({', '.join(FETCHED)}), a folder, or a hub id such as ByteDance/Ouro-1.4B"
    )
