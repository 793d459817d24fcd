"""Runs over items: order, failures, the cache, batches, scores, the command; and spread over workers the same rows."""

import json
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from threading import Barrier

import pytest

from sigma0.bench.core.ledger import read_rows
from sigma0.bench.core.rows import StrategyQARow
from sigma0.bench.strategyqa.asking import AnswerCache, AskSettings
from sigma0.bench.strategyqa.batched import BatchedChat
from sigma0.bench.strategyqa.items import load_both, load_items, world_items
from sigma0.bench.strategyqa.level import Level, Prediction, read_answer, run_level
from sigma0.bench.strategyqa.opening import Opening, do_level, pieces_of
from sigma0.bench.strategyqa.registry import EXPERIMENTS, ONCE, Makings, chain_of_thought, direct
from sigma0.bench.strategyqa.table import score
from sigma0.reason.chat import ChatFailed, Completion, LocalChat, ScriptedChat
from sigma0.reason.messages import ChatSettings, Usage
from tests.bench.core.worker_items import Here
from tests.bench.running import bench, refused
from tests.reference import tiny_llama

ITEMS = world_items(8)
SETTINGS = AskSettings()
L0 = Level("L0", direct)
USER = [{"role": "user", "content": "Is it?"}]


def test_a_level_that_needs_items_is_not_made_without():
    for name in ("L2-rag", "L5-icl"):
        with pytest.raises(ValueError, match=name):
            EXPERIMENTS[name](Makings())


@pytest.mark.parametrize(
    "text, answer",
    [
        ("Yes", True), ("no.", False), (" **Yes**, because", True), ("The answer is no", False), ("Answer: YES!", True),
        ("I think the answer is yes. No, wait. The answer is no.", False), ("Final answer: No", False),
        ("Nothing", None), ("", None), ("Maybe yes", None), ("Yesterday", None), ("nowhere", None), ("It is so", None),
        ("Yes or No.", None), ("no/yes", None), ("Yes, and no", None), ("Answer: Yes or No", None), ("No idea.", None),
        ("No information is given", None), ("The answer is no answer", None), ("Answer: no or yes. Answer: no", False),
        ("No, and no again", False), ("No more", False), ("Yes" + "/" * 10_000, True),
    ],
)  # fmt: skip
def test_only_a_yes_or_no_that_was_given_is_an_answer(text, answer):
    assert read_answer(text) is answer


def test_world_items_are_questions_of_several_hops_with_both_answers():
    items = world_items(40)
    assert {item.answer for item in items} == {True, False} and len({item.qid for item in items}) == 40
    assert all(len(item.facts) >= 2 and item.question.endswith("?") for item in items)
    assert not {item.question for item in items} & {item.question for item in world_items(40, "train")}


def published(n, start=0):
    return [
        {
            "qid": f"q{number}", "term": "x", "description": "d", "question": "Is it?", "answer": number % 2 == 0,
            "facts": ["f"], "decomposition": ["a?", "b?"], "evidence": [[[["P-1"]], ["operation"]]],
        }
        for number in range(start, start + n)
    ]  # fmt: skip


@pytest.mark.slow
def test_published_files_are_checked(tmp_path):
    def write(train, dev):
        (tmp_path / "train.json").write_text(json.dumps(train))
        (tmp_path / "dev.json").write_text(json.dumps(dev))

    write(published(2061), published(229, 3000))
    train, dev = load_both(str(tmp_path))
    assert (len(train), len(dev)) == (2061, 229)
    cases = [
        (published(2060), published(229, 3000), "2060 items with 2060 ids, not 2061"),
        ([*published(2060), *published(1)], published(229, 3000), "2061 items with 2060 ids"),
        (published(2061), published(229), "229 items stand in train and in dev, such as q0"),
        (published(2061), [{**published(1)[0], "answer": "yes"}], "answer"),
        (published(2061), [{**published(1)[0], "more": 1}], "more"),
    ]
    for train, dev, message in cases:
        write(train, dev)
        with pytest.raises(ValueError, match=message):
            load_both(str(tmp_path))
    (tmp_path / "dev.json").write_text("[")
    with pytest.raises(ValueError, match="no list of items: Invalid JSON"):
        load_items(str(tmp_path), "dev")


