"""The speed benchmark: its counts, its peer and its output; times are not judged here."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sigma0 import ExitConfig
from sigma0.bench.__main__ import app
from sigma0.bench.core.ledger import SpeedRow, parse_row, read_rows
from sigma0.bench.core.replay import Trace
from sigma0.bench.speed import decoders, published_process, shapes
from sigma0.bench.speed.courses import (
    RECORDED,
    STATED,
    RecordedCourse,
    cut_at_end,
    described,
    record_course,
    settled_loops,
    stated,
)
from sigma0.bench.speed.decoders import FULL, Decoded, Ours, PromptedCache
from sigma0.bench.speed.measure import WAYS, Plan, _decode, _figures, _settings
from sigma0.bench.speed.peer import Stock
from sigma0.bench.speed.table import markdown, rule_text
from tests.reference import tiny_model


def run(*arguments):
    return CliRunner().invoke(app, ["speed", *arguments])


@pytest.mark.slow
def test_rows_hold_the_ways_and_their_conditions(pocket, tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    asked = ["pocket", "--context", "9", "--new-tokens", "5", "--rounds", "2", "--dtype", "float32"]
    result = run(*asked, "--out", str(ledger), "--json")
    assert result.exit_code == 0, result.output
    rows = [parse_row(line) for line in result.stdout.splitlines()]
    assert read_rows(ledger) == rows and [row.way for row in rows] == list(WAYS)
    ways = {row.way: row for row in rows}
    total = pocket[0].num_loops
    assert {row.total_loops for row in rows} == {total} and {row.context for row in rows} == {9}
    for row in rows:
        assert row.ideal == pytest.approx(total / row.passes_per_token)
        assert row.speed_ratio.low <= row.speed_ratio.value <= row.speed_ratio.high
        assert row.parameters == sum(parameter.numel() for parameter in pocket[0].parameters())
    for way in ("full", "judged", "never", "huggingface"):
        assert ways[way].passes_per_token == ways[way].rows_per_token == total
    for way in ("judged", "never", "verify", "huggingface"):
        assert ways[way].same_tokens is True
    for way in ("finish", "drop"):
        assert 1 <= ways[way].passes_per_token <= total
    assert ways["drop"].rows_per_token == ways["drop"].passes_per_token
    # 9 prompt tokens and the 4 that were fed back, as the formula of weights.md has it
    config = pocket[0].config
    one = config.num_hidden_layers * total * 2 * config.num_key_value_heads * config.head_dim * 4
    assert ways["finish"].kv_bytes_in_use == ways["huggingface"].kv_bytes_in_use == 13 * one
    assert ways["finish"].kv_bytes_allocated >= ways["finish"].kv_bytes_in_use
    again = run(*asked, "--out", str(ledger))
    assert again.exit_code == 0 and len(read_rows(ledger)) == 2 * len(WAYS)
    assert "Prompt tokens/s" in again.stdout and "huggingface" in again.stdout
    assert markdown(rows).count("\n") == len(WAYS) + 1


@pytest.mark.slow
def test_a_shape_replays_a_course(tmp_path):
    course = tmp_path / "course.json"
    course.write_text(json.dumps({"total_loops": 8, "exits": [2, 4, 6, 8], "settled": [1, 8, 2, 2]}))
    asked = ["--shape", "tiny", "--context", "6", "--new-tokens", "6", "--rounds", "1", "--course", str(course)]
    result = run(*asked, "--out", str(tmp_path / "ledger.jsonl"), "--json", "--batch", "2")
    assert result.exit_code == 0, result.output
    ways = {row.way: row for row in map(parse_row, result.stdout.splitlines())}
    assert all(row.batch_size == 2 and row.total_loops == 4 for row in ways.values())
    assert ways["finish"].mode == "replay" and ways["finish"].course.exits == (1, 2, 3, 4)
    assert ways["finish"].course.settled == (1, 4, 1, 1) and ways["full"].course is None
    # Sequence 0 goes 1 2 3 4 1, sequence 1 starts elsewhere: 4 1 2 3 4; a row for each loop, for 5 tokens of each.
    assert ways["drop"].rows_per_token == pytest.approx((11 + 14) / 10)
    assert ways["finish"].same_tokens is None and ways["never"].same_tokens is True


def test_stock_decoding_writes_what_full_depth_writes():
    model = tiny_model(seed=1, total_ut_steps=4)
    ids = torch.randint(8, 61, (3, 7), generator=torch.Generator().manual_seed(0))
    stock, prompted = Stock(model, ids, 9), PromptedCache(model, ids, 9)
    theirs, ours = stock.decode(), Ours(prompted, FULL, None).decode()
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, exit_config=FULL, eos_token_id=None
    )
    assert theirs.tokens.tolist() == ours.tokens.tolist() == expected[:, 7:].tolist()
    assert (theirs.passes, theirs.rows, theirs.head_rows) == (ours.passes, ours.rows, ours.head_rows)
    assert (stock.decode().tokens == theirs.tokens).all() and theirs.seconds > 0


def test_a_prompt_is_continued_from_the_same_place_by_every_setting():
    model = tiny_model(seed=1, total_ut_steps=4)
    ids = torch.tensor([[9, 10, 11, 12]])
    prompted = PromptedCache(model, ids, 8)
    ways = [Ours(prompted, ExitConfig(q=0.4, after_exit=after), None) for after in ("finish", "drop", "verify")]
    ways.append(Ours(prompted, FULL, Trace(4, (1, 3, 2))))
    first = [way.decode() for way in ways]
    again = [way.decode() for way in reversed(ways)][::-1]
    for one, two in zip(first, again, strict=True):
        assert one.tokens.tolist() == two.tokens.tolist() and one.passes == two.passes
    assert first[3].passes == 1 + 3 + 2 + 1 + 3 + 2 + 1


def test_figures_from_given_times():
    model = tiny_model(seed=1, total_ut_steps=4)
    plan = Plan(("full", "finish"), ExitConfig(), None, "", 5, 3)
    ids = torch.zeros((2, 6), dtype=torch.int64)

    def runs(passes, *seconds):
        return [Decoded(each, passes, 20, 8, torch.zeros(2, 5), 100, 200, tail_passes=1) for each in seconds]

    found = _figures(model, ids, plan, runs(8, 1.0, 4.0, 2.0), runs(16, 3.0, 6.0, 4.0))
    # Ratios of the rounds: 3, 1.5, 2; the ratio of the medians would be 2 as well, their mean would not.
    assert found["speed_ratio"].value == 2.0 and found["ideal"] == 2.0 and found["share_of_ideal"].value == 1.0
    assert found["milliseconds_per_token"].value == 500.0 and found["tokens_per_second"].value == 4.0
    assert (
        found["passes_per_token"] == 2.0 and found["rows_per_token"] == 2.5 and found["tail_passes_per_token"] == 0.25
    )
    block = sum(parameter.nbytes for parameter in model.model.layers.parameters())
    assert found["weight_bandwidth"] == pytest.approx(block * 8 / 2.0)
    assert found["kv_bytes_in_use"] == 100 and found["kv_bytes_allocated"] == 200 and found["same_tokens"]


def test_the_first_round_warms_up_and_counts_for_nothing():
    class Slow:
        """A decoder whose runs take 9, 1, 2, 3 ... seconds."""

        def __init__(self):
            self.times = iter([9.0, 1.0, 2.0, 3.0, 4.0])

        def prompt(self):
            return 1.0

        def decode(self):
            return Decoded(next(self.times), 8, 8, 8, torch.zeros(1, 5), 1, 1)

    plan = Plan(("full", "finish"), ExitConfig(), None, "", 5, 3)
    steps = []
    runs, _ = _decode({way: Slow() for way in plan.ways}, plan, torch.zeros((1, 4)), lambda: steps.append(1))
    assert {way: [run.seconds for run in found] for way, found in runs.items()} == {
        "full": [1.0, 2.0, 3.0],
        "finish": [1.0, 2.0, 3.0],
    }
    assert len(steps) == 2 * 4


def test_no_time_is_counted_before_the_first_token(monkeypatch):
    """With a clock that ticks once for each reading, a run's time is what lies between its first and last token."""
    ticks = iter(range(1000))
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(decoders, "time", clock)
    monkeypatch.setattr(published_process, "time", clock)
    model = tiny_model(seed=1, total_ut_steps=4)
    ids = torch.tensor([[9, 10, 11, 12]])
    prompted = PromptedCache(model, ids, 6)
    prompted.read()
    assert Ours(prompted, FULL, None).decode().seconds == 1.0
    stock = Stock(model, ids, 6)
    stock.prompt()
    assert stock.decode().seconds == 5.0  # the clock is read at each of 6 tokens


