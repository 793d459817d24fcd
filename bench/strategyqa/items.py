"""Items of StrategyQA (Geva et al., TACL 2021, arXiv 2101.02235), and the micro-world's in the same form."""

import json
import re
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from sigma0.bench.core.conditions import Strict
from sigma0.bench.pocket.items import Split as WorldSplit
from sigma0.bench.pocket.world import MIX, draw
from sigma0.errors import one_line
from sigma0.jsonl import read_text

T = TypeVar("T")
Split = Literal["train", "dev"]
# of the published files
SIZES: dict[Split, int] = {"train": 2061, "dev": 229}
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# sentences that an answer rests on, at least: fewer are no question of several hops
HOPS = 2


class Item(Strict, strict=True):
    """A question whose answer is yes or no."""

    qid: str  # Its id
    term: str  # What it is about
    description: str  # Of the term, a few words
    question: str  # It
    answer: bool  # The label. No level sees it but the learning ones, and those only once they have answered
    facts: tuple[str, ...] = ()  # That the answer rests on
    decomposition: tuple[str, ...] = ()  # The question in steps; `#1` stands for the answer to the first
    evidence: list[Any] = Field(default_factory=list)  # Paragraph ids that annotators found for each step


_ITEMS = TypeAdapter(list[Item])


def load_items(data: str, split: Split) -> list[Item]:
    """The items of a split: of a folder of the published files, or of a dataset's id on the hub (library `datasets`).

    Raises:
        ValueError: If they cannot be read, or are not what was published: 2,061 and 229 items with ids of their own.
    """
    folder = Path(data).expanduser()
    path = folder / f"{split}.json"
    items = read_json(path, _ITEMS, "list of items") if folder.is_dir() else _from_hub(data, split)
    if len(items) != SIZES[split] or len({item.qid for item in items}) != SIZES[split]:
        ids = len({item.qid for item in items})
        raise ValueError(f"{data!r}: {split} holds {len(items)} items with {ids} ids, not {SIZES[split]} with as many")
    return items


def load_both(data: str) -> tuple[list[Item], list[Item]]:
    """The items of train and dev, whose ids are 2,290 different ones."""
    train, dev = load_items(data, "train"), load_items(data, "dev")
    shared = {item.qid for item in train} & {item.qid for item in dev}
    if shared:
        raise ValueError(f"{data!r}: {len(shared)} items stand in train and in dev, such as {min(shared)}")
    return train, dev


def world_items(n: int, split: WorldSplit = "test", seed: int = 0) -> list[Item]:
    """The micro-world's yes or no questions of at least two hops, one about each story."""
    return list(islice(_world(split, seed), n))


def _world(split: WorldSplit, seed: int) -> Iterator[Item]:
    mix = MIX.__class__(binary=1.0)
    for index in count():
        for item in draw(split, seed, index, questions=1, mix=mix).items:
            if item.binary and item.hops >= HOPS:
                yield Item(
                    qid=f"world-{split}-{seed}-{index}",
                    term=item.subject,
                    description=f"of a story of {item.family}",
                    question=item.prompt,
                    answer=item.key == "Yes",
                    facts=item.derivation[:-1],
                    decomposition=(*item.derivation[:-1], item.question),
                )


def read_json(path: Path, adapter: TypeAdapter[T], what: str) -> T:
    """What a file of JSON holds."""
    try:
        return adapter.validate_json(read_text(path))
    except ValidationError as error:
        raise ValueError(f"{str(path)!r} is no {what}: {one_line(error)[:400]}") from error


def _from_hub(name: str, split: Split) -> list[Item]:
    if not _HUB_ID.fullmatch(name):
        raise ValueError(f"{name!r} is no folder, and no dataset's id on the hub such as 'owner/name'")
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{name!r} is no folder, and for a dataset of the hub the datasets library is needed: "
            "pip install 'sigma0-lm[eval]'"
        ) from error
    names = {"train": "train", "dev": "test"}
    try:
        rows = load_dataset(name)[names[split]]
    except (OSError, ValueError, KeyError) as error:
        output = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"the dataset {name!r} cannot be had: {output[0]}") from error
    values = [{key: value for key, value in row.items() if key in Item.model_fields} for row in rows]
    try:
        # lists of JSON are the tuples of an item
        return _ITEMS.validate_json(json.dumps(values))
    except ValidationError as error:
        raise ValueError(f"{name}: {one_line(error)[:400]}") from error
