"""Is what a text claims anchored in its context? Claim by claim, by looking things up.

A claim is a sentence with a number, a date, a name, a quotation, an identifier or a link, or else a plain statement;
questions and judgements of taste are none, and of a guess ("I think", "might") only the clauses that do not share it.
A claim is anchored where everything in it that can be looked up is found in the context (the prompt, supplied sources,
executed results):

    link, identifier, quotation   verbatim, but for case and spaces in a quotation, scheme and host's case in a link
    name                          its words in a row, or what its initials stand for
    number, date                  equal within its rounding, of the same unit or the same thing, in a passage with the
                                  claim's names, or with some of its words if it has none
    every claim                   half of its other words occur somewhere in the context, of a plain statement three
                                  quarters; and the passage that says nearly the same does not deny it, or the reverse

A number that is not found but comes of the context's numbers by one step of arithmetic (a sum, difference, product,
quotient, count or equality) makes its claim neither anchored nor unanchored: so many follow from a few that it shows
nothing, and it may well be right.

A passage is a sentence of the context that is no question, or two in a row if the second has no name. A text that is
nothing but a number, a date, a quotation or a link, such as a result, counts for any claim. This is a lexical check: it
detects invented names and figures, but not a false combination of words that all occur in one passage. A
`SupportModel` may be added.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sigma0.signals.grounding.claims import (
    Checkable,
    Kind,
    assertions,
    checkable,
    common_words,
    content_words,
    is_negated,
    is_opinion,
    is_question,
    is_statement,
    sentences,
)
from sigma0.signals.grounding.evidence import Evidence, Passage
from sigma0.signals.grounding.words import listed, stem

ENOUGH_WORDS, HALF, MOST_WORDS = 0.3, 0.5, 0.75
# Words that only present a number, as in "the result is 42".
_PRESENTING = frozenset(
    map(stem, listed("answer result output value total sum number difference product quotient average mean count"))
)
_BOTH = re.compile(r"\s(?:and|&)\s")


class SupportModel(Protocol):
    """A model of whether evidence supports a claim, such as NLI and span models."""

    def support(self, claim: str, evidence: str) -> float:
        """How far `evidence` supports `claim`, in [0, 1]."""


@dataclass(frozen=True)
class Claim:
    """A checkable sentence."""

    text: str  # The sentence, or the clause of it that is stated as certain
    # Whether the context bears it out; None where its numbers may follow by one step of arithmetic, which nobody
    # has checked
    anchored: bool | None
    # The nearest passage in the context; if none shares a word, a result that stands alone, or None
    evidence: str | None
    kind: Kind  # The hardest thing in it


@dataclass(frozen=True)
class Grounding:
    """The claims of a text."""

    score: float | None  # Share that is anchored of the claims of which that is known; None where there are none
    claims: tuple[Claim, ...]  # In the order of the text

    @property
    def unanchored(self) -> tuple[Claim, ...]:
        """The claims without an anchor."""
        return tuple(claim for claim in self.claims if claim.anchored is False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def check(
    text: str, context: str | Sequence[str], *, tolerance: float = 0.05, model: SupportModel | None = None
) -> Grounding:
    """Looks every claim of a text up in its context.

    Args:
        text: What was generated.
        context: The prompt, sources, results: one text or several.
        tolerance: Relative difference allowed for a number that is stated as approximate.
        model: Asked about each claim that the words bear out, with the nearest passage; 0.5 and more is support.

    Raises:
        ValueError: For a tolerance outside [0, 1).
    """
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance lies in [0, 1), got {tolerance}")
    texts = [context] if isinstance(context, str) else list(context)
    common = common_words(" ".join([*texts, text]))
    stated = _stated(text, common)
    if not stated:
        return Grounding(None, ())
    evidence = Evidence(texts, common)
    claims = [
        _looked_up(part, checkable_parts, kind, evidence, tolerance, model) for part, checkable_parts, kind in stated
    ]
    known = [claim.anchored for claim in claims if claim.anchored is not None]
    return Grounding(sum(known) / len(known) if known else None, tuple(claims))


def _stated(text: str, common: frozenset[str]) -> list[tuple[str, Checkable, Kind]]:
    """What can be checked of a text, and of what kind it is."""
    stated = []
    for sentence in sentences(text):
        for part in [] if is_question(sentence) else assertions(sentence):
            parts = checkable(part, common)
            kind = _kind(part, parts)
            if kind is not None:
                stated.append((part, parts, kind))
    return stated


def _kind(sentence: str, parts: Checkable) -> Kind | None:
    """What makes a sentence a claim; None where it is none."""
    kind = parts.kind
    if kind in (None, "entity") and is_opinion(sentence, parts.names):
        return None
    return "statement" if kind is None and is_statement(sentence) else kind


def _looked_up(
    sentence: str, parts: Checkable, kind: Kind, evidence: Evidence, tolerance: float, model: SupportModel | None
) -> Claim:
    words = set(content_words(sentence))
    shared = evidence.shared(words)
    nearest = _nearest(parts, shared, evidence)
    quoted = (
        all(map(evidence.has_link, parts.links))
        and all(map(evidence.has_code, parts.code))
        and all(map(evidence.has_quote, parts.quotes))
        and not (nearest is not None and _denies(nearest, sentence, words))
    )
    anchored: bool | None = (
        quoted
        and all(evidence.naming(name).any() for name in parts.names)
        and _quantities_stand(parts, len(words), shared, evidence, tolerance)
        and _words_stand(parts, words, kind, evidence)
    )
    if anchored and model is not None:
        anchored = nearest is not None and model.support(sentence, nearest.text) >= 0.5
    elif quoted and not anchored and _each_named(parts.names, evidence):
        anywhere = np.ones(len(evidence.passages), dtype=bool)
        dated = all(evidence.has_date(date, anywhere) for date in parts.dates)
        anchored = None if dated and evidence.may_follow(parts.numbers, words, tolerance) else False
    return Claim(sentence, anchored, None if nearest is None else nearest.text, kind)


def _each_named(names: Sequence[str], evidence: Evidence) -> bool:
    """Whether everybody is named somewhere; "Anna and Ben", of whom together something is told, one by one."""
    alone = [name for both in names for name in _BOTH.split(both) if stem(name) not in _PRESENTING]
    return all(evidence.naming(name).any() for name in alone)


def _nearest(parts: Checkable, shared: NDArray[np.float64], evidence: Evidence) -> Passage | None:
    """The passage with the most shared words and names, the shorter of two; else one that speaks for any claim."""
    likeness = shared.copy()
    for name in parts.names:
        likeness += evidence.naming(name)
    if likeness.any():
        likeness = np.where(likeness > 0, likeness - 0.001 * evidence.lengths, -np.inf)
        return evidence.passages[int(likeness.argmax())]
    return evidence.passages[int(evidence.lone.argmax())] if evidence.lone.any() else None


def _words_stand(parts: Checkable, words: set[str], kind: Kind, evidence: Evidence) -> bool:
    """Whether enough of the words beside the names stand anywhere in the context."""
    others = words - {word for name in parts.names for word in content_words(name)}
    if kind != "statement" and evidence.lone.any():
        others -= _PRESENTING
    share = MOST_WORDS if kind == "statement" else HALF
    return len(others & evidence.stems) >= share * len(others)


def _quantities_stand(
    parts: Checkable, words: int, shared: NDArray[np.float64], evidence: Evidence, tolerance: float
) -> bool:
    """Whether every number and date stands in a passage that speaks of the same thing."""
    if not parts.numbers and not parts.dates:
        return True
    if parts.names:
        near = np.logical_and.reduce([evidence.naming(name) for name in parts.names])
    elif words:
        near = shared >= max(ENOUGH_WORDS * words, 1)
    else:
        near = evidence.wordless
    return all(evidence.has_number(number, near, tolerance) for number in parts.numbers) and all(
        evidence.has_date(date, near | evidence.lone) for date in parts.dates
    )


def _denies(passage: Passage, sentence: str, words: set[str]) -> bool:
    """Whether a passage that says nearly the same has the opposite sign."""
    same = bool(words) and len(words & passage.stems) >= MOST_WORDS * len(words)
    return same and passage.negated != is_negated(sentence)
