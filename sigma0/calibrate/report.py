"""What `sigma0 calibrate` prints and writes."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sigma0.calibrate.agreement import THRESHOLD, Calibration
from sigma0.calibrate.bootstrap import Estimate
from sigma0.calibrate.kv import KVCalibration
from sigma0.calibrate.ladder import DoubtCalibration
from sigma0.calibrate.latency import LatencyCalibration
from sigma0.calibrate.risk import DoorCalibration
from sigma0.config import RULE_DEFAULTS
from sigma0.models.exit_thresholds import CalibratedThreshold, ExitThresholds
from sigma0.models.hf_generate import DepthGenerationMixin

# Rows of the table around the choice; the whole list is in the JSON.
_SHOWN = 12
# No code and no pickles.
COPIED = ("*.safetensors", "*.json", "*.jinja", "*.model", "LICENSE*")


def print_calibration(result: Calibration) -> None:
    """Prints the settings around the choice, the choice, its check, and what the promise means."""
    console = Console(highlight=False, soft_wrap=True)
    name = THRESHOLD[result.mode]
    table = Table(title=f"{result.mode} on {result.prompts} prompts, patient settings first", title_justify="left")
    for column in (name, "agreement", "p-value", "mean depth", "kept"):
        table.add_column(column, justify="right")
    for row in result.tested[-_SHOWN:]:
        table.add_row(
            f"{row.threshold:g}",
            f"{row.agreement:.3%}",
            f"{row.p_value:.2g}",
            f"{row.mean_depth:.2f}",
            "yes" if row.passed else "no",
        )
    console.print(table)
    if result.chosen is None or result.check is None:
        console.print(_refusal(result))
        return
    check = result.check
    console.print(f"chosen          {result.mode}, {name} = {getattr(result.chosen, name):g}")
    console.print(f"promise         agreement >= {result.agreement:g} with confidence {result.confidence:g}")
    console.print(f"agreement       {_percent(check.agreement)} on {check.prompts} prompts set apart")
    console.print(f"same text       {_percent(check.same)} of free runs, beside full depth")
    console.print(f"passes_saved    {_percent(check.passes_saved)}")
    console.print(f"rows_saved      {_percent(check.rows_saved)}")


def print_rules(results: Sequence[Calibration]) -> None:
    """Prints the choice for each of several rules and its check, and which one the model will use."""
    console = Console(highlight=False, soft_wrap=True)
    first = results[0]
    title = f"every rule on {first.prompts} prompts: agreement >= {first.agreement:g}"
    table = Table(title=f"{title}, all at once with confidence {first.confidence:g}", title_justify="left")
    columns = ("rule", "threshold", "agreement", "same text", "mean depth", "passes_saved", "rows_saved")
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    for rule in results:
        if rule.chosen is None or rule.check is None:
            table.add_row(rule.mode, "none keeps it")
            continue
        check = rule.check
        depth = "-" if check.mean_depth is None else f"{check.mean_depth.value:.2f}"
        threshold = f"{THRESHOLD[rule.mode]} = {rule.chosen.threshold:g}"
        shares = (check.agreement, check.same, None, check.passes_saved, check.rows_saved)
        cells = [depth if share is None else f"{share.value:.2%}" for share in shares]
        table.add_row(rule.mode, threshold, *cells)
    console.print(table)
    best = cheapest_rule(results)
    if best is None:
        console.print(refusal(results))
    else:
        console.print(f"default         {best.mode}: the fewest passes on the prompts that the choice was made on")


def cheapest_rule(results: Sequence[Calibration]) -> Calibration | None:
    """Of the rules with a threshold, the one whose new tokens stop at the least mean depth where it was chosen."""
    kept = [rule for rule in results if rule.chosen is not None]
    return min(kept, key=chosen_depth, default=None)


def chosen_depth(result: Calibration) -> float:
    """Mean exit depth of the new tokens at the threshold that was chosen."""
    return next(row.mean_depth for row in reversed(result.tested) if row.passed)


def refusal(result: Sequence[Calibration] | DoorCalibration | KVCalibration) -> str:
    """Why no setting was chosen, and the way out."""
    if isinstance(result, KVCalibration):
        first = result.tested[0]
        return (
            f"no codec keeps agreement >= {result.agreement:g} with confidence {result.confidence:g}: {first.kv.codec} "
            f"has a mean agreement of {first.agreement:.3%} over {result.prompts} prompts (p = {first.p_value:.2g}): "
            "give more prompts, or ask for a lower agreement or confidence"
        )
    if isinstance(result, Sequence):
        return "\n".join(_refusal(rule) for rule in result)
    return _refusal(result)


def _refusal(result: Calibration | DoorCalibration) -> str:
    if isinstance(result, DoorCalibration):
        _, opened, wrong = result.best
        return (
            f"no policy keeps a risk of at most {result.risk:g} with confidence {result.confidence:g}: the safest lets "
            f"{opened} of {result.prompts[1]} answers through, {wrong} of them wrong. Give more prompts, allow a "
            "larger risk or less confidence, or ask more of the exit rule (--exit margin --threshold 0.95)"
        )
    first = result.tested[0]
    fewest, half = result.needed
    return (
        f"no threshold of {result.mode} keeps agreement >= {result.agreement:g} with confidence {result.confidence:g}: "
        f"the most patient one, {THRESHOLD[result.mode]} = {first.threshold:g}, has a mean agreement of "
        f"{first.agreement:.3%} over {result.prompts} prompts (p = {first.p_value:.2g}). The promise takes {fewest} "
        f"prompts without one error, {half} at half of the allowed errors, those of the check included: give more "
        "prompts, or ask for a lower agreement or confidence"
    )


def print_codecs(result: KVCalibration) -> None:
    """Prints every codec that was tested, the smallest that passed, and its check."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table(title=f"K/V on {result.prompts} prompts, many bits first", title_justify="left")
    for column in ("codec", "bits of loops", "group", "bits/number", "agreement", "p-value", "kept"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    for row in result.tested:
        bits = "" if row.kv.bits is None else "-".join(map(str, row.kv.bits))
        table.add_row(
            row.kv.codec, bits, str(row.kv.group), f"{row.number_bits:g}", f"{row.agreement:.3%}",
            f"{row.p_value:.2g}", "yes" if row.passed else "no",
        )  # fmt: skip
    console.print(table)
    console.print(f"in few bits     {result.coded_share:.1%} of what new tokens are read over, in the mean")
    if result.chosen is None:
        console.print(refusal(result))
        return
    console.print(f"chosen          kv_config = {result.chosen.to_dict()}")
    console.print(f"promise         agreement >= {result.agreement:g} with confidence {result.confidence:g}")
    console.print(f"agreement       {_percent(result.check)} on {result.checked} prompts set apart")


def print_latency(result: LatencyCalibration) -> None:
    """Prints every setting tried under `verify`, the fastest, and its check."""
    console = Console(highlight=False, soft_wrap=True)
    name = THRESHOLD[result.mode]
    table = Table(title=f"{result.mode} under verify on {result.prompts} prompts", title_justify="left")
    for column in (name, "passes/token", "of them tail", "accepted", "passes_saved"):
        table.add_column(column, justify="right")
    for row in result.tested:
        table.add_row(
            f"{row.threshold:g}",
            f"{row.passes_per_token.value:.2f}",
            f"{row.tail_passes_per_token.value:.2f}",
            f"{row.accepted.value:.1%}",
            f"{row.passes_saved.value:.1%}",
        )
    console.print(table)
    console.print(f"chosen          {result.mode}, {name} = {getattr(result.chosen, name):g}, after_exit = verify")
    console.print(
        f"passes_saved    {_percent(result.check.passes_saved)} on {result.checked_prompts} prompts set apart"
    )
    console.print(f"accepted        {_percent(result.check.accepted)} of their tokens")


def print_doors(result: DoorCalibration) -> None:
    """Prints fates and policy, what they do on other prompts, and what the promise means."""
    console = Console(highlight=False, soft_wrap=True)
    fit, tested, checked = result.prompts
    rule = THRESHOLD.get(result.exit_config.mode)
    threshold = "" if rule is None else f", {rule} = {getattr(result.exit_config, rule):g}"
    console.print(f"exit rule       {result.exit_config.mode}{threshold}: {result.right:.1%} of the answers are right")
    if result.labels != "answers":
        console.print(f"labels          right is what {_reference(result.labels)} says, which may be wrong itself")
    console.print(f"fates           growth {result.fates.growth:g}, spiral from {result.fates.spiral:g} degrees on")
    _print_confidence(console, result)
    console.print(f"thresholds      {result.passed} kept the risk of {result.tested} tested ({fit} + {tested} prompts)")
    if result.chosen is None or result.check is None:
        console.print(refusal(result))
        return
    policy, check = result.chosen, result.check
    grounded = "no grounding asked for" if policy.tau_g is None else f"groundedness over {policy.tau_g:g}"
    asked = f"confidence {policy.min_confidence:.4g} or more"
    if policy.rule == "certificate":
        asked = "converged and contracting"
    console.print(f"chosen          {asked}, proximity under {policy.tau_c:g}, {grounded}")
    console.print(f"promise         of the answers let through at most {result.risk:.1%} are wrong, with confidence")
    console.print(f"                {result.confidence:g}")
    console.print(f"right           {_percent(check.right)} on {checked} prompts set apart")
    console.print(f"let through     {_percent(check.opened)} of them")
    console.print(f"right of those  {_share(check.right_of_opened)}")
    console.print(f"of right ones   {_share(check.opened_of_right)} let through")
    area = "none to tell" if check.auroc is None else f"{check.auroc:.3f}"
    console.print(
        f"confidence      AUROC {area}, calibration error {check.calibration_error:.1%}, Brier {check.brier:.3f}"
    )
    by_entropy = (
        "none keeps the risk" if result.by_entropy is None else f"{_percent(result.by_entropy.opened)} let through"
    )
    console.print(f"mean entropy    {by_entropy}, as a door by itself")


def print_doubt(result: DoubtCalibration, larger: str) -> None:
    """Prints when tokens go up, and what that does on other prompts.

    Args:
        result: Of the calibration.
        larger: Name of the larger model.
    """
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"alone           {result.alone:.2%} of {result.tokens} tokens are {larger}'s")
    if result.below is None or result.check is None:
        return
    check = result.check
    console.print(f"goes up         confidence under {result.below:.4g}: {result.handed_up:.2%} of the tokens")
    console.print(f"agreement       {result.agreement:.2%}, handed-up tokens counted in")
    console.print(f"check           {check.tokens} tokens of {check.prompts} prompts set apart:")
    console.print(f"goes up         {_percent(check.handed_up)} of them")
    console.print(f"agreement       {_percent(check.agreement)}, without a ladder {_percent(check.alone)}")