def test_items_are_answered_beside_each_other_and_told_in_their_order():
    together = Barrier(4, timeout=30)

    def said(messages, **_):
        together.wait()
        return "Yes"

    run = run_level(L0, ITEMS, ScriptedChat(said), SETTINGS, concurrency=4)
    assert [entry.qid for entry in run.answered] == [item.qid for item in ITEMS]
    assert run.right == sum(item.answer for item in ITEMS) and run.usage.calls == 8
    assert all(entry.purposes == ("answer",) for entry in run.answered)


def test_a_question_without_an_answer_is_asked_again_and_then_missed():
    counts = dict.fromkeys((item.qid for item in ITEMS), 0)

    def said(messages, **_):
        item = next(item for item in ITEMS if item.question in messages[0]["content"])
        counts[item.qid] += 1
        if item is ITEMS[0] or (item is ITEMS[1] and counts[item.qid] == 1):
            raise ChatFailed("the line is cut")
        return "No"

    run = run_level(L0, ITEMS, ScriptedChat(said), SETTINGS, retries=2)
    assert [counts[item.qid] for item in ITEMS] == [3, 2, *[1] * 6]
    assert run.answered[0].prediction == Prediction(None, "no answer: the line is cut")
    assert dict(run.misses) == {"no answer": 1} and not run.answered[0].right


def test_only_the_attempt_that_counts_is_counted():
    """A question that failed after another one: what its attempt asked before is in neither usage nor purposes."""
    reported = iter(["First it is", ChatFailed("the line is cut"), "It is", "No"])

    def said(messages, **_):
        result = next(reported)
        if isinstance(result, ChatFailed):
            raise result
        return result

    run = run_level(Level("L1-cot", chain_of_thought), ITEMS[:1], ScriptedChat(said), SETTINGS, retries=1)
    assert not list(reported) and run.usage.calls == 2 and run.answered[0].purposes == ("reason", "answer")


def test_a_level_is_never_scored_on_what_it_was_made_from():
    level = EXPERIMENTS["L5-icl"](Makings(train=[*world_items(3, "train"), ITEMS[2]]))
    with pytest.raises(ValueError, match=f"made from 1 of the items to be scored, such as {ITEMS[2].qid}"):
        run_level(level, ITEMS, ScriptedChat([]), SETTINGS)


def test_the_cache_repeats_a_run_without_a_question(tmp_path, pocket):
    chat = LocalChat(*pocket, "pocket")
    path = tmp_path / "cache.jsonl"
    first = run_level(L0, ITEMS, chat, SETTINGS, AnswerCache(path, {"pocket": "a"}))
    silent = ScriptedChat([], "pocket")
    again = run_level(L0, ITEMS, silent, SETTINGS, AnswerCache(path, {"pocket": "a"}))
    assert [entry.prediction for entry in again.answered] == [entry.prediction for entry in first.answered]
    assert again.usage == first.usage
    # other weights, settings, or words are other questions
    for identity, settings in (("b", SETTINGS), ("a", AskSettings(max_tokens=9)), ("a", AskSettings(effort="low"))):
        result = run_level(L0, ITEMS, silent, settings, AnswerCache(path, {"pocket": identity}), retries=0)
        assert dict(result.misses) == {"no answer": 8}
    path.write_bytes(path.read_bytes()[:-20])
    assert len(AnswerCache(path, {"pocket": "a"})) == 7
    path.write_text('{"key": "x", "answer": {"text": "y"}}\n')
    with pytest.raises(ValueError, match="line 1"):
        AnswerCache(path, {})


def test_an_answer_of_before_there_were_grammars_is_found(tmp_path):
    first = {"effort": "low", "max_tokens": 9, "temperature": 0.0, "seed": 3, "stop": []}
    key = sha256(json.dumps(["scripted", "digest", USER, first], sort_keys=True).encode()).hexdigest()
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"key": key, "answer": Completion("Yes.").to_dict()}) + "\n")
    cache, chat = AnswerCache(path, {"scripted": "digest"}), ScriptedChat([])
    settings = AskSettings("low", 9, 0.0, 3)
    assert cache.get(chat, USER, settings) == Completion("Yes.")
    held = AskSettings("low", 9, 0.0, 3, grammar='start: "No."')
    assert cache.get(chat, USER, held) is None
    cache.put(chat, USER, held, Completion("No."))
    assert AnswerCache(path, {"scripted": "digest"}).get(chat, USER, held) == Completion("No.")
    assert cache.get(chat, USER, settings) == Completion("Yes.")


