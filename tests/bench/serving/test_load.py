"""Clients of the load benches against a real server, and what is made of what they saw."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("fastapi")

from sigma0 import ExitConfig
from sigma0.bench.core.conditions import Conditions, Figure
from sigma0.bench.core.rows import ServeRow
from sigma0.bench.serving import measure as loads
from sigma0.bench.serving.servers import counts
from tests.bench.core.test_ledger import CONDITIONS
from tests.serve.conftest import plain  # noqa: F401

QUESTIONS = ["Mary went to the kitchen. Where is Mary?", "Leo went to the barn. Where is Leo?"]


def ask(server, **extra):
    return loads.Ask(server.url, "pocket", QUESTIONS, 5, extra)


def test_a_closed_loop_answers_every_request(plain):  # noqa: F811
    before = counts(plain.url)
    load = asyncio.run(loads.drive(ask(plain, sigma0={"exit": {"mode": "full"}}), "closed", 3, 7))
    after = counts(plain.url)
    assert len(load.answers) == 7 and load.failed == 0
    assert {answer.tokens for answer in load.answers} == {5}
    assert after["tokens"] - before["tokens"] == 35 and after["rows"] > before["rows"]
    for answer in load.answers:
        assert len(answer.arrivals) == 5
        assert [answer.began, *answer.arrivals] == sorted([answer.began, *answer.arrivals])
    assert load.tokens_per_second == pytest.approx(35 / load.seconds)
    assert 0 < load.first_token.p50 <= load.first_token.p99


def test_an_open_loop_lets_requests_come_when_they_come(plain, monkeypatch):  # noqa: F811
    """By a clock that stands still: each request waits for its own moment, and for no answer."""
    waits = []

    async def wait(seconds):
        waits.append(seconds)
        if len(waits) == 6:
            together.set()
        await together.wait()

    async def run():
        nonlocal together
        together = asyncio.Event()
        return await loads.drive(ask(plain), "open", 50.0, 6, seed=2)

    together = None
    monkeypatch.setattr(loads, "perf_counter", lambda: 100.0)
    still = SimpleNamespace(sleep=wait, gather=asyncio.gather, Semaphore=asyncio.Semaphore)
    monkeypatch.setattr(loads, "asyncio", still)
    load = asyncio.run(run())
    assert load.failed == 0 and {answer.tokens for answer in load.answers} == {5}
    assert waits == pytest.approx(np.cumsum(np.random.default_rng(2).exponential(1 / 50, 6)))


def test_refusals_are_failures(plain):  # noqa: F811
    load = asyncio.run(loads.drive(ask(plain, temperature=9), "closed", 1, 2))
    assert load.failed == 2 and load.answers[0].failure.startswith("400: ")
    nobody = asyncio.run(loads.drive(loads.Ask("http://127.0.0.1:9", "pocket", QUESTIONS, 5, {}), "closed", 1, 1))
    assert nobody.failed == 1 and "ConnectError" in nobody.answers[0].failure


def test_times_become_percentiles():
    output = loads.percentiles([0.1, 0.2, 0.3])
    assert output.p50 == pytest.approx(200) and output.p99 == pytest.approx(298)
    assert loads.percentiles([]).p50 == 0
    load = loads.Load(2.0, [loads.Answer(0.0, [0.5, 0.6, 0.8], 3), loads.Answer(0.0, [], 0, "broke")])
    assert load.first_token.p50 == pytest.approx(500) and load.between_tokens.p50 == pytest.approx(150)


def measured(tokens, text="", **counts):
    return loads.Load(2.0, [loads.Answer(0.0, [0.5], tokens, text=text)], counts)


def test_ratios_are_taken_round_by_round():
    full = [measured(10, rows=20, passes=4.0), measured(20, rows=40, passes=4.0)]
    by_way = {"full": full, "transformers": [measured(5), measured(40)]}
    configs = {"full": ExitConfig(mode="full")}
    full, theirs = loads.serve_rows({("closed", 4.0): by_way}, configs, Conditions(**CONDITIONS), "compile")
    assert (full.runner, theirs.runner) == ("compile", "eager")
    assert full.speed_ratio.value == 1 and full.rows_per_second == 15 and full.passes_per_second == 2
    assert (theirs.speed_ratio.low, theirs.speed_ratio.value, theirs.speed_ratio.high) == (0.5, 1.25, 2)
    assert theirs.rows_per_second is None and theirs.exit_config is None
    assert ServeRow.model_validate_json(theirs.model_dump_json()) == theirs
    assert Figure.spread([3.0, 1.0, 2.0]).value == 2


def test_drafts_of_vllm_are_told_beside_the_texts():
    drafted = measured(20, "other", drafts=4.0, accepted_tokens=6.0)
    by_way = {"vllm": [measured(10, "same")], "vllm-drafts": [drafted], "full": [measured(5, "same")]}
    alone, drafts, full = loads.vllm_rows({("closed", 8.0): by_way}, Conditions(**CONDITIONS), "1", 4, 2)
    assert (drafts.accepted_length, drafts.drafts, drafts.draft_loops, drafts.clients) == (2.5, 4, 2, 8)
    assert alone.accepted_length is None and alone.drafts is None
    assert [row.same_text for row in (alone, drafts, full)] == [1, 0, 1]
    assert [row.speed_ratio.value for row in (alone, drafts, full)] == [1, 2, 0.5]


def test_all_ways_are_asked_for_by_their_settings():
    ways = loads.our_configs(ExitConfig(q=0.6))
    assert ways["full"].mode == "full" and ways["never"].q == 1.0
    assert [ways[name].after_exit for name in ("finish", "drop", "verify")] == ["finish", "drop", "verify"]
    assert {ways[name].q for name in ("finish", "drop", "verify")} == {0.6}
    assert list(loads.our_configs(ExitConfig(), ["full", "drop"])) == ["full", "drop"]
    for wrong in (["full", "fast"], ["drop", "full"]):
        with pytest.raises(ValueError, match="must begin with full"):
            loads.our_configs(ExitConfig(), wrong)
