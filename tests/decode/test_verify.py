"""`verify` writes what full depth writes: token for token when greedy, in distribution when drawn."""

from dataclasses import replace
from unittest.mock import Mock, call

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.generation.streamers import BaseStreamer

import sigma0
from sigma0 import ExitConfig
from tests.decode.test_conformance import written
from tests.reference import gap, settled_model, tiny_model

FULL = ExitConfig(mode="full")
FIRST = ExitConfig(mode="fixed", depth=1, after_exit="verify")
RULES = st.one_of(
    st.floats(0.05, 1.0).map(lambda q: ExitConfig(q=q, after_exit="verify")),
    st.floats(0.01, 0.9).map(lambda theta: ExitConfig(mode="margin", theta=theta, after_exit="verify")),
    st.floats(0.05, 2.0).map(lambda eps: ExitConfig(mode="converge", eps=eps, after_exit="verify")),
    st.floats(0.05, 2.0).map(lambda eps: ExitConfig(mode="accel", eps=eps, patience=1, after_exit="verify")),
    st.integers(1, 3).map(lambda depth: ExitConfig(mode="fixed", depth=depth, after_exit="verify")),
    st.just(ExitConfig(mode="full", after_exit="verify")),
)
MODELS = [
    tiny_model(seed=0, total_ut_steps=3, num_hidden_layers=2),
    settled_model(seed=1, total_ut_steps=4, num_hidden_layers=1),
    settled_model(seed=2, total_ut_steps=6, num_hidden_layers=1),
    tiny_model(seed=3, total_ut_steps=3, num_hidden_layers=1),
]


def run(model, ids, config, new, mask=None, **asked):
    mask = torch.ones_like(ids) if mask is None else mask
    return written(model, ids.tolist(), config, new, attention_mask=mask, **asked)


