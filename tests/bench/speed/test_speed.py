"""The speed benchmark: its counts, its ways and its output; times are not judged here."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sigma0 import ExitConfig
from sigma0.bench.core.ledger import parse_row, read_rows
from sigma0.bench.core.replay import Trace
from sigma0.bench.speed import courses, decoders, published_process, shapes
from sigma0.bench.speed.decoders import FULL, Decoded, Ours, PromptedCache
from sigma0.bench.speed.engine import Engined, open_engine
from sigma0.bench.speed.measure import WAYS, Plan, _decode, _figures, _settings
from sigma0.bench.speed.peer import Stock
from sigma0.bench.speed.table import rule_text, speed_table
from tests.bench.running import bench, refused
from tests.reference import tiny_model

NEW = 9
SMALL = ("--context", "9", "--new-tokens", "5", "--rounds", "2", "--dtype", "float32")
TINY = ("--shape", "tiny", "--device", "cpu", "--context", "6", "--rounds", "1", "--dtype", "float32")


def rows_of(ledger, *arguments):
    result = bench("speed", *arguments, "--out", ledger, "--json")
    return [parse_row(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_rows_hold_the_ways_and_their_conditions(pocket, ledger):
    rows = rows_of(ledger, "pocket", *SMALL)
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
    again = bench("speed", "pocket", *SMALL, "--out", ledger)
    assert len(read_rows(ledger)) == 2 * len(WAYS)
    assert "Prompt tokens/s" in again.stdout and "huggingface" in again.stdout
    assert speed_table(rows).count("\n") == len(WAYS) + 3


@pytest.mark.slow
def test_a_shape_replays_a_course(ledger, tmp_path):
    course = tmp_path / "course.json"
    course.write_text(json.dumps({"total_loops": 8, "exits": [2, 4, 6, 8], "settled": [1, 8, 2, 2]}))
    rows = rows_of(ledger, *TINY, "--new-tokens", "6", "--course", str(course), "--batch", "2")
    ways = {row.way: row for row in rows}
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
    settings = {"max_new_tokens": 9, "do_sample": False, "exit_config": FULL, "eos_token_id": None}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
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

    def runs(passes, *seconds, timed=None):
        given = {"kv_in_use": 100, "kv_allocated": 200, "tail_passes": 1, "timed": timed}
        return [Decoded(item, passes, 20, 8, torch.zeros(2, 5), **given) for item in seconds]

    obtained = _figures(model, 6, runs(8, 1.0, 4.0, 2.0), runs(16, 3.0, 6.0, 4.0))
    # Ratios of the rounds: 3, 1.5, 2; the ratio of the medians would be 2 as well, their mean would not.
    assert obtained["speed_ratio"].value == 2.0 and obtained["ideal"] == 2.0 and obtained["share_of_ideal"].value == 1.0
    assert obtained["milliseconds_per_token"].value == 500.0 and obtained["tokens_per_second"].value == 4.0
    assert [obtained[f"{name}_per_token"] for name in ("passes", "rows", "tail_passes")] == [2.0, 2.5, 0.25]
    block = sum(parameter.nbytes for parameter in model.model.layers.parameters())
    assert obtained["weight_bandwidth"] == pytest.approx(block * 8 / 2.0)
    assert obtained["kv_bytes_in_use"] == 100 and obtained["kv_bytes_allocated"] == 200 and obtained["same_tokens"]
    # an engine's runs may be of other lengths: 8 tokens of each sequence beside 4
    other = _figures(model, 6, runs(8, 1.0, timed=16), runs(16, 1.0, timed=8))
    assert other["speed_ratio"].value == 2.0 and other["milliseconds_per_token"].value == 125.0


def test_the_first_round_warms_up_and_counts_for_nothing():
    def slow():
        times = iter([9.0, 1.0, 2.0, 3.0, 4.0])
        return SimpleNamespace(decode=lambda: Decoded(next(times), 8, 8, 8, torch.zeros(1, 5), 1, 1))

    plan, steps = Plan(("full", "finish"), ExitConfig(), None, "", 5, 3), []
    runs, _ = _decode({way: slow() for way in plan.ways}, plan, torch.zeros((1, 4)), lambda: steps.append(1))
    taken = {way: [run.seconds for run in obtained] for way, obtained in runs.items()}
    assert taken == {way: [1.0, 2.0, 3.0] for way in plan.ways} and len(steps) == 2 * 4


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
def test_the_course_command_writes_the_course_of_the_model(tmp_path):
    out = tmp_path / "course.json"
    result = bench("course", "pocket", "--exit-config", '{"q": 0.5}', "--out", out)
    obtained = courses.RecordedCourse.read(out)
    trace, again = obtained.trace, courses.record_course("pocket", ExitConfig(q=0.5))
    assert obtained.model_copy(update={"time": ""}) == again.model_copy(update={"time": ""})
    assert obtained.source.startswith("pocket (qexit: q 0.5), answers to") and obtained.settings == {"q": 0.5}
    assert trace.total_loops == 6 and len(trace.exits) == len(trace.settled)
    assert set(trace.exits) | set(trace.settled) <= set(range(1, 7)) and len(set(trace.settled)) > 1
    assert obtained.conditions.model == "pocket" and f"{len(obtained.exits)} tokens" in result.stdout


@pytest.mark.parametrize("course", ["recorded", "stated"])
@pytest.mark.cpu(3)
def test_a_shape_says_which_course_it_replays(course, ledger):
    ways = ("--ways", "verify,self-speculation", "--drafts", "1,2")
    verify, drafted = rows_of(ledger, *TINY, "--new-tokens", "20", "--course", course, *ways)
    given, source = courses.STATED, "stated"
    if course == "recorded":
        given, source = courses.RecordedCourse.read(courses.RECORDED).trace, "recorded from pocket-large (margin: theta"
    trace = given.scaled(4)
    for row in (verify, drafted):
        assert (row.mode, row.course.exits, row.course.settled) == ("replay", trace.exits, trace.settled)
        assert row.course.source.startswith(source)
    assert drafted.settings == {"depth": 1, "length": 2} and drafted.same_tokens is None
    assert rule_text([verify, drafted]) == " Self-speculation drafts 2 tokens at loop 1."
    # a round takes 2 passes of drafts and 4 of the verification, and gives the drafts that were settled and one more
    fed = rounds = 0
    while fed < 19:
        right = [trace.settled[(fed + place) % len(trace.settled)] <= 1 for place in range(2)] + [False]
        fed, rounds = fed + right.index(False) + 1, rounds + 1
    assert drafted.passes_per_token == pytest.approx(6 * rounds / fed)


def test_texts_are_cut_behind_their_first_end():
    text = torch.tensor([[2, 5, 7, 8, 2, 9, 2]])
    assert courses.cut_at_end(text, 2, 2).tolist() == [[2, 5, 7, 8, 2]]
    assert courses.cut_at_end(text, 2, [9, 8]).tolist() == [[2, 5, 7, 8]]
    assert courses.cut_at_end(text, 2, None).tolist() == courses.cut_at_end(text, 2, 1).tolist() == text.tolist()


def test_a_course_is_described():
    said = courses.described(Trace(4, (1, 2, 4, 3), (1, 3, 4, 4)), "made up")
    assert said == "made up; mean exit 2.50 of 4 loops, 67 % of the proposals withdrawn"
    assert "2.00 of 4 loops, 17 %" in courses.described(courses.STATED, "")


def test_settings_name_what_has_a_say():
    config = ExitConfig(q=0.3, after_exit="verify", min_loops=2)
    assert _settings(config, False) == {"q": 0.3, "min_loops": 2, "redraft": 1}
    assert _settings(config, True) == {"redraft": 1} and _settings(ExitConfig(q=0.3), False) == {"q": 0.3}


def test_settled_loops():
    argmax = np.array([[1, 5, 2, 7], [3, 5, 2, 8], [1, 6, 2, 7], [1, 5, 2, 9]])
    assert courses.settled_loops(argmax) == [3, 4, 1, 4]


@pytest.mark.parametrize(
    "read, text, message",
    [
        (courses.stated, "{", "holds no course"),
        (courses.stated, '{"total_loops": 3, "exits": [4]}', "loop 4"),
        (courses.stated, '{"total_loops": 3, "exits": [1], "speed": 2}', "speed"),
        (courses.RecordedCourse.read, None, "holds no recorded course"),
        (courses.RecordedCourse.read, '{"exits": [1]}', "holds no recorded course"),
    ],
)
def test_a_bad_course_is_named(tmp_path, read, text, message):
    file = tmp_path / "course.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(file)


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
        ([*TINY, "--by", "both"], "no such decoder: 'both'"),
        ([*TINY, "--by", "engine"], "huggingface, judged: of the library alone"),
    ],
)
def test_bad_input_is_one_line(arguments, message, ledger):
    assert message in refused("speed", *arguments, "--out", ledger)


RULES = {
    "full": FULL,
    "finish": ExitConfig(q=0.4),
    "drop": ExitConfig(q=0.4, after_exit="drop"),
    "verify": ExitConfig(q=0.4, after_exit="verify"),
}


@pytest.fixture(scope="module")
def engined():
    model = tiny_model(seed=1, total_ut_steps=4)
    model.generation_config.eos_token_id = None
    ids = torch.randint(8, 61, (3, 21), generator=torch.Generator().manual_seed(0))
    return model, ids, open_engine(model, ids, NEW)


@pytest.mark.parametrize("way", RULES)
def test_the_engine_writes_what_the_library_writes(engined, way):
    model, ids, engine = engined
    ours = Engined(engine, ids, NEW, RULES[way], None)
    obtained = ours.decode()
    expected = Ours(PromptedCache(model, ids, NEW), RULES[way], None).decode()
    assert obtained.tokens.tolist() == expected.tokens.tolist() and obtained.runner == "eager"
    # the second time its prompts come from the prefix cache
    assert ours.decode().tokens.tolist() == expected.tokens.tolist()
    assert not engine.has_work and obtained.timed >= 3 * (NEW - 1)


@pytest.mark.parametrize("settled", [(1, 1, 1, 1), (1, 1, 3, 1)], ids=["all-stand", "one-falls"])
@pytest.mark.parametrize("after", ["finish", "drop", "verify"])
def test_a_course_takes_the_passes_that_it_takes_in_the_library(engined, after, settled):
    model, ids, engine = engined
    config, trace = ExitConfig(q=0.4, after_exit=after), Trace(4, (1, 2, 1, 2), settled)
    obtained = Engined(engine, ids, NEW, config, trace).decode()
    expected = Ours(PromptedCache(model, ids, NEW), config, trace).decode()
    assert obtained.timed == 3 * (NEW - 1)
    assert obtained.passes == expected.passes
    # the course is no longer in force
    full = Engined(engine, ids, NEW, FULL, None).decode()
    assert full.passes == 4 * (NEW - 1) and full.rows == full.timed * 4


def test_prompts_are_read_from_nothing_each_time(engined):
    _, ids, engine = engined
    ours, before = Engined(engine, ids, NEW, FULL, None), engine.counts.prompt_rows
    assert ours.prompt() > 0
    once = engine.counts.prompt_rows - before
    ours.prompt()
    assert engine.counts.prompt_rows - before == 2 * once > 0


@pytest.mark.slow
def test_rows_name_the_engine(ledger):
    asked = (*TINY, "--new-tokens", "5", "--by", "engine", "--batch", "2")
    ways = {row.way: row for row in rows_of(ledger, *asked, "--ways", "full,finish,drop,verify")}
    assert {row.by for row in ways.values()} == {"engine"} and ways["full"].passes_per_token == 4
    assert ways["finish"].mode == "replay" and ways["finish"].passes_per_token < 4
    ruled = ("--ways", "full,verify", "--course", "rule", "--exit-config", '{"mode": "qexit", "q": 0.5}')
    _, verified = rows_of(ledger, *asked, *ruled)
    assert verified.mode == "qexit" and verified.course is None and verified.same_tokens is True


@pytest.fixture
def code(tmp_path):
    """A folder of published code: ours, under another name."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "code.py").write_text("from sigma0.models import OuroConfig, OuroForCausalLM\n")
    auto_map = {"AutoConfig": "code.OuroConfig", "AutoModelForCausalLM": "code.OuroForCausalLM"}
    (folder / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    return folder


@pytest.mark.exhaustive
def test_published_code_writes_the_tokens_of_full_depth(code, ledger):
    full, published = rows_of(ledger, "pocket", *SMALL, "--published-code", str(code), "--ways", "full")
    assert published.way == "published" and published.same_tokens is True and published.runner == "eager"
    assert published.passes_per_token == full.passes_per_token == full.total_loops
    assert published.kv_bytes_in_use == full.kv_bytes_in_use
    assert published.speed_ratio.value > 0 and published.prompt_tokens_per_second > 0
    assert {"published code on torch", "published code on transformers"} < set(published.versions)


@pytest.mark.slow
def test_published_code_that_cannot_run_is_refused(code, ledger):
    asked = ("speed", "pocket", *SMALL, "--published-code", code, "--ways", "full", "--out", ledger)
    (code / "code.py").write_text("import a_module_that_nobody_has\n")
    assert "ended with exit code 1" in refused(*asked, "--published-python", sys.executable)
    (code / "config.json").write_text("{}")
    assert "has no config.json with an auto_map" in refused(*asked)
    assert "leave out with the engine" in refused(*asked, "--by", "engine")
