"""Lemmas and what they depend on: a small graph that is sound by construction."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from sigma0.errors import one_line

LemmaType = Literal["structural", "reduction", "computational", "verification", "synthesis"]
LemmaStatus = Literal["pending", "verified", "failed", "unverified"]
TYPES: tuple[LemmaType, ...] = get_args(LemmaType)
FINAL = "FINAL"
MAX_LEMMAS = 10
# characters
MAX_STATEMENT = 8_000
MAX_TEXT = 40_000
ID_PATTERN = r"^[A-Z][A-Z0-9_]{0,15}$"

Id = Annotated[str, Field(pattern=ID_PATTERN)]
_FILLS: dict[LemmaStatus, str] = {
    "pending": "#eeeeee",
    "verified": "#b7e4c7",
    "failed": "#f4b6b6",
    "unverified": "#f6e3a1",
}


@checked(frozen=True, config=ConfigDict(extra="forbid", str_strip_whitespace=True))
class Lemma:
    """A statement on the way to the answer.

    Attributes:
        id: An upper-case letter, then at most 15 of upper-case letters, digits and underscores.
        statement: What is to be shown or found.
        type: What kind of step it is.
        dependencies: Ids of the lemmas that it builds on.
        verification_strategy: How code may check it.
        status: `unverified` where it could not be checked, `failed` where no attempt passed.
        value: What execution found, of a counting lemma.
        proof: The text that stands for it.
        why: How it came to its status, in a sentence.
    """

    id: Id
    statement: Annotated[str, Field(min_length=1, max_length=MAX_STATEMENT)]
    type: LemmaType = "structural"
    dependencies: tuple[Id, ...] = ()
    verification_strategy: Annotated[str, Field(max_length=MAX_STATEMENT)] = ""
    status: LemmaStatus = "pending"
    value: Annotated[str, Field(max_length=MAX_STATEMENT)] | None = None
    proof: Annotated[str, Field(max_length=MAX_TEXT)] = ""
    why: Annotated[str, Field(max_length=MAX_STATEMENT)] = ""

    def __post_init__(self) -> None:
        if len(set(self.dependencies)) < len(self.dependencies):
            raise ValueError(f"lemma {self.id} depends twice on the same lemma: {', '.join(self.dependencies)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(_LEMMA.dump_python(self, mode="json"))

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Lemma":
        """The same out of JSON values.

        Raises:
            ValueError: For an unknown key or a bad value, naming it.
        """
        try:
            return _LEMMA.validate_python(dict(value))
        except ValidationError as error:
            raise ValueError(f"lemma {str(value.get('id'))[:40]!r}: {one_line(error)}") from error


_LEMMA = TypeAdapter(Lemma)


@dataclass(frozen=True)
class LemmaGraph:
    """Lemmas without a cycle, all of them on the way to the one called FINAL.

    Attributes:
        lemmas: In the order of the plan; from 1 to `MAX_LEMMAS`.

    Raises:
        ValueError: If they are no such graph; says what to change.
    """

    lemmas: tuple[Lemma, ...]

    def __post_init__(self) -> None:
        _check_ids([lemma.id for lemma in self.lemmas])
        for lemma in self.lemmas:
            unknown = [dependency for dependency in lemma.dependencies if dependency not in self]
            if unknown:
                raise ValueError(f"lemma {lemma.id} depends on {', '.join(unknown)}, which the plan does not hold")
        self._sorter()
        reached = self.needed_by(FINAL)
        stray = [lemma.id for lemma in self.lemmas if lemma.id != FINAL and lemma.id not in reached]
        if stray:
            raise ValueError(f"FINAL does not build on {', '.join(stray)}: let it depend on them, or leave them out")

    def __contains__(self, lemma_id: object) -> bool:
        return any(lemma.id == lemma_id for lemma in self.lemmas)

    def __getitem__(self, lemma_id: str) -> Lemma:
        for lemma in self.lemmas:
            if lemma.id == lemma_id:
                return lemma
        raise KeyError(lemma_id)

    @property
    def final(self) -> Lemma:
        """The lemma whose proof holds the answer."""
        return self[FINAL]

    @property
    def verified(self) -> tuple[str, ...]:
        """Ids of the verified lemmas, in topological order."""
        return tuple(lemma.id for lemma in self.order() if lemma.status == "verified")

    def layers(self) -> tuple[tuple[Lemma, ...], ...]:
        """Lemmas as early as they can come: those of one layer do not build on each other."""
        sorter = self._sorter()
        layers = []
        while sorter.is_active():
            names = set(sorter.get_ready())
            sorter.done(*names)
            layers.append(tuple(lemma for lemma in self.lemmas if lemma.id in names))
        return tuple(layers)

    def order(self) -> tuple[Lemma, ...]:
        """Each lemma after those that it builds on, and otherwise as in the plan."""
        return tuple(lemma for layer in self.layers() for lemma in layer)

    def ready(self, verified: Collection[str]) -> tuple[Lemma, ...]:
        """Pending lemmas of which everything that they build on is verified.

        Args:
            verified: Ids.
        """
        return tuple(
            lemma
            for lemma in self.order()
            if lemma.status == "pending" and lemma.id not in verified and set(lemma.dependencies) <= set(verified)
        )

    def needed_by(self, lemma_id: str) -> frozenset[str]:
        """Ids of all that a lemma builds on, over any number of steps."""
        needed: set[str] = set()
        open_ids = list(self[lemma_id].dependencies)
        while open_ids:
            lemma_id = open_ids.pop()
            if lemma_id not in needed:
                needed.add(lemma_id)
                open_ids += self[lemma_id].dependencies
        return frozenset(needed)

    def with_lemmas(self, *lemmas: Lemma) -> "LemmaGraph":
        """This graph with some lemmas in place of those of the same id; new ones are added in front of them.

        Raises:
            ValueError: If that is no graph of lemmas.
        """
        given = {lemma.id: lemma for lemma in lemmas}
        kept = tuple(given.get(lemma.id, lemma) for lemma in self.lemmas)
        return LemmaGraph(tuple(lemma for lemma in lemmas if lemma.id not in self) + kept)

    def with_status(
        self, lemma_id: str, status: LemmaStatus, why: str, proof: str | None = None, value: str | None = None
    ) -> "LemmaGraph":
        """This graph with a lemma's status, and how it came to it; None keeps its proof and value."""
        lemma = self[lemma_id]
        return self.with_lemmas(
            replace(
                lemma,
                status=status,
                why=why[:MAX_STATEMENT],
                proof=lemma.proof if proof is None else proof[:MAX_TEXT],
                value=lemma.value if value is None else value,
            )
        )

    def to_mermaid(self) -> str:
        """The graph in Mermaid's language, coloured by status; what models wrote is escaped."""
        lines = ["graph TD"]
        for lemma in self.lemmas:
            label = f"{lemma.id}: {shortened(lemma.statement)}" + (f" = {lemma.value}" if lemma.value else "")
            lines.append(f'    {lemma.id}["{_escaped(label)}"]:::{lemma.status}')
        lines += [f"    {dependency} --> {lemma.id}" for lemma in self.lemmas for dependency in lemma.dependencies]
        lines += [f"    classDef {status} fill:{fill},color:#000000" for status, fill in _FILLS.items()]
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"lemmas": [lemma.to_dict() for lemma in self.lemmas]}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "LemmaGraph":
        """The same out of JSON values.

        Raises:
            ValueError: For an unknown key, a bad value, or lemmas that are no such graph.
        """
        lemmas = value.get("lemmas")
        if set(value) != {"lemmas"} or not isinstance(lemmas, Sequence) or isinstance(lemmas, str):
            raise ValueError(f"a lemma graph is a mapping with a list under 'lemmas' alone, got keys {sorted(value)}")
        if not all(isinstance(lemma, Mapping) for lemma in lemmas):
            raise ValueError("each lemma of a graph is a mapping")
        return cls(tuple(Lemma.from_dict(lemma) for lemma in lemmas))

    def _sorter(self) -> TopologicalSorter[str]:
        sorter = TopologicalSorter({lemma.id: lemma.dependencies for lemma in self.lemmas})
        try:
            sorter.prepare()
        except CycleError as error:
            # graphlib tells a cycle from what is built on to what builds on it
            raise ValueError(f"the lemmas go in a circle: {' builds on '.join(reversed(error.args[1]))}") from error
        return sorter


def shortened(text: str, most: int = 60) -> str:
    """A text on one line, without control characters, cut where it is longer than `most` characters."""
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def status_colour(status: LemmaStatus) -> str:
    """Of a lemma's box in pictures."""
    return _FILLS[status]


def _check_ids(ids: Sequence[str]) -> None:
    if len(ids) > MAX_LEMMAS:
        raise ValueError(f"a plan of {len(ids)} lemmas is too long: at most {MAX_LEMMAS} are allowed, FINAL included")
    if len(set(ids)) < len(ids):
        twice = sorted({lemma_id for lemma_id in ids if ids.count(lemma_id) > 1})
        raise ValueError(f"lemma {', '.join(twice)} stands in the plan more than once: give each an id of its own")
    if FINAL not in ids:
        raise ValueError("the plan holds no lemma FINAL: give the one that states the answer this id")


def _escaped(text: str) -> str:
    """Letters, digits and harmless signs as they are, all else as Mermaid's numbered entities."""
    return "".join(sign if sign.isalnum() or sign in " .,:=+-/" else f"#{ord(sign)};" for sign in text)
