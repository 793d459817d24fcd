"""A problem solved lemma by lemma: planned, proved in topological order, and reported with what was verified."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import sigma0.reason.lemma.prompts as prompts
from sigma0.reason.desk import Desk, LimitReached
from sigma0.reason.lemma.asking import Questions
from sigma0.reason.lemma.boxed import boxed
from sigma0.reason.lemma.graph import FINAL, MAX_STATEMENT, LemmaGraph
from sigma0.reason.lemma.planning import LemmaGraphBuilder
from sigma0.reason.lemma.proving import LemmaVerifier
from sigma0.reason.lemma.repair import RepairStrategist
from sigma0.reason.lemma.running import Runner
from sigma0.reason.lemma.settings import LemmaSettings
from sigma0.reason.lemma.traversing import GraphTraverser
from sigma0.reason.messages import ChatModel, Usage


@dataclass(frozen=True)
class LemmaSolution:
    """What came of a problem."""

    answer: str | None  # Where all lemmas on the way to it are verified; else None
    verified: bool  # Whether there is one
    best_guess: str | None  # Where there is none, what a model holds for likely; nothing vouches for it
    graph: LemmaGraph | None  # As it ended; None where a limit left no plan
    why: str  # In a sentence
    usage: Usage  # Of all questions

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        graph = None if self.graph is None else self.graph.to_dict()
        return {**vars(self), "graph": graph, "usage": asdict(self.usage)}


class ALGSolver:
    """Solves problems by a graph of lemmas (ALG), each gated by assertions that were executed.

    Args:
        model: Who is asked.
        sandbox: Where programs are run.
        above: A larger model: asked where the other gives no answer, or where its verdict on a proof says "escalate".
        settings: Or a mapping of them.
        desk: Of the run, with its trail and its limits.

    Raises:
        ValueError: For bad settings.
    """

    def __init__(
        self,
        model: ChatModel,
        sandbox: Runner,
        *,
        above: ChatModel | None = None,
        settings: LemmaSettings | Mapping[str, Any] | None = None,
        desk: Desk,
    ) -> None:
        if isinstance(settings, Mapping):
            settings = LemmaSettings.from_dict(settings)
        self.model = model
        self.sandbox = sandbox
        self.above = above
        self.settings = settings or LemmaSettings()
        self.desk = desk

    def solve(self, problem: str, graph: LemmaGraph | None = None) -> LemmaSolution:
        """Solves a problem, or says why not.

        Args:
            problem: Not empty, at most `MAX_STATEMENT` characters.
            graph: Of an earlier run, to go on with: its verified lemmas stand, the others are pending again.

        Raises:
            ValueError: For an empty or too long problem.
            ChatFailed: If no model answers; that is written down.
        """
        if not 0 < len(problem.strip()) <= MAX_STATEMENT:
            raise ValueError(f"a problem has 1 to {MAX_STATEMENT} characters, got {len(problem.strip())}")
        questions = Questions(self.model, self.desk, self.settings, self.above)
        try:
            graph = _anew(graph) if graph is not None else LemmaGraphBuilder(questions).build(problem)
        except LimitReached as error:
            self.desk.trail.decide("limit", f"there is no plan: {error}", limit=error.limit)
            return self._unsolved(None, None, f"there is no plan: {error}")
        traverser = GraphTraverser(questions, LemmaVerifier(questions, self.sandbox), RepairStrategist(questions))
        graph = traverser.traverse(problem, graph)
        final = graph.final
        if final.status == "verified":
            why = f"FINAL and all that it builds on are verified, {len(graph.needed_by(FINAL)) + 1} lemmas in all"
            return LemmaSolution(final.value or boxed(final.proof), True, None, graph, why, self.desk.usage)
        guess = boxed(traverser.proofs.get(FINAL, "")) or self._guess(questions, problem, graph)
        return self._unsolved(graph, guess, traverser.ended_by or _blame(graph))

    def _guess(self, questions: Questions, problem: str, graph: LemmaGraph) -> str | None:
        known = [graph[lemma_id] for lemma_id in graph.verified]
        try:
            return boxed(questions.ask("prove", "best guess", prompts.guess(problem, known)).text)
        except LimitReached as error:
            self.desk.trail.decide("limit", f"there is no guess: {error}", limit=error.limit)
            return None

    def _unsolved(self, graph: LemmaGraph | None, guess: str | None, why: str) -> LemmaSolution:
        remainder = (
            "nothing stands for it" if guess is None else "a best guess stands for it, which nothing vouches for"
        )
        self.desk.trail.decide("gave up", f"there is no verified answer, {remainder}: {why}", best_guess=guess)
        return LemmaSolution(None, False, guess, graph, why, self.desk.usage)


def _anew(graph: LemmaGraph) -> LemmaGraph:
    """With all pending but the verified lemmas that build on verified ones alone."""
    stand = {lemma_id for lemma_id in graph.verified if graph.needed_by(lemma_id) <= set(graph.verified)}
    return graph.with_lemmas(
        *(
            replace(lemma, status="pending", why="", proof="", value=None)
            for lemma in graph.lemmas
            if lemma.id not in stand
        )
    )


def _blame(graph: LemmaGraph) -> str:
    """Which lemmas failed, and why."""
    failed = [lemma for lemma in graph.lemmas if lemma.status == "failed"]
    return "; ".join(f"{lemma.id} failed: {lemma.why}" for lemma in failed)
