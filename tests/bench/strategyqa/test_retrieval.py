"""TF-IDF over paragraphs: what is found and what is refused; and L2 with paragraphs in its prompts."""

import json
import sys
from functools import partial

import pytest

from sigma0.bench.strategyqa.items import world_items
from sigma0.bench.strategyqa.level import Level
from sigma0.bench.strategyqa.registry import EXPERIMENTS, Makings
from sigma0.bench.strategyqa.workflow import (
    Paragraph,
    ParagraphIndex,
    fact_paragraphs,
    load_paragraphs,
    shown,
    workflow,
)
from tests.bench.strategyqa.calls import asked

TEXTS = {
    "Piano-1": ("Piano", "A grand piano is between 1.5 and 3 metres long."),
    "Piano-2": ("Piano", "The piano was invented in Italy."),
    "Car-1": ("Car", "The boot of a small car is about 0.7 metres long."),
    "Fish-1": ("Fish", "Fish live in water."),
    "Fish-2": ("Fish", "Fish live in water."),
}


@pytest.fixture
def index():
    return ParagraphIndex({name: Paragraph(title=title, content=text) for name, (title, text) in TEXTS.items()})


def ids(index, query):
    return [name for name, _ in index.search(query)]


def test_the_best_paragraph_comes_first_and_strangers_not_at_all(index):
    assert ids(index, "How long is a grand piano?") == ["Piano-1", "Piano-2", "Car-1"]
    assert ids(index, "zebra") == ids(index, "") == []
    # equal ones stand in the order of the file
    assert ids(index, "Fish live in water")[:2] == ids(index, "fish") == ["Fish-1", "Fish-2"]
    for paragraphs in ({}, {"a": Paragraph(title="", content="!")}):
        with pytest.raises(ValueError, match="hold no words"):
            ParagraphIndex(paragraphs)


def test_a_published_file_is_searched(tmp_path):
    path = tmp_path / "paragraphs.json"
    more = {"section": "s", "headers": [["h"]], "para_index": 1}
    paragraphs = {name: {"title": title, "content": text, **more} for name, (title, text) in TEXTS.items()}
    path.write_text(json.dumps(paragraphs))
    assert ids(ParagraphIndex(load_paragraphs(path)), "fish") == ["Fish-1", "Fish-2"]
    assert EXPERIMENTS["L2-rag"](Makings(paragraphs=path)).name == "L2-rag"


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
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    with pytest.raises(ValueError, match=r"sigma0-lm\[bench\]"):
        ParagraphIndex({"a": Paragraph(title="t", content="some words")})


def test_facts_of_items_are_paragraphs():
    items = world_items(3)
    paragraphs = fact_paragraphs(items)
    assert len(paragraphs) == sum(len(item.facts) for item in items)
    ((name, obtained), *_) = ParagraphIndex(paragraphs).search(items[0].facts[0])
    assert obtained.content == items[0].facts[0] and name == f"{items[0].qid}-0"


def test_what_was_searched_is_in_the_trace_and_the_query_holds_the_answers_before_it(index):
    replies = ["1. What is in Italy?\n2. Who invented #1?\n3. Zebra?\n4. Is #1 it?", "a piano", "x", "y", "Yes", "Yes"]
    prediction, calls = asked(Level("L2-rag", partial(workflow, None, index)), "Q?", *replies)
    trace = prediction.trace["workflow"]
    searched = [step for step in trace.steps if step.function == "retrieve"]
    assert [step.arguments[0] for step in searched] == ["What is in Italy?", "Who invented a piano?", "Zebra?"]
    assert [step.result[:1] for step in searched] == [("Piano-2",), ("Piano-2",), ()]
    assert "Passages:\n- Piano: The piano was invented in Italy.\n" in calls[2][1]
    assert not any("Passages" in prompt for _, prompt in (calls[0], *calls[3:]))
    assert trace.grounded and trace.pattern == tuple(purpose for purpose, _ in calls)
    assert shown([("p", Paragraph(title="T", content="long\n" * 500))], 9) == "- T: long long\n"
