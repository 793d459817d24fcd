"""The bench of ended circles: its figures of a setting are what that setting does, and the text quotes its rows."""

from itertools import product

import numpy as np
import pytest

import sigma0
from sigma0.bench.collapse.measure import TAUS, WAYS, costs, ended_at, grid, rows, series
from sigma0.bench.core.conditions import read_report
from sigma0.bench.pocket.prompts import micro_world
from sigma0.decode.ops import TORCH
from sigma0.decode.repetition import CollapseStop, TextStats
from tests.bench.running import RESULTS, ROOT

TEXT = " ".join((ROOT / "sigma0" / "signals" / "README.md").read_text().split())
REPORT = read_report(RESULTS / "collapse.json")[1]


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("running", [1, 16])
def test_a_setting_ends_a_text_where_the_library_does(tau, running):
    rng, rule, ended = np.random.default_rng(3), CollapseStop(tau, running), 0
    for period in (1, 4, 20, 90, 400):
        ids = [*range(1000, 1020), *np.resize(rng.permutation(500)[:period], 150).tolist()]
        stats, high, expected = TextStats(TORCH), 0, None
        text = stats.text()
        for number, token_id in enumerate(ids, start=1):
            high = high + 1 if stats.take([text], [token_id])[-1][0] >= tau else 0
            if expected is None and rule.ends_after(number, high):
                expected = number
        assert ended_at(series("x", ids), tau, running, rule.every) == expected
        ended += expected is not None
    assert 0 < ended < 5


def test_rows_count_texts_of_a_kind_and_how_late_loops_end():
    circle, plain = [1, 2, 3] * 60, list(range(180))
    texts = [series("calm", plain), series("calm", plain), series("loops", circle, 40), series("loops", plain, 40)]
    calm, loops = rows(texts, 0.9, 16)
    end = ended_at(texts[2], 0.9, 16, CollapseStop().every)
    setting = {"tau": 0.9, "running": 16, "texts": 2}
    assert calm == {"kind": "calm", **setting, "ended": 0, "late": None}
    assert loops == {"kind": "loops", **setting, "ended": 1, "late": end - 40}
    assert {(item["tau"], item["kind"]) for item in grid(texts)} == set(product(TAUS, ("calm", "loops")))


def test_every_way_is_timed_beside_the_plainest_one():
    model, tokenizer = sigma0.load("pocket", device="cpu", dtype="float32")
    output = costs(model, tokenizer, list(micro_world(2, "test", 0)), 4, 3, lambda: None)
    assert [item["way"] for item in output] == list(WAYS) and all(item["ms"] > 0 for item in output)
    assert output[0]["ratio"] == {"value": 1.0, "interval": (1.0, 1.0)}


def test_it_costs_little_and_cuts_no_ordinary_answer():
    assert list(REPORT["models"]) == ["pocket", "pocket-large"]
    for result in REPORT["models"].values():
        (both,) = (row["ratio"] for row in result["costs"] if row["way"] == "both")
        assert both["interval"][1] <= 1.1 and result["cut"] == 0
    assert next(row["ended"] for row in REPORT["texts"] if row["kind"] == "stories") == 0


def test_the_shipped_setting_is_the_one_that_was_measured():
    shipped = CollapseStop()
    assert (REPORT["tau"], REPORT["running"], REPORT["every"]) == (shipped.tau, shipped.running, shipped.every)
    assert f"at least {shipped.tau} after {shipped.running} tokens running" in TEXT


def test_the_grid_says_why():
    """As `bench/proximity/README.md` has it."""
    cut = {(row["kind"], row["tau"], row["running"]): row["ended"] for row in REPORT["grid"]}
    runs = sorted({running for _, _, running in cut})
    assert not any(cut["stories", 0.9, running] for running in runs)
    assert all(cut["stories", 0.8, running] for running in runs)
    assert cut["code", 0.9, 16] < cut["code", 0.9, 12]
    assert 0.98 * cut["drifted loops", 0.9, 12] < cut["drifted loops", 0.9, 16] < cut["drifted loops", 0.9, 12]
