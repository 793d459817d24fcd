"""vLLM with the plugin beside our own server: the same questions, as long as their answers are."""

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from rich.console import Console

from sigma0.bench.core.conditions import describe
from sigma0.bench.core.ledger import Conditions, VllmRow
from sigma0.bench.core.tables import BenchTable
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.serving.load import Ask, Load, closed_loop, percentiles
from sigma0.bench.serving.measure import spread
from sigma0.bench.serving.servers import draft_arguments, draft_counts, serving_process, vllm_server
from sigma0.calibrate.prompts import encode_prompts
from sigma0.commands.console import progress_bar
from sigma0.config import ExitConfig
from sigma0.models.load import checkpoint_folder, load

QUESTIONS = 32
# vLLM says how many tokens a chunk has where it is asked to
VLLM_EXTRA: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass(frozen=True)
class VllmPlan:
    """What is measured.

    Attributes:
        model: Shipped name, folder or hub id.
        python: Interpreter of the environment that has vLLM.
        clients: Numbers of them.
        requests: For each client, way and round; `QUESTIONS` in all at least.
        max_tokens: Of every answer at most.
        drafts: Of a step at most.
        draft_loops: Of a draft.
        rounds: Interleaved.
    """

    model: str
    python: str
    clients: tuple[int, ...]
    requests: int
    max_tokens: int
    drafts: int
    draft_loops: int
    rounds: int


@dataclass(frozen=True)
class Served:
    """One way under one load in one round.

    Attributes:
        load: What the clients saw.
        accepted_length: Tokens for each step with drafts; None where there were none.
    """

    load: Load
    accepted_length: float | None


Found = Mapping[int, Mapping[str, Sequence[Served]]]


def measure_vllm(plan: VllmPlan, hidden: bool = False) -> list[VllmRow]:
    """Starts the servers, and asks each under each load.

    Args:
        plan: What is measured.
        hidden: Whether no bar is shown.

    Raises:
        ValueError: For a server that does not start.
    """
    looped, tokenizer = load(plan.model, device="cpu", dtype="float32")
    folder = checkpoint_folder(plan.model)
    asked = [prompt for prompt in micro_world(2 * QUESTIONS) if not isinstance(prompt.content, str)]
    prompts = [str(prompt.content[0]["content"]) for prompt in asked]  # type: ignore[index]
    own = asdict(looped.resolve_exit_config(None))
    configs = {"full": ExitConfig(mode="full")}
    configs |= {after: ExitConfig(**{**own, "after_exit": after}) for after in ("verify", "finish")}
    found: dict[int, dict[str, list[Served]]] = {}
    with ExitStack() as stack:
        served = ["--dtype", "float32", "--threads", "1", "--max-running", "32", "--max-waiting", "64"]
        _, url = stack.enter_context(serving_process(str(folder), served))
        eager = ["--enforce-eager", "--max-model-len", "1024"]
        drafting = [*eager, *draft_arguments(plan.drafts, plan.draft_loops)]
        asks = {
            name: Ask(stack.enter_context(vllm_server(plan.python, folder, arguments)), folder.name, prompts,
                      plan.max_tokens, VLLM_EXTRA)
            for name, arguments in (("vllm", eager), ("vllm-drafts", drafting))
        }  # fmt: skip
        for name, config in configs.items():
            extra = {"sigma0": {"exit": asdict(config), "on_collapse": "ignore"}}
            asks[name] = Ask(url, folder.name, prompts, plan.max_tokens, extra)
        for ask in asks.values():
            asyncio.run(closed_loop(ask, 8, QUESTIONS))
        # there and back, so that none is always the first
        runs = [
            (clients, name)
            for clients in plan.clients
            for number in range(plan.rounds)
            for name in list(asks)[:: 1 if number % 2 == 0 else -1]
        ]
        with progress_bar("runs", len(runs), hidden) as advance:
            for done, (clients, name) in enumerate(runs, start=1):
                requests = max(QUESTIONS, plan.requests * clients)
                run = _run(asks[name], clients, requests, name == "vllm-drafts")
                found.setdefault(clients, {}).setdefault(name, []).append(run)
                advance(done)
    ids = encode_prompts(looped, tokenizer, asked, plan.max_tokens)
    where = "questions of pocket's world as chat, test split, seed 0"
    conditions = describe(looped, plan.model, where, ids, [None] * len(ids), plan.max_tokens)
    return vllm_rows(found, conditions, plan, vllm_version(plan.python))


