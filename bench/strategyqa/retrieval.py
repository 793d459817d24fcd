"""Paragraphs found by TF-IDF, and an index of them that is stored without code and checked when it is loaded."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from sigma0.bench.strategyqa.items import Item
from sigma0.errors import needs_extra, one_line

MATRIX_FILE = "matrix.npz"
TERMS_FILE = "terms.json"
TOP_K = 3
# logarithmic counts, so that a long paragraph does not win by repeating a word
_VECTORIZER = {"sublinear_tf": True, "dtype": np.float64}
_PARTS = ("data", "indices", "indptr", "shape")


class Paragraph(BaseModel):
    """A paragraph of an article, in the form of the published file.

    Attributes:
        title: Of the article.
        section: Of the article, that it stands in.
        headers: Above it.
        para_index: Its number in the article.
        content: Its text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    title: str
    section: str | None = None
    headers: Any = None
    para_index: int = 0
    content: str


@dataclass(frozen=True)
class Passage:
    """A paragraph that was found.

    Attributes:
        id: Of the paragraph.
        title: Of its article.
        text: It.
        score: Cosine with the query, in (0, 1].
    """

    id: str
    title: str
    text: str
    score: float


class Index(Protocol):
    """Whatever finds paragraphs."""

    def search(self, query: str, top_k: int) -> list[Passage]:
        """The paragraphs that are most like a query, at most `top_k`, best first."""


