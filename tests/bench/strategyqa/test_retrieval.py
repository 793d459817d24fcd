"""TF-IDF over paragraphs: what is found, what is stored, what is refused; and L2 with paragraphs in its prompts."""

import builtins
import json
from hashlib import sha256
from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest

from sigma0.bench.strategyqa.items import world_items
from sigma0.bench.strategyqa.retrieval import (
    MATRIX_FILE,
    TERMS_FILE,
    Paragraph,
    ParagraphIndex,
    Passage,
    fact_paragraphs,
    load_paragraphs,
    open_index,
    shown,
)
from sigma0.bench.strategyqa.traces import WorkflowTrace
from sigma0.bench.strategyqa.workflow import RetrievalWorkflow
from tests.bench.strategyqa.definitions import asked

TEXTS = {
    "Piano-1": ("Piano", "A grand piano is between 1.5 and 3 metres long."),
    "Piano-2": ("Piano", "The piano was invented in Italy."),
    "Car-1": ("Car", "The boot of a small car is about 0.7 metres long."),
    "Fish-1": ("Fish", "Fish live in water."),
    "Fish-2": ("Fish", "Fish live in water."),
}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "paragraphs.json"
    values = {
        name: {"title": title, "section": "s", "headers": [["h"]], "para_index": n, "content": text}
        for n, (name, (title, text)) in enumerate(TEXTS.items())
    }
    path.write_text(json.dumps(values))
    return path


@pytest.fixture
def folder(tmp_path, source):
    ParagraphIndex(load_paragraphs(source)).save(tmp_path / "index", source)
    return tmp_path / "index"


@pytest.fixture
def index():
    return ParagraphIndex({name: Paragraph(title=title, content=text) for name, (title, text) in TEXTS.items()})


def test_the_best_paragraph_comes_first_and_strangers_not_at_all(index):
    found = index.search("How long is a grand piano?", 5)
    assert found[0].id == "Piano-1" and found[0].title == "Piano" and found[0].text == TEXTS["Piano-1"][1]
    assert {each.id for each in found} == {"Piano-1", "Piano-2", "Car-1"}
    assert all(1 >= a.score >= b.score > 0 for a, b in pairwise(found))
    assert index.search("zebra", 3) == [] and index.search("", 3) == []
    assert len(index) == len(TEXTS)


def test_equal_paragraphs_stand_in_the_order_of_the_file(index):
    found = index.search("Fish live in water", 2)
    assert [each.id for each in found] == ["Fish-1", "Fish-2"] and found[0].score == found[1].score <= 1
    assert [each.id for each in index.search("fish", 1)] == ["Fish-1"]


def test_nothing_cannot_be_searched_or_asked_for(index):
    with pytest.raises(ValueError, match="top_k"):
        index.search("fish", 0)
    for paragraphs in ({}, {"a": Paragraph(title="", content="!")}):
        with pytest.raises(ValueError, match="hold no words"):
            ParagraphIndex(paragraphs)


def test_a_stored_index_finds_the_same_to_the_last_bit(source, folder):
    made = ParagraphIndex(load_paragraphs(source))
    loaded = ParagraphIndex.load(folder, source)
    for query in ("How long is a grand piano?", "fish", "small water car", "nothing of it"):
        assert loaded.search(query, 5) == made.search(query, 5)
    assert sorted(path.name for path in folder.iterdir()) == sorted([MATRIX_FILE, TERMS_FILE])


def test_an_index_is_made_once_and_written_the_same_each_time(source, folder, tmp_path):
    ParagraphIndex.load(folder, source).save(tmp_path / "again", source)
    assert open_index(source, tmp_path / "new").search("fish", 2) == open_index(source, folder).search("fish", 2)
    before = (tmp_path / "new" / TERMS_FILE).stat().st_mtime_ns
    open_index(source, tmp_path / "new")
    assert (tmp_path / "new" / TERMS_FILE).stat().st_mtime_ns == before
    for name in (MATRIX_FILE, TERMS_FILE):
        assert len({(tmp_path / each / name).read_bytes() for each in ("index", "again", "new")}) == 1


def test_no_pickle_is_read_or_written(folder):
    with np.load(folder / MATRIX_FILE, allow_pickle=False) as file:
        assert sorted(file.files) == ["data", "indices", "indptr", "shape"]
        assert all(file[name].dtype.kind in "if" for name in file.files)


def test_an_index_of_other_paragraphs_is_refused(source, folder, tmp_path, index):
    with pytest.raises(ValueError, match="was not made from"):
        index.save(tmp_path / "other", source)
    assert not (tmp_path / "other").exists()
    source.write_text(source.read_text().replace("Italy", "Spain"))
    with pytest.raises(ValueError, match="was not made from"):
        ParagraphIndex.load(folder, source)


