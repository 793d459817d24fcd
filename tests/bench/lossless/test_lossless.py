"""The cost of `verify`: real runs against counts from argmax traces."""

from types import SimpleNamespace

import pytest

from sigma0 import ExitConfig
from sigma0.bench.lossless.measure import Simulated, measure_lossless
from tests.bench.running import bench, refused, reported
from tests.reference import settled_model

NEW = 9


def test_real_runs_take_the_passes_that_the_traces_say():
    model = settled_model(seed=2, total_ut_steps=6, num_hidden_layers=1)
    prompts = [(9, 10, 11), (20, 33), (8, 50, 41, 12)]
    configs = [ExitConfig(mode="margin", theta=0.05, redraft=again) for again in (False, True)]
    output = []
    report = measure_lossless(model, "tiny", prompts, configs, NEW, output.append)
    assert output == list(range(1, 10)) and [report[k] for k in ("prompts", "new_tokens", "total_loops")] == [3, NEW, 6]
    costs = [SimpleNamespace(**{**cost, "simulated": Simulated(**cost["simulated"])}) for cost in report["costs"]]
    one, many = costs
    assert one.identical == many.identical == 1.0
    assert one.simulated.full == 3 * 6 * (NEW - 1)
    assert one.passes["value"] == pytest.approx(one.simulated.passes / one.simulated.full)
    assert many.passes["value"] == pytest.approx(many.simulated.with_redraft / many.simulated.full)
    assert many.passes["value"] < one.passes["value"] < 1 and one.rows["value"] > many.rows["value"] >= 1
    for cost in costs:
        low, high = cost.passes["interval"]
        assert cost.passes_without_tail["value"] < cost.passes["value"] and low <= cost.passes["value"] <= high
    assert many.accepted["value"] > one.accepted["value"] and many.head_rows["value"] > one.head_rows["value"] > 1
    with pytest.raises(ValueError, match="1 new tokens"):
        measure_lossless(model, "tiny", [(9,)], [ExitConfig()], 1)


def test_the_command_prints_a_table_or_json():
    asked = ("lossless", "pocket", "-n", 2, "--new-tokens", 6, "--rules", '[{"mode": "margin", "theta": 0.3}]')
    table, report = bench(*asked).stdout, reported(*asked)
    assert "margin theta 0.3" in table and "100 %" in table
    assert [cost["exit_config"]["redraft"] for cost in report["costs"]] == [False, True]
    assert {cost["exit_config"]["after_exit"] for cost in report["costs"]} == {"verify"}
    assert "speed" in refused(*asked[:-1], '[{"speed": 1}]')
