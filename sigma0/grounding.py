"""Is what a text claims anchored in its context? Claim by claim, by looking things up.

A claim is a sentence with a number, a date, a name, a quotation, an identifier or a link, or else a plain statement;
guesses ("I think", "might"), questions and judgements of taste are none. A claim is anchored where everything in it
that can be looked up is found in the context (the prompt, supplied sources, executed results):

    link, identifier, quotation   verbatim, but for case and spaces in a quotation
    name                          its words in a row, or what its initials stand for
    number, date                  equal within its rounding, in a place that speaks of the claim's names, or of some of
                                  its words where it has none
    every claim                   half of its other words stand somewhere in the context, of a plain statement three
                                  quarters; and the place that says nearly the same does not deny it, or the reverse

A place is a sentence of the context that asks nothing, or two in a row where the second names nobody. This is a
lexical check: it sees what was made up, and it cannot see a false combination of words that all stand in one place. A
`SupportModel` may be asked on top.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from sigma0.claims import (
    Checkable,
    Date,
    Kind,
    Number,
    checkable,
    content_words,
    is_hedged,
    is_negated,
    is_opinion,
    is_question,
    is_statement,
    sentences,
    stem,
)

ENOUGH_WORDS, HALF, MOST_WORDS = 0.3, 0.5, 0.75
# Signs that a bare number does not share.
_MARKED = frozenset({"%", "$", "EUR", "GBP"})


class SupportModel(Protocol):
    """A model that tells whether evidence supports a claim, as NLI and span models do."""

    def support(self, claim: str, evidence: str) -> float:
        """How far `evidence` supports `claim`, in [0, 1]."""


@dataclass(frozen=True)
class Claim:
    """A checkable sentence.

    Attributes:
        text: The sentence.
        anchored: Whether the context bears it out.
        evidence: The place in the context that is nearest to it; None where none shares a word.
        kind: The hardest thing in it.
    """

    text: str
    anchored: bool
    evidence: str | None
    kind: Kind


@dataclass(frozen=True)
class Grounding:
    """The claims of a text.

    Attributes:
        score: Share of the claims that are anchored; None where nothing was checkable.
        claims: In the order of the text.
    """

    score: float | None
    claims: tuple[Claim, ...]

    @property
    def unanchored(self) -> tuple[Claim, ...]:
        """The claims without an anchor."""
        return tuple(claim for claim in self.claims if not claim.anchored)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class _Place:
    text: str
    found: Checkable
    tokens: tuple[str, ...]
    stems: frozenset[str]
    negated: bool


def check(
    text: str, context: str | Sequence[str], *, tolerance: float = 0.05, model: SupportModel | None = None
) -> Grounding:
    """Looks every claim of a text up in its context.

    Args:
        text: What was generated.
        context: The prompt, sources, results: one text or several.
        tolerance: Relative difference allowed where a number is said to be rough.
        model: Asked about each claim that the words bear out, with the nearest place; 0.5 and more is support.

    Raises:
        ValueError: For a tolerance outside [0, 1).
    """
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance lies in [0, 1), got {tolerance}")
    texts = [context] if isinstance(context, str) else list(context)
    common = frozenset(re.findall(r"\b[a-z][a-z'-]+\b", " ".join([*texts, text])))
    common |= {stem(word) for word in common}
    places = [place for each in texts for place in _places(each, common)]
    everything = "\n".join(texts)
    claims = []
    for sentence in sentences(text):
        found = checkable(sentence, common)
        kind = _kind(sentence, found)
        if kind is not None:
            claims.append(_looked_up(sentence, found, kind, places, everything, tolerance, model))
    score = sum(claim.anchored for claim in claims) / len(claims) if claims else None
    return Grounding(score, tuple(claims))


def _kind(sentence: str, found: Checkable) -> Kind | None:
    """What makes a sentence a claim; None where it is none."""
    if is_question(sentence) or is_hedged(sentence):
        return None
    kind = found.kind
    if kind in (None, "entity") and is_opinion(sentence):
        return None
    return "statement" if kind is None and is_statement(sentence) else kind


def _places(text: str, common: frozenset[str]) -> list[_Place]:
    parts = [part for part in sentences(text) if not is_question(part)]
    alone = [_place(part, common) for part in parts]
    pairs = [
        _place(f"{first} {second.text}", common)
        for first, second in zip(parts, alone[1:], strict=False)
        if not second.found.names
    ]
    return alone + pairs


def _place(text: str, common: frozenset[str]) -> _Place:
    return _Place(text, checkable(text, common), _tokens(text), frozenset(content_words(text)), is_negated(text))


def _tokens(text: str) -> tuple[str, ...]:
    return tuple(re.sub(r"[’']s?$", "", word).lower() for word in re.findall(r"[\w’'-]+", text))


def _looked_up(
    sentence: str,
    found: Checkable,
    kind: Kind,
    places: Sequence[_Place],
    everything: str,
    tolerance: float,
    model: SupportModel | None,
) -> Claim:
    words = set(content_words(sentence))
    nearest = max(places, key=lambda place: _nearness(place, found, words), default=None)
    if nearest is not None and not _nearness(nearest, found, words):
        nearest = None
    anchored = (
        all(
            link.rstrip("/") in {each.rstrip("/") for place in places for each in place.found.links}
            for link in found.links
        )
        and all(_has_verbatim(each, everything) for each in found.code)
        and all(_squeezed(each) in _squeezed(everything) for each in found.quotes)
        and all(any(_has_name(place, name) for place in places) for name in found.names)
        and _quantities_stand(found, words, places, tolerance)
        and _words_stand(found, words, places, MOST_WORDS if kind == "statement" else HALF)
        and not (nearest is not None and _denies(nearest, sentence, words))
    )
    if anchored and model is not None:
        anchored = nearest is not None and model.support(sentence, nearest.text) >= 0.5
    return Claim(sentence, anchored, None if nearest is None else nearest.text, kind)


def _nearness(place: _Place, found: Checkable, words: set[str]) -> float:
    """Shared words and names, shorter places first."""
    names = sum(_has_name(place, name) for name in found.names)
    shared = len(words & place.stems)
    return names + shared - 0.001 * len(place.tokens) if names or shared else 0.0


def _overlap(place: _Place, words: set[str]) -> float:
    return len(words & place.stems) / len(words) if words else 0.0


def _words_stand(found: Checkable, words: set[str], places: Sequence[_Place], share: float) -> bool:
    """Whether enough of the words beside the names stand anywhere in the context."""
    others = words - {each for name in found.names for each in content_words(name)}
    known = frozenset().union(*(place.stems for place in places))
    return not others or len(others & known) >= share * len(others)


def _quantities_stand(found: Checkable, words: set[str], places: Sequence[_Place], tolerance: float) -> bool:
    """Whether every number and date stands in a place that speaks of the same thing."""

    def speaks(place: _Place) -> bool:
        if found.names:
            return all(_has_name(place, name) for name in found.names)
        return _overlap(place, words) >= ENOUGH_WORDS

    near = [place for place in places if speaks(place)]
    numbers = [number for place in near for number in place.found.numbers]
    dates = [date for place in near for date in place.found.dates]
    return all(_number_stands(number, numbers, dates, tolerance) for number in found.numbers) and all(
        any(_same_date(date, other) for other in dates) for date in found.dates
    )


def _number_stands(number: Number, numbers: Sequence[Number], dates: Sequence[Date], tolerance: float) -> bool:
    if any(number.value == date.year for date in dates):
        return True
    return any(_same_number(number, other, tolerance) for other in numbers)


def _same_number(claimed: Number, other: Number, tolerance: float) -> bool:
    if claimed.known_unit and other.known_unit and claimed.unit != other.unit:
        return False
    if claimed.known_unit != other.known_unit and {claimed.unit, other.unit} & _MARKED:
        return False
    allowed = max(claimed.step / 2, tolerance * abs(other.value) if claimed.about else 0.0, 1e-9 * abs(other.value))
    return abs(claimed.value - other.value) <= allowed * (1 + 1e-9)


def _same_date(claimed: Date, other: Date) -> bool:
    pairs = ((claimed.year, other.year), (claimed.month, other.month), (claimed.day, other.day))
    return all(mine is None or mine == theirs for mine, theirs in pairs)


def _has_verbatim(identifier: str, text: str) -> bool:
    return re.search(rf"(?<![\w]){re.escape(identifier)}(?!\w)", text) is not None


def _squeezed(text: str) -> str:
    return re.sub(r"\W+", " ", text).strip().lower()


def _has_name(place: _Place, name: str) -> bool:
    wanted = _tokens(name)
    size = len(wanted)
    if any(place.tokens[start : start + size] == wanted for start in range(len(place.tokens) - size + 1)):
        return True
    if name.isupper() and size == 1 and 2 <= len(name) <= 6:
        return any(_initials(each) == name for each in place.found.names)
    return any(each.isupper() and _initials(name) == each for each in place.found.names)


def _initials(name: str) -> str:
    return "".join(word[0] for word in name.split() if word[0].isupper())


def _denies(place: _Place, sentence: str, words: set[str]) -> bool:
    """Whether a place that says nearly the same has the opposite sign."""
    return _overlap(place, words) >= MOST_WORDS and place.negated != is_negated(sentence)
