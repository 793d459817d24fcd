"""Export of a checkpoint folder for tools that do not import sigma0 themselves."""

import json
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

SHIM = "shim"


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> Path:
    """Writes model and tokenizer with an `auto_map`, so that `trust_remote_code=True` finds the installed package.

    Args:
        model: A looped model.
        tokenizer: Its tokenizer.
        folder: Where to write; created if missing.

    Returns:
        The folder.

    Raises:
        ValueError: If the folder holds files already.
    """
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{str(folder)!r} exists and is not an empty folder")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    classes = {
        "AutoConfig": type(model.config).__name__,
        "AutoModel": type(model.base_model).__name__,
        "AutoModelForCausalLM": type(model).__name__,
    }
    names = ", ".join(sorted(classes.values()))
    (target / f"{SHIM}.py").write_text(
        f"# Needs `pip install sigma0-lm`; holds no code of its own.\nfrom sigma0.models import {names}\n"
    )
    path = target / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {auto: f"{SHIM}.{name}" for auto, name in classes.items()}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return target
