"""What a text is checked against: the passages of a context, indexed once so that each claim is looked up quickly."""

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sigma0.signals.grounding.claims import Checkable, checkable, content_words, is_negated, is_question, sentences
from sigma0.signals.grounding.quantities import Date, Number, same_number
from sigma0.signals.grounding.steps import Places, Steps
from sigma0.signals.grounding.words import without_possessive

_Key = TypeVar("_Key", bound=Hashable)
_NOWHERE = np.zeros(0, dtype=np.intp)
# "Jean-Paul" is two, "O'Neill" is one
_TOKEN = re.compile(r"\w+(?:['\u2019]\w+)*")
# Numbers in words that are none by themselves, and what joins and begins the items of a list.
_FACTORS = {"one": 1.0, "half": 0.5, "twice": 2.0, "double": 2.0, "triple": 3.0, "third": 1 / 3, "quarter": 0.25}
_FACTOR = re.compile(rf"\b(?:{'|'.join(_FACTORS)})", re.IGNORECASE)
_JOINT = re.compile(r",\s*(?:(?:and|or|&)\s)?|\s(?:and|or|&)\s")
_ITEM = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s", re.MULTILINE)
# What sets two things equal, so that a number of one is the other's.
_EQUAL = re.compile(r"\bas \w+ as\b|\bthe same \w+ as\b", re.IGNORECASE)
# Words of a claim from which on a sentence with nearly the same ones speaks of the same thing.
_REPEATED, _ALIKE = 3, 0.75
_VERSION = re.compile(r"(?<![\d.])\d+(?:\.\d+){2,}(?![\w]|\.\d)")


@dataclass(frozen=True, slots=True)
class Passage:
    """A sentence of the context, or two in a row where the second names nobody."""

    text: str  # As written
    parts: Checkable  # What in it can be looked up
    tokens: tuple[str, ...]  # Its words and numbers in lower case, in order
    stems: frozenset[str]  # Of the words that carry meaning
    negated: bool  # Whether it denies something
    lone: bool = False  # Whether it is a number, date, quotation or link and nothing else, which speaks for any claim


