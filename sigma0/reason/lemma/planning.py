"""From a problem to a graph of lemmas: the plan's format, and who asks for it.

A plan is blocks of five fields, each on a line of its own and in this order or another:

    LEMMA L1
    TYPE: structural | reduction | computational | verification | synthesis
    STATEMENT: what is to be shown or found
    DEPENDS: none, or ids with commas between them
    VERIFY: how code may check it

"Dependencies" and "Verification strategy" are read as these fields, too. Case, blank lines, rules, bullets, bold type
and Markdown fences do not matter, and prose in front of the first block is skipped; a line that begins no field goes on
with the one before. "Lemma 1" is L1, "Final lemma" is FINAL; a title may stand behind an id, and is the statement where
there is no other, and a remark in brackets after a type or an id. JSON and numbered lists are read as well
(`sigma0.reason.lemma.plan_formats`). All else is refused: unknown types and ids, fields that lack or stand twice, and
whatever `LemmaGraph` refuses.
"""

import re
from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError

import sigma0.reason.lemma.prompts as prompts
from sigma0.config import Messages
from sigma0.errors import one_line
from sigma0.reason.lemma.asking import Questions
from sigma0.reason.lemma.graph import FINAL, ID_PATTERN, MAX_TEXT, TYPES, Lemma, LemmaGraph, shortened
from sigma0.reason.lemma.plan_formats import Block, json_blocks, list_blocks

PLAN_ATTEMPTS = 2
_FIELDS = ("TYPE", "STATEMENT", "DEPENDS", "VERIFY")
# of a block: what stands behind its id, and the first line that stands in none of its fields
_TITLED, _STRAY = "title", "stray"
_DECORATION = r"^[\s>#*+\-\u2022_`]*(?:[0-9]+[.)]\s+)?[*_`]*"
# a title is parted from its id by a sign, so that prose such as "Lemma L1 is plain" is none
_TITLE = r"(?:\s*[:.\u2013\u2014-](.*)|\s*\(.*\))?[\s:*_`]*$"
_HEADER = re.compile(rf"{_DECORATION}lemma\s+[*_`\[]*([^\s:.*`()\[\]\u2013\u2014-]+)[*_`\]]*{_TITLE}", re.IGNORECASE)
_FINAL_HEADER = re.compile(rf"{_DECORATION}(?:the\s+)?final(?:\s+lemma)?[*_`]*\s*:?[\s*_`]*$", re.IGNORECASE)
_NAMES = rf"{'|'.join(_FIELDS)}|DEPENDS[ _]ON|DEPENDENCIES|VERIFICATION(?:[ _](?:STRATEGY|METHOD))?"
_FIELD = re.compile(rf"{_DECORATION}({_NAMES})[*_`]*\s*:[*_`]*\s*(.*)$", re.IGNORECASE)
_FENCE = re.compile(r"^\s*(?:```|~~~)")
_RULE = re.compile(r"^\s*(?:[-*_=]\s*){3,}$")
_REMARK = re.compile(r"(?<=[\w*_`])\s*\([^()]*\)")
_NONE = frozenset(("", "none", "-", "\u2013", "\u2014", "nothing", "n/a"))
_ID = re.compile(ID_PATTERN)
P = TypeVar("P")


class LemmaGraphBuilder:
    """Asks for a plan, tells what is wrong with it, and falls back to the problem as one lemma.

    Args:
        questions: How a model is asked.
    """

    def __init__(self, questions: Questions) -> None:
        self.questions = questions

    def build(self, problem: str) -> LemmaGraph:
        """A graph for a problem; FINAL alone where no valid plan came.

        Args:
            problem: Not empty, and short enough for a statement.

        Raises:
            LimitReached: If a limit of the run forbids a question.
            ChatFailed: If no model answers.
        """
        trail = self.questions.desk.trail
        graph = ask_for_lemmas(
            self.questions, "plan", prompts.plan(problem), lambda text: LemmaGraph(tuple(parse_lemmas(text)))
        )
        if graph is not None:
            trail.decide("planned", f"a valid plan of {len(graph.lemmas)} lemmas came", graph=graph.to_dict())
            return graph
        alone = LemmaGraph((Lemma(FINAL, problem, "synthesis", verification_strategy="compute the answer"),))
        why = f"no valid plan came in {PLAN_ATTEMPTS} attempts, so the problem is tried as one lemma"
        trail.decide("fallback", why, graph=alone.to_dict())
        return alone


def ask_for_lemmas(
    questions: Questions, purpose: str, messages: Messages, read: Callable[[str], P], lemma: str | None = None
) -> P | None:
    """Asks for lemmas until they can be read, telling each time what is wrong; each refusal is written down.

    Args:
        questions: How a model is asked.
        purpose: Of all attempts.
        messages: The question.
        read: Makes of a text what is asked for; a ValueError says what is wrong with it.
        lemma: Id of the one that they are for, if there is one.

    Returns:
        What was read; None after `PLAN_ATTEMPTS`.
    """
    question = messages
    for attempt in range(1, PLAN_ATTEMPTS + 1):
        reply = questions.ask("plan", f"{purpose}, attempt {attempt}", question, lemma).text[:MAX_TEXT]
        try:
            return read(reply)
        except ValueError as error:
            questions.desk.trail.decide("plan refused", str(error), purpose=purpose, attempt=attempt)
            question = prompts.again(messages, reply, str(error))
    return None


