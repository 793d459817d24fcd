"""Texts and loops as ids, by kind: what a proximity must be low on, and what it must be high on."""

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sigma0.decode.transfer import Ints

PERIODS = tuple(range(1, 65))
SHORTEST_CHANGED, LARGEST_BABBLE = 8, 16
LONGEST = 256
# Of a text, so that a model can read it in minutes.
MOST_TOKENS = 60_000
_SEED = 0


@dataclass(frozen=True)
class Text:
    """The first ids of a stored text, `[N]`, with the sha256 of its file; its kind is "prose", "code" or "lists"."""

    kind: str
    name: str
    sha256: str
    ids: Ints


@dataclass(frozen=True)
class Loop:
    """A text that has collapsed."""

    # "exact"; "changed": one id of each period is another one; "drifted": each period has lost an id or gained
    # one; "babble": a few ids in any order
    kind: str
    period: int  # Ids until it comes back; of babble, how many ids there are
    first: int  # Ids once 3 periods and 40 ids are out: where it must be noticed
    ids: Ints  # `[LONGEST]`


def read_text(kind: str, path: Path, tokenizer: Any) -> Text:
    """A text file, a `.jsonl` or `.jsonl.gz` of HumanEval's problems, or a `.json` of StrategyQA's items.

    Raises:
        ValueError: For a file of another kind.
    """
    raw = path.read_bytes()
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode().splitlines()
        text = "\n\n".join(item["prompt"] + item["canonical_solution"] for item in map(json.loads, lines))
    elif path.suffix == ".json":
        text = "\n".join(fact for item in json.loads(raw) for fact in item["facts"])
    else:
        text = raw.decode()
    ids = np.array(tokenizer(text, verbose=False)["input_ids"][:MOST_TOKENS], dtype=np.int64)
    return Text(kind, path.name, hashlib.sha256(raw).hexdigest(), ids)


def loops(prose: Ints, seeds: int) -> Iterator[Loop]:
    """Spans of a text over and over, for every period, and with faults in each period from 8 on; and babble.

    Spans, some for each period, and faults are taken from the prose, `[N]`.
    """
    rng = np.random.default_rng(_SEED)
    for period in PERIODS:
        for _ in range(seeds):
            start = int(rng.integers(0, len(prose) - period))
            span = prose[start : start + period]
            first = max(3 * period, 40)
            yield Loop("exact", period, first, np.resize(span, LONGEST))
            if period >= SHORTEST_CHANGED:
                for kind, fault in (("changed", _changed), ("drifted", _drifted)):
                    periods = [fault(span, prose, rng) for _ in range(-(-LONGEST // (period - 1)))]
                    yield Loop(kind, period, first, np.concatenate(periods)[:LONGEST])
            if 2 <= period <= LARGEST_BABBLE:
                yield Loop("babble", period, first, rng.choice(span, LONGEST))


def _changed(span: Ints, prose: Ints, rng: np.random.Generator) -> Ints:
    faulty: Ints = span.copy()
    faulty[rng.integers(len(span))] = rng.choice(prose)
    return faulty


def _drifted(span: Ints, prose: Ints, rng: np.random.Generator) -> Ints:
    place = rng.integers(len(span))
    faulty: Ints = np.delete(span, place) if rng.integers(2) else np.insert(span, place, rng.choice(prose))
    return faulty


def by_kind(texts: Mapping[str, tuple[Path, ...]], tokenizer: Any) -> list[Text]:
    """All files, in their order."""
    return [read_text(kind, path, tokenizer) for kind, paths in texts.items() for path in paths]