def test_batches_say_what_each_question_is_told_alone(pocket):
    settings = {"vocab_size": len(pocket[1]), "initializer_range": 0.3, "max_position_embeddings": 512}
    chat = LocalChat(tiny_llama(seed=6, num_hidden_layers=2, **settings), pocket[1], "plain")
    stop = AskSettings(max_tokens=12, stop=("the",))
    for settings in (AskSettings(max_tokens=12), stop):
        alone = run_level(L0, ITEMS, chat, settings)
        batched = run_level(L0, ITEMS, BatchedChat(chat, 3), settings, concurrency=8)
        assert [entry.prediction for entry in batched.answered] == [entry.prediction for entry in alone.answered]
        assert batched.usage.completion_tokens == alone.usage.completion_tokens
    with pytest.raises(ChatFailed, match="context of 512"):
        BatchedChat(chat, 3).complete([{"role": "user", "content": "Is it? " * 300}], ChatSettings(max_tokens=1))


def test_scores_are_paired_with_the_baseline():
    right = ["Yes" if item.answer else "No" for item in ITEMS]
    wrong = ["No" if item.answer else "Yes" for item in ITEMS]
    runs = []
    for name, answers in (("L0", wrong), ("L1-coc", right), ("L4-pipeline", ["?"] * 8)):
        chat = ScriptedChat(Completion(text, Usage(1, 5, 2)) for text in answers)
        run = run_level(L0, ITEMS, chat, SETTINGS, retries=0)
        runs.append(type(run)(name, "none", run.answered))
    assert [entry["p_value"] for entry in score(runs[1:])] == [None, None], "without the baseline nothing is compared"
    _, first, second = result = score(runs)
    assert [entry["accuracy"].value for entry in result] == [0.0, 1.0, 0.0]
    assert [entry["difference"] for entry in result] == [None, 1.0, 0.0]
    assert first["p_value"] == 2 / 2**8 and first["p_holm"] == 4 / 2**8 and second["p_holm"] == 1.0
    assert second["misses"] == {"answer": 8} and first["calls"] == 1.0 and first["completion_tokens"] == 16


@pytest.mark.exhaustive
def test_the_command_runs_every_level_on_the_shipped_model_and_repeats_itself(tmp_path, ledger):
    cache, picture = tmp_path / "cache.jsonl", tmp_path / "levels.svg"
    options = ("strategyqa", "-e", "all", "-n", 2, "--max-new-tokens", 12, "--cache", cache, "--out", ledger)
    result = bench(*options, "--picture", picture)
    assert "under 200, differences of 10 points are noise" in result.stdout and picture.stat().st_size > 1000
    bench(*options, "--json")
    rows = read_rows(ledger)
    assert all(isinstance(row, StrategyQARow) for row in rows) and [row.level for row in rows] == [*ONCE, *ONCE]
    told = [row.model_dump(exclude={"time"}) for row in rows]
    assert told[: len(ONCE)] == told[len(ONCE) :]
    assert {row.level: row.labels for row in rows}["L5"] == "each item's own, behind its prediction"


@pytest.mark.parametrize(
    "options, message",
    [
        (["-e", "L9"], "no such level: 'L9'"),
        (["-e", "L0", "-e", "L0"], "named twice"),
        (["-e", "L0", "--effort", "huge"], "no such effort: 'huge'"),
        (["-e", "L4", "--route", "dice"], "no such route: 'dice'"),
        (["-e", "L0", "--data", "/no/where", "--split", "test"], "no such split: 'test'"),
        (["-e", "L0", "--data", "/no/where"], "is no folder"),
        (["-e", "L0", "--workers", "2", "--base-url", "http://127.0.0.1:9/v1"], "raise --concurrency instead"),
    ],
)
def test_bad_input_is_told_in_a_line(options, message):
    assert message in refused("strategyqa", *options)


