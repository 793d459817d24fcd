"""The lemma graph for a model that was taught to plan and to look up: each lemma is asked for again, alone.

Such a model writes no proofs and no programs. What it can do is one step at a time: the sentence that tells of a name,
one sum, the answer that follows from what is known. So a plan's lemma is asked for again, by itself:

* a look-up stands if it gives the same sentence, and the text holds that word for word;
* a sum stands if the step alone gives the same statement; or what the step alone gives stands if it is the value of
  the sum that the plan wrote down: two of three have to agree, the step alone among them;
* the answer stands if the step alone gives it, be it before all sums of the plan were made. Yes or no is no matter of
  the model: it is computed from question and statement (`sigma0.reason.forms.settled`).

Where a single step finds something else that stands, it takes the lemma's place, and the rest is planned anew.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sigma0.reason.desk import Desk, LimitReached
from sigma0.reason.forms import Parts, acting, part, planning, read_action, settled
from sigma0.reason.lemma.graph import FINAL, MAX_LEMMAS, MAX_STATEMENT, Lemma, LemmaGraph
from sigma0.reason.lemma.planning import parse_lemmas
from sigma0.reason.lemma.settings import LemmaSettings
from sigma0.reason.lemma.solver import LemmaSolution
from sigma0.reason.messages import ChatModel, ChatSettings

_SUM = re.compile(r"(\d{1,6}) ([+-]) (\d{1,6})")
_LOOK = re.compile(r"What is told of (?:the )?(\w+)\?")


@dataclass(frozen=True)
class _Found:
    """What a step that was asked for alone gave; `statement` is empty where nothing stands."""

    statement: str
    why: str
    is_final: bool = False


class FormSolver:
    """Solves a problem by plans whose steps are asked for again, one by one.

    Args:
        model: Who is asked; it knows the forms `plan`, `look` and `act`.
        desk: Of the run, with its trail and its limits.
        settings: Of its questions: efforts of plans and checks, tokens, temperature; `repairs` and `restructures`
            together are how often the rest is planned anew.
    """

    def __init__(self, model: ChatModel, desk: Desk, settings: LemmaSettings | None = None) -> None:
        self.model = model
        self.desk = desk
        self.settings = settings or LemmaSettings()

    def solve(self, problem: str) -> LemmaSolution:
        """Solves a problem, or says why not.

        Args:
            problem: A text and a question at its end.

        Raises:
            ValueError: For another problem.
            ChatFailed: If the model gives no answer.
        """
        parts, known = part(problem), list[Lemma]()
        guess, why = None, "no plan came"
        try:
            for attempt in range(1 + self.settings.repairs + self.settings.restructures):
                lemmas = self._plan(parts, known, attempt)
                guess = lemmas[-1].statement if lemmas else guess
                is_done, why = self._walk(parts, known, lemmas)
                if is_done:
                    return self._end(known, None, why)
        except LimitReached as error:
            self.desk.trail.decide("limit", str(error), limit=error.limit)
            why = str(error)
        return self._end(known, guess, why)

    def _plan(self, parts: Parts, known: Sequence[Lemma], attempt: int) -> list[Lemma]:
        """The steps that are left, in order and named after what is known; none where no plan can be read."""
        text = self._ask("plan", f"plan {attempt + 1}", planning(parts, [lemma.statement for lemma in known]))
        try:
            graph = LemmaGraph(tuple(parse_lemmas(text)))
            if graph.lemmas[-1].id != FINAL:
                raise ValueError("FINAL is not the last lemma of the plan")
        except ValueError as error:
            self.desk.trail.decide("plan refused", str(error), attempt=attempt + 1)
            return []
        self.desk.trail.decide("planned", f"a plan of {len(graph.lemmas)} lemmas came", graph=graph.to_dict())
        # as written, which is how the model was taught to go on; a lemma before what it builds on finds less, no more
        lemmas = _renamed(graph.lemmas, known)
        return [
            replace(one, statement=settled(parts.question, one.statement)) if one.id == FINAL else one for one in lemmas
        ]

    def _walk(self, parts: Parts, known: list[Lemma], lemmas: Sequence[Lemma]) -> tuple[bool, str]:
        """Checks lemmas in order and adds to what is known, up to the first that does not stand.

        Returns:
            Whether the answer stands, which is then the last of what is known, and how it ended.
        """
        for lemma in lemmas:
            if len(known) == MAX_LEMMAS:
                return False, f"{MAX_LEMMAS} lemmas do not suffice"
            result = self._alone(parts, known, lemma, lemmas[-1])
            at = lemmas[-1] if result.is_final else lemma
            stands = result.statement == at.statement
            what = "verified" if stands else "repair" if result.statement else "failed"
            output = {"lemma": at.id, "statement": at.statement, "found": result.statement}
            self.desk.trail.decide(what, f"{at.id}: {result.why}", **output)
            if result.statement:
                statement, why = result.statement, result.why[:MAX_STATEMENT]
                known.append(replace(at, statement=statement, status="verified", why=why))
            if result.is_final and stands:
                return True, "every step, asked for alone, came again"
            if not stands:
                return False, f"{at.id} does not stand: {result.why}"
        return False, "no plan could be read" if not lemmas else "the answer was never asked for"

    def _alone(self, parts: Parts, known: Sequence[Lemma], lemma: Lemma, final: Lemma) -> _Found:
        """The step of a lemma, asked for by itself."""
        ask = lemma.verification_strategy
        if lemma.id != FINAL:
            look = _LOOK.fullmatch(ask)
            if look is not None:
                return self._look(parts, known, lemma, look[1])
            if _SUM.fullmatch(ask) is None:
                return _Found("", f"{ask!r} is neither a look-up nor a sum")
        text = self._ask("check", f"step {len(known) + 1} alone", acting(parts, [one.statement for one in known]))
        try:
            action = read_action(text)
        except ValueError as error:
            return _Found("", str(error))
        if action.act == "answer":
            if not any(_LOOK.fullmatch(one.verification_strategy) for one in known):
                return _Found("", "nothing was looked up that the answer could follow from")
            answer = settled(parts.question, action.what)
            if answer == final.statement:
                return _Found(answer, "asked for alone, the answer is the same", is_final=True)
            return _Found("", f"asked for alone, the answer is {answer!r}, not {final.statement!r}")
        if action.act != "note" or lemma.id == FINAL:
            return _Found("", f"asked for alone, the next step is to {action.act}: {action.what!r}")
        if action.what == lemma.statement:
            return _Found(action.what, "asked for alone, the step gives the same")
        if _says(action.what, ask):
            return _Found(action.what, f"asked for alone, the step gives what {ask} is")
        return _Found("", f"asked for alone, the step gives {action.what!r}, not {lemma.statement!r}")

    def _look(self, parts: Parts, known: Sequence[Lemma], lemma: Lemma, name: str) -> _Found:
        question = lemma.verification_strategy
        output = " ".join((parts.question, *(one.statement for one in known)))
        if not re.search(rf"\b{name}\b", output):
            return _Found("", f"{question!r} asks about nothing that question or lemmas before it name")
        sentences, asked = parts.sentences, f"{parts.text} {question}"
        first = self._ask("check", f"step {len(known) + 1} alone", asked)
        if first == lemma.statement and first in sentences:
            return _Found(first, "it stands in the text, and the look-up alone finds it")
        again = self._ask("high", f"step {len(known) + 1} again", asked)
        if again in sentences and again in (first, lemma.statement):
            return _Found(again, f"two of three look-ups find {again!r} in the text")
        return _Found("", f"look-ups differ, or are not in the text: {first!r}, {again!r}")

    def _ask(self, kind: str, purpose: str, text: str) -> str:
        efforts = self.settings.efforts
        effort = efforts.plan if kind == "plan" else efforts.check if kind == "check" else "high"
        settings = ChatSettings(effort, self.settings.max_tokens, self.settings.temperature)
        purpose = f"{purpose} ({self.desk.usage.calls + 1})"
        return self.desk.ask(self.model, purpose, [{"role": "user", "content": text}], settings).text.strip()

    def _end(self, known: Sequence[Lemma], guess: str | None, why: str) -> LemmaSolution:
        is_solved = bool(known) and known[-1].id == FINAL
        graph = _graph(known) if is_solved else None
        answer = known[-1].statement if is_solved else None
        return LemmaSolution(answer, is_solved, None if is_solved else guess, graph, why, self.desk.usage)


def _renamed(lemmas: Sequence[Lemma], known: Sequence[Lemma]) -> list[Lemma]:
    """Lemmas of a plan counted on from what is known."""
    names = {lemma.id: f"L{len(known) + place}" for place, lemma in enumerate(lemmas, 1) if lemma.id != FINAL}
    return [
        replace(
            lemma,
            id=names.get(lemma.id, lemma.id),
            dependencies=tuple(names.get(other, other) for other in lemma.dependencies),
        )
        for lemma in lemmas
    ]


def _graph(known: Sequence[Lemma]) -> LemmaGraph:
    """What is known as a graph: FINAL builds on all that nothing else builds on."""
    used = {other for lemma in known[:-1] for other in lemma.dependencies}
    ends = tuple(lemma.id for lemma in known[:-1] if lemma.id not in used)
    names = {lemma.id for lemma in known}
    kept = [replace(one, dependencies=tuple(name for name in one.dependencies if name in names)) for one in known[:-1]]
    return LemmaGraph((*kept, replace(known[-1], dependencies=ends)))


def _says(statement: str, expression: str) -> bool:
    """Whether a statement has the value of a sum for its only number."""
    result = _SUM.fullmatch(expression)
    if result is None:
        return False
    left, right = int(result[1]), int(result[3])
    return re.findall(r"\d+", statement) == [str(left + right if result[2] == "+" else left - right)]
