"""Tuning without a GPU: which tilings are tried, which wins, and how a table takes it in."""

import json
import random

import pytest
import torch

from sigma0.bench.kernels.tune import candidates, products_of, search, write_table
from sigma0.kernels.row_product import MOST_SPLITS, TABLE, Tiling, preferring, read_table, tiling_of
from tests.bench.running import refused

FIRST = Tiling(16, 128, 2, 5, 1)


def test_the_products_of_a_layer_and_of_the_head():
    output = [(item.name, item.outputs, item.inner, item.split) for item in products_of("ouro-1.4b")]
    layer = [("qkv", 6144, 2048, False), ("output", 2048, 2048, True), ("gate-up", 11264, 2048, False)]
    assert output == [*layer, ("down", 2048, 5632, True), ("head", 49152, 2048, False)]
    known = {(row["outputs"], row["inner"], row["split"]) for row in read_table()}
    assert known <= {item[1:] for item in output}


def test_what_a_device_has_no_room_for_is_not_tried():
    for product in products_of("ouro-1.4b"):
        obtained = candidates(product, torch.bfloat16, FIRST)
        assert obtained[0] == FIRST and len(set(obtained)) == len(obtained) > 30
        assert obtained == candidates(product, torch.bfloat16, FIRST)
        assert {tiling.splits for tiling in obtained} == ({1, 2, 4} if product.split else {1})
        for tiling in obtained:
            assert (tiling.outputs + 16) * tiling.step * tiling.stages * 2 <= 200_000
            assert tiling.splits <= MOST_SPLITS and tiling.outputs * tiling.step <= 16384
        # the dtype of tests needs twice the room
        assert len(candidates(product, torch.float32, FIRST)) < len(obtained)


@pytest.mark.parametrize("seed", range(5))
def test_the_search_times_what_the_time_allows(seed):
    rng = random.Random(seed)
    obtained = candidates(products_of("ouro-1.4b")[1], torch.bfloat16, FIRST)
    took = {tiling: rng.choice([None, rng.uniform(5, 50)]) for tiling in obtained}
    took[obtained[0]] = 20.0
    clock, prepared, asked = [0.0], [], []

    def time_of(tiling):
        clock[0] += 1
        asked.append(tiling)
        return took[tiling]

    until = rng.choice([0, 10, 40, 10**6])
    timed = search(obtained, time_of, until, lambda some: prepared.extend(some), lambda: clock[0])
    assert asked == prepared == obtained[: len(asked)]
    # whole groups that are compiled side by side, and the first of them whatever the time
    assert len(asked) == min(len(obtained), 16 * max(1, -(-until // 16)))
    assert timed == {tiling: took[tiling] for tiling in asked if took[tiling] is not None}


def test_where_no_tiling_runs_it_is_said():
    with pytest.raises(ValueError, match="none of 1 tilings runs"):
        search([FIRST], lambda tiling: None, 0)


def test_rows_replace_those_of_the_same_product_alone(tmp_path):
    path = tmp_path / "products.json"
    product = products_of("ouro-1.4b")[1]
    newer = product.row(90, torch.bfloat16, FIRST, 4.987)
    other = product.row(100, torch.bfloat16, FIRST, 3)
    write_table(path, [other, newer])
    rows = json.loads(path.read_text())
    assert len(rows) == len(read_table()) + 1 and newer in rows and newer["us"] == 4.99 and rows[-1] == other
    write_table(path, [other])
    assert json.loads(path.read_text()) == rows and len(path.read_text().splitlines()) == len(rows) + 2
    # what ships is written so already
    write_table(path := tmp_path / "same.json", [])
    assert path.read_text() == TABLE.read_text()


def test_a_row_is_tried_before_the_table():
    product = products_of("ouro-1.4b")[1]
    hidden, weight = (torch.empty(rows, product.inner) for rows in (1, product.outputs))
    before, table = tiling_of(hidden, weight, splits=True), list(read_table())
    wanted = Tiling(64, 64, 8, 3, 2)
    with preferring(product.row(0, torch.float32, wanted, 0)):
        assert tiling_of(hidden, weight, splits=True) == wanted
        assert tiling_of(hidden, weight) != wanted
    assert tiling_of(hidden, weight, splits=True) == before != wanted and read_table() == table


def test_tuning_needs_a_gpu(tmp_path):
    said = refused("kernels", "--tune", "--device", "cpu", "--out", tmp_path / "none.json")
    assert "--tune needs a GPU" in said and not list(tmp_path.iterdir())