@pytest.mark.slow
def test_recorded_courses_are_those_of_the_model():
    found = record_course("pocket", ExitConfig(q=0.5))
    trace, source = found.trace, found.source
    assert (
        trace.total_loops == 6
        and len(trace.exits) == len(trace.settled)
        and source.startswith("pocket (qexit: q 0.5), answers to")
    )
    assert RecordedCourse.model_validate_json(found.model_dump_json()) == found and found.conditions.model == "pocket"
    assert set(trace.exits) | set(trace.settled) <= set(range(1, 7)) and len(set(trace.settled)) > 1


@pytest.mark.parametrize("course, depths", [("recorded", RECORDED), ("stated", None)])
@pytest.mark.cpu(3)
def test_a_shape_says_which_course_it_replays(course, depths, tmp_path):
    asked = ["--shape", "tiny", "--course", course, "--context", "6", "--new-tokens", "20", "--rounds", "1"]
    ways = ["--ways", "verify,self-speculation", "--drafts", "1,2"]
    result = run(*asked, *ways, "--out", str(tmp_path / "ledger.jsonl"), "--json")
    assert result.exit_code == 0, result.output
    verify, drafted = map(parse_row, result.stdout.splitlines())
    trace = (STATED if depths is None else RecordedCourse.read(depths).trace).scaled(4)
    for row in (verify, drafted):
        assert (row.mode, row.course.exits, row.course.settled) == ("replay", trace.exits, trace.settled)
        assert row.course.source.startswith("stated" if depths is None else "recorded from pocket-large (margin: theta")
    assert drafted.settings == {"depth": 1, "length": 2} and drafted.same_tokens is None
    assert rule_text([verify, drafted]) == " Self-speculation drafts 2 tokens at loop 1."
    # a round takes 2 passes of drafts and 4 of the verification, and gives the drafts that were settled and one more
    fed = rounds = 0
    while fed < 19:
        right = [trace.settled[(fed + place) % len(trace.settled)] <= 1 for place in range(2)] + [False]
        fed, rounds = fed + right.index(False) + 1, rounds + 1
    assert drafted.passes_per_token == pytest.approx(6 * rounds / fed)