class Evidence:
    """The passages of a context, and in which of them a word, name, number or date stands.

    Args:
        texts: Prompt, sources, results.
        common: Words that a capital at the beginning makes no name.

    Attributes:
        passages: In order.
        lone: Which of them are numbers or the like and nothing else.
        wordless: Which of them hold no word that carries meaning, as "It is 5." does.
        lengths: In tokens.
    """

    def __init__(self, texts: Sequence[str], common: frozenset[str]) -> None:
        self._read = [[_passage(part, common) for part in sentences(text)] for text in texts]
        self.passages = [passage for singles in self._read for passage in _passages(singles)]
        self.lone = np.array([passage.lone for passage in self.passages], dtype=bool)
        self.wordless = np.array([not passage.stems for passage in self.passages], dtype=bool)
        self.lengths = np.array([len(passage.tokens) for passage in self.passages], dtype=float)
        self._by_stem = _postings((index, passage.stems) for index, passage in enumerate(self.passages))
        self._naming: dict[str, NDArray[np.bool_]] = {}
        self._texts = texts
        self._everything = "\n".join(texts)

    # what few claims ask for is indexed when one does

    @cached_property
    def _rows(self) -> list[str]:
        return [f" {' '.join(passage.tokens)} " for passage in self.passages]

    @cached_property
    def _by_token(self) -> dict[str, NDArray[np.intp]]:
        return _postings((index, set(passage.tokens)) for index, passage in enumerate(self.passages))

    @cached_property
    def _by_name(self) -> dict[str, NDArray[np.intp]]:
        return _postings((index, set(passage.parts.names)) for index, passage in enumerate(self.passages))

    @cached_property
    def _by_initials(self) -> dict[str, NDArray[np.intp]]:
        return _postings(
            (index, {initials(name) for name in passage.parts.names}) for index, passage in enumerate(self.passages)
        )

    @cached_property
    def _words(self) -> frozenset[str]:
        return frozenset(re.findall(r"\w+", self._everything))

    @cached_property
    def _versions(self) -> frozenset[str]:
        return frozenset(_VERSION.findall(self._everything))

    @cached_property
    def _squeezed_texts(self) -> str:
        return "\n".join(f" {_squeezed(text)} " for text in self._texts)

    @cached_property
    def _links(self) -> frozenset[str]:
        return frozenset(_same_link(link) for passage in self.passages for link in passage.parts.links)

    @property
    def stems(self) -> Set[str]:
        """All stems of the context."""
        return self._by_stem.keys()

    def shared(self, words: Iterable[str]) -> NDArray[np.float64]:
        """How many of the words each passage holds."""
        counts = np.zeros(len(self.passages))
        for word in words:
            counts[self._by_stem.get(word, _NOWHERE)] += 1
        return counts

    def naming(self, name: str) -> NDArray[np.bool_]:
        """Which passages hold the words of a name in a row, or what its initials stand for."""
        if name not in self._naming:
            self._naming[name] = self._mask(self._in_a_row(name), *self._abbreviated(name))
        return self._naming[name]

    def _in_a_row(self, name: str) -> NDArray[np.intp]:
        wanted = tokens_of(name)
        candidates = min((self._by_token.get(token, _NOWHERE) for token in wanted), key=len, default=_NOWHERE)
        if len(wanted) < 2:
            return candidates
        row = f" {' '.join(wanted)} "
        return np.array([index for index in candidates if row in self._rows[index]], dtype=np.intp)

    def _abbreviated(self, name: str) -> tuple[NDArray[np.intp], ...]:
        if name.isupper() and 2 <= len(name) <= 6 and len(tokens_of(name)) == 1:
            return (self._by_initials.get(name, _NOWHERE),)
        return (self._by_name.get(initials(name), _NOWHERE),)

    def _mask(self, *indexes: NDArray[np.intp]) -> NDArray[np.bool_]:
        mask = np.zeros(len(self.passages), dtype=bool)
        for rows in indexes:
            mask[rows] = True
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
        return _is_separate(identifier, self._everything)

    def has_quote(self, quote: str) -> bool:
        """Whether a quotation stands there, but for case, spaces and punctuation."""
        return f" {_squeezed(quote)} " in self._squeezed_texts if _squeezed(quote) else True

    def has_number(self, number: Number, near: NDArray[np.bool_], tolerance: float) -> bool:
        """Whether a number stands in one of the near passages, or is a year of a date there."""
        if number.may_be_year and self._occurs(self._by_date.get((int(number.amount), None, None)), near):
            return True
        return any(
            (self._occurs(where, near) and same_number(number, other, tolerance))
            or (self._occurs(where, self.lone) and same_number(number, other, tolerance, lone=True))
            for other, where in self._candidates(number, tolerance)
        )

    def has_date(self, date: Date, near: NDArray[np.bool_]) -> bool:
        """Whether a date occurs in one of the near passages, in the parts that are given."""
        return self._occurs(self._by_date.get((date.year, date.month, date.day)), near)

    def may_follow(self, numbers: Sequence[Number], words: Set[str], tolerance: float) -> bool:
        """Whether some of the numbers come of the context's by one step, and the others stand anywhere in it.

        A step is a sum, difference, product or quotient, or counting: the items of a list, or the sentences that share
        a word. "Clara is as old as Leo" is one too.

        Where a sentence tells nearly the same, the step begins with a number of that sentence: else a figure that was
        altered would follow from whatever numbers stand anywhere.

        Args:
            numbers: Of a claim.
            words: Its stems.
            tolerance: Relative difference allowed for a number that is stated as approximate.
        """
        counts = self._counts | {sum(bool(words & passage.stems) for passage, _ in self._stated)}
        alike = [places for passage, places in self._stated if _is_alike(words, passage.stems)]
        first = None
        if alike:
            first, counts = np.concatenate(alike), frozenset()
        equal = [] if alike else self._equal(words)
        unknown = [
            number
            for number in numbers
            if (number.unit or number.amount not in counts)
            and not self._steps.lead_to(number, tolerance, first)
            and not any(same_number(number, other, tolerance) for other in equal)
        ]
        return len(unknown) < len(numbers) and all(
            any(same_number(number, other, tolerance, lone=True) for other in self._known) for number in unknown
        )

    def _equal(self, words: Set[str]) -> list[Number]:
        """Numbers of what some sentence, without a number of its own, sets equal to what a claim speaks of."""
        others = [
            passage.stems - words
            for passage, places in self._stated
            if not len(places)
            and not passage.negated
            and len(passage.stems & words) >= 2
            and _EQUAL.search(passage.text)
        ]
        return [
            number
            for passage, _ in self._stated
            if any(passage.stems & other for other in others)
            for number in _numbers_of(passage)
        ]

    @cached_property
    def _known(self) -> list[Number]:
        """All numbers, also those of questions and dates."""
        return [number for singles in self._read for passage in singles for number in _numbers_of(passage)]

    @cached_property
    def _stated(self) -> list[tuple[Passage, Places]]:
        """Every sentence, questions too, and the places of its numbers among all."""
        every = [passage for singles in self._read for passage in singles]
        ends = np.cumsum([0, *(len(_numbers_of(passage)) for passage in every)])
        return [(passage, np.arange(*around)) for passage, around in zip(every, pairwise(ends), strict=True)]

    @cached_property
    def _steps(self) -> Steps:
        # two are tried anyway
        many = [places for _, places in self._stated if len(places) > 2]
        ends = np.cumsum([0, *(len(singles) for singles in self._read)])
        texts = [[places for _, places in self._stated[start:end]] for start, end in pairwise(ends)]
        return Steps(self._known, [*many, *(np.concatenate(places) for places in texts if places)])

    @cached_property
    def _counts(self) -> frozenset[int]:
        """How many items there may be in a list."""
        joints = {len(_JOINT.findall(passage.text)) for passage, _ in self._stated}
        listed = {count + more for count in joints - {0} for more in (0, 1)} | ({2} if joints - {0} else set())
        return frozenset(listed - {1}) | {len(_ITEM.findall(text)) for text in self._texts}

    @staticmethod
    def _occurs(where: NDArray[np.intp] | None, near: NDArray[np.bool_]) -> bool:
        return where is not None and bool(near[where].any())

    @cached_property
    def _by_date(self) -> dict[tuple[int | None, ...], NDArray[np.intp]]:
        return _postings(
            (index, {less for date in passage.parts.dates for less in _less_exact(date)})
            for index, passage in enumerate(self.passages)
        )

    @cached_property
    def _numbers(self) -> tuple[list[float], list[tuple[Number, NDArray[np.intp]]]]:
        """Values in their order, and the number of each with the passages that it is in."""
        postings = _postings(
            (index, {number.plain for number in passage.parts.numbers if math.isfinite(number.value)})
            for index, passage in enumerate(self.passages)
        )
        # a number without a unit is compared with what was written, another with the value in the unit's base
        entries = {(key, number) for number in postings for key in (number.value, number.amount)}
        ordered = sorted(entries, key=lambda entry: entry[0])
        return [key for key, _ in ordered], [(number, postings[number]) for _, number in ordered]

    def _candidates(self, number: Number, tolerance: float) -> Iterator[tuple[Number, NDArray[np.intp]]]:
        """Numbers of the context that may be equal, and where they stand."""
        if not math.isfinite(number.value):
            return
        values, numbers = self._numbers
        relative = max(tolerance if number.about else 0.0, 1e-9)
        for key, step in {(number.value, number.step * number.factor), (number.amount, number.step)}:
            reach = 1.001 * max(step / 2, relative / (1 - relative) * abs(key))
            yield from numbers[bisect_left(values, key - reach) : bisect_right(values, key + reach)]