@pytest.mark.slow
@given(st.sampled_from(MODELS), RULES, st.integers(1, 4), st.integers(1, 14), st.integers(0, 2**16), st.booleans())
def test_text_and_scores_of_processed_logits_are_those_of_full_depth(model, config, batch, new, seed, redraft):
    ids = torch.randint(8, 61, (batch, 1 + seed % 7), generator=torch.Generator().manual_seed(seed))
    asked = {"repetition_penalty": 1.4, "output_scores": True}
    full, result = (run(model, ids, item, new, **asked) for item in (FULL, replace(config, redraft=redraft)))
    assume(min(gap(row) for step in full.scores for row in step) > 1e-4)
    assert result.sequences.tolist() == full.sequences.tolist()
    for mine, theirs in zip(result.scores, full.scores, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("after_exit", ["finish", "drop", "verify"])
def test_a_stream_keeps_nothing_for_gradients(pocket, after_exit):
    prompt, config = "Mary went to the kitchen. Where is Mary?", {"q": 0.3, "after_exit": after_exit}
    tokens = sigma0.stream(*pocket, prompt, exit_config=config)
    waiting = [tokens._loop.cache.in_flight for _ in tokens]
    kept = [in_flight.hidden.requires_grad for in_flight in waiting if in_flight is not None]
    assert (kept or after_exit == "drop") and not any(kept)


def test_only_checked_tokens_are_streamed():
    model, ids = MODELS[1], torch.tensor([[9, 10, 11]])
    full = run(model, ids, FULL, 12).sequences[0, 3:].tolist()
    streamer = Mock(BaseStreamer)
    model.generate(ids, max_new_tokens=12, do_sample=False, exit_config=FIRST, streamer=streamer)
    put = [given.args[0].tolist() for given in streamer.put.call_args_list]
    assert [token for chunk in put[1:] for token in chunk] == full and streamer.method_calls[-1] == call.end()
    with pytest.raises(ValueError, match="streamer on a batch"):
        model.generate(ids.expand(2, -1), max_new_tokens=2, exit_config=FIRST, streamer=streamer)


def test_what_keeps_state_between_calls_is_refused_by_name():
    model, ids, calls = MODELS[1], torch.tensor([[9, 10, 11]]), []

    def counting(ids, scores):
        calls.append(ids.shape[1])
        return scores

    def sated(ids, scores, **_):
        calls.append(ids.shape[1])
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(ValueError, match=r"counting keeps state.*verify"):
        run(model, ids, FIRST, 4, logits_processor=[counting])
    with pytest.raises(ValueError, match=r"sated keeps state"):
        run(model, ids, FIRST, 4, stopping_criteria=[sated])


def test_strangers_see_one_sequence_at_a_time():
    model = MODELS[1]
    ids, mask = torch.tensor([[9, 10, 11], [0, 13, 12]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    config = ExitConfig(mode="fixed", depth=2, after_exit="verify")

    def bent(ids, scores):
        scores[:, ids[0, -1] % 7 :: 7] -= 1.5
        return scores

    result = run(model, ids, config, 9, mask, logits_processor=[bent])
    for row in range(2):
        alone = run(model, ids[[row]], FULL, 9, mask[[row]], logits_processor=[bent])
        assert result.sequences[row].tolist() == alone.sequences[0].tolist()


def test_a_callers_function_gets_the_true_batch_index():
    model = MODELS[1]
    ids = torch.tensor([[9, 10, 11], [14, 13, 12], [20, 21, 22]])
    allowed = {0: list(range(8, 30)), 1: list(range(30, 50)), 2: list(range(50, 61))}
    asked = set()

    def prefix(batch, sent):
        asked.add(batch)
        return allowed[batch]

    result = run(model, ids, FIRST, 8, prefix_allowed_tokens_fn=prefix)
    full = run(model, ids, FULL, 8, prefix_allowed_tokens_fn=prefix)
    assert result.sequences.tolist() == full.sequences.tolist() and asked == {0, 1, 2}


def test_a_single_step_is_refused_and_a_forward_reads_at_full_depth():
    model, ids = MODELS[1], torch.tensor([[9, 10, 11]])
    cache = model.new_cache()
    with torch.no_grad():
        logits = model(ids, exit_config=FIRST, past_key_values=cache).logits
        assert torch.equal(logits, model(ids, exit_config=FULL).logits)
        with pytest.raises(ValueError, match="call generate or stream"):
            model(ids[:, :1], exit_config=FIRST, past_key_values=cache)


@pytest.mark.parametrize(
    "answer", [bool, torch.tensor, lambda over: torch.tensor([over])], ids=["bool", "0-dim", "1-dim"]
)
def test_criteria_may_answer_in_any_form(answer):
    criteria = {"stopping_criteria": [lambda ids, scores, **_: answer(ids.shape[1] >= 6)]}
    texts = [run(MODELS[1], torch.tensor([[9, 10]]), item, 9, **criteria).sequences.tolist() for item in (FULL, FIRST)]
    assert texts[0] == texts[1] and len(texts[0][0]) == 6


@pytest.mark.parametrize(
    "ends, length",
    [(lambda ids, scores: ids.shape[1] - 2 > len(scores), 11), (lambda ids, scores: len(scores) >= 4, 6)],
    ids=["at drafts alone", "at loop T alone"],
)
def test_what_a_criterion_says_of_a_draft_is_followed_only_if_it_says_so_at_loop_t(ends, length):
    """Scores are kept for told tokens alone: a draft that runs ahead of them may seem to be the last, or not to be."""
    own = [lambda ids, scores, **_: torch.tensor([ends(ids, scores)])]
    ids, criteria = torch.tensor([[9, 10]]), {"stopping_criteria": own, "output_scores": True}
    full, result = (run(MODELS[2], ids, config, 9, **criteria) for config in (FULL, FIRST))
    assert result.sequences.tolist() == full.sequences.tolist() and result.sequences.shape[1] == length
    assert result.past_key_values.length == full.past_key_values.length
    assert length == 6 or not result.accepted.all(), "no draft seemed to be the last: that was not tested"


def test_a_cache_whose_last_tokens_were_taken_back_goes_on_without_a_mask():
    model, generator = MODELS[1], torch.Generator().manual_seed(3)
    trimmed = 0
    for _ in range(12):
        ids = torch.randint(8, 61, (2, 4), generator=generator)
        mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
        text = run(model, ids, FULL, 8, mask).sequences[:, 4:]
        # Both sequences end with a token that full depth writes, so that followers of a draft may outlive the text.
        kwargs = {"eos_token_id": [int(text[0, 3]), int(text[1, 4])]}
        full, result = run(model, ids, FULL, 8, mask, **kwargs), run(model, ids, FIRST, 8, mask, **kwargs)
        assert result.sequences.tolist() == full.sequences.tolist()
        caches = [item.past_key_values for item in (full, result)]
        assert caches[1].length == caches[0].length
        trimmed += not result.accepted[result.exit_depths > 0].all()
        nexts = [model(torch.tensor([[33], [34]]), past_key_values=cache, exit_config=FULL).logits for cache in caches]
        torch.testing.assert_close(nexts[0], nexts[1], rtol=1e-4, atol=1e-4)
    assert trimmed


@pytest.mark.parametrize("new", [1, 2, 3])
@pytest.mark.parametrize("after", ["finish", "drop", "verify"])
def test_a_text_of_few_tokens_has_as_many_and_no_more(new, after):
    model, ids = tiny_model(seed=3, total_ut_steps=4), torch.tensor([[5, 9, 2]])
    config = ExitConfig(q=0.4, after_exit=after)
    asked = {"exit_config": config, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    out = model.generate(ids, max_new_tokens=new, **asked)
    longer = model.generate(ids, max_new_tokens=5, **asked)
    assert out.sequences[0].tolist() == longer.sequences[0, : 3 + new].tolist()
    assert out.exit_depths[0].tolist() == longer.exit_depths[0, :new].tolist()
    if after == "verify":
        assert (out.tail_passes == 0) == (new == 1) and out.loop_passes >= out.tail_passes
