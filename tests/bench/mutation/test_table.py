"""The row of a run, and the page."""

import json

import pytest
from typer.testing import CliRunner

from sigma0.bench.commands import app
from sigma0.bench.core.ledger import append_row, parse_row, read_rows
from sigma0.bench.core.rows_tests import MutationRow, MutationScore, Survivor
from sigma0.bench.mutation.table import latest_mutants, whole


def row(seed=0, time="2026-01-01T00:00:00+00:00", **folders):
    scores = {name: MutationScore(**score) for name, score in folders.items()}
    never = Survivor(file="a.py", line=3, before="x < y", after="x <= y", tests=4, reason="x is never y")
    alive = Survivor(file="a.py", line=9, before="x = 1", after="x = 2", tests=0, reason=None)
    total = sum(scores.values(), MutationScore())
    return MutationRow(
        time=time, commit=None, device="cpu", versions={"python": "3.11"}, seed=seed, n=9, minutes=20.0,
        most_seconds=60.0, folders=scores, survivors=(never,) * total.equivalent + (alive,) * total.survived,
    )  # fmt: skip


FIRST = row(
    decode={"killed": 6, "by_time": 1, "survived": 2, "equivalent": 1, "not_reached": 5}, ladder={"not_reached": 2}
)


def test_a_score_is_of_what_was_reached_and_can_be_noticed():
    assert FIRST.folders["decode"].share == 0.75 and FIRST.folders["ladder"].share is None
    assert FIRST.whole == MutationScore(killed=6, by_time=1, survived=2, equivalent=1, not_reached=7)


def test_a_row_goes_into_the_ledger_and_comes_back(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    assert parse_row(FIRST.model_dump_json()) == FIRST
    assert append_row(ledger, FIRST) and not append_row(ledger, FIRST)
    assert append_row(ledger, row(seed=1)) and read_rows(ledger) == [FIRST, row(seed=1)]
    with pytest.raises(ValueError, match="kiled"):
        parse_row(json.dumps({**FIRST.model_dump(), "folders": {"decode": {"kiled": 1}}}))


@pytest.mark.parametrize(("survived", "equivalent"), [(1, 2), (3, 0), (3, 1), (-1, 4)])
def test_counts_that_are_not_those_of_the_list_are_refused(survived, equivalent):
    told = FIRST.model_dump()
    told["folders"]["decode"] |= {"survived": survived, "equivalent": equivalent}
    with pytest.raises(ValueError, match=r"by the list|greater than or equal to 0"):
        MutationRow(**told)


def test_the_page_shows_the_last_run_of_each_seed():
    later = row(time="2026-02-01T00:00:00+00:00", signals={"killed": 1})
    assert latest_mutants([later, row(seed=3), FIRST]) == [later, row(seed=3)]
    page = whole([FIRST, row(seed=3)])
    assert "## Seed 0" in page and "## Seed 3" in page
    assert "| decode | 14 | 6 | 1 | 2 | 1 | 5 | 75% |" in page and "| all | 16 | 6 | 1 | 2 | 1 | 7 | 75% |" in page
    assert "| ladder | 2 | 0 | 0 | 0 | 0 | 2 | - |" in page
    killed, _, equivalent = page.split("## Seed 3")[0].partition("Equivalent:")
    assert "Not killed:\n\n- a.py: `x = 1` -> `x = 2`: no fast test runs it" in killed
    assert "- a.py: `x < y` -> `x <= y`: x is never y" in equivalent


def test_bad_folders_are_named():
    pytest.importorskip("cosmic_ray")
    result = CliRunner().invoke(app, ["mutants", "--folder", "kitchen"])
    assert result.exit_code == 2 and "'kitchen'" in result.output