class _Terms(BaseModel):
    """What is stored beside the matrix, as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: str
    matrix: str
    vocabulary: dict[str, int]
    idf: list[float]


_PARAGRAPHS = TypeAdapter(dict[str, Paragraph])


class ParagraphIndex:
    """TF-IDF over paragraphs, in memory.

    Args:
        paragraphs: By id.

    Raises:
        ValueError: If they hold no words, or scikit-learn is missing.
    """

    def __init__(self, paragraphs: dict[str, Paragraph]) -> None:
        self._take(paragraphs)
        self._vectorizer = _vectorizer()
        try:
            self._matrix = self._vectorizer.fit_transform(_texts(paragraphs.values()))
        except ValueError as error:
            raise ValueError(f"{len(paragraphs)} paragraphs hold no words to search for: {error}") from error

    @classmethod
    def load(cls, folder: Path, source: Path) -> "ParagraphIndex":
        """A stored index.

        Args:
            folder: That `save` wrote.
            source: The paragraph file that it was made from; texts are read from it.

        Raises:
            ValueError: If either cannot be read, was changed, or does not belong to the other.
        """
        content = _read(source)
        terms = _read_terms(folder / TERMS_FILE)
        packed = _read(folder / MATRIX_FILE)
        if terms.source != sha256(content).hexdigest():
            raise ValueError(f"the index in {str(folder)!r} was not made from {str(source)!r}: make it again")
        if terms.matrix != sha256(packed).hexdigest():
            raise ValueError(f"{str(folder / MATRIX_FILE)!r} was changed since it was written: make the index again")
        paragraphs = _parse(content, source)
        self = cls.__new__(cls)
        self._take(paragraphs)
        try:
            self._matrix = _unpack(packed, (len(paragraphs), len(terms.idf)))
            self._vectorizer = _vectorizer(terms.vocabulary)
            self._vectorizer.idf_ = np.array(terms.idf, dtype=np.float64)
        except (ValueError, KeyError, BadZipFile) as error:
            raise ValueError(f"the index in {str(folder)!r} is none: {error}; make it again") from error
        return self

    def save(self, folder: Path, source: Path) -> None:
        """Stores the index, as arrays and JSON.

        Args:
            folder: Made where it is missing.
            source: The paragraph file that this index was made from.

        Raises:
            ValueError: If it was made from other paragraphs.
        """
        content = _read(source)
        if _parse(content, source) != self._paragraphs:
            raise ValueError(f"this index was not made from {str(source)!r}")
        packed = BytesIO()
        matrix = self._matrix
        np.savez(packed, data=matrix.data, indices=matrix.indices, indptr=matrix.indptr, shape=np.array(matrix.shape))
        terms = _Terms(
            source=sha256(content).hexdigest(),
            matrix=sha256(packed.getvalue()).hexdigest(),
            vocabulary={term: int(column) for term, column in sorted(self._vectorizer.vocabulary_.items())},
            idf=self._vectorizer.idf_.tolist(),
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MATRIX_FILE).write_bytes(packed.getvalue())
        told = {"digest": _digest(terms), **terms.model_dump()}
        (folder / TERMS_FILE).write_text(json.dumps(told, ensure_ascii=False) + "\n", encoding="utf-8")

    def search(self, query: str, top_k: int = TOP_K) -> list[Passage]:
        """The paragraphs that share most with a query, best first; ties as in the file.

        Args:
            query: Words.
            top_k: Paragraphs at most, >= 1; those that share no word are left out.

        Raises:
            ValueError: For a bad `top_k`.
        """
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        scores = (self._matrix @ self._vectorizer.transform([query]).T).toarray().ravel()
        best = np.argsort(-scores, kind="stable")[:top_k].tolist()
        return [self._passage(row, float(scores[row])) for row in best if scores[row] > 0]

    def __len__(self) -> int:
        return len(self._ids)

    def _take(self, paragraphs: dict[str, Paragraph]) -> None:
        self._paragraphs = paragraphs
        self._ids = list(paragraphs)

    def _passage(self, row: int, score: float) -> Passage:
        found = self._paragraphs[self._ids[row]]
        # rounding lifts the cosine of equal texts above 1
        return Passage(self._ids[row], found.title, found.content, min(score, 1.0))


def load_paragraphs(path: Path) -> dict[str, Paragraph]:
    """The paragraphs of the published file, by id.

    Raises:
        ValueError: If it cannot be read, or is not in that form.
    """
    return _parse(_read(path), path)


def open_index(source: Path, folder: Path) -> ParagraphIndex:
    """The index of a paragraph file, out of a folder; where it holds none yet, it is made and stored there.

    Raises:
        ValueError: As `ParagraphIndex.load`.
    """
    if (folder / TERMS_FILE).exists():
        return ParagraphIndex.load(folder, source)
    index = ParagraphIndex(load_paragraphs(source))
    index.save(folder, source)
    return index


def fact_paragraphs(items: Sequence[Item]) -> dict[str, Paragraph]:
    """The facts of items as paragraphs, for where no paragraph file is at hand.

    A level that searches the facts of the very items that it is asked has been given what their answers rest on.
    """
    return {
        f"{item.qid}-{number}": Paragraph(title=item.term, para_index=number, content=fact)
        for item in items
        for number, fact in enumerate(item.facts)
    }


def shown(passages: Sequence[Passage], longest: int) -> str:
    """Passages as lines of a prompt, the text of each cut after `longest` characters."""
    return "".join(f"- {each.title}: {' '.join(each.text.split())[:longest]}\n" for each in passages)


def _vectorizer(vocabulary: dict[str, int] | None = None) -> Any:
    with needs_extra("bench"):
        from sklearn.feature_extraction.text import TfidfVectorizer
    return TfidfVectorizer(vocabulary=vocabulary, **_VECTORIZER)


def _texts(paragraphs: Iterable[Paragraph]) -> list[str]:
    return [f"{each.title}\n{each.content}" for each in paragraphs]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error


def _parse(content: bytes, path: Path) -> dict[str, Paragraph]:
    try:
        return _PARAGRAPHS.validate_json(content)
    except ValidationError as error:
        raise ValueError(f"{str(path)!r} is no paragraph file: {one_line(error)[:400]}") from error


def _read_terms(path: Path) -> _Terms:
    try:
        told = json.loads(_read(path))
        digest = told.pop("digest")
        terms = _Terms.model_validate(told)
    except ValidationError as error:
        raise ValueError(f"{str(path)!r} holds no terms of an index: {one_line(error)[:400]}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{str(path)!r} holds no terms of an index: {error}; make the index again") from error
    if digest != _digest(terms):
        raise ValueError(f"{str(path)!r} was changed since it was written: make the index again")
    return terms


def _digest(terms: _Terms) -> str:
    return sha256(json.dumps(terms.model_dump(), sort_keys=True).encode()).hexdigest()


def _unpack(packed: bytes, shape: tuple[int, int]) -> Any:
    """The sparse matrix, with every index checked against its shape."""
    with needs_extra("bench"):
        from scipy.sparse import csr_matrix
    with np.load(BytesIO(packed), allow_pickle=False) as file:
        parts = {name: file[name] for name in _PARTS}
    if tuple(parts["shape"].tolist()) != shape:
        raise ValueError(f"the matrix is {parts['shape'].tolist()}, not {list(shape)}")
    matrix = csr_matrix((parts["data"], parts["indices"], parts["indptr"]), shape=shape)
    matrix.check_format(full_check=True)
    return matrix
