import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.harness.telemetry import BatchCost, DepthLog, DepthTally, Reading
from sigma0.signals.savings import savings

ROWS = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=8), min_size=1, max_size=4)


def readings(rows):
    return [Reading(tuple(row), ("fixed",) * len(row)) for row in rows]


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_batches_are_pooled_and_not_averaged(batches):
    tally = DepthTally(6)
    for rows in batches:
        tally.add_batch(readings(rows), BatchCost(7, 11, 3))
    output, all_rows = tally.to_dict(), [row for rows in batches for row in rows]
    assert output["mean_depth"] == pytest.approx(savings(all_rows, 0, 0, 6).mean_depth)
    if len(batches) == 1:
        known = savings(all_rows, 7, 11, 6)
        for name in ("depth_saved", "passes_saved", "rows_saved"):
            assert output[name] == pytest.approx(getattr(known, name))
    tokens = sum(map(len, all_rows))
    assert output["tokens"] == tokens == sum(output["by_loop"].values()) == sum(output["reasons"].values())
    full = sum(6 * (max(map(len, rows)) - 1) for rows in batches)
    assert output["passes_saved"] == (pytest.approx(1 - 7 * len(batches) / full) if full else None)
    assert (output["batches"], output["requests"]) == (len(batches), len(all_rows))


def test_scored_tokens_count_from_the_first_and_save_no_passes():
    tally = DepthTally(4)
    tally.add(Reading((1, 3), ("threshold_met", "max_depth"), truncated=5), written=False)
    output = tally.to_dict()
    assert (output["mean_depth"], output["depth_saved"], output["truncated_requests"]) == (2, 0.5, 1)
    assert "passes_saved" not in output
    assert (output["by_loop"], output["reasons"]) == ({"1": 1, "3": 1}, {"max_depth": 1, "threshold_met": 1})
    assert DepthTally(4).to_dict()["mean_depth"] is None


def test_a_depth_log_is_a_file_of_its_own(tmp_path):
    log = DepthLog(str(tmp_path / "new" / "depths.jsonl"))
    log.write({"a": 1})
    log.write({"a": 2})
    lines = (tmp_path / "new" / "depths.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == [{"a": 1}, {"a": 2}]
    with pytest.raises(ValueError, match="depth_log="):
        DepthLog(str(tmp_path / "new" / "depths.jsonl"))
    DepthLog(None).write({"a": 3})
