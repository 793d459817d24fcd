"""Sentences of a text, and what in them can be checked: numbers, dates, names, quotations, identifiers, links."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sigma0.signals.grounding.quantities import Date, Number, is_measure, take_dates, take_numbers, unit_of
from sigma0.signals.grounding.words import CAPITAL, is_stop, listed, stem, without_possessive, words_of

Kind = Literal["number", "date", "entity", "quote", "code", "link", "statement"]

_ABBREVIATIONS = frozenset(
    listed(
        """
    mr mrs ms dr prof sr jr st vs etc inc ltd co corp no vol fig eq ca approx dept univ gov gen col sgt capt
    lt rev hon jan feb mar apr jun jul aug sep sept oct nov dec e.g i.e u.s u.k u.n d.c a.m p.m b.c a.d ph.d
    """
    )
)
_HEDGES = re.compile(
    r"\b(?:i (?:think|believe|guess|suppose|feel|imagine|doubt|hope|wonder|would say)|in my (?:opinion|view)|"
    r"to my mind|perhaps|maybe|possibly|might|(?-i:may)|could(?! not\b)|probably|presumably|seems?|appears? to|"
    r"not sure|it is (?:possible|likely)|as far as i know|if i (?:recall|remember))\b",
    re.IGNORECASE,
)
_JUDGEMENTS = frozenset(
    listed(
        """
    beautiful lovely wonderful amazing awful terrible nice great good bad best worst better worse boring fun
    interesting impressive pretty ugly delicious favorite favourite should ought
    """
    )
)
# Lower case only: "Great Britain" is no judgement.
_OPINIONS = re.compile(rf"\b(?:{'|'.join(_JUDGEMENTS)})\b")
_JUDGED = re.compile(
    r"\b(?:should|ought|(?:is|are|was|were|be|been|looks?|sounds?|feels?|seems?)\s+(?:\w+\s+){0,3}?"
    rf"(?:{'|'.join(_JUDGEMENTS)}))\b"
)
_NEGATIONS = re.compile(
    r"\b(?:not|no|never|none|nobody|nothing|neither|nor|cannot|without|lack(?:s|ed|ing)?|unable to|"
    r"(?:fail(?:s|ed|ing)?|refuse[sd]?|refusing|decline[sd]?|declining) to|\w+n['’]t)\b",
    re.IGNORECASE,
)
_VERB = (
    r"(?:is|are|was|were|has|had|have|did|does|do|will|would|can|came|went|won|lost|wrote|made|took|became|began|left|"
    r"got|met|sold|built|led|rose|fell|ran|held|lies|lives|costs?|weighs?|stands?|rises?|\w{2,}ed)"
)
# Between clauses stated as a guess and others; whitespace is squeezed before.
_CLAUSES = re.compile(
    rf"; |, (?:but|although|though|whereas|while|yet|however) |,? and (?=(?:[\w'’-]+ ){{0,3}}?{_VERB}\b)", re.IGNORECASE
)
_SUBJECT = re.compile(
    rf"(?:that )?(?:(?:(?:the|an?|his|her|its|my|our|their|your|some|many|both|\d\S*) )?[\w'’-]+|"
    rf"{CAPITAL}[\w'’-]*(?: {CAPITAL}[\w'’-]*)*)"
)
_QUESTION = re.compile(r"\?[\"'”’)\]]*$")
_ASKS = re.compile(
    r"[\"'“‘(]?(?:wh(?:at|o|om|ose|ich|en|ere|y)|how|is|are|am|was|were|do|does|did|has|have|had|can|could|will|would|"
    r"shall|should|may|might|must)\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(
    rf"(?<=[.!?])(?P<closing>[\"'”’)\]]*)\s+(?=[\"'“‘(\[]?(?:{CAPITAL}|\d))|\n\s*\n|\n(?=\s*(?:[-*•]|\d+[.)])\s)|\n"
)
_URL = re.compile(
    r"(?:https?://|\bwww\.)[^\s<>\"'`\[\]]+|(?<![\w.@/-])(?:[a-z0-9-]+\.)+[a-z]{2,24}/[^\s<>\"'`\[\]]*", re.IGNORECASE
)
_FOOTNOTE = re.compile(r"\[\d{1,3}\]")
_QUOTES = re.compile(r"[\"“]([^\"“”]{3,}?)[\"”]|(?<!\w)[‘']([^'‘’]{8,}?)[’'](?!\w)")
_CODE = re.compile(
    r"`(?P<ticked>[^`\n]+)`|(?<![\w.])(?P<dotted>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?:\(\))?)|"
    # calls, snake_case, camelCase
    r"(?<!\w)(?:[A-Za-z]\w*\(\)|[a-z]+(?:_[a-z0-9]+)+\b|[a-z][a-z0-9]*[A-Z]\w*)|"
    # versions and addresses but no dates, letters and digits glued together but neither 1e10 nor km2
    r"(?<![\w.])(?:(?!\d\d?\.\d\d?\.\d{4}(?!\w|\.\d))v?\d+(?:\.\d+){2,}(?!\w)|"
    r"(?!(?:[cmk]?m|ft)[23]\b)[a-z]+\d\w*|(?!\d+(?:e\d+|[cmk]?m[23])\b)\d+(?:[a-z]+\d\w*|[A-Z]\w*))"
)
_NAME = re.compile(
    rf"(?<!\w)(?:{CAPITAL}[\w’'-]*|{CAPITAL}\.)"
    rf"(?:\s+(?:(?:of|the|de|la|von|van|del|da|di|and|&)\s+){{0,2}}(?:{CAPITAL}[\w’'-]*|{CAPITAL}\.))*"
)
_COMMANDED = re.compile(
    r"\s*(?:$|[^\w\s,'’.-]|(?:the|a|an|this|that|these|those|your|it|them|to|all|each|every|up|at)\b)"
)
_FACTS = re.compile(
    r"^(?:the|this|these|those|there|its?|his|her|their|all|every|no|an?)\b|\b(?:is|are|was|were|has|have|had)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Checkable:
    """What a sentence states that can be looked up."""

    links: tuple[str, ...]  # URLs
    code: tuple[str, ...]  # Identifiers, versions, addresses
    quotes: tuple[str, ...]  # What stands in quotation marks
    dates: tuple[Date, ...]  # Dates with a month
    numbers: tuple[Number, ...]  # Other numbers, years among them
    names: tuple[str, ...]  # Names of people, places, works
    rest: str  # The sentence without all of these but the names

    @property
    def kind(self) -> Kind | None:
        """The hardest thing in it."""
        for kind, parts in (
            ("link", self.links),
            ("code", self.code),
            ("quote", self.quotes),
            ("date", self.dates),
            ("number", self.numbers),
            ("entity", self.names),
        ):
            if parts:
                return kind  # type: ignore[return-value]
        return None

    @property
    def is_lone(self) -> bool:
        """Whether a number, date, quotation, identifier or link is all there is, as in the result of a calculation."""
        return self.kind not in (None, "entity") and not re.search(r"\w", self.rest)


def sentences(text: str) -> list[str]:
    """The sentences of a text; items of a list are sentences too."""
    parts: list[list[str]] = []
    for piece in _pieces(text):
        if parts and _ends_in_abbreviation(parts[-1][-1]):
            parts[-1].append(piece)
        else:
            parts.append([piece])
    return [re.sub(r"^(?:[-*•]|\d+[.)])\s+", "", " ".join(part)) for part in parts]


def _pieces(text: str) -> Iterator[str]:
    start = 0
    for match in _SENTENCE_END.finditer(text):
        piece = text[start : max(match.start(), match.end("closing"))].strip()
        start = match.end()
        if piece:
            yield piece
    if text[start:].strip():
        yield text[start:].strip()


def _ends_in_abbreviation(piece: str) -> bool:
    last = piece.rsplit(maxsplit=1)[-1]
    if not last.endswith("."):
        return False
    word = last[:-1].lstrip("(\"'“").lower()
    return word in _ABBREVIATIONS or (len(word) == 1 and word.isalpha() and word != "i")


def assertions(sentence: str) -> list[str]:
    """What a sentence states as certain: all of it or, if it holds a guess, the clauses without one."""
    if not is_hedged(sentence):
        return [sentence]
    return [clause for clause in _clauses(" ".join(sentence.split())) if not is_hedged(clause)]


def _clauses(sentence: str) -> list[str]:
    clauses, start = [], 0
    for match in _CLAUSES.finditer(sentence):
        clause = sentence[start : match.start()]
        # in "perhaps the cat and the dog were there" the subject goes on
        if "and" in match.group() and _SUBJECT.fullmatch(_HEDGES.sub("", clause).strip(" ,")):
            continue
        clauses.append(clause)
        start = match.end()
    return [*clauses, sentence[start:]]


def is_hedged(sentence: str) -> bool:
    """Whether something in it is stated as a guess."""
    return bool(_HEDGES.search(sentence))


def is_opinion(sentence: str, names: Sequence[str] = ()) -> bool:
    """Whether it judges rather than states.

    Args:
        sentence: One sentence.
        names: The names in it. Where there are some, they must be what is judged, and stand before the judgement.
    """
    if not names:
        return bool(_OPINIONS.search(sentence))
    judged = _JUDGED.search(sentence)
    return judged is not None and not any(name in sentence[judged.start() :] for name in names)


def is_question(sentence: str) -> bool:
    """Whether it asks; a question mark at the end of a link does not."""
    if not _QUESTION.search(sentence):
        return False
    last = sentence.rsplit(maxsplit=1)[-1]
    return not _URL.match(last.lstrip("(\"'[")) or bool(_ASKS.match(sentence))


def is_negated(sentence: str) -> bool:
    """Whether it denies something: an odd number of negations."""
    return len(_NEGATIONS.findall(sentence)) % 2 == 1


def is_statement(sentence: str) -> bool:
    """Whether it states something about something, in enough words to be looked up."""
    return bool(_FACTS.search(sentence)) and len(content_words(sentence)) >= 2


def content_words(text: str) -> list[str]:
    """Stems of the words that carry meaning; numbers, units and negations are compared by themselves."""
    words = words_of(_NEGATIONS.sub(" ", text))
    return [stem(word) for word in words if not is_stop(word) and unit_of(word) is None]


def common_words(text: str) -> frozenset[str]:
    """Words in lower case, and their stems: a capital at the beginning of a sentence makes them no names."""
    words = {word for word in words_of(text) if word.islower()}
    return frozenset(words | {stem(word) for word in words})


def checkable(sentence: str, common: frozenset[str] = frozenset()) -> Checkable:
    """What of a sentence can be looked up.

    Args:
        sentence: One sentence.
        common: Words known in lower case elsewhere, so that a capital at the beginning makes them no name.
    """
    links, rest = _take_links(sentence)
    code, rest = _take(_CODE, _identifier, rest)
    quotes = tuple(next(filter(None, groups)).strip(" .,;") for groups in _QUOTES.findall(rest))
    dates, rest = take_dates(_FOOTNOTE.sub(" ", rest))
    numbers, rest = take_numbers(rest)
    rest = _QUOTES.sub(" \n ", rest)
    return Checkable(links, code, quotes, dates, numbers, tuple(_names(rest, common)), rest)


def _take(
    pattern: re.Pattern[str], reads: Callable[[re.Match[str]], str | None], text: str
) -> tuple[tuple[str, ...], str]:
    taken: list[str] = []

    def take(match: re.Match[str]) -> str:
        read = reads(match)
        if not read:
            return match.group()
        taken.append(read)
        return " "

    rest = pattern.sub(take, text)
    return tuple(taken), rest


def _take_links(text: str) -> tuple[tuple[str, ...], str]:
    if "/" not in text and "www." not in text.lower():
        return (), text
    return _take(_URL, lambda match: _trimmed(match.group()), text)


def _trimmed(link: str) -> str:
    """A link without the punctuation after it, and without a parenthesis that was opened before it."""
    depth = 0
    for index, character in enumerate(link):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            link = link[:index]
            break
    return link.rstrip(".,;:!?*’”")


def _identifier(match: re.Match[str]) -> str | None:
    """An identifier; None for a dotted abbreviation, or two sentences with no space between them."""
    dotted = match["dotted"]
    if dotted and not dotted.endswith("()"):
        parts = dotted.split(".")
        short = max(map(len, parts)) < 2 or parts[0] in _ABBREVIATIONS or dotted in _ABBREVIATIONS
        if short or dotted[0].isupper() or (len(parts) == 2 and parts[1][0].isupper()):
            return None
    if match["ticked"]:
        return match["ticked"].strip()
    # neither is "kW" camelCase, nor "5KM" an identifier
    return None if unit_of(match.group()) or is_measure(match.group()) else match.group()


def _names(text: str, common: frozenset[str]) -> Iterator[str]:
    for count, line in enumerate(text.split("\n")):
        beginning = len(line) - len(line.lstrip(" \"'“‘(*_;")) if count == 0 else -1
        for match in _NAME.finditer(line):
            # a capital at the beginning says nothing of a word that is common, or that commands ("Use the ...")
            first = match.start() <= beginning
            words = match.group().split()
            commands = len(words) == 1 and bool(_COMMANDED.match(line, match.end()))
            start, stop = 0, len(words)
            if first and not is_stop(words[0]) and (commands or _is_common(words[0], len(words), common)):
                start = 1
            while start < stop and is_stop(words[start]):
                start += 1
            while start < stop and is_stop(words[stop - 1]):
                stop -= 1
            name = without_possessive(" ".join(words[start:stop])).strip(" .,'’")
            if len(name) > 1 and not is_stop(name):
                yield name


def _is_common(word: str, words: int, common: frozenset[str]) -> bool:
    bare = without_possessive(word).lower()
    alone = words == 1 and (bare.endswith(("ing", "ly")) or bare in _JUDGEMENTS)
    return alone or bare in common or stem(bare) in common
