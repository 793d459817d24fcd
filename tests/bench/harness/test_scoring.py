import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sigma0
from sigma0.bench.harness.items import TASKS
from sigma0.bench.harness.scoring import Pair, WriteSettings, read_exit, score, truncate_at_stop, write
from sigma0.bench.harness.telemetry import BatchCost, DepthLog, DepthTally, Reading
from sigma0.calibrate.teacher_forcing import ForcedText, read_forced
from sigma0.config import ExitConfig
from sigma0.signals.savings import savings

FULL, EAGER = ExitConfig(mode="full"), ExitConfig(mode="qexit", q=0.3)
VOCABULARY = 61
IDS = st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=9).map(tuple)
PAIRS = st.lists(st.builds(Pair, IDS, IDS), min_size=1, max_size=6)


def scores(model, pairs, exit_config, batch_size=4):
    result = dict(score(model, pairs, exit_config, batch_size))
    return [result[number] for number in range(len(pairs))]


def alone(model, pair, exit_config):
    """The definition, one text at a time."""
    ids = torch.tensor([pair.context + pair.continuation])
    with torch.no_grad():
        logits = model(ids, exit_config=exit_config, use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)[len(pair.context) - 1 : -1]
    targets = torch.tensor(pair.continuation)
    return float(logprobs[range(len(targets)), targets].sum()), bool((logprobs.argmax(-1) == targets).all())


@pytest.mark.slow
@settings(max_examples=25)
@given(PAIRS, st.sampled_from([FULL, EAGER, ExitConfig(mode="fixed", depth=2)]), st.integers(1, 4))
def test_a_score_is_the_sum_over_the_continuation_whatever_else_is_in_the_batch(tiny, pairs, exit_config, batch_size):
    for pair, result in zip(pairs, scores(tiny, pairs, exit_config, batch_size), strict=True):
        logprob, greedy = alone(tiny, pair, exit_config)
        assert result.logprob == pytest.approx(logprob, abs=1e-4)
        assert result.is_greedy == greedy
        assert len(result.reading.depths) == len(result.reading.reasons) == len(pair.continuation)


def test_depths_are_those_of_teacher_forcing(pocket):
    model, tokenizer = pocket
    story = tuple(tokenizer("Mary went to the kitchen. The cup was taken by Mary. Where is the cup?")["input_ids"])
    answer = tuple(tokenizer(" The cup is in the kitchen.")["input_ids"])
    config = ExitConfig(mode="qexit", q=0.6)
    (result,) = scores(model, [Pair(story, answer)], config)
    text = ForcedText(story + answer, len(answer))
    readings = read_forced(model, {"rule": model.exit_rule(config)}, [text])
    assert list(result.reading.depths) == readings.exits["rule"][readings.is_new].tolist()
    assert len(set(result.reading.depths)) > 1
    assert set(result.reading.reasons) <= {"threshold_met", "max_depth"}


def test_verify_is_scored_at_full_depth_and_drop_like_finish(tiny):
    pairs = [Pair((5, 6, 7), (8, 9))]
    verify, drop = ExitConfig(mode="qexit", q=0.3, after_exit="verify"), ExitConfig(q=0.3, after_exit="drop")
    assert read_exit(verify) == FULL
    assert scores(tiny, pairs, verify) == scores(tiny, pairs, FULL)
    assert scores(tiny, pairs, drop) == scores(tiny, pairs, EAGER)


def test_continuations_of_one_context_are_read_once(tiny, monkeypatch):
    read = []
    forward = type(tiny).forward
    monkeypatch.setattr(
        type(tiny), "forward", lambda self, ids, **kwargs: read.append(ids.shape) or forward(self, ids, **kwargs)
    )
    scores(tiny, [Pair((5, 6, 7), (8,)), Pair((5, 6, 7), (9,)), Pair((5, 6), (7, 8))], FULL)
    assert read == [(1, 3)]


def test_a_long_context_loses_its_beginning(tiny):
    limit = tiny.config.max_position_embeddings
    ids = tuple(3 + number % 50 for number in range(limit + 5))
    (result,) = scores(tiny, [Pair(ids, (4, 5))], FULL)
    (short,) = scores(tiny, [Pair(ids[-(limit - 1) :], (4, 5))], FULL)
    assert result.logprob == pytest.approx(short.logprob, abs=1e-4)
    assert (result.reading.truncated, short.reading.truncated) == (6, 0)
    with pytest.raises(ValueError, match="exceeds the model's context"):
        scores(tiny, [Pair((3,), ids)], FULL)


@pytest.mark.parametrize("ids", [((), (1,)), ((1,), ())])
def test_a_pair_has_two_sides(ids):
    with pytest.raises(ValueError, match="a context of"):
        Pair(*ids)


GREEDY = {"do_sample": False}
EXITS = [
    ExitConfig(mode="full"),
    ExitConfig(mode="qexit", q=0.6),
    ExitConfig(mode="qexit", q=0.6, after_exit="verify"),
    ExitConfig(mode="margin", theta=0.5, after_exit="drop"),
]


@pytest.fixture(scope="module")
def prompts():
    return [json.loads(line)["prompt"] for line in (TASKS / "micro_world_answer.jsonl").read_text().splitlines()[:5]]


def written(pocket, prompts, exit_config, until=(), new=24):
    model, tokenizer = pocket
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    return write(model, tokenizer, ids, WriteSettings(exit_config, new, tuple(until), GREEDY))


@pytest.mark.parametrize("exit_config", EXITS, ids=lambda config: f"{config.mode}-{config.after_exit}")
def test_a_batch_writes_what_generate_writes_alone(pocket, prompts, exit_config):
    batch = written(pocket, prompts, exit_config)
    for prompt, text, reading in zip(prompts, batch.texts, batch.readings, strict=True):
        known = sigma0.generate(*pocket, prompt, exit_config=exit_config, max_new_tokens=24, verdict=False)
        assert text == known.text
        assert reading.depths == tuple(token.depth for token in known.tokens)
        assert reading.reasons == tuple(token.reason for token in known.tokens)


def test_a_batch_takes_fewer_passes_than_its_rows_alone(pocket, prompts):
    batch = written(pocket, prompts, EXITS[1])
    alone = [written(pocket, [prompt], EXITS[1]).cost for prompt in prompts]
    assert batch.cost.passes < sum(cost.passes for cost in alone)
    assert batch.cost.prompt_rows == sum(cost.prompt_rows for cost in alone)
    depths = [reading.depths for reading in batch.readings]
    assert savings(depths, batch.cost.passes, batch.cost.rows, pocket[0].num_loops).passes_saved > 0


def test_a_text_ends_ahead_of_the_first_string(pocket, prompts):
    whole = written(pocket, prompts[:2], EXITS[1]).texts
    stopped = written(pocket, prompts[:2], EXITS[1], until=(" in the", " comes from"))
    assert [truncate_at_stop(text, (" in the", " comes from")) for text in whole] == list(stopped.texts)
    assert all(len(short) < len(text) for short, text in zip(stopped.texts, whole, strict=True))


def test_a_long_prompt_loses_its_beginning(pocket):
    model, tokenizer = pocket
    ids = tokenizer("Mary went to the kitchen. " * 600)["input_ids"]
    limit = model.config.max_position_embeddings
    batch = write(model, tokenizer, [ids[-200:], ids], WriteSettings(EXITS[0], 4, (), GREEDY))
    assert [reading.truncated for reading in batch.readings] == [0, len(ids) - (limit - 4)]
    with pytest.raises(ValueError, match="leaves no room"):
        write(model, tokenizer, [ids], WriteSettings(EXITS[0], limit, (), GREEDY))


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
