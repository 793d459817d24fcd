"""`sigma0 calibrate`: a threshold for a quality budget, the fastest one that is checked, or doors for a risk."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from sigma0.checkpoints import resolve_model, shipped_models
from sigma0.commands.console import loading, one_line_errors, progress_bar
from sigma0.commands.options import (
    AsJson,
    Device,
    DoorRuleName,
    Dtype,
    ModelArgument,
    Recurrence,
    Stride,
    Threads,
    grouped,
    option,
)
from sigma0.errors import needs_extra

if TYPE_CHECKING:
    from sigma0.config import ExitConfig

# Options that one objective alone reads, and what they are to it.
_BELONGS = {
    "door_rule": ("risk", "what the door reads"),
    "segment": ("kv", "cache positions that are encoded together"),
    "labels": ("risk", "the others go by full depth's own tokens"),
    "threshold": ("risk", "the others find the threshold themselves"),
}


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """What is calibrated, on what, and where it is stored."""

    prompts: Path = option(..., "JSON lines with a prompt, and for a risk an answer, each (*.jsonl), or paragraphs.")
    objective: Literal["agreement", "latency", "risk", "kv"] = option(
        "agreement",
        "agreement: keep the promise with finish; latency: fewest passes with verify; risk: the converge door "
        "lets through as many answers as the risk allows; kv: fewest bits of K/V that keep the promise.",
    )
    agreement: float = option(0.99, "Share of new tokens that must keep full depth's choice.")
    risk: float = option(0.05, "Wrong answers allowed among those that the door lets through.")
    confidence: float = option(0.95, "With which that is to hold.")
    exit: str | None = option(
        None,
        "Exit rule: qexit (default), margin, converge, accel or accel-steps, or all of them at once; for a "
        "risk, the model's.",
    )
    threshold: float | None = option(None, "For a risk: q, theta or eps of --exit; it is stored too.")
    labels: Literal["answers", "full-depth", "larger"] = option(
        "answers",
        "For a risk, what right means: the answers of the prompts, what the model says at full depth, or what "
        "a --larger one says.",
    )
    larger: str | None = option(None, "The model of --labels larger.")
    door_rule: DoorRuleName = None
    ladder: str | None = option(None, "A larger model with the same tokenizer: find when tokens should go up to it.")
    rate: float | None = option(None, "With --ladder: the share of tokens to go up, in place of an agreement.")
    segment: int | None = option(None, "For kv: cache positions that are encoded together. [default: 64]")
    max_new_tokens: int = option(64, "New tokens of each prompt at most.", min=1)
    out: Path | None = option(None, "New or empty folder for a calibrated copy of a model that is no folder.")
    device: Device = "auto"
    dtype: Dtype = "auto"
    recurrence: Recurrence = None
    stride: Stride = None
    threads: Threads = 1
    as_json: AsJson = False

    def check(self) -> None:
        """Refuses options that are not read together, and a promise or a rule that there is not."""
        from sigma0.calibrate.agreement import check_mode, prompts_needed

        given = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        if "ladder" in given:
            if unread := given & {"objective", "exit", "threshold", "out", "recurrence", "stride"}:
                options = ", ".join(f"--{name}" for name in sorted(unread))
                raise ValueError(f"--ladder prints a policy for models as they are: leave {options} out")
            return
        if "rate" in given:
            raise ValueError("--rate belongs to --ladder: the share of tokens that go up to the larger model")
        if (self.labels == "larger") != ("larger" in given):
            raise ValueError("--labels larger and --larger MODEL belong together: whose answers count as right")
        if self.objective == "kv" and given & {"exit", "threshold", "labels"}:
            raise ValueError("--objective kv goes by full depth's own tokens: leave --exit and --labels out")
        for name, (objective, what) in _BELONGS.items():
            if name in given and self.objective != objective:
                raise ValueError(f"--{name.replace('_', '-')} belongs to --objective {objective}: {what}")
        if "threshold" in given and self.exit is None:
            raise ValueError("--threshold needs --exit: the rule that it belongs to")
        if self.exit is not None and (self.exit, self.objective) != ("all", "agreement"):
            check_mode(self.exit)
        if self.objective != "risk":
            prompts_needed(self.agreement, self.confidence)

    def exit_config(self) -> "ExitConfig | None":
        """The exit rule that a risk is to be kept under; None: the model's own."""
        from sigma0.calibrate.agreement import GRIDS, THRESHOLD
        from sigma0.config import ExitConfig

        if self.exit is None or self.objective != "risk":
            return None
        first = GRIDS[self.exit][0]
        if self.threshold is not None:
            return ExitConfig.parse({**first.to_dict(), THRESHOLD[self.exit]: self.threshold})
        # the threshold that the model was calibrated with, in the form that was named
        return ExitConfig(mode=first.mode, accel_scale=first.accel_scale)

    def run(self, what: str, total: int, work: Callable[..., Any], *given: Any) -> Any:
        """What some work makes of its arguments and a function that reports its progress, beside a bar."""
        with progress_bar(what, total, hidden=self.as_json) as advance:
            return work(*given, advance)

    def search(self, looped: Any, tokenizer: Any, read: Any, config: "ExitConfig | None") -> Any:
        """The result of the objective on a model and its prompts."""
        from sigma0.calibrate.agreement import GRIDS, calibrate_rules, prompts_done
        from sigma0.calibrate.kv import calibrate_kv, codecs_of
        from sigma0.calibrate.labels import label_prompts
        from sigma0.calibrate.latency import calibrate_latency, latency_runs
        from sigma0.calibrate.prompts import encode_prompts
        from sigma0.calibrate.risk import calibrate_doors
        from sigma0.config import KVConfig
        from sigma0.decode.kv_store import BlockShape
        from sigma0.models.load import load_causal

        new, promise = self.max_new_tokens, (self.agreement, self.confidence, self.max_new_tokens)
        ids = encode_prompts(looped, tokenizer, read, new)
        if self.objective == "risk":
            labels = self.labels if self.larger is None else Path(self.larger).name
            if self.labels != "answers":
                teacher = looped, tokenizer
                if self.larger is not None:
                    teacher = load_causal(self.larger, device=self.device, dtype=self.dtype)
                read = self.run("labels", len(read), label_prompts, *teacher, read, new)
            doors = looped, tokenizer, read, self.risk, self.confidence, config, new, labels
            return self.run("answers", len(read), calibrate_doors, *doors)
        if self.objective == "kv":
            segment = KVConfig().segment if self.segment is None else self.segment
            texts = len(ids) * len(codecs_of(BlockShape.of(looped, 1), segment))
            return self.run("texts", texts, calibrate_kv, looped, ids, *promise, segment)
        rules = tuple(GRIDS) if self.exit == "all" else (self.exit or "qexit",)
        fitting = [rule for rule in rules if looped.has_gate or GRIDS[rule][0].mode != "qexit"]
        if not fitting:
            # one that reads a gate where there is none is refused
            looped.resolve_exit_config(GRIDS[rules[0]][0])
        if self.objective == "latency":
            runs = latency_runs(len(ids), fitting[0])
            return self.run("runs", runs, calibrate_latency, looped, ids, fitting[0], new)
        prompts = prompts_done(len(ids), len(fitting))
        return self.run("prompts", prompts, calibrate_rules, looped, ids, fitting, *promise)


