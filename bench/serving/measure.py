"""Servers under load, way by way, and rows of them."""

import asyncio
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from statistics import median
from typing import Any

from sigma0.bench.core.conditions import describe
from sigma0.bench.core.ledger import Conditions, Figure, ServeRow, VllmRow
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.serving.load import WAYS, Ask, Load, drive, percentiles
from sigma0.bench.serving.servers import counts
from sigma0.calibrate.prompts import encode_prompts
from sigma0.commands.console import progress_bar
from sigma0.config import AfterExit, ExitConfig


@dataclass(frozen=True)
class Run:
    """One way under one load in one round.

    Attributes:
        load: What the clients saw.
        counts: What the server counted meanwhile; empty where it does not tell.
    """

    load: Load
    counts: Mapping[str, float]


# By kind (closed or open) and amount (clients or requests a second) of the load, and by way; one for each round.
Found = Mapping[tuple[str, float], Mapping[str, Sequence[Run]]]


def run(ask: Ask, kind: str, amount: float, requests: int) -> Run:
    """One way under one load, once."""
    before = ask.counts(ask.url)
    load = asyncio.run(drive(ask, kind, amount, requests))
    after = ask.counts(ask.url)
    return Run(load, {name: after[name] - before[name] for name in before})


def in_turn(
    asks: Mapping[str, Ask],
    loads: Sequence[tuple[str, float]],
    rounds: int,
    requests: Callable[[str, float], int],
    hidden: bool,
) -> Found:
    """Every way under every load, there and back, so that none is always the first.

    Args:
        asks: What each way asks.
        loads: Kind and amount.
        rounds: How often.
        requests: Of a round under a load.
        hidden: Whether no bar is shown.
    """
    found: dict[tuple[str, float], dict[str, list[Run]]] = {load: {way: [] for way in asks} for load in loads}
    runs = [(load, way) for load in loads for number in range(rounds) for way in list(asks)[:: -1 if number % 2 else 1]]
    with progress_bar("runs", len(runs), hidden) as advance:
        for done, (load, way) in enumerate(runs, start=1):
            found[load][way].append(run(asks[way], *load, requests(*load)))
            advance(done)
    return found


def our_configs(own: ExitConfig, wanted: Sequence[str] = WAYS) -> dict[str, ExitConfig]:
    """Full depth, its rule never met, and the three things that become of deeper loops.

    Raises:
        ValueError: For an unknown way, or where full depth, which the others are measured by, is not the first.
    """
    unknown = sorted(set(wanted) - set(WAYS))
    if unknown or wanted[0] != "full":
        raise ValueError(f"ways {','.join(wanted)!r} must begin with full and be some of {', '.join(WAYS)}")
    afters: tuple[AfterExit, ...] = ("finish", "drop", "verify")
    configs = {"full": ExitConfig(mode="full"), "never": ExitConfig(mode="qexit", q=1.0)}
    configs |= {after: replace(own, after_exit=after) for after in afters}
    return {way: configs[way] for way in wanted}


def our_asks(
    configs: Mapping[str, ExitConfig], url: str, model: str, prompts: Sequence[str], max_tokens: int
) -> dict[str, Ask]:
    """What each of our ways asks of our server; answers go on past their end, where they may well run in circles."""
    extras = {way: {"exit": asdict(config), "on_collapse": "ignore"} for way, config in configs.items()}
    return {way: Ask(url, model, prompts, max_tokens, {"sigma0": extra}, counts) for way, extra in extras.items()}


def questions(looped: Any, tokenizer: Any, model: str, max_tokens: int) -> tuple[list[str], Conditions]:
    """Questions of pocket's world, and the conditions of a run with them."""
    asked = [prompt for prompt in micro_world(64) if not isinstance(prompt.content, str)]
    ids = encode_prompts(looped, tokenizer, asked, max_tokens)
    where = "questions of pocket's world as chat, test split, seed 0"
    conditions = describe(looped, model, where, ids, [None] * len(ids), max_tokens)
    return [str(prompt.content[0]["content"]) for prompt in asked], conditions  # type: ignore[index]


def vllm_version(python: str) -> str:
    """The version of vLLM in an interpreter's environment."""
    code = "import importlib.metadata as m; print(next(m.version(n) for n in m.packages_distributions()['vllm']))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def serve_rows(found: Found, configs: Mapping[str, ExitConfig], conditions: Conditions, runner: str) -> list[ServeRow]:
    """A row for each way and load, ratios over full depth taken round by round.

    Args:
        found: What was measured.
        configs: What our ways ask for.
        conditions: Of the run.
        runner: Of our server.
    """
    ended, rows = datetime.now(timezone.utc).isoformat(), []
    for (kind, amount), by_way in found.items():
        for way, runs in by_way.items():
            told = {
                "time": ended,
                "way": way,
                "runner": runner if way in configs else "eager",
                "exit_config": configs[way].to_dict() if way in configs else None,
                "load": kind,
                "amount": amount,
                "rows_per_second": _rate(runs, "rows"),
                "passes_per_second": _rate(runs, "passes"),
                "between_tokens_ms": runs[-1].load.between_tokens,
            }
            figures = _figures(runs, by_way["full"])
            rows.append(ServeRow.model_validate({**conditions.model_dump(), **told, **figures}))
    return rows


def vllm_rows(found: Found, conditions: Conditions, version: str, drafts: int, draft_loops: int) -> list[VllmRow]:
    """A row for each way and load, ratios over vLLM at full depth taken round by round.

    Args:
        found: What was measured.
        conditions: Of the run.
        version: Of vLLM.
        drafts: Of a step at most.
        draft_loops: Of a draft.
    """
    ended, rows = datetime.now(timezone.utc).isoformat(), []
    for (_, clients), by_way in found.items():
        expected = {answer.number: answer.text for answer in by_way["full"][-1].load.answers}
        for way, runs in by_way.items():
            answers = [answer for run in runs for answer in run.load.answers]
            drafting, last = way == "vllm-drafts", runs[-1]
            steps = last.counts.get("drafts")
            told = {
                "time": ended,
                "way": way,
                "vllm": version,
                "drafts": drafts if drafting else None,
                "draft_loops": draft_loops if drafting else None,
                "accepted_length": 1 + last.counts["accepted_tokens"] / steps if steps else None,
                "clients": int(clients),
                "same_text": sum(answer.text == expected[answer.number] for answer in answers) / len(answers),
                "answer_ms": percentiles([answer.ended - answer.began for answer in last.load.answers]),
            }
            figures = _figures(runs, by_way["vllm"])
            rows.append(VllmRow.model_validate({**conditions.model_dump(), **told, **figures}))
    return rows


def _figures(runs: Sequence[Run], base: Sequence[Run]) -> dict[str, Any]:
    """What both rows tell of a way."""
    speeds, others = ([run.load.tokens_per_second for run in each] for each in (runs, base))
    last = runs[-1].load
    return {
        "requests": len(last.answers),
        "rounds": len(runs),
        "failed": sum(run.load.failed for run in runs),
        "tokens_per_second": spread(speeds),
        "speed_ratio": spread([speed / other for speed, other in zip(speeds, others, strict=True)]),
        "first_token_ms": last.first_token,
    }


def spread(values: Sequence[float]) -> Figure:
    """Median, least and greatest of the rounds."""
    return Figure(value=median(values), low=min(values), high=max(values))


def _rate(runs: Sequence[Run], name: str) -> float | None:
    values = [run.counts[name] / run.load.seconds for run in runs if name in run.counts]
    return median(values) if values else None
