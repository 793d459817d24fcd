"""The strategies of `sigma0 solve`: each builds its outer loop from the command line, and runs it."""

import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

from sigma0.commands.options import SolveOptions
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


class Solved(NamedTuple):
    """What a strategy hands back to the command line."""

    solved: bool  # Whether its own gate was passed
    text: str  # What is printed
    why: str  # In a sentence
    report: dict[str, Any]  # All of it, as JSON


class Order(NamedTuple):
    """What the command line asks for."""

    problem: str
    asked: SolveOptions
    chats: list[ChatModel]  # The cheapest first
    desk: Desk

    def head(self, models: list[ChatModel], settings: dict[str, Any]) -> Heading:
        """Heads the trail."""
        names = tuple(model.name for model in models)
        versions = {name: version(name) for name in ("sigma0-lm", "torch", "transformers")}
        strategy = cast(Strategy, self.asked.strategy)
        heading = Heading(strategy, self.problem, names, settings, versions, self.asked.resume)
        self.desk.trail.add(heading)
        return heading

    def record(self, settings: dict[str, Any]) -> None:
        """Heads the trail, and has answers kept in the memory file, or taken from it."""
        repo = {} if self.asked.repo is None else {"repo": str(self.asked.repo.resolve())}
        sources = [source(chat) for chat in self.chats]
        heading = self.head(self.chats, {**settings, "seed": self.desk.seed, "sources": sources, **repo})
        if self.asked.memory is not None:
            self.desk.record = Record(self.asked.memory, heading, self.asked.resume)

    def settings(self) -> dict[str, Any]:
        """The settings of a JSON file, and over them what stands on the command line."""
        config, values = self.asked.config, {}
        if config is not None:
            try:
                values = json.loads(Path(config).read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                raise ValueError(f"--config {config!r} cannot be read as JSON: {error}") from error
            if not isinstance(values, dict):
                raise ValueError(f"--config {config!r} holds no JSON object")
        given = {"temperature": self.asked.temperature, "max_tokens": self.asked.max_tokens}
        return {**values, **{name: value for name, value in given.items() if value is not None}}


def _progressive(order: Order) -> Solved:
    asked, (chat, samples) = order.asked, as_ladder(order.chats)
    manager = ProgressiveReasoningManager(None if asked.config is None else named_config(asked.config))
    default = 0.7 if samples else 0.0
    settings: dict[str, Any] = {"temperature": default if asked.temperature is None else asked.temperature}
    if asked.max_tokens is not None:
        settings["max_tokens"] = asked.max_tokens
    # checked in the form that the model was taught, criticised in words, or asked again
    task: Callable[[str], ProgressiveTask] = Critique if follows_instructions(order.chats) else BareQuestion
    task = FormTask if "check" in known_forms(order.chats) else task
    files: dict[str, Any] = {"manager": manager, "memory": asked.memory, "problem": order.problem}
    loop = VerifyLoop(task(order.problem), order.desk, chat, **files, **settings)
    if asked.resume:
        loop.resume()
        if asked.config is not None and loop.manager.config != manager.config:
            raise ValueError(f"--config {asked.config} is not the policy of the memory file: leave it out to go on")
    order.head([chat], {**settings, "policy": loop.manager.config.to_dict()})
    report = loop.run()
    return Solved(report.solved, report.solution or "", report.why, report.to_dict())


def _lemma(order: Order) -> Solved:
    settings = LemmaSettings.from_dict(order.settings())
    model, above = order.chats[0], order.chats[-1] if len(order.chats) > 1 else None
    order.record(settings.to_dict())
    if known_forms(order.chats) >= {"plan", "look", "act"}:
        result = FormSolver(model, order.desk, settings).solve(order.problem)
    else:
        result = ALGSolver(model, Sandbox(), above=above, settings=settings, desk=order.desk).solve(order.problem)
    order.desk.trail.add(Outcome(result.verified, result.answer or result.best_guess, result.why, asdict(result.usage)))
    if order.asked.graph is not None and result.graph is not None:
        draw(result.graph, order.asked.graph)
    lemmas = [] if result.graph is None else [lemma_line(lemma.id, lemma.status) for lemma in result.graph.order()]
    guess = f"best guess, which nothing vouches for: {result.best_guess or 'none'}"
    lines = [*lemmas, (result.answer or "") if result.verified else guess]
    return Solved(result.verified, "\n".join(lines), result.why, result.to_dict())


def _agent(order: Order) -> Solved:
    settings = AgentSettings.from_dict(order.settings())
    order.record(settings.to_dict())
    assert order.asked.repo is not None
    result = RepoAgent(order.chats, Sandbox(), order.desk, settings).solve(order.problem, order.asked.repo)
    order.desk.trail.add(Outcome(result.solved, result.patch, result.why, asdict(result.usage)))
    return Solved(result.solved, result.patch or "the workspace is unchanged", result.why, result.to_dict())


STRATEGIES: dict[str, Callable[[Order], Solved]] = {"progressive": _progressive, "lemma": _lemma, "agent": _agent}