def vllm_version(python: str) -> str:
    """The version of vLLM in an interpreter's environment."""
    code = "import importlib.metadata as m; print(next(m.version(n) for n in m.packages_distributions()['vllm']))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _run(ask: Ask, clients: int, requests: int, drafting: bool) -> Served:
    before = draft_counts(ask.url) if drafting else None
    load = asyncio.run(closed_loop(ask, clients, requests))
    if before is None:
        return Served(load, None)
    after = draft_counts(ask.url)
    steps, stood = (after[name] - before[name] for name in ("drafts", "accepted_tokens"))
    return Served(load, 1 + stood / steps if steps else None)


def vllm_rows(found: Found, conditions: Conditions, plan: VllmPlan, version: str) -> list[VllmRow]:
    """A row for each way and load, ratios taken round by round.

    Args:
        found: What was measured, by clients and way.
        conditions: Of the run.
        plan: What was measured.
        version: Of vLLM.
    """
    ended, rows = datetime.now(timezone.utc).isoformat(), []
    for clients, by_way in found.items():
        expected = {answer.number: answer.text for answer in by_way["full"][-1].load.answers}
        for way, runs in by_way.items():
            answers = [answer for run in runs for answer in run.load.answers]
            last = runs[-1].load
            drafting = way == "vllm-drafts"
            speeds = [run.load.tokens_per_second for run in runs]
            base = [run.load.tokens_per_second for run in by_way["vllm"]]
            rows.append(
                VllmRow(
                    **conditions.model_dump(),
                    time=ended,
                    way=way,  # type: ignore[arg-type]
                    vllm=version,
                    drafts=plan.drafts if drafting else None,
                    draft_loops=plan.draft_loops if drafting else None,
                    accepted_length=runs[-1].accepted_length,
                    clients=clients,
                    requests=len(last.answers),
                    rounds=len(runs),
                    failed=sum(run.load.failed for run in runs),
                    tokens_per_second=spread(speeds),
                    speed_ratio=spread([speed / other for speed, other in zip(speeds, base, strict=True)]),
                    same_text=sum(answer.text == expected[answer.number] for answer in answers) / len(answers),
                    first_token_ms=last.first_token,
                    answer_ms=percentiles([answer.ended - answer.began for answer in last.answers]),
                )
            )
    return rows


def print_vllm(rows: Sequence[VllmRow]) -> None:
    """The rows as a table."""
    names = (
        "clients",
        "way",
        "tokens/s",
        "of vllm",
        "same text",
        "a step",
        "first 50/99 %",
        "answer 50/99 %",
        "failed",
    )
    cells = [
        (
            str(row.clients),
            row.way,
            f"{row.tokens_per_second.value:.0f}",
            f"{row.speed_ratio.value:.2f} ({row.speed_ratio.low:.2f} to {row.speed_ratio.high:.2f})",
            f"{row.same_text:.1%}",
            "-" if row.accepted_length is None else f"{row.accepted_length:.2f}",
            f"{row.first_token_ms.p50:.0f} / {row.first_token_ms.p99:.0f}",
            f"{row.answer_ms.p50:.0f} / {row.answer_ms.p99:.0f}",
            str(row.failed),
        )
        for row in rows
    ]
    title = "medians of the rounds; latencies of the last, ms"
    Console().print(BenchTable(names, cells, title, left=("clients", "way")).rich())
