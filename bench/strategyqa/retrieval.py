"""Paragraphs found by TF-IDF."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter

from sigma0.bench.strategyqa.items import Item, read_json
from sigma0.errors import needs_extra

TOP_K = 3


class Paragraph(BaseModel):
    """A paragraph of an article, in the form of the published file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    title: str
    section: str | None = None
    headers: Any = None
    para_index: int = 0
    content: str


_PARAGRAPHS = TypeAdapter(dict[str, Paragraph])


class ParagraphIndex:
    """TF-IDF over paragraphs, in memory.

    Raises:
        ValueError: If they hold no words, or scikit-learn is missing.
    """

    def __init__(self, paragraphs: dict[str, Paragraph]) -> None:
        with needs_extra("bench"):
            from sklearn.feature_extraction.text import TfidfVectorizer
        self._paragraphs = list(paragraphs.items())
        # logarithmic counts, so that a long paragraph does not win by repeating a word
        self._vectorizer = TfidfVectorizer(sublinear_tf=True, dtype=np.float64)
        try:
            self._matrix = self._vectorizer.fit_transform(
                f"{each.title}\n{each.content}" for each in paragraphs.values()
            )
        except ValueError as error:
            raise ValueError(f"{len(paragraphs)} paragraphs hold no words to search for: {error}") from error

    def search(self, query: str) -> list[tuple[str, Paragraph]]:
        """The paragraphs that share most words with a query and their ids, best first, at most `TOP_K`; ties as in the
        file.
        """
        scores = (self._matrix @ self._vectorizer.transform([query]).T).toarray().ravel()
        best = np.argsort(-scores, kind="stable")[:TOP_K].tolist()
        return [self._paragraphs[row] for row in best if scores[row] > 0]


def load_paragraphs(path: Path) -> dict[str, Paragraph]:
    """The paragraphs of the published file, by id.

    Raises:
        ValueError: If it cannot be read, or is not in that form.
    """
    return read_json(path, _PARAGRAPHS, "paragraph file")


def fact_paragraphs(items: Sequence[Item]) -> dict[str, Paragraph]:
    """The facts of items as paragraphs, for where no paragraph file is at hand.

    A level that searches the facts of the very items that it is asked has been given what their answers rest on.
    """
    return {
        f"{item.qid}-{number}": Paragraph(title=item.term, para_index=number, content=fact)
        for item in items
        for number, fact in enumerate(item.facts)
    }


def shown(found: Sequence[tuple[str, Paragraph]], longest: int) -> str:
    """Paragraphs as lines of a prompt, the text of each cut after `longest` characters."""
    return "".join(f"- {each.title}: {' '.join(each.content.split())[:longest]}\n" for _, each in found)