def _postings(keyed: Iterable[tuple[int, Iterable[_Key]]]) -> dict[_Key, NDArray[np.intp]]:
    """For each key the indexes of what holds it."""
    postings: defaultdict[_Key, list[int]] = defaultdict(list)
    for index, keys in keyed:
        for key in keys:
            postings[key].append(index)
    return {key: np.array(indexes, dtype=np.intp) for key, indexes in postings.items()}


def _less_exact(date: Date) -> Iterable[tuple[int | None, ...]]:
    """The date, and all it says when parts of it are left out."""
    return product(*({part, None} for part in (date.year, date.month, date.day)))


def _is_alike(words: Set[str], stems: Set[str]) -> bool:
    """Whether a sentence has nearly the words of a claim, and is long enough for that to say something."""
    return len(words) >= _REPEATED and len(words & stems) >= _ALIKE * len(words | stems)


def _numbers_of(passage: Passage) -> list[Number]:
    dates = [part for date in passage.parts.dates for part in (date.year, date.day) if part is not None]
    words = [_FACTORS[word.lower()] for word in _FACTOR.findall(passage.text)]
    finite = [number for number in passage.parts.numbers if math.isfinite(number.value)]
    return [*finite, *(Number(float(amount)) for amount in (*dates, *words))]


def _passages(read: Sequence[Passage]) -> list[Passage]:
    singles = [passage for passage in read if not is_question(passage.text)]
    if len(singles) == 1 and singles[0].parts.is_lone:
        return [replace(singles[0], lone=True)]
    return singles + [_joined(first, second) for first, second in pairwise(singles) if not second.parts.names]


def _passage(text: str, common: frozenset[str]) -> Passage:
    return Passage(text, checkable(text, common), tokens_of(text), frozenset(content_words(text)), is_negated(text))


def _joined(first: Passage, second: Passage) -> Passage:
    one, two = first.parts, second.parts
    joint = Checkable(
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
    return Passage(text, joint, first.tokens + second.tokens, first.stems | second.stems, negated)


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


def _is_separate(piece: str, text: str) -> bool:
    start = text.find(piece)
    while start >= 0:
        if not re.match(r"\w", text[max(start - 1, 0) : start]) and not re.match(
            r"\w", text[start + len(piece) : start + len(piece) + 1]
        ):
            return True
        start = text.find(piece, start + 1)
    return False