def _print_confidence(console: Console, result: DoorCalibration) -> None:
    """Prints what the confidence reads, and what was left out."""
    model = result.confidence_model
    if model is None:
        console.print(
            "confidence      exp(-mean entropy): too few answers are wrong, or right, or nothing tells them apart"
        )
        return
    table = Table(title=f"confidence fitted on {model.answers} answers, by cross-fitting", title_justify="left")
    for column in ("feature", "AUROC alone", "log loss saved", "read"):
        table.add_column(column, justify="left" if column == "feature" else "right")
    output = sorted(result.features, key=lambda figure: (not figure.chosen, -(figure.gain or -1.0)))
    for figure in output[:_SHOWN]:
        area = "-" if figure.auroc is None else f"{figure.auroc:.3f}"
        gain = "-" if figure.gain is None or figure.error is None else f"{figure.gain:+.4f} (se {figure.error:.4f})"
        table.add_row(figure.name, area, gain, "yes" if figure.chosen else "no")
    console.print(table)
    shared = "too different to tell strange ones" if model.pairs is None else f"{len(model.pairs)} pairs of ids"
    console.print(f"prompts         {shared}; new ones up to {model.most_new:.1%} are in calibration")


def _reference(labels: str) -> str:
    return "the model at full depth" if labels == "full-depth" else labels


