"""Whether every figure of a text has a source, and texts rewritten from their sources.

A figure is covered in one of four ways: a block between `<!-- figures: NAME -->` and `<!-- end -->` is generated as a
whole; so is what a `$ sigma0 ...` command prints in a console fence; a sentence holds figures that are computed; and
what is no measurement (numbers of papers, versions, settings, examples) is listed as literal, in prose with the words
around it, in code as the sequence of all figures.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

OPEN, CLOSE = "\ue000", "\ue001"
_FIGURE = re.compile(r"(?<![A-Za-z_\d])\d+(?:[.,]\d+)*")
_BLOCK = re.compile(r"(?<=<!-- figures: )([^\n]*?) -->\n(.*?)(?=<!-- end -->)", re.DOTALL)
_CONSOLE = re.compile(r"^```console\n\$ (sigma0 [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`|\]\([^)\s]*\)|https?://\S+", re.MULTILINE | re.DOTALL)
_MARKED = re.compile(f"{OPEN}(.*?){CLOSE}")


@dataclass(frozen=True)
class Sources:
    """Where the figures of a text come from.

    Attributes:
        blocks: Generated blocks by name, each ending in a line break.
        sentences: Pieces of sentences whose computed figures are marked (`computed`).
        literal: Words with figures that are no measurement, and how often they stand in prose and tables.
        code: The figures of all code and link targets, in order, parted by blanks.
        printed: What a `sigma0` command prints.
    """

    blocks: Mapping[str, str] = field(default_factory=dict)
    sentences: Sequence[str] = ()
    literal: Mapping[str, int] = field(default_factory=dict)
    code: str = ""
    printed: Callable[[str], str] = lambda command: ""


@dataclass(frozen=True)
class Fault:
    """A figure without its source, or a source without its figure.

    Attributes:
        line: Where, counted from 1; 0 where a source has no place.
        text: What is wrong.
    """

    line: int
    text: str


def computed(value: float | str, form: str = "") -> str:
    """A figure as its sentence shows it, marked as computed."""
    return f"{OPEN}{value:{form}}{CLOSE}"


def figures(text: str) -> list[re.Match[str]]:
    """Every figure of a text; digits that belong to a name, as in float32, are none."""
    return list(_FIGURE.finditer(text))


def faults(text: str, sources: Sources) -> list[Fault]:
    """What of a text is not as its sources have it."""
    found: list[Fault] = []
    covered = [False] * len(text)

    def cover(first: int, last: int) -> None:
        covered[first:last] = [True] * (last - first)

    def fault(place: int, told: str) -> None:
        found.append(Fault(text.count("\n", 0, place) + 1 if place >= 0 else 0, told))

    names = []
    for match in _BLOCK.finditer(text):
        names.append(match[1])
        cover(*match.span())
        if sources.blocks.get(match[1]) != match[2]:
            fault(match.start(), f"block {match[1]!r} is not as generated")
    if sorted(names) != sorted(sources.blocks):
        fault(-1, f"blocks {sorted(names)} stand in the text, {sorted(sources.blocks)} are generated")
    for match in _CONSOLE.finditer(text):
        cover(*match.span(2))
        if _stripped(sources.printed(match[1])) != _stripped(match[2]):
            fault(match.start(2), f"this is not what {match[1][:40]!r}... prints")
    code = []
    for match in _CODE.finditer(text):
        code += [each[0] for each in figures(match[0]) if not covered[match.start() + each.start()]]
    for sentence in sources.sentences:
        pattern, values = _pattern(sentence)
        places = [match for match in pattern.finditer(text) if not covered[match.start()]]
        if len(places) != 1:
            fault(-1, f"stands {len(places)} times in place of once: {_plain(sentence)!r}")
        for match in places[:1]:
            cover(*match.span())
            for place, value in enumerate(values, start=1):
                if match[place] != value:
                    fault(match.start(place), f"{match[place]} should be {value} in {_plain(sentence)!r}")
    for match in _CODE.finditer(text):
        cover(*match.span())
    if " ".join(code) != sources.code:
        fault(-1, f"figures in code are {' '.join(code)!r}, listed are {sources.code!r}")
    for words, times in sorted(sources.literal.items(), key=lambda each: -len(each[0])):
        places = [match for match in _literal(words).finditer(text) if not all(_of(covered, match))]
        for match in places:
            cover(*match.span())
        if len(places) != times:
            fault(-1, f"literal {words!r} stands {len(places)} times, not {times}")
    for match in figures(text):
        if not covered[match.start()]:
            fault(match.start(), f"{match[0]} has no source: {context(text, match)!r}")
    return found


def rewritten(text: str, sources: Sources) -> str:
    """The text with blocks, console output and computed figures as their sources have them; line breaks stay."""
    text = _BLOCK.sub(lambda match: f"{match[1]} -->\n{sources.blocks.get(match[1], match[2])}", text)
    text = _CONSOLE.sub(lambda match: match[0].replace(match[2], f"{sources.printed(match[1]).strip()}\n"), text)
    for sentence in sources.sentences:
        pattern, values = _pattern(sentence)
        match = pattern.search(text)
        if match:
            for place in range(len(values), 0, -1):
                text = text[: match.start(place)] + values[place - 1] + text[match.end(place) :]
    return text


def context(text: str, match: re.Match[str]) -> str:
    """A figure with the words before and after it, as far as they stand in its line."""
    first, last = text.rfind("\n", 0, match.start()) + 1, (text + "\n").find("\n", match.end())
    before = re.search(r"(?:[^\s|()\[\]]+ )?[^\s|()\[\]]*$", text[first : match.start()])
    after = re.match(r"[^\s|()\[\]]*(?: [^\s|()\[\]]+)?", text[match.end() : last])
    return f"{before[0] if before else ''}{match[0]}{after[0] if after else ''}"


def code_figures(text: str, sources: Sources) -> str:
    """What `Sources.code` should be."""
    told = next((each.text for each in faults(text, sources) if each.text.startswith("figures in code")), "")
    return told.split("'")[1] if told else sources.code


def _of(covered: Sequence[bool], match: re.Match[str]) -> list[bool]:
    """Which figures of a place are covered."""
    return [covered[match.start() + each.start()] for each in figures(match[0])]


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _plain(sentence: str) -> str:
    return _MARKED.sub(r"\1", sentence)


def _spaced(words: str) -> str:
    """A pattern of words, whatever blanks and line breaks part them."""
    return r"\s+".join(map(re.escape, re.split(r"\s+", words)))


def _literal(words: str) -> re.Pattern[str]:
    before = r"(?<![\w.,])" if words[0].isdigit() else ""
    return re.compile(before + _spaced(words) + r"(?!\d)(?![.,]\d)")


def _pattern(sentence: str) -> tuple[re.Pattern[str], list[str]]:
    """What finds a sentence whatever its computed figures are, and these figures."""
    parts = _MARKED.split(sentence)
    pieces = [_spaced(part) if place % 2 == 0 else r"([+-]?[\d.,]*\d)" for place, part in enumerate(parts)]
    return re.compile("".join(pieces)), parts[1::2]