def test_a_file_without_a_recorded_course_is_named(tmp_path):
    file = tmp_path / "course.json"
    with pytest.raises(ValueError, match="holds no recorded course"):
        RecordedCourse.read(file)
    file.write_text('{"exits": [1]}')
    with pytest.raises(ValueError, match="holds no recorded course"):
        RecordedCourse.read(file)


@pytest.mark.exhaustive
def test_the_course_command_writes_what_it_records(tmp_path):
    out = tmp_path / "course.json"
    result = CliRunner().invoke(app, ["course", "pocket", "--exit-config", '{"q": 0.5}', "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = RecordedCourse.read(out)
    assert found.settings == {"q": 0.5} and f"{len(found.exits)} tokens" in result.stdout
    assert found.model_copy(update={"time": ""}) == record_course("pocket", ExitConfig(q=0.5)).model_copy(
        update={"time": ""}
    )


def test_texts_are_cut_behind_their_first_end():
    text = torch.tensor([[2, 5, 7, 8, 2, 9, 2]])
    assert cut_at_end(text, 2, 2).tolist() == [[2, 5, 7, 8, 2]]
    assert cut_at_end(text, 2, [9, 8]).tolist() == [[2, 5, 7, 8]]
    assert cut_at_end(text, 2, None).tolist() == cut_at_end(text, 2, 1).tolist() == text.tolist()


def test_a_course_is_described():
    assert described(Trace(4, (1, 2, 4, 3), (1, 3, 4, 4)), "made up") == (
        "made up; mean exit 2.50 of 4 loops, 67 % of the proposals withdrawn"
    )
    assert "2.00 of 4 loops, 17 %" in described(STATED, "")


def test_settings_name_what_has_a_say():
    config = ExitConfig(q=0.3, after_exit="verify", min_loops=2)
    assert _settings(config, False) == {"q": 0.3, "min_loops": 2, "redraft": 1}
    assert _settings(config, True) == {"redraft": 1} and _settings(ExitConfig(q=0.3), False) == {"q": 0.3}


def test_settled_loops():
    argmax = np.array([[1, 5, 2, 7], [3, 5, 2, 8], [1, 6, 2, 7], [1, 5, 2, 9]])
    assert settled_loops(argmax) == [3, 4, 1, 4]


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "holds no course"),
        ('{"total_loops": 3, "exits": [4]}', "loop 4"),
        ('{"total_loops": 3, "exits": [1], "speed": 2}', "speed"),
    ],
)
def test_a_bad_course_is_named(tmp_path, text, message):
    file = tmp_path / "course.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        stated(file)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "either a model or --shape"),
        (["pocket", "--shape", "100m"], "either a model or --shape"),
        (["--shape", "huge"], f"no such shape: 'huge'; one of {', '.join(shapes.SHAPES)}"),
        (["pocket", "--ways", "full,fast"], "no such way: 'fast'"),
        (["pocket", "--ways", "full,full"], "each way once"),
        (["--shape", "tiny", "--exit-config", '{"q": 0.5}'], "replaces the exit rule"),
        (["--shape", "tiny", "--course", "recorded", "--exit-config", '{"q": 0.5}'], "replaces the exit rule"),
        (["--shape", "tiny", "--ways", "two-branches"], "two-branches: a course says nothing"),
        (["pocket", "--ways", "self-speculation", "--drafts", "2"], "'2' is no depth and length of drafts"),
        (["pocket", "--ways", "self-speculation", "--drafts", "6,2"], "drafts at loop 6, but a model of 6 loops"),
        (["pocket", "--ways", "one-branch", "--batch", "2"], "not for a batch of 2"),
        (["pocket", "--context", "99999"], "--context 99999"),
        (["pocket", "--course", "missing.json"], "'missing.json' holds no course"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path):
    result = run(*arguments, "--out", str(tmp_path / "ledger.jsonl"))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_row_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="benchmark"):
        parse_row('{"benchmark": "size"}')
    assert "course" in SpeedRow.model_fields


@pytest.mark.exhaustive
def test_the_report_shows_the_last_run_of_each_size(pocket, tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    for context in ("9", "9", "11"):
        asked = ["pocket", "--context", context, "--new-tokens", "3", "--rounds", "1", "--ways", "full,finish"]
        assert run(*asked, "--out", str(ledger)).exit_code == 0
    rows = read_rows(ledger)
    result = CliRunner().invoke(app, ["report", str(ledger)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "speed.md").read_text()
    for section in page.split("## Roofline"):
        assert section.count("| full |") == section.count("| finish |") == 2
    assert markdown(rows[2:4]) in page and markdown(rows[4:]) in page and markdown(rows[2:4]) in result.stdout