def parse_lemmas(text: str) -> list[Lemma]:
    """The lemmas of a plan.

    Args:
        text: In the format above.

    Raises:
        ValueError: If it is not in that format; says which lemma and what lacks.
    """
    text = text[:MAX_TEXT]
    blocks = json_blocks(text) or _blocks(text)
    if not any(field in fields for _, fields in blocks for field in _FIELDS):
        blocks = list_blocks(text) or blocks
    if not blocks:
        raise ValueError("the plan holds no line of the form 'LEMMA L1'")
    return [_lemma(*block) for block in blocks]


def _blocks(text: str) -> list[Block]:
    """The lemmas in the form that is asked for, with their fields; what stands in none of these has no name."""
    blocks: list[Block] = []
    field: str | None = None
    closed = False
    for line in text.splitlines():
        header, named = _header(line), _FIELD.match(line)
        if header is not None:
            lemma_id, title = header
            blocks.append((lemma_id, {_TITLED: title} if title else {}))
            field, closed = None, False
        elif not blocks or not line.strip() or closed:
            continue
        elif _FENCE.match(line) or _RULE.match(line):
            # what stands behind a fence or a rule, up to the next lemma, is no part of the plan
            closed = any(name in blocks[-1][1] for name in _FIELDS)
        elif named:
            field = _open_field(blocks[-1], _field_name(named[1]), named[2])
        elif field is None:
            blocks[-1][1].setdefault(_STRAY, line)
        else:
            blocks[-1][1][field] += f" {line.strip()}"
    return blocks


def _header(line: str) -> tuple[str, str] | None:
    """The id, and the title, in a line that begins a lemma."""
    match = _HEADER.match(line)
    if match:
        return _as_id(match[1]), (match[2] or "").strip(" \t:*_`")
    return (FINAL, "") if _FINAL_HEADER.match(line) else None


def _as_id(name: str) -> str:
    """A name as an id: of a bare number that of the lemma so numbered."""
    return f"L{name}" if name.isdecimal() else name.upper()


def _field_name(text: str) -> str:
    return next(name for name in _FIELDS if text[:5].upper() == name[:5])


def _open_field(block: Block, name: str, value: str) -> str:
    lemma_id, fields = block
    if name in fields:
        raise ValueError(f"lemma {shortened(lemma_id, 20)}: {name} stands in it twice")
    fields[name] = value.strip()
    return name


def _lemma(lemma_id: str, fields: dict[str, str]) -> Lemma:
    shown = shortened(lemma_id, 20)
    if not _ID.match(lemma_id):
        raise ValueError(f"lemma id {shown!r} must be a letter and then at most 15 letters, digits or underscores")
    if _STRAY in fields:
        raise ValueError(f"lemma {shown}: the line {shortened(fields[_STRAY], 40)!r} stands in none of its fields")
    if _TITLED in fields:
        fields = {"STATEMENT": fields[_TITLED], **fields}
    missing = [name for name in _FIELDS if name not in fields or (name == "STATEMENT" and not fields[name])]
    if missing:
        raise ValueError(f"lemma {shown} lacks {', '.join(missing)}")
    kind = next((name for name in TYPES if name == _bare(fields["TYPE"]).lower()), None)
    if kind is None:
        raise ValueError(f"lemma {shown}: TYPE {shortened(fields['TYPE'], 30)!r} is none of {', '.join(TYPES)}")
    try:
        return Lemma(
            id=lemma_id,
            statement=fields["STATEMENT"],
            type=kind,
            dependencies=_ids(shown, fields["DEPENDS"]),
            verification_strategy=fields["VERIFY"],
        )
    except ValidationError as error:
        raise ValueError(f"lemma {shown}: {one_line(error)}") from error


def _ids(lemma_id: str, text: str) -> tuple[str, ...]:
    bare = _bare(text)
    if bare.lower() in _NONE:
        return ()
    words = (word.strip("*_`()[]{}.") for word in re.split(r"[\s,;&+]+", bare))
    named = (word for word in words if word and word.lower() not in ("and", "lemma", "lemmas"))
    ids = tuple(dict.fromkeys(map(_as_id, named)))
    wrong = [name for name in ids if not _ID.match(name)]
    if wrong:
        raise ValueError(f"lemma {lemma_id}: DEPENDS names {shortened(wrong[0], 30)!r}, which is no id: ids or none")
    return ids


def _bare(value: str) -> str:
    """What a field says, without remarks in brackets and the signs around it."""
    return _REMARK.sub(" ", value).strip(" .*_`[](){}")
