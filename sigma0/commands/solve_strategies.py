"""The strategies of `sigma0 solve`: each builds its outer loop from the command line, and runs it."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sigma0.commands.solve_models import as_ladder, follows_instructions, known_forms, source
from sigma0.commands.solve_progress import lemma_line
from sigma0.reason.agent.agent import AgentSettings, RepoAgent
from sigma0.reason.chat import ChatModel
from sigma0.reason.desk import Desk
from sigma0.reason.lemma import ALGSolver, LemmaSettings, draw
from sigma0.reason.lemma.form_solver import FormSolver
from sigma0.reason.progressive.bare import BareQuestion
from sigma0.reason.progressive.critique import Critique
from sigma0.reason.progressive.effort import ProgressiveReasoningManager
from sigma0.reason.progressive.form_task import FormTask
from sigma0.reason.progressive.policies import named_config
from sigma0.reason.progressive.verify_loop import ProgressiveTask, VerifyLoop
from sigma0.reason.record import Record
from sigma0.reason.sandbox.sandbox import Sandbox
from sigma0.reason.trail import Heading, Outcome, Strategy

_LIBRARIES = ("sigma0-lm", "torch", "transformers")


@dataclass(frozen=True)
class Solved:
    """What a strategy hands back to the command line.

    Attributes:
        solved: Whether its own gate was passed.
        text: What is printed.
        why: In a sentence.
        report: All of it, as JSON.
    """

    solved: bool
    text: str
    why: str
    report: dict[str, Any]


@dataclass(frozen=True)
class Order:
    """What the command line asks for.

    Attributes:
        problem: What is to be solved.
        strategy: Which outer loop.
        chats: Models, the cheapest first.
        config: Name of a policy, or a JSON file; None: the default.
        memory: File of the run: state of a progressive one, answers of the others.
        resume: Whether the memory is taken up.
        repo: Folder of an agent's task.
        graph: Where a lemma graph is drawn.
        temperature: Of the sampling; None: the strategy's default.
        max_tokens: New tokens of each text at most; None: the strategy's default.
    """

    problem: str
    strategy: Strategy
    chats: list[ChatModel]
    config: str | None
    memory: Path | None
    resume: bool
    repo: Path | None
    graph: Path | None
    temperature: float | None
    max_tokens: int | None


def _head(order: Order, desk: Desk, models: list[ChatModel], settings: dict[str, Any]) -> Heading:
    names = tuple(model.name for model in models)
    versions = {name: version(name) for name in _LIBRARIES}
    heading = Heading(order.strategy, order.problem, names, settings, versions, order.resume)
    desk.trail.add(heading)
    return heading


def _recorded(order: Order, desk: Desk, settings: dict[str, Any]) -> None:
    """Heads the trail, and has answers kept in the memory file, or taken from it."""
    repo = {} if order.repo is None else {"repo": str(order.repo.resolve())}
    sources = [source(chat) for chat in order.chats]
    heading = _head(order, desk, order.chats, {**settings, "seed": desk.seed, "sources": sources, **repo})
    if order.memory is not None:
        desk.record = Record(order.memory, heading, order.resume)


def _settings(order: Order) -> dict[str, Any]:
    """The settings of a JSON file, and over them what stands on the command line."""
    values: dict[str, Any] = {}
    if order.config is not None:
        try:
            values = json.loads(Path(order.config).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"--config {order.config!r} cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"--config {order.config!r} holds no JSON object")
    given = {"temperature": order.temperature, "max_tokens": order.max_tokens}
    return {**values, **{name: value for name, value in given.items() if value is not None}}


def _progressive(order: Order, desk: Desk) -> Solved:
    chat, samples = as_ladder(order.chats)
    manager = ProgressiveReasoningManager(None if order.config is None else named_config(order.config))
    default = 0.7 if samples else 0.0
    settings: dict[str, Any] = {"temperature": default if order.temperature is None else order.temperature}
    if order.max_tokens is not None:
        settings["max_tokens"] = order.max_tokens
    loop = VerifyLoop(_task(order), desk, chat, manager=manager, memory=order.memory, problem=order.problem, **settings)
    if order.resume:
        loop.resume()
        if order.config is not None and loop.manager.config != manager.config:
            raise ValueError(f"--config {order.config} is not the policy of the memory file: leave it out to go on")
    _head(order, desk, [chat], {**settings, "policy": loop.manager.config.to_dict()})
    report = loop.run()
    return Solved(report.solved, report.solution or "", report.why, report.to_dict())


def _task(order: Order) -> ProgressiveTask:
    """The problem as fits the model: checked in the form that it was taught, criticised in words, or asked again."""
    if "check" in known_forms(order.chats):
        return FormTask(order.problem)
    return (Critique if follows_instructions(order.chats) else BareQuestion)(order.problem)


def _lemma(order: Order, desk: Desk) -> Solved:
    settings = LemmaSettings.from_dict(_settings(order))
    model, above = order.chats[0], order.chats[-1] if len(order.chats) > 1 else None
    _recorded(order, desk, settings.to_dict())
    if known_forms(order.chats) >= {"plan", "look", "act"}:
        result = FormSolver(model, desk, settings).solve(order.problem)
    else:
        result = ALGSolver(model, Sandbox(), above=above, settings=settings, desk=desk).solve(order.problem)
    desk.trail.add(Outcome(result.verified, result.answer or result.best_guess, result.why, asdict(result.usage)))
    if order.graph is not None and result.graph is not None:
        draw(result.graph, order.graph)
    lemmas = [] if result.graph is None else [lemma_line(lemma.id, lemma.status) for lemma in result.graph.order()]
    answer = (
        result.answer if result.verified else f"best guess, which nothing vouches for: {result.best_guess or 'none'}"
    )
    return Solved(result.verified, "\n".join([*lemmas, answer or ""]), result.why, result.to_dict())


def _agent(order: Order, desk: Desk) -> Solved:
    settings = AgentSettings.from_dict(_settings(order))
    _recorded(order, desk, settings.to_dict())
    assert order.repo is not None
    result = RepoAgent(order.chats, Sandbox(), desk, settings).solve(order.problem, order.repo)
    desk.trail.add(Outcome(result.solved, result.patch, result.why, asdict(result.usage)))
    return Solved(result.solved, result.patch or "the workspace is unchanged", result.why, result.to_dict())


STRATEGIES: dict[str, Callable[[Order, Desk], Solved]] = {
    "progressive": _progressive,
    "lemma": _lemma,
    "agent": _agent,
}
