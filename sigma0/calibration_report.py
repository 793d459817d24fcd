"""What `sigma0 calibrate` prints and writes."""

import shutil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sigma0.calibration import THRESHOLD, Calibration
from sigma0.estimates import Estimate
from sigma0.latency import LatencyCalibration
from sigma0.settings import ExitConfig

# Rows of the table around the choice; the whole list is in the JSON.
_SHOWN = 12
# No code and no pickles.
COPIED = ("*.safetensors", "*.json", "*.jinja", "*.model", "LICENSE*")


def print_calibration(found: Calibration) -> None:
    """Prints the settings around the choice, the choice, its check, and what the promise means."""
    console = Console(highlight=False, soft_wrap=True)
    name = THRESHOLD[found.mode]
    table = Table(title=f"{found.mode} on {found.prompts} prompts, patient settings first", title_justify="left")
    for column in (name, "agreement", "p-value", "mean depth", "kept"):
        table.add_column(column, justify="right")
    for row in found.tested[-_SHOWN:]:
        table.add_row(
            f"{row.threshold:g}",
            f"{row.agreement:.3%}",
            f"{row.p_value:.2g}",
            f"{row.mean_depth:.2f}",
            "yes" if row.passed else "no",
        )
    console.print(table)
    if found.chosen is None or found.check is None:
        console.print(refusal(found))
        return
    check = found.check
    console.print(f"chosen          {found.mode}, {name} = {getattr(found.chosen, name):g}")
    console.print(f"promise         agreement >= {found.agreement:g} with confidence {found.confidence:g}")
    console.print(f"agreement       {_percent(check.agreement)} on {check.prompts} prompts set apart")
    console.print(f"same text       {_percent(check.same)} of free runs, beside full depth")
    console.print(f"passes_saved    {_percent(check.passes_saved)}")
    console.print(f"rows_saved      {_percent(check.rows_saved)}")


def refusal(found: Calibration) -> str:
    """Why no setting was chosen, and the way out."""
    first = found.tested[0]
    fewest, half = found.needed
    return (
        f"no threshold keeps agreement >= {found.agreement:g} with confidence {found.confidence:g}: the most patient "
        f"one, {THRESHOLD[found.mode]} = {first.threshold:g}, has a mean agreement of {first.agreement:.3%} over "
        f"{found.prompts} prompts (p = {first.p_value:.2g}). The promise takes {fewest} prompts without one error, "
        f"{half} at half of the allowed errors, those of the check included: give more prompts, or ask for a lower "
        "agreement or confidence"
    )


def print_latency(found: LatencyCalibration) -> None:
    """Prints every setting tried under `verify`, the fastest, and its check."""
    console = Console(highlight=False, soft_wrap=True)
    name = THRESHOLD[found.mode]
    table = Table(title=f"{found.mode} under verify on {found.prompts} prompts", title_justify="left")
    for column in (name, "passes/token", "of them tail", "accepted", "passes_saved"):
        table.add_column(column, justify="right")
    for row in found.tested:
        table.add_row(
            f"{row.threshold:g}",
            f"{row.passes_per_token.value:.2f}",
            f"{row.tail_passes_per_token.value:.2f}",
            f"{row.accepted.value:.1%}",
            f"{row.passes_saved.value:.1%}",
        )
    console.print(table)
    console.print(f"chosen          {found.mode}, {name} = {getattr(found.chosen, name):g}, after_exit = verify")
    console.print(f"passes_saved    {_percent(found.check.passes_saved)} on {found.checked_prompts} prompts set apart")
    console.print(f"accepted        {_percent(found.check.accepted)} of their tokens")


def print_found(found: Calibration | LatencyCalibration) -> None:
    """Prints either kind."""
    print_calibration(found) if isinstance(found, Calibration) else print_latency(found)


def write_calibration(model: Any, chosen: ExitConfig, folder: Path) -> None:
    """Stores the chosen setting in the `generation_config.json` of a checkpoint's folder.

    Args:
        model: The looped model that was loaded from there.
        chosen: The setting.
        folder: The checkpoint's folder.
    """
    model.generation_config.exit_config = chosen.to_dict()
    # While this flag is set, transformers drops what it does not know when it loads the file.
    model.generation_config._from_model_config = False
    model.generation_config.save_pretrained(folder)


def copy_checkpoint(source: Path, folder: Path) -> None:
    """Copies a checkpoint's weights, configs, tokenizer and licence, just as they are, into an existing folder."""
    for pattern in COPIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return "none to tell: there is one token a prompt"
    low, high = estimate.interval
    return f"{estimate.value:.2%} ({low:.2%} to {high:.2%})"