def records_of(results: Sequence[Calibration]) -> dict[str, CalibratedThreshold]:
    """What is stored of each rule that has a threshold, by the name that `ExitThresholds` has for it."""
    return {
        rule.mode.replace("-", "_"): CalibratedThreshold(
            agreement=rule.agreement,
            confidence=rule.confidence,
            prompts=rule.prompts,
            mean_depth=round(chosen_depth(rule), 4),
            **{field: getattr(rule.chosen, field) for field in RULE_DEFAULTS[rule.chosen.mode]},
        )
        for rule in results
        if rule.chosen is not None
    }


CalibrationResult = Sequence[Calibration] | LatencyCalibration | DoorCalibration | KVCalibration


def readings_note(model: DepthGenerationMixin) -> str | None:
    """What readings of a model with a coda take for granted; None of others."""
    if not model.stages[1]:
        return None
    return (
        f"readings        of each token at its loop, through a coda that sees earlier tokens at loop {model.num_loops}"
    )


def print_result(result: CalibrationResult) -> None:
    """Prints any of the four."""
    if isinstance(result, KVCalibration):
        print_codecs(result)
    elif isinstance(result, DoorCalibration):
        print_doors(result)
    elif isinstance(result, LatencyCalibration):
        print_latency(result)
    elif len(result) == 1:
        print_calibration(result[0])
    else:
        print_rules(result)