def test_a_ledger_that_cannot_be_read_is_told_before_a_question_is_asked(tmp_path, ledger):
    cache = tmp_path / "cache.jsonl"
    ledger.write_text('{"benchmark": "beauty"}\n')
    assert "line 1" in refused("strategyqa", "-e", "L0", "-n", 2, "--cache", cache, "--out", ledger)
    assert not cache.exists()


def opening(**changes):
    reported = {"n": 5, "device": "cpu", "dtype": "float32", "concurrency": 2, "retries": 0, "max_new_tokens": 6}
    return Opening(**(reported | changes))


def made(opened, names=ONCE):
    return [(name, EXPERIMENTS[name](opened.makings)) for name in names]


def test_as_many_items_go_to_a_worker_as_it_answers_at_a_time():
    reported = opening()
    opened = replace(reported.open(), concurrency=2)
    pieces = pieces_of(made(opened, ("L0", "L5", "L2")), reported, opened)
    result = [(piece["level"], piece["first"], piece["step"]) for piece in pieces]
    assert result == [("L5", 0, 5), *[(name, first, 2) for name in ("L0", "L2") for first in (0, 2, 4)]]


def test_an_opening_is_the_same_behind_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # a folder does not take the place of a name
    for name in ("world", "pocket", "big"):
        (tmp_path / name).mkdir()
    reported = opening(cache=Path("answers.jsonl"), ladder="pocket, big", route="verdict")
    assert Opening.model_validate_json(reported.model_dump_json()) == reported
    result = reported.resolved()
    assert result.cache == tmp_path / "answers.jsonl" and result.ladder == f"pocket,{tmp_path / 'big'}"
    assert (result.data, result.model, result.paragraphs) == ("world", "pocket", None)
    with pytest.raises(ValueError, match="seeds"):
        Opening(**{**dict(reported), "seeds": 3})


def test_a_worker_that_finds_something_else_under_the_names_is_refused(tmp_path):
    shown = tmp_path / "steps.json"
    shown.write_text("[]")
    reported = opening(template=shown)
    opened = reported.open()
    (piece, *_) = pieces_of([("L0", EXPERIMENTS["L0"](opened.makings))], reported, opened)
    shown.write_text("[ ]")
    with pytest.raises(ValueError, match="other weights, items or files under the same names"):
        do_level(piece)


def test_what_names_hide_is_in_the_digest(tmp_path):
    shown = tmp_path / "shown.json"
    digests = [opening().open().sha256(), opening(n=4).open().sha256()]
    for text in ("[]", "[ ]"):
        shown.write_text(text)
        digests.append(opening(demonstrations=shown).open().sha256())
    digests.append(opening(model="pocket-large").open().sha256())
    assert len(set(digests)) == 5
    assert opening().open().sha256() == digests[0]


def test_the_rows_of_workers_are_those_of_one_process(tmp_path, monkeypatch):
    """With Ray's workers, and where one is killed: `fidelity/test_fidelity_command.py`, `core/test_workers.py`."""
    out, alone, pool = tmp_path / "two.jsonl", tmp_path / "one.jsonl", Here(2)
    pool.redone = 1
    monkeypatch.setattr("sigma0.bench.core.workers.worker_pool", lambda workers, *_: nullcontext(pool))
    # a worker that goes on to another run begins anew with a level that learns
    size = ("-e", "L0", "-e", "L5", "-n", 3, "--max-new-tokens", 6, "--device", "cpu", "--dtype", "float32")
    for path, workers in ((out, 2), (tmp_path / "again.jsonl", 2), (alone, 1)):
        result = bench("strategyqa", *size, "--workers", workers, "--out", path)
        assert ("1 parts were done again" in result.stderr) == (workers == 2)
    assert not list(tmp_path.glob(".two-*.work.jsonl")), "what was kept for the run goes with its end"
    # without what the clock says
    rows, expected = ([row.model_dump(exclude={"time", "seconds"}) for row in read_rows(path)] for path in (out, alone))
    assert rows == expected and [row["level"] for row in rows] == ["L0", "L5"]
