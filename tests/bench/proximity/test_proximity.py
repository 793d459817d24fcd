"""Loops, texts, the fit, and what the shipped proximity promises."""

import gzip
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sigma0
from sigma0.bench.core.conditions import read_report
from sigma0.bench.proximity import measure
from sigma0.bench.proximity.measure import LONGEST, loops, read_text
from sigma0.kernels.collapse import CollapseRule, CollapseState, collapse_reference
from tests.bench.running import RESULTS
from tests.kernels import definitions
from tests.reference import tiny_llama

REPORT = read_report(RESULTS / "proximity.json")[1]
PROSE = np.random.default_rng(0).zipf(1.3, 40_000) % 3000


def test_loops_are_what_they_are_called():
    made = list(loops(PROSE, 2))
    for loop in made:
        assert len(loop.ids) == LONGEST and loop.first == max(3 * loop.period, 40)
        equal = loop.ids[loop.period :] == loop.ids[: -loop.period]
        if loop.kind == "exact":
            assert equal.all()
        elif loop.kind == "changed":
            assert not equal.all() and equal.mean() >= 1 - 2 / loop.period - 0.05
        elif loop.kind == "babble":
            assert len(set(loop.ids.tolist())) <= loop.period
    assert {loop.kind for loop in made} == {"exact", "changed", "drifted", "babble"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind, bar", [("exact", 0.8), ("changed", 0.6)])
def test_a_loop_is_noticed_once_three_periods_and_forty_ids_are_out(kind, bar):
    """From the ids alone, whatever the logits say, at every period and at every later moment."""
    rule = CollapseRule()
    for loop in loops(PROSE, 3):
        if loop.kind == kind:
            places = np.arange(loop.first, LONGEST + 1)
            traits = np.concatenate([measure.repetition(loop.ids, places), np.zeros((len(places), 2))], axis=1)
            assert measure.proximities(rule, traits).min() > bar, loop.period


def test_the_shipped_parts_are_the_committed_fit_which_keeps_what_is_promised():
    assert asdict(CollapseRule()) == REPORT["parts"]
    held_out = [row for row in REPORT["figures"] + REPORT["figures_of_ids_alone"] if not row["fitted"]]
    prose = [row for row in held_out if row["kind"] == "prose"]
    assert sum(row["readings"] for row in prose) >= 2 * 2000 and all(row["quantiles"][4] < 0.4 for row in prose)
    for kind, bar in (("exact", 0.8), ("changed", 0.6)):
        rows = [row for row in held_out if row["kind"] == kind]
        assert len(rows) == 2 and all(row["lowest"] > bar for row in rows)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=60, max_size=300))
@example([1, 2] * 40)
@example([1])
def test_repetition_is_the_definition(ids):
    periodicity, _, echo, distinct = definitions.repetition(ids)
    result = measure.repetition(np.array(ids), np.array([len(ids)]))[0]
    np.testing.assert_allclose(result, [periodicity, echo, 1 - distinct], atol=1e-6)


def test_certainty_is_what_the_canary_reads():
    model = tiny_llama(seed=0, vocab_size=60, initializer_range=1.0)
    ids = np.random.default_rng(1).integers(0, 60, 40)
    result = measure.certainty(model, ids)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None]).logits[0]
    state = CollapseState.empty(1, "cpu")
    state.observed.fill_(1)  # the first id has an entropy of 0 in the study
    for place in range(1, 40):
        row, token = logits[place - 1][None], torch.tensor([ids[place]])
        statistics = collapse_reference(row, token, state, torch.tensor([0]), CollapseRule()).statistics[0]
        assert float(statistics[2]) == pytest.approx(result[place, 0], abs=2e-3)
        assert float(statistics[1]) == pytest.approx(result[place, 1], abs=1e-4)


@pytest.mark.exhaustive
def test_a_fit_tells_loops_from_text(tmp_path):
    tokenizer = sigma0.load("pocket")[1]
    rng = np.random.default_rng(0)
    words = sorted(token for token in tokenizer.get_vocab() if token.isalpha())
    file = tmp_path / "prose.txt"
    file.write_text(" ".join(rng.choice(words, 6000)))
    code = tmp_path / "code.jsonl.gz"
    line = json.dumps({"prompt": "Mary ", "canonical_solution": " ".join(rng.choice(words, 400))})
    code.write_bytes(gzip.compress(line.encode()))
    texts = [read_text("prose", file, tokenizer), read_text("code", code, tokenizer)]
    assert [text.kind for text in texts] == ["prose", "code"] and len(texts[0].ids) >= 6000
    readings = measure.read_texts(None, texts, 200) + measure.read_loops(None, loops(texts[0].ids, 2))
    rule = measure.fit(readings)
    output = {(row["kind"], row["fitted"]): row for row in measure.figures(rule, readings)}
    assert output["exact", True]["lowest"] >= measure.BARS["exact"] - 0.02 and output["exact", False]["lowest"] > 0.8
    assert output["prose", False]["quantiles"][4] < 0.4
    calm = np.concatenate([item.traits for item in readings if item.kind == "prose"])
    area, curve = measure.roc(rule, calm, next(item.traits for item in readings if item.kind == "exact"))
    assert area > 0.99 and curve[0] == (0.0, 0.0) and curve[-1] == (1.0, 1.0)
