"""What a text is checked against: the places of a context, indexed once so that each claim is looked up quickly."""

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sigma0.signals.grounding.claims import Checkable, checkable, content_words, is_negated, is_question, sentences
from sigma0.signals.grounding.quantities import Date, Number, same_number
from sigma0.signals.grounding.words import without_possessive

_Key = TypeVar("_Key", bound=Hashable)
_NOWHERE = np.zeros(0, dtype=np.intp)
# "Jean-Paul" is two, "O'Neill" is one
_TOKEN = re.compile(r"\w+(?:['\u2019]\w+)*")
_VERSION = re.compile(r"(?<![\d.])\d+(?:\.\d+){2,}(?![\w]|\.\d)")


@dataclass(frozen=True, slots=True)
class Place:
    """A sentence of the context, or two in a row where the second names nobody.

    Attributes:
        text: As written.
        found: What in it can be looked up.
        tokens: Its words and numbers in lower case, in order.
        stems: Of the words that carry meaning.
        negated: Whether it denies something.
        lone: Whether it is a number, date, quotation or link and nothing else, which speaks for any claim.
    """

    text: str
    found: Checkable
    tokens: tuple[str, ...]
    stems: frozenset[str]
    negated: bool
    lone: bool = False


class Evidence:
    """The places of a context, and in which of them a word, name, number or date stands.

    Args:
        texts: Prompt, sources, results.
        common: Words that a capital at the beginning makes no name.

    Attributes:
        places: In order.
        lone: Which of them are numbers or the like and nothing else.
        wordless: Which of them hold no word that carries meaning, as "It is 5." does.
        lengths: In tokens.
    """

    def __init__(self, texts: Sequence[str], common: frozenset[str]) -> None:
        self.places = [place for text in texts for place in _places(text, common)]
        self.lone = np.array([place.lone for place in self.places], dtype=bool)
        self.wordless = np.array([not place.stems for place in self.places], dtype=bool)
        self.lengths = np.array([len(place.tokens) for place in self.places], dtype=float)
        self._rows = [f" {' '.join(place.tokens)} " for place in self.places]
        self._by_stem = _postings((index, place.stems) for index, place in enumerate(self.places))
        self._by_token = _postings((index, set(place.tokens)) for index, place in enumerate(self.places))
        self._by_name = _postings((index, set(place.found.names)) for index, place in enumerate(self.places))
        self._by_initials = _postings(
            (index, {initials(name) for name in place.found.names}) for index, place in enumerate(self.places)
        )
        self._naming: dict[str, NDArray[np.bool_]] = {}
        self._index_quantities()
        everything = "\n".join(texts)
        self._everything = everything
        self._words = frozenset(re.findall(r"\w+", everything))
        self._versions = frozenset(_VERSION.findall(everything))
        self._squeezed = "\n".join(f" {_squeezed(text)} " for text in texts)
        self._links = frozenset(_same_link(link) for place in self.places for link in place.found.links)

    @property
    def stems(self) -> Set[str]:
        """All stems of the context."""
        return self._by_stem.keys()

    def shared(self, words: Iterable[str]) -> NDArray[np.float64]:
        """How many of the words each place holds."""
        counts = np.zeros(len(self.places))
        for word in words:
            counts[self._by_stem.get(word, _NOWHERE)] += 1
        return counts

    def naming(self, name: str) -> NDArray[np.bool_]:
        """Which places hold the words of a name in a row, or what its initials stand for."""
        if name not in self._naming:
            self._naming[name] = self._mask(self._in_a_row(name), *self._abbreviated(name))
        return self._naming[name]

    def _in_a_row(self, name: str) -> NDArray[np.intp]:
        wanted = tokens_of(name)
        found = min((self._by_token.get(token, _NOWHERE) for token in wanted), key=len, default=_NOWHERE)
        if len(wanted) < 2:
            return found
        row = f" {' '.join(wanted)} "
        return np.array([index for index in found if row in self._rows[index]], dtype=np.intp)

    def _abbreviated(self, name: str) -> tuple[NDArray[np.intp], ...]:
        if name.isupper() and 2 <= len(name) <= 6 and len(tokens_of(name)) == 1:
            return (self._by_initials.get(name, _NOWHERE),)
        return (self._by_name.get(initials(name), _NOWHERE),)

    def _mask(self, *indexes: NDArray[np.intp]) -> NDArray[np.bool_]:
        mask = np.zeros(len(self.places), dtype=bool)
        for each in indexes:
            mask[each] = True
        return mask

    def has_link(self, link: str) -> bool:
        """Whether a link is among the context's; neither scheme nor the case of its host matters."""
        return _same_link(link) in self._links

    def has_code(self, identifier: str) -> bool:
        """Whether an identifier stands there verbatim, and is no part of a longer one."""
        version = identifier.removeprefix("v")
        if _VERSION.fullmatch(version):
            return version in self._versions
        if re.fullmatch(r"\w+", identifier):
            return identifier in self._words
        return _stands_alone(identifier, self._everything)

    def has_quote(self, quote: str) -> bool:
        """Whether a quotation stands there, but for case, spaces and punctuation."""
        return f" {_squeezed(quote)} " in self._squeezed if _squeezed(quote) else True

    def has_number(self, number: Number, near: NDArray[np.bool_], tolerance: float) -> bool:
        """Whether a number stands in one of the near places, or is a year of a date there."""
        if number.may_be_year and self._stands(self._by_date.get((int(number.amount), None, None)), near):
            return True
        return any(
            (self._stands(where, near) and same_number(number, other, tolerance))
            or (self._stands(where, self.lone) and same_number(number, other, tolerance, lone=True))
            for other, where in self._candidates(number, tolerance)
        )

    def has_date(self, date: Date, near: NDArray[np.bool_]) -> bool:
        """Whether a date stands in one of the near places, as far as it is told."""
        return self._stands(self._by_date.get((date.year, date.month, date.day)), near)

    @staticmethod
    def _stands(where: NDArray[np.intp] | None, near: NDArray[np.bool_]) -> bool:
        return where is not None and bool(near[where].any())

    def _index_quantities(self) -> None:
        dates: list[tuple[int, set[tuple[int | None, ...]]]] = []
        numbers: list[tuple[int, set[Number]]] = []
        for index, place in enumerate(self.places):
            dates.append((index, {less for date in place.found.dates for less in _less_told(date)}))
            plain = {number.plain for number in place.found.numbers if math.isfinite(number.value)}
            numbers.append((index, plain))
        self._by_date = _postings(dates)
        found = _postings(numbers)
        # a number without a unit is compared with what was written, another with the value in the unit's base
        entries = {(key, number) for number in found for key in (number.value, number.amount)}
        ordered = sorted(entries, key=lambda entry: entry[0])
        self._values = [key for key, _ in ordered]
        self._numbers = [(number, found[number]) for _, number in ordered]

    def _candidates(self, number: Number, tolerance: float) -> Iterator[tuple[Number, NDArray[np.intp]]]:
        """Numbers of the context that may be equal, and where they stand."""
        if not math.isfinite(number.value):
            return
        relative = max(tolerance if number.about else 0.0, 1e-9)
        for key, step in {(number.value, number.step * number.factor), (number.amount, number.step)}:
            reach = 1.001 * max(step / 2, relative / (1 - relative) * abs(key))
            yield from self._numbers[bisect_left(self._values, key - reach) : bisect_right(self._values, key + reach)]


