"""The way through a graph: round by round, each lemma as soon as all that it builds on is verified.

A round makes one attempt at each lemma that is ready; what comes of them is settled in the order of the plan before the
next round begins. So the result is the same however many are proved at a time.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sigma0.reason.desk import LimitReached
from sigma0.reason.lemma.asking import LemmaLimitReached, Questions
from sigma0.reason.lemma.counting import is_counting
from sigma0.reason.lemma.graph import Lemma, LemmaGraph
from sigma0.reason.lemma.prompts import Failure, Step
from sigma0.reason.lemma.proving import Attempt, LemmaVerifier
from sigma0.reason.lemma.repair import RepairStrategist
from sigma0.reason.messages import Completion

A = TypeVar("A")
B = TypeVar("B")
_WANTS_ABOVE = ("escalate", "abort")
Stop = LimitReached | LemmaLimitReached


class GraphTraverser:
    """Proves the lemmas of a graph in topological order, seeing verified ones alone.

    Args:
        questions: How models are asked.
        verifier: Makes attempts.
        strategist: Says what comes after a failure.

    Attributes:
        graph: As it stands.
        proofs: The last proof of each lemma, whatever became of it.
        ended_by: Why the traversal ended before its time; None where it did not.
    """

    def __init__(self, questions: Questions, verifier: LemmaVerifier, strategist: RepairStrategist) -> None:
        self.questions = questions
        self.verifier = verifier
        self.strategist = strategist
        self.proofs: dict[str, str] = {}
        self.ended_by: str | None = None
        self._trail = questions.desk.trail
        self._failures: dict[str, tuple[Failure, ...]] = {}
        self._attempts: Counter[str] = Counter()
        self._since_change: Counter[str] = Counter()
        self._escalations_left = questions.settings.escalations

    def traverse(self, problem: str, graph: LemmaGraph) -> LemmaGraph:
        """The graph with what became of its lemmas.

        Args:
            problem: That is being solved.
            graph: Its verified lemmas stand.

        Raises:
            ChatFailed: If no model answers.
        """
        self.graph = graph
        while self.ended_by is None:
            steps = [self._step(problem, lemma) for lemma in self.graph.ready(self.graph.verified)]
            if not steps:
                break
            for step, attempt in zip(steps, self._round(steps), strict=True):
                self._settle(step, attempt)
        return self.graph

    def _step(self, problem: str, lemma: Lemma) -> Step:
        needed = self.graph.needed_by(lemma.id)
        verified = tuple(lemma for lemma in self.graph.order() if lemma.id in needed)
        assert all(lemma.status == "verified" for lemma in verified)
        failures = self._failures.get(lemma.id, ())
        return Step(problem, lemma, verified, failures, is_counting(lemma, problem))

    def _round(self, steps: list[Step]) -> list[Attempt | Stop]:
        self._attempts.update(step.lemma.id for step in steps)
        proposals = self._each(lambda step: self.verifier.propose(step, self._number(step)), steps)
        risen = [self._rises(step, proposal) for step, proposal in zip(steps, proposals, strict=True)]
        proposals = self._each(self._from_above, zip(steps, proposals, risen, strict=True))
        return self._each(self._examine, zip(steps, proposals, strict=True))

    def _rises(self, step: Step, proposed: Completion | Stop) -> bool:
        """Whether a proof is asked again of the larger model; decided one after another, for there is one limit."""
        above = self.questions.above
        if above is None or isinstance(proposed, Stop) or proposed.door not in _WANTS_ABOVE:
            return False
        state = {"lemma": step.lemma.id, "door": proposed.door, "model": above.name}
        if self._escalations_left == 0:
            limit = self.questions.settings.escalations
            self._trail.decide("stay", f"the limit of {limit} escalations keeps {step.lemma.id} where it is", **state)
            return False
        self._escalations_left -= 1
        why = f"the verdict on the proof of {step.lemma.id} says {proposed.door}, so {above.name} is asked"
        self._trail.decide("escalate", why, **state)
        return True

    def _from_above(self, proposed: tuple[Step, Completion | Stop, bool]) -> Completion | Stop:
        step, proposal, rises = proposed
        return self.verifier.propose(step, self._number(step), of_above=True) if rises else proposal

    def _examine(self, proposed: tuple[Step, Completion | Stop]) -> Attempt | Stop:
        step, proposal = proposed
        return proposal if isinstance(proposal, Stop) else self.verifier.examine(step, self._number(step), proposal)

    def _number(self, step: Step) -> int:
        return self._attempts[step.lemma.id]

    def _each(self, function: Callable[[A], B | Stop], items: Iterable[A]) -> list[B | Stop]:
        """A function of each item, some at a time; where a limit forbids one, that limit."""

        def limited(item: A) -> B | Stop:
            try:
                return function(item)
            except (LimitReached, LemmaLimitReached) as error:
                return error

        if self.questions.settings.workers == 1:
            return [limited(item) for item in items]
        with ThreadPoolExecutor(self.questions.settings.workers) as pool:
            return list(pool.map(limited, items))

    def _settle(self, step: Step, attempt: Attempt | Stop) -> None:
        lemma_id = step.lemma.id
        if isinstance(attempt, LimitReached):
            self._end(f"{lemma_id} was not finished: {attempt}", "limit", limit=attempt.limit, lemma=lemma_id)
        elif isinstance(attempt, LemmaLimitReached):
            self._give_up(lemma_id, str(attempt))
        else:
            self.proofs[lemma_id] = attempt.proof
            if attempt.outcome == "failed":
                self._after_failure(step, attempt)
            else:
                self.graph = self.graph.with_status(
                    lemma_id, attempt.outcome, attempt.why, attempt.proof, attempt.value
                )
                why = f"{lemma_id} is {attempt.outcome}: {attempt.why}"
                self._trail.decide(attempt.outcome, why, lemma=lemma_id, value=attempt.value)
                if attempt.outcome == "unverified":
                    self.ended_by = self.ended_by or why

    def _after_failure(self, step: Step, attempt: Attempt) -> None:
        lemma_id = step.lemma.id
        self._since_change[lemma_id] += 1
        self._failures[lemma_id] = (*step.failures, Failure(attempt.proof, attempt.why))
        if self.ended_by is not None:
            return
        what = self.strategist.next_step(self._since_change[lemma_id])
        number = self._attempts[lemma_id]
        if what == "repair":
            why = f"attempt {number} at {lemma_id} failed, it is tried again: {attempt.why}"
            self._trail.decide("repair", why, lemma=lemma_id, attempt=number)
        elif what == "give up":
            self._give_up(lemma_id, f"{number} attempts failed, the last one because {attempt.why}")
        else:
            self._restructure(step, attempt.why)

    def _restructure(self, step: Step, failed_because: str) -> None:
        lemma_id = step.lemma.id
        step = Step(step.problem, step.lemma, step.verified, self._failures[lemma_id], step.counts)
        try:
            graph = self.strategist.restructure(self.graph, step)
        except LimitReached as error:
            self._end(f"the plan could not be changed for {lemma_id}: {error}", "limit", limit=error.limit)
            return
        except LemmaLimitReached as error:
            self._give_up(lemma_id, str(error))
            return
        if graph is None:
            self._give_up(lemma_id, f"no valid new lemmas came, and its last attempt failed because {failed_because}")
            return
        new = [lemma.id for lemma in graph.lemmas if lemma.id not in self.graph]
        self.graph = graph
        self._since_change[lemma_id] = 0
        why = f"{lemma_id} failed too often, so it now builds on {', '.join(new)}: {failed_because}"
        self._trail.decide("restructure", why, lemma=lemma_id, graph=graph.to_dict())

    def _give_up(self, lemma_id: str, why: str) -> None:
        self.graph = self.graph.with_status(lemma_id, "failed", why, self.proofs.get(lemma_id))
        waiting = [
            lemma.id
            for lemma in self.graph.order()
            if lemma.status == "pending" and lemma_id in self.graph.needed_by(lemma.id)
        ]
        for waiting_id in waiting:
            self.graph = self.graph.with_status(waiting_id, "pending", f"it was not attempted: it builds on {lemma_id}")
        not_tried = f"; {', '.join(waiting)} will not be attempted" if waiting else ""
        self._trail.decide("failed", f"{lemma_id} is given up: {why}{not_tried}", lemma=lemma_id, not_tried=waiting)

    def _end(self, why: str, what: str, **state: object) -> None:
        self._trail.decide(what, why, **state)
        self.ended_by = self.ended_by or why