@grouped
def calibrate(asked: CalibrateOptions, model: ModelArgument) -> None:
    """Turn a quality budget or a risk into thresholds, and store them in generation_config.json."""
    with one_line_errors(), needs_extra("calibrate"), ExitStack() as waiting:
        resolve_model(model)
        waiting.enter_context(loading(model, hidden=asked.as_json))
        # the intervals of a result need them at the very end
        import scipy as scipy
        import sklearn as sklearn
        import torch

        torch.set_num_threads(asked.threads)
        from sigma0.calibrate import report
        from sigma0.calibrate.prompts import read_prompts
        from sigma0.models.load import checkpoint_folder, load

        asked.check()
        if asked.ladder is not None:
            waiting.close()
            _calibrate_ladder(model, asked.ladder, asked)
            return
        config, folder = asked.exit_config(), calibrated_folder(model, asked.out)
        read = read_prompts(asked.prompts)
        place = {name: getattr(asked, name) for name in ("device", "dtype", "recurrence", "stride", "door_rule")}
        looped, tokenizer = load(model, **place)
        waiting.close()
        result = asked.search(looped, tokenizer, read, config)
        if asked.as_json:
            typer.echo(json.dumps(report.result_json(result), indent=1))
        else:
            report.print_result(result)
            if (note := report.readings_note(looped)) is not None:
                typer.echo(note)
        settings = report.settings_of(result, looped.exit_thresholds)
        if not settings:
            typer.echo(report.refusal(result) if asked.as_json else "nothing was stored", err=True)
            raise typer.Exit(1)
        message = "not stored: pass --out FOLDER for a calibrated copy"
        if folder is not None:
            if asked.out is not None:
                report.copy_checkpoint(checkpoint_folder(model), folder)
            report.write_calibration(looped, settings, folder)
            message = f"stored in {folder / 'generation_config.json'}"
    typer.echo(message, err=asked.as_json)


def calibrated_folder(model: str, out: Path | None) -> Path | None:
    """Where a calibrated setting goes: the model's own folder, or one that is new or empty; None if nowhere."""
    if out is None:
        folder = Path(model).expanduser()
        return folder if model not in shipped_models() and folder.is_dir() else None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {str(out)!r} is not a new or empty folder")
    out.mkdir(parents=True, exist_ok=True)
    return out


def _calibrate_ladder(small: str, large: str, asked: CalibrateOptions) -> None:
    from sigma0.calibrate.ladder import calibrate_doubt
    from sigma0.calibrate.prompts import encode_prompts, read_prompts
    from sigma0.calibrate.report import print_doubt
    from sigma0.ladder import Doubt, Rung
    from sigma0.ladder.triggers import trigger_to_dict
    from sigma0.models.load import load_causal

    rungs = [
        Rung.local(*load_causal(name, device=asked.device, dtype=asked.dtype), Path(name).name)
        for name in (small, large)
    ]
    ids = encode_prompts(rungs[0].model, rungs[0].tokenizer, read_prompts(asked.prompts), asked.max_new_tokens)
    promise = asked.rate, asked.agreement, asked.confidence, asked.max_new_tokens
    result = asked.run("prompts", len(ids), calibrate_doubt, *rungs, ids, *promise)
    policy = None if result.below is None else trigger_to_dict(Doubt(result.below))
    if asked.as_json:
        typer.echo(json.dumps({**asdict(result), "policy": policy}, indent=1))
    else:
        print_doubt(result, rungs[1].name)
        if policy is not None:
            typer.echo(f"use             sigma0 generate --ladder {small},{large} --policy '{json.dumps(policy)}'")
    if policy is None:
        typer.echo("no confidence keeps that agreement: give more prompts, or ask for less", err=True)
        raise typer.Exit(1)
