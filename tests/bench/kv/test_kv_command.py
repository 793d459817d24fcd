"""`python -m sigma0.bench kv`: rows whose figures are those of tensors and of runs."""

from itertools import product

import pytest

from sigma0.bench.core.ledger import read_rows
from sigma0.bench.kv.command import at_context
from sigma0.bench.kv.table import draw_kv, latest_kv, whole
from tests.bench.running import bench, refused

SMALL = ("-n", "3", "--segment", "16", "--max-new-tokens", "6")


@pytest.mark.exhaustive
def test_rows_tell_what_a_codec_costs_and_saves(tmp_path, ledger):
    worst = '{"codec": "residual", "bits": [1, 1, 1, 1, 1, 1], "group": 32}'
    asked = ("--kv", "int8", "--kv", worst, "--contexts", "0,40", "--rounds", 1, "--free", 2, "--concurrency")
    bench("kv", "pocket", *asked, *SMALL, "--out", ledger)
    rows = read_rows(ledger)
    settings = [(row.context, row.codec, row.segment) for row in rows]
    assert settings == list(product((0, 40), ("int8", "residual"), (16,)))
    for row in rows:
        assert row.token_bytes_computed == 2 * 6 * 128 * 4
        assert row.token_bytes == row.token_bytes_computed * row.number_bits / 32
        assert 0 < row.coded_share < 1 and row.n == 3 and 0 < row.tokens <= 18
        assert row.milliseconds_per_token > 0 and row.rounds == 1
        assert row.concurrent >= row.concurrent_computed > 0 and row.same_alone == row.compared_alone == 3
    fine, coarse = rows[2:]
    assert (fine.number_bits, coarse.number_bits) == (9, 1.5)
    assert fine.kl.value < coarse.kl.value and fine.agreement.value >= coarse.agreement.value
    runs = latest_kv(rows)
    assert [[row.number_bits for row in current] for current in runs] == [[9, 1.5], [9, 1.5]]
    assert "segments of 16; timed behind" in whole(runs) and "residual 1-1-1-1-1-1 / 32" in whole(runs)
    draw_kv(runs, tmp_path / "kv.svg")
    assert (tmp_path / "kv.svg").read_text().count("pocket, ") == 4


def test_what_cannot_be_measured_is_named(ledger):
    asked = ("kv", "pocket", *SMALL, "--out", ledger)
    assert "takes codecs of few bits" in refused(*asked, "--kv", "full")
    assert "--contexts takes numbers from 0 to 2042" in refused(*asked, "--contexts", 2048)
    assert not ledger.exists()


def test_prompts_in_a_row_make_longer_ones():
    prompts = [(1, 2, 3), (4, 5), (6, 7, 8, 9), (10,)]
    assert at_context(prompts, 0, 2) == [(1, 2, 3), (4, 5)]
    with pytest.raises(ValueError, match="4 prompts make no 2 of 5 ids: the shortest has 3"):
        at_context(prompts, 5, 2)
    assert at_context(prompts, 3, 2) == [(7, 8, 9), (4, 5, 10)]
