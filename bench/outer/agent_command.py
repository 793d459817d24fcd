"""`python -m sigma0.bench agent`: the three-tier agent on a small repository with one fault at a time."""

import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import torch
import typer

from sigma0.bench.core.ledger import OWN, append_row, check_ledger
from sigma0.bench.core.options import AsJsonLines, FormsModel, LedgerFile
from sigma0.bench.core.output import tell_rows
from sigma0.bench.outer.command import open_asked
from sigma0.bench.outer.measure import Result, hard_questions, to_row
from sigma0.bench.outer.toy import FAULTS, write
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import Threads
from sigma0.reason.agent.agent import AgentSettings, RepoAgent
from sigma0.reason.agent.escalation import ThreeTierEscalation
from sigma0.reason.desk import Desk
from sigma0.reason.sandbox.sandbox import Sandbox
from sigma0.reason.trail import Trail

TASK = "The tests of this repository fail. Mend the code, so that they pass."


def agent(
    model: FormsModel = "pocket-solver",
    held: Annotated[bool, typer.Option(help="Hold replies to one action by a grammar.")] = True,
    steps: Annotated[int, typer.Option(min=4, help="Steps on each fault at most; a tier every quarter.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each reply at most.")] = 128,
    seed: Annotated[int, typer.Option(help="Of the questions.")] = 0,
    threads: Threads = 1,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Let the three-tier agent mend a small repository with one of several faults at a time."""
    torch.set_num_threads(threads)
    started = datetime.now(timezone.utc).isoformat()
    with one_line_errors():
        check_ledger(out)
        sandbox = Sandbox()
        if sandbox.unavailable is not None:
            raise ValueError(f"the agent runs tests in a sandbox alone, and there is none: {sandbox.unavailable}")
        # conditions of the row: the faults are the questions
        where = f"a repository of the micro-world's rules with one of {len(FAULTS)} faults"
        asked, _ = open_asked(model, hard_questions(2, seed), where, None)
        quarter = steps // 4
        tiers = ThreeTierEscalation(
            tier1=quarter, tier2=2 * quarter, tier3=3 * quarter, check_interval=max(1, quarter // 2), max_steps=steps
        )
        settings = AgentSettings(escalation=tiers, max_tokens=max_tokens, context_chars=8_000, held=held)
        results, taken, refused = [], 0, 0
        with progress_bar("faults", len(FAULTS), as_json) as advance:
            for place, fault in enumerate(FAULTS):
                desk = Desk(Trail(), seed=seed + place)
                with tempfile.TemporaryDirectory() as folder:
                    write(Path(folder), fault)
                    found = RepoAgent([asked.chat], sandbox, desk, settings).solve(TASK, Path(folder))
                taken += found.steps
                refused += sum(decision.what == "refused" for decision in desk.trail.decisions)
                results.append(Result(found.patch, found.solved, found.solved, desk.usage))
                advance(place + 1)
        conditions = asked.conditions.model_copy(update={"n": len(FAULTS), "max_new_tokens": max_tokens})
        way = f"agent, {'held to actions' if held else 'free'}, {steps} steps"
        row = to_row(way, asked.over(conditions), results, {}, seed, started)
        append_row(out, row)
    solved = sum(one.right for one in results)
    line = f"{solved} of {len(FAULTS)} faults mended; {refused} of {taken} replies were no action that could be taken"
    tell_rows([row], as_json, lambda: typer.echo(line), f"1 row in {out}")
