"""What to do about a lemma that failed: another attempt, other lemmas under it, or an honest end."""

from dataclasses import replace
from typing import Literal

import sigma0.reason.lemma.prompts as prompts
from sigma0.reason.lemma.asking import Questions
from sigma0.reason.lemma.graph import FINAL, LemmaGraph
from sigma0.reason.lemma.planning import ask_for_lemmas, parse_lemmas
from sigma0.reason.lemma.prompts import Step

NextStep = Literal["repair", "restructure", "give up"]
MAX_NEW = 3


class RepairStrategist:
    """Repairs a lemma some times, changes the plan some times, then gives up; one for each run.

    Args:
        questions: How models are asked.
    """

    def __init__(self, questions: Questions) -> None:
        self.questions = questions
        self.restructures_left = questions.settings.restructures

    def next_step(self, failures: int) -> NextStep:
        """What comes after a failure.

        Args:
            failures: Attempts at the lemma that failed since the plan was last changed for it, this one included.
        """
        if failures <= self.questions.settings.repairs:
            return "repair"
        return "restructure" if self.restructures_left > 0 else "give up"

    def restructure(self, graph: LemmaGraph, step: Step) -> LemmaGraph | None:
        """The graph with new lemmas that the failed one builds on; None where no valid ones came.

        Args:
            graph: As it is.
            step: The lemma that failed, with its failures.

        Raises:
            LimitReached, LemmaLimitReached, ChatFailed: As `Questions.ask` does.
        """
        assert self.restructures_left > 0
        self.restructures_left -= 1
        number = self.questions.settings.restructures - self.restructures_left
        return ask_for_lemmas(
            self.questions,
            f"restructure {number} for {step.lemma.id}",
            prompts.restructuring(step.problem, graph, step, MAX_NEW),
            lambda text: with_new_lemmas(graph, step.lemma.id, text),
            step.lemma.id,
        )


def with_new_lemmas(graph: LemmaGraph, failed: str, text: str) -> LemmaGraph:
    """A graph with the lemmas of a text in it, on which a failed one then builds, pending again.

    Args:
        graph: As it is.
        failed: Id of the failed lemma.
        text: 1 to `MAX_NEW` lemmas in the plan's format.

    Raises:
        ValueError: If they are none, too many, not new, or make no valid graph.
    """
    new = parse_lemmas(text)
    if len(new) > MAX_NEW:
        raise ValueError(f"these are {len(new)} new lemmas: at most {MAX_NEW} are allowed")
    known = [lemma.id for lemma in new if lemma.id in graph or lemma.id == FINAL]
    if known:
        raise ValueError(f"the plan already holds {', '.join(known)}: give new lemmas ids of their own")
    lemma = graph[failed]
    builds_on = tuple(dict.fromkeys((*lemma.dependencies, *(added.id for added in new))))
    return graph.with_lemmas(*new, replace(lemma, dependencies=builds_on, status="pending"))