def result_json(result: CalibrationResult) -> dict[str, Any] | list[dict[str, Any]]:
    """The whole of it for JSON; several rules as a list."""
    if isinstance(result, DoorCalibration):
        return result.to_dict()
    if isinstance(result, LatencyCalibration | KVCalibration):
        return asdict(result)
    rules = [asdict(rule) for rule in result]
    return rules[0] if len(rules) == 1 else rules


def settings_of(result: CalibrationResult, known: ExitThresholds | None = None) -> dict[str, dict[str, Any] | None]:
    """What is stored of it, by its name in `generation_config.json`; nothing where nothing was chosen.

    Of several rules the cheapest becomes the model's own.

    Args:
        result: Of a calibration.
        known: The thresholds that the model has; those of other rules are kept.
    """
    if isinstance(result, DoorCalibration):
        if result.chosen is None:
            return {}
        fitted = result.confidence_model
        return {
            "exit_config": result.exit_config.to_dict(),
            "fate_config": result.fates.to_dict(),
            "door_policy": result.chosen.to_dict(),
            # None clears one that the model had
            "confidence_model": None if fitted is None else fitted.to_dict(),
        }
    if isinstance(result, KVCalibration):
        return {} if result.chosen is None else {"kv_config": result.chosen.to_dict()}
    # a door keeps its promise under the exit rule that it was calibrated with: another rule takes it away
    no_door: dict[str, dict[str, Any] | None] = {"door_policy": None, "confidence_model": None}
    if isinstance(result, LatencyCalibration):
        return {"exit_config": result.chosen.to_dict(), **no_door}
    best = cheapest_rule(result)
    if best is None or best.chosen is None:
        return {}
    thresholds = (known or ExitThresholds()).updated(records_of(result))
    return {"exit_config": best.chosen.to_dict(), "exit_thresholds": thresholds.to_dict(), **no_door}


def write_calibration(model: DepthGenerationMixin, settings: dict[str, dict[str, Any] | None], folder: Path) -> None:
    """Stores settings in the `generation_config.json` of a checkpoint's folder.

    Args:
        model: The looped model that was loaded from there.
        settings: By name.
        folder: The checkpoint's folder.
    """
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
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


def _share(estimate: Estimate | None) -> str:
    return "none to tell" if estimate is None else _percent(estimate)
