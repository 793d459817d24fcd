"""Decoding by the engine in the speed bench: its texts, and its counts beside the library's."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from sigma0 import ExitConfig
from sigma0.bench.__main__ import app
from sigma0.bench.core.ledger import parse_row
from sigma0.bench.core.replay import Trace
from sigma0.bench.speed.decoders import FULL, Ours, PromptedCache
from sigma0.bench.speed.engine import Engined, open_engine
from tests.reference import tiny_model

NEW = 9
RULES = {
    "full": FULL,
    "finish": ExitConfig(q=0.4),
    "drop": ExitConfig(q=0.4, after_exit="drop"),
    "verify": ExitConfig(q=0.4, after_exit="verify"),
}


@pytest.fixture(scope="module")
def bench():
    model = tiny_model(seed=1, total_ut_steps=4)
    model.generation_config.eos_token_id = None
    ids = torch.randint(8, 61, (3, 21), generator=torch.Generator().manual_seed(0))
    return model, ids, open_engine(model, ids, NEW)


@pytest.mark.parametrize("way", RULES)
def test_the_engine_writes_what_the_library_writes(bench, way):
    model, ids, engine = bench
    ours = Engined(engine, ids, NEW, RULES[way], None)
    found = ours.decode()
    expected = Ours(PromptedCache(model, ids, NEW), RULES[way], None).decode()
    assert found.tokens.tolist() == expected.tokens.tolist() and found.runner == "eager"
    # the second time its prompts come from the prefix cache
    assert ours.decode().tokens.tolist() == expected.tokens.tolist()
    assert not engine.has_work and found.timed >= 3 * (NEW - 1)


@pytest.mark.parametrize("settled", [(1, 1, 1, 1), (1, 1, 3, 1)], ids=["all-stand", "one-falls"])
@pytest.mark.parametrize("after", ["finish", "drop", "verify"])
def test_a_course_takes_the_passes_that_it_takes_in_the_library(bench, after, settled):
    model, ids, engine = bench
    config, trace = ExitConfig(q=0.4, after_exit=after), Trace(4, (1, 2, 1, 2), settled)
    found = Engined(engine, ids, NEW, config, trace).decode()
    expected = Ours(PromptedCache(model, ids, NEW), config, trace).decode()
    assert found.timed == 3 * (NEW - 1)
    assert found.passes == expected.passes
    # the course is no longer in force
    full = Engined(engine, ids, NEW, FULL, None).decode()
    assert full.passes == 4 * (NEW - 1) and full.rows == full.timed * 4


def test_prompts_are_read_from_nothing_each_time(bench):
    _, ids, engine = bench
    ours, before = Engined(engine, ids, NEW, FULL, None), engine.counts.prompt_rows
    assert ours.prompt() > 0
    once = engine.counts.prompt_rows - before
    ours.prompt()
    assert engine.counts.prompt_rows - before == 2 * once > 0


@pytest.mark.slow
def test_rows_name_the_engine(tmp_path):
    asked = ["speed", "--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--by", "engine", "--batch", "2"]
    small = ["--context", "6", "--new-tokens", "5", "--rounds", "1", "--out", str(tmp_path / "ledger.jsonl"), "--json"]
    result = CliRunner().invoke(app, [*asked, *small, "--ways", "full,finish,drop,verify"])
    assert result.exit_code == 0, result.output
    ways = {row.way: row for row in map(parse_row, result.stdout.splitlines())}
    assert {row.by for row in ways.values()} == {"engine"} and ways["full"].passes_per_token == 4
    assert ways["finish"].mode == "replay" and ways["finish"].passes_per_token < 4
    ruled = [
        *asked,
        *small,
        "--ways",
        "full,verify",
        "--course",
        "rule",
        "--exit-config",
        '{"mode": "qexit", "q": 0.5}',
    ]
    result = CliRunner().invoke(app, ruled)
    verified = parse_row(result.stdout.splitlines()[-1])
    assert verified.mode == "qexit" and verified.course is None and verified.same_tokens is True


@pytest.mark.parametrize(
    "arguments, message",
    [(["--by", "both"], "no such decoder: 'both'"), (["--by", "engine"], "huggingface, judged: of the library alone")],
)
def test_what_there_is_not_is_named(arguments, message, tmp_path):
    asked = ["speed", "--shape", "tiny", "--device", "cpu", *arguments, "--out", str(tmp_path / "ledger.jsonl")]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


def test_a_run_of_other_lengths_is_compared_token_by_token(bench):
    from sigma0.bench.speed.measure import Plan, _figures

    model, ids, engine = bench
    plan = Plan(("full", "finish"), ExitConfig(), None, "", NEW, 1, by="engine")
    run = Engined(engine, ids, NEW, FULL, None).decode()
    full, other = replace(run, seconds=1.0, timed=24), replace(run, seconds=1.0, timed=48)
    found = _figures(model, ids, plan, [other], [full])
    assert found["speed_ratio"].value == 2.0 and found["milliseconds_per_token"].value == 1000 / 16