def test_a_changed_or_missing_part_is_named(source, folder):
    content = bytearray((folder / MATRIX_FILE).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / MATRIX_FILE).write_bytes(content)
    with pytest.raises(ValueError, match="changed since it was written"):
        ParagraphIndex.load(folder, source)
    for name in (MATRIX_FILE, TERMS_FILE):
        (folder / name).unlink()
        with pytest.raises(ValueError, match=name):
            ParagraphIndex.load(folder, source)


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told["idf"].__setitem__(0, 99.0),
        lambda told: told.update(source="0" * 64),
        lambda told: told.update(digest="0" * 64),
        lambda told: told.update(extra=1),
        lambda told: told.pop("digest"),
        lambda told: told.update(idf="many"),
    ],
)
def test_changed_terms_are_refused(source, folder, change):
    told = json.loads((folder / TERMS_FILE).read_text())
    change(told)
    for content in (json.dumps(told), "", "[]", "1", "{"):
        (folder / TERMS_FILE).write_text(content)
        with pytest.raises(ValueError, match=TERMS_FILE):
            ParagraphIndex.load(folder, source)


def forge(folder, vocabulary=None, **parts):
    """An index with other parts, whose digests all fit."""
    with np.load(folder / MATRIX_FILE) as file:
        held = {name: file[name] for name in file.files} | parts
    packed = BytesIO()
    np.savez(packed, **held)
    (folder / MATRIX_FILE).write_bytes(packed.getvalue())
    told = json.loads((folder / TERMS_FILE).read_text())
    told["matrix"] = sha256(packed.getvalue()).hexdigest()
    told["vocabulary"] |= vocabulary or {}
    del told["digest"]
    told["digest"] = sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    (folder / TERMS_FILE).write_text(json.dumps(told))


@pytest.mark.parametrize(
    "parts",
    [
        {"indices": np.full(40, 10**6)},
        {"indptr": np.array([0, 5, 3, 9, 10, 11])},
        {"shape": np.array([2, 2])},
        {"data": np.array([print], dtype=object)},
        {"vocabulary": {"piano": 10**6}},
    ],
)
def test_a_forged_index_whose_digests_fit_is_refused(source, folder, parts):
    forge(folder)
    assert ParagraphIndex.load(folder, source).search("fish", 1)[0].id == "Fish-1", "the forger forges well"
    forge(folder, **parts)
    with pytest.raises(ValueError, match="make it again"):
        ParagraphIndex.load(folder, source)


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"a": {"title": "t"}}', '{"a": {"title": "t", "content": "c", "x": 1}}']
)
def test_what_is_no_paragraph_file_is_refused(tmp_path, content):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(ValueError, match="no paragraph file"):
        load_paragraphs(tmp_path / "p.json")
    with pytest.raises(ValueError, match="cannot be read"):
        load_paragraphs(tmp_path / "none.json")


def test_a_missing_library_is_told_in_one_line(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="sklearn")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"sigma0-lm\[bench\]"):
        ParagraphIndex({"a": Paragraph(title="t", content="some words")})


def test_facts_of_items_are_paragraphs():
    items = world_items(3)
    paragraphs = fact_paragraphs(items)
    assert len(paragraphs) == sum(len(item.facts) for item in items)
    found = ParagraphIndex(paragraphs).search(items[0].facts[0], 1)
    assert found[0].text == items[0].facts[0] and found[0].id == f"{items[0].qid}-0"


def test_what_was_searched_is_in_the_trace_and_the_query_holds_the_answers_before_it(index):
    replies = ["1. What is in Italy?\n2. Who invented #1?\n3. Zebra?\n4. Is #1 it?", "a piano", "x", "y", "Yes", "Yes"]
    prediction, calls = asked(RetrievalWorkflow(index, top_k=1), "Q?", *replies)
    trace = WorkflowTrace.from_dict(prediction.trace)
    searched = [step for step in trace.steps if step.function == "retrieve"]
    assert [step.arguments[0] for step in searched] == ["What is in Italy?", "Who invented a piano?", "Zebra?"]
    assert [step.result for step in searched] == [("Piano-2",), ("Piano-2",), ()]
    assert "Passages:\n- Piano: The piano was invented in Italy.\n" in calls[2][1]
    assert not any("Passages" in prompt for _, prompt in (calls[0], *calls[3:]))
    assert trace.get_audit_info()["grounded"] and trace.pattern == tuple(purpose for purpose, _ in calls)
    assert shown([Passage("p", "T", "long\n" * 500, 1.0)], 9) == "- T: long long\n"
