"""`bench overhead`: every way over an empty model, and what its rows say."""

import pytest

from sigma0.bench.core.ledger import read_rows
from sigma0.bench.overhead.measure import WRITTEN, Bench, Case, cases
from sigma0.checkpoints import resolve_model
from sigma0.models.load import load_tokenizer
from tests.bench.running import bench


@pytest.fixture(scope="module")
def empty():
    return Bench(load_tokenizer(resolve_model("pocket")), loops=4, positions=128)


@pytest.mark.parametrize("telemetry", [False, True])
@pytest.mark.parametrize("way", ["library", "engine"])
def test_rows_are_those_of_the_case(empty, way, telemetry):
    one = empty.run(Case(way, "eager", telemetry, sequences=3, lanes=1, passes=16))
    assert (one.passes, one.rows) == (16, 48)
    # a token enters in every pass of each sequence, and T of it are in flight but for the first and the last few
    every = empty.run(Case(way, "eager", telemetry, sequences=3, lanes=4, passes=16))
    assert every.rows / every.passes > 3 * 4 * 0.75


def test_operations_are_counted(empty):
    sample = empty.run(Case("library", "eager", False, sequences=2, lanes=1, passes=16), counted=True)
    assert sample.operations > sample.passes * 3


def test_cases_are_every_way_at_every_number_of_rows():
    ways = list(cases(("library", "transformers"), ("eager", "compile"), (1, 8), loops=8, passes=16))
    assert len(ways) == 4 + 1 + 8 + 1
    assert {case.sequences * case.lanes for case in ways} == {1, 8}


@pytest.mark.slow
def test_the_rows_are_in_the_ledger(ledger):
    bench("overhead", "--runners", "eager", "--rows", 1, "--rounds", 1, "--passes", 8, "--out", ledger)
    rows = read_rows(ledger)
    ours = [(way, "eager", telemetry) for way in ("library", "engine") for telemetry in (False, True)]
    assert [(row.way, row.runner, row.telemetry) for row in rows] == [*ours, ("transformers", None, False)]
    assert all(row.microseconds_per_pass.value > 0 for row in rows)


def test_what_is_written_is_a_word():
    """An id of half a character is decoded again with every other one after it, which no text does."""
    assert load_tokenizer(resolve_model("pocket")).decode([WRITTEN]).strip().isalpha()
