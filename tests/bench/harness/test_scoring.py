import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.bench.harness.scoring import Pair, read_exit, score
from sigma0.calibrate.teacher_forcing import ForcedText, read_forced
from sigma0.config import ExitConfig

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