def _postings(keyed: Iterable[tuple[int, Iterable[_Key]]]) -> dict[_Key, NDArray[np.intp]]:
    """For each key the indexes of what holds it."""
    found: defaultdict[_Key, list[int]] = defaultdict(list)
    for index, keys in keyed:
        for key in keys:
            found[key].append(index)
    return {key: np.array(indexes, dtype=np.intp) for key, indexes in found.items()}


def _less_told(date: Date) -> Iterable[tuple[int | None, ...]]:
    """The date, and all it says when parts of it are left out."""
    return product(*({part, None} for part in (date.year, date.month, date.day)))


def _places(text: str, common: frozenset[str]) -> list[Place]:
    alone = [_place(part, common) for part in sentences(text) if not is_question(part)]
    if len(alone) == 1 and alone[0].found.is_lone:
        return [replace(alone[0], lone=True)]
    return alone + [_together(first, second) for first, second in pairwise(alone) if not second.found.names]


def _place(text: str, common: frozenset[str]) -> Place:
    return Place(text, checkable(text, common), tokens_of(text), frozenset(content_words(text)), is_negated(text))


def _together(first: Place, second: Place) -> Place:
    one, two = first.found, second.found
    found = Checkable(
        one.links + two.links,
        one.code + two.code,
        one.quotes + two.quotes,
        one.dates + two.dates,
        one.numbers + two.numbers,
        one.names + two.names,
        f"{one.rest} {two.rest}",
    )
    negated = first.negated != second.negated
    text = f"{first.text} {second.text}"
    return Place(text, found, first.tokens + second.tokens, first.stems | second.stems, negated)


def tokens_of(text: str) -> tuple[str, ...]:
    """Words and numbers in lower case, in order."""
    return tuple(without_possessive(word).lower() for word in _TOKEN.findall(text))


def initials(name: str) -> str:
    """Of its words with a capital."""
    return "".join(word[0] for word in name.split() if word[0].isupper())


def _same_link(link: str) -> str:
    """A link as it is compared."""
    host, slash, path = re.sub(r"^https?://", "", link, flags=re.IGNORECASE).partition("/")
    return f"{host.lower().removeprefix('www.')}{slash}{path}".rstrip("/")


def _squeezed(text: str) -> str:
    return re.sub(r"\W+", " ", text).strip().lower()


def _stands_alone(piece: str, text: str) -> bool:
    place = text.find(piece)
    while place >= 0:
        if not re.match(r"\w", text[max(place - 1, 0) : place]) and not re.match(
            r"\w", text[place + len(piece) : place + len(piece) + 1]
        ):
            return True
        place = text.find(piece, place + 1)
    return False
