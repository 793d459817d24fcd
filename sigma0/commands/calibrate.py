"""`sigma0 calibrate`: a threshold for a quality budget, the fastest one that is checked, or doors for a risk."""

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sigma0.checkpoints import resolve_model, shipped_models
from sigma0.commands.console import loading, one_line_errors, progress_bar
from sigma0.commands.options import AsJson, Device, DoorRuleName, Dtype, ModelArgument, Recurrence, Stride, Threads
from sigma0.errors import needs_extra

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from sigma0.calibrate.prompts import Prompt
    from sigma0.config import ExitConfig
    from sigma0.models.hf_generate import DepthGenerationMixin

Objective = Literal["agreement", "latency", "risk", "kv"]
Labels = Literal["answers", "full-depth", "larger"]


def calibrate(
    model: ModelArgument,
    prompts: Annotated[
        Path, typer.Option(help="JSON lines with a prompt, and for a risk an answer, each (*.jsonl), or paragraphs.")
    ],
    objective: Annotated[
        Objective,
        typer.Option(
            help="agreement: keep the promise with finish; latency: fewest passes with verify; risk: the converge door "
            "lets through as many answers as the risk allows; kv: fewest bits of K/V that keep the promise."
        ),
    ] = "agreement",
    agreement: Annotated[float, typer.Option(help="Share of new tokens that must keep full depth's choice.")] = 0.99,
    risk: Annotated[float, typer.Option(help="Wrong answers allowed among those that the door lets through.")] = 0.05,
    confidence: Annotated[float, typer.Option(help="With which that is to hold.")] = 0.95,
    exit: Annotated[
        str | None,
        typer.Option(
            "--exit",
            help="Exit rule: qexit (default), margin, converge, accel or accel-steps, or all of them at once; for a "
            "risk, the model's.",
        ),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="For a risk: q, theta or eps of --exit; it is stored too.")
    ] = None,
    labels: Annotated[
        Labels,
        typer.Option(
            help="For a risk, what right means: the answers of the prompts, what the model says at full depth, or what "
            "a --larger one says."
        ),
    ] = "answers",
    larger: Annotated[str | None, typer.Option(help="The model of --labels larger.")] = None,
    door_rule: DoorRuleName = None,
    ladder: Annotated[
        str | None, typer.Option(help="A larger model with the same tokenizer: find when tokens should go up to it.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="With --ladder: the share of tokens to go up, in place of an agreement.")
    ] = None,
    segment: Annotated[
        int | None, typer.Option(help="For kv: cache positions that are encoded together. [default: 64]")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each prompt at most.")] = 64,
    out: Annotated[
        Path | None, typer.Option(help="New or empty folder for a calibrated copy of a model that is no folder.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    recurrence: Recurrence = None,
    stride: Stride = None,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Turn a quality budget or a risk into thresholds, and store them in generation_config.json."""
    with one_line_errors(), needs_extra("calibrate"), ExitStack() as waiting:
        resolve_model(model)
        waiting.enter_context(loading(model, hidden=as_json))
        # the intervals of a result need them at the very end
        import scipy as scipy
        import sklearn as sklearn
        import torch

        torch.set_num_threads(threads)
        from sigma0.calibrate.agreement import prompts_needed
        from sigma0.calibrate.prompts import encode_prompts, read_prompts
        from sigma0.calibrate.report import (
            copy_checkpoint,
            print_result,
            readings_note,
            refusal,
            result_json,
            settings_of,
            write_calibration,
        )
        from sigma0.models.load import checkpoint_folder, load

        if rate is not None and ladder is None:
            raise ValueError("--rate belongs to --ladder: the share of tokens that go up to the larger model")
        if ladder is not None:
            if recurrence is not None or stride is not None:
                raise ValueError("--recurrence and --stride do not reach the rungs of a --ladder: leave them out")
            if objective != "agreement" or exit is not None or threshold is not None or out is not None:
                raise ValueError("--ladder finds a policy, which is printed: leave --objective, --exit and --out out")
            waiting.close()
            _print_doubt(model, ladder, prompts, rate, agreement, confidence, max_new_tokens, device, dtype, as_json)
            return
        if (labels == "larger") != (larger is not None):
            raise ValueError("--labels larger and --larger MODEL belong together: whose answers count as right")
        if door_rule is not None and objective != "risk":
            raise ValueError("--door-rule belongs to --objective risk: what the door reads")
        if segment is not None and objective != "kv":
            raise ValueError("--segment belongs to --objective kv: cache positions that are encoded together")
        if objective == "risk":
            config = risk_settings(exit, threshold)
        elif objective == "kv":
            if exit is not None or threshold is not None or labels != "answers":
                raise ValueError("--objective kv goes by full depth's own tokens: leave --exit and --labels out")
            prompts_needed(agreement, confidence)
        else:
            if labels != "answers":
                raise ValueError(f"--labels belongs to --objective risk; {objective} goes by full depth's own tokens")
            if threshold is not None:
                raise ValueError(f"--threshold belongs to --objective risk; {objective} finds the threshold itself")
            rules = rules_of(exit or "qexit")
            if objective == "latency" and len(rules) > 1:
                raise ValueError("--objective latency takes one rule: --exit qexit, margin, converge or accel")
            prompts_needed(agreement, confidence)
        folder = calibrated_folder(model, out)
        read = read_prompts(prompts)
        looped, tokenizer = load(
            model, device=device, dtype=dtype, recurrence=recurrence, stride=stride, door_rule=door_rule
        )
        waiting.close()
        if objective not in ("risk", "kv"):
            rules = rules_that_fit(looped, rules)
        ids = encode_prompts(looped, tokenizer, read, max_new_tokens)
        if objective == "risk":
            read = _labelled(looped, tokenizer, read, larger, labels, max_new_tokens, device, dtype, as_json)
            named = labels if larger is None else Path(larger).name
            result = _find_doors(looped, tokenizer, read, risk, confidence, config, max_new_tokens, named, as_json)
        elif objective == "kv":
            result = _find_codec(looped, ids, agreement, confidence, max_new_tokens, segment, as_json)
        else:
            result = _find(looped, ids, objective, rules, agreement, confidence, max_new_tokens, as_json)
        if as_json:
            typer.echo(json.dumps(result_json(result), indent=1))
        else:
            print_result(result)
            if (note := readings_note(looped)) is not None:
                typer.echo(note)
        settings = settings_of(result, looped.exit_thresholds)
        if not settings:
            typer.echo(refusal(result) if as_json else "nothing was stored", err=True)
            raise typer.Exit(1)
        if folder is None:
            message = "not stored: pass --out FOLDER for a calibrated copy"
        else:
            if out is not None:
                copy_checkpoint(checkpoint_folder(model), folder)
            write_calibration(looped, settings, folder)
            message = f"stored in {folder / 'generation_config.json'}"
    typer.echo(message, err=as_json)


def risk_settings(exit: str | None, threshold: float | None) -> "ExitConfig | None":
    """The exit rule that a risk is to be kept under; None: the model's own.

    Raises:
        ValueError: For a threshold without a rule, or one that the rule cannot have.
    """
    from sigma0.calibrate.agreement import GRIDS, THRESHOLD, check_mode
    from sigma0.config import ExitConfig

    if exit is None:
        if threshold is not None:
            raise ValueError("--threshold needs --exit: the rule that it belongs to")
        return None
    first = GRIDS[check_mode(exit)][0]
    if threshold is not None:
        return ExitConfig.parse({**first.to_dict(), THRESHOLD[exit]: threshold})
    # the threshold that the model was calibrated with, in the form that was named
    return ExitConfig(mode=first.mode, accel_scale=first.accel_scale)


def rules_of(exit: str) -> tuple[str, ...]:
    """The rules to calibrate, by the name of one or `all`.

    Raises:
        ValueError: For a name that is neither.
    """
    from sigma0.calibrate.agreement import GRIDS, check_mode

    return tuple(GRIDS) if exit == "all" else (check_mode(exit),)


def rules_that_fit(looped: "DepthGenerationMixin", rules: tuple[str, ...]) -> tuple[str, ...]:
    """Of several rules those that do not read a gate where a model has none; one alone is left to be refused.

    Raises:
        ValueError: For one rule that the model cannot have.
    """
    from sigma0.calibrate.agreement import GRIDS

    fitting = tuple(rule for rule in rules if looped.has_gate or GRIDS[rule][0].mode != "qexit")
    if not fitting:
        looped.resolve_exit_config(GRIDS[rules[0]][0])
    return fitting


def calibrated_folder(model: str, out: Path | None) -> Path | None:
    """Where a calibrated setting goes: the model's own folder, or a new one; None if nowhere.

    Raises:
        ValueError: If `out` holds something.
    """
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"--out {str(out)!r} is not a new or empty folder")
        out.mkdir(parents=True, exist_ok=True)
        return out
    is_folder = model not in shipped_models() and Path(model).expanduser().is_dir()
    return Path(model).expanduser() if is_folder else None


def _find(
    looped: "DepthGenerationMixin",
    ids: list[tuple[int, ...]],
    objective: Objective,
    rules: tuple[str, ...],
    agreement: float,
    confidence: float,
    max_new_tokens: int,
    quiet: bool,
) -> Any:
    from sigma0.calibrate.agreement import calibrate_rules, prompts_done
    from sigma0.calibrate.latency import calibrate_latency, latency_runs

    if objective == "latency":
        with progress_bar("runs", latency_runs(len(ids), rules[0]), hidden=quiet) as advance:
            return calibrate_latency(looped, ids, rules[0], max_new_tokens, advance)
    with progress_bar("prompts", prompts_done(len(ids), len(rules)), hidden=quiet) as advance:
        return calibrate_rules(looped, ids, rules, agreement, confidence, max_new_tokens, advance)


def _find_codec(
    looped: "DepthGenerationMixin",
    ids: list[tuple[int, ...]],
    agreement: float,
    confidence: float,
    max_new_tokens: int,
    segment: int | None,
    quiet: bool,
) -> Any:
    from sigma0.calibrate.kv import calibrate_kv, codecs_of
    from sigma0.config import KVConfig

    segment = KVConfig().segment if segment is None else segment
    with progress_bar("texts", len(ids) * len(codecs_of(looped.num_loops, segment)), hidden=quiet) as advance:
        return calibrate_kv(looped, ids, agreement, confidence, max_new_tokens, segment, advance)


def _find_doors(
    looped: "DepthGenerationMixin",
    tokenizer: "PreTrainedTokenizerFast",
    read: "list[Prompt]",
    risk: float,
    confidence: float,
    config: "ExitConfig | None",
    max_new_tokens: int,
    labels: str,
    quiet: bool,
) -> Any:
    from sigma0.calibrate.risk import calibrate_doors

    with progress_bar("answers", len(read), hidden=quiet) as advance:
        return calibrate_doors(looped, tokenizer, read, risk, confidence, config, max_new_tokens, labels, advance)


def _labelled(
    looped: "DepthGenerationMixin",
    tokenizer: "PreTrainedTokenizerFast",
    read: "list[Prompt]",
    larger: str | None,
    labels: Labels,
    max_new_tokens: int,
    device: str,
    dtype: str,
    quiet: bool,
) -> "list[Prompt]":
    """The prompts with the answers that count as right."""
    from sigma0.calibrate.labels import label_prompts
    from sigma0.models.load import load_causal

    if labels == "answers":
        return read
    model, its = (looped, tokenizer) if larger is None else load_causal(larger, device=device, dtype=dtype)
    with progress_bar("labels", len(read), hidden=quiet) as advance:
        return label_prompts(model, its, read, max_new_tokens, advance)


def _print_doubt(
    small: str,
    large: str,
    prompts: Path,
    rate: float | None,
    agreement: float,
    confidence: float,
    max_new_tokens: int,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Finds and prints when tokens should go up."""
    from sigma0.calibrate.ladder import calibrate_doubt
    from sigma0.calibrate.prompts import encode_prompts, read_prompts
    from sigma0.calibrate.report import print_doubt
    from sigma0.ladder import Doubt, Rung
    from sigma0.ladder.triggers import trigger_to_dict
    from sigma0.models.load import load_causal

    rungs = [Rung.local(*load_causal(name, device=device, dtype=dtype), Path(name).name) for name in (small, large)]
    ids = encode_prompts(rungs[0].model, rungs[0].tokenizer, read_prompts(prompts), max_new_tokens)
    with progress_bar("prompts", len(ids), hidden=as_json) as advance:
        result = calibrate_doubt(rungs[0], rungs[1], ids, rate, agreement, confidence, max_new_tokens, advance)
    policy = None if result.below is None else trigger_to_dict(Doubt(result.below))
    if as_json:
        typer.echo(json.dumps({**asdict(result), "policy": policy}, indent=1))
    else:
        print_doubt(result, rungs[1].name)
        if policy is not None:
            typer.echo(f"use             sigma0 generate --ladder {small},{large} --policy '{json.dumps(policy)}'")
    if policy is None:
        typer.echo("no confidence keeps that agreement: give more prompts, or ask for less", err=True)
        raise typer.Exit(1)
