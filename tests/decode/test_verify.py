"""`verify` writes what full depth writes: token for token when greedy, in distribution when drawn."""

from collections import deque
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import sigma0
from sigma0 import ExitConfig
from sigma0.bench.lossless.drafts import full_texts, record, simulate
from sigma0.decode.native_runner import NativeRunner
from sigma0.decode.step import EMITTED, ENDS, FRESH, TOKEN
from tests.reference import gap, settled_model, tiny_model

FULL = ExitConfig(mode="full")
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


def run(model, ids, config, new, mask=None, **kwargs):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=new,
        do_sample=kwargs.pop("do_sample", False),
        exit_config=config,
        return_dict_in_generate=True,
        **kwargs,
    )


def near_tie(outputs):
    return any(gap(row[row.isfinite()]) < 1e-4 for step in outputs.scores for row in step if row.abs().sum() > 0)


@pytest.mark.slow
@given(
    st.sampled_from(MODELS),
    RULES,
    st.integers(1, 4),
    st.integers(1, 14),
    st.integers(0, 2**16),
    st.booleans(),
    st.sampled_from([1.0, 1.4]),
    st.booleans(),
)
def test_greedy_text_is_that_of_full_depth(model, config, batch, new, seed, early_end, penalty, redraft):
    config = replace(config, redraft=redraft)
    generator = torch.Generator().manual_seed(seed)
    prompt = 1 + seed % 7
    ids = torch.randint(8, 61, (batch, prompt), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : int(torch.randint(0, prompt, (), generator=generator))] = 0
    kwargs = {"repetition_penalty": penalty, "output_scores": True}
    full = run(model, ids, FULL, new, mask, **kwargs)
    if early_end:
        # An EOS that full depth really writes somewhere.
        kwargs["eos_token_id"] = int(full.sequences[seed % batch, prompt + seed % new])
        full = run(model, ids, FULL, new, mask, **kwargs)
    assume(not near_tie(full))
    found = run(model, ids, config, new, mask, **kwargs)
    assert found.sequences.tolist() == full.sequences.tolist()
    for mine, theirs in zip(found.scores, full.scores, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    total = model.num_loops
    lengths = (full.exit_depths > 0).sum(-1)
    assert ((found.exit_depths > 0).sum(-1) == lengths).all()
    assert (found.exit_depths <= total).all() and (found.exit_depths[:, 0] == total).all()
    # Where no draft stood, the token was read at T.
    told = found.exit_depths > 0
    undrafted = told & ~found.accepted
    assert (found.exit_depths[undrafted] == total).all()
    assert found.accepted[:, 0].all() and not found.accepted[~told].any()
    # Never more passes than full depth, and at least those of the exits that stood.
    assert found.loop_passes <= total * (int(lengths.max()) - 1)
    longest = (found.exit_depths[:, 1:].sum(-1)).max()
    assert found.loop_passes >= int(longest)
    assert 0 <= found.tail_passes < total
    if batch == 1:
        # Drafts that are overruled, or made anew on the way, throw away what was computed behind them.
        assert found.loop_rows >= total * (int(lengths[0]) - 1)
        assert redraft or undrafted.any() or found.loop_rows == total * (int(lengths[0]) - 1)


@pytest.mark.parametrize("redraft", [False, True])
def test_what_is_overruled_ran_out_of_loops_and_was_not_the_rules_choice(redraft):
    model = MODELS[1]
    # Met at the first loop of every token: whatever does not stand was drafted and overruled.
    config = ExitConfig(q=1e-6, after_exit="verify", redraft=redraft)
    found = run(model, torch.tensor([[9, 10, 11], [20, 33, 41], [8, 9, 8]]), config, 16, eos_token_id=None)
    reasons = {
        stands: {reason for row, told in zip(found.exit_reasons, found.accepted.tolist(), strict=True)
                 for reason, accepted in list(zip(row, told, strict=True))[1:] if accepted == stands}
        for stands in (True, False)
    }  # fmt: skip
    assert reasons == {True: {"threshold_met"}, False: {"max_depth"}}


def test_a_rule_that_never_stops_early_costs_what_full_depth_does():
    model, ids = MODELS[1], torch.tensor([[9, 10, 11]])
    full, found = run(model, ids, FULL, 8), run(model, ids, ExitConfig(q=1.0, after_exit="verify"), 8)
    assert (found.loop_passes, found.loop_rows, found.tail_passes) == (full.loop_passes, full.loop_rows, 0)
    assert found.accepted.all() and (found.exit_depths == 4).all()


def test_proposals_that_stand_save_passes():
    model, ids = MODELS[2], torch.tensor([[9, 10, 11]])
    once = ExitConfig(mode="margin", theta=0.05, after_exit="verify", redraft=False)
    found, full = run(model, ids, once, 20), run(model, ids, FULL, 20)
    again = run(model, ids, replace(once, redraft=True), 20)
    assert found.sequences.tolist() == full.sequences.tolist() == again.sequences.tolist()
    assert again.loop_passes < found.loop_passes < full.loop_passes and found.accepted.float().mean() > 0
    assert not found.accepted.all(), "no draft was rejected: the test would not tell"
    # Redrawn on the way, and right before T: told with the loop of the readout that drafted them.
    redrawn = ~found.accepted[0] & again.accepted[0]
    assert redrawn.any() and (again.exit_depths[0, redrawn] < 6).all()
    assert again.head_rows > found.head_rows


@pytest.mark.parametrize("redraft", [False, True])
def test_passes_are_those_of_the_readouts_at_full_depth(redraft):
    """What a run costs follows from the argmax of each loop along the text: the simulation's count, to the pass."""
    redrafts_save = verify_saves = 0
    for theta, model, prompt in product((0.02, 0.1, 0.4), MODELS[1:3], ([9, 10, 11], [20, 33, 41, 50], [8])):
        config = ExitConfig(mode="margin", theta=theta, after_exit="verify", redraft=redraft)
        simulated = simulate(*record(model, [tuple(prompt)], full_texts(model, [tuple(prompt)], 12), config))
        found = run(model, torch.tensor([prompt]), config, 12, eos_token_id=None)
        assert found.loop_passes == (simulated.with_redraft if redraft else simulated.passes)
        redrafts_save += simulated.with_redraft < simulated.passes
        verify_saves += simulated.passes < simulated.full
    assert redrafts_save and verify_saves


def test_a_golden_checkpoint_gives_the_tokens_of_full_depth(golden):
    ids = torch.randint(3, golden.model.config.vocab_size, (3, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    reference = run(golden.model, ids, FULL, 24, mask, eos_token_id=None)
    for config in (ExitConfig(q=0.3, after_exit="verify"), ExitConfig(mode="margin", theta=0.02, after_exit="verify")):
        found = run(golden.model, ids, config, 24, mask, eos_token_id=None)
        assert found.sequences.tolist() == reference.sequences.tolist()


def test_after_a_drafted_end_nothing_is_fed_until_it_is_verified():
    model, ids = MODELS[1], torch.tensor([[12, 20, 33]])
    plain = run(model, ids, FULL, 16, eos_token_id=None).sequences[0, 3:].tolist()
    drafts = []
    step = NativeRunner.step

    def spied(*args):
        stepped = step(*args)
        lines = stepped.lines
        fresh = (lines[:, FRESH] > 0) & (lines[:, EMITTED] == 0)
        drafts.extend((token, bool(ends)) for token, ends in lines[fresh][:, [TOKEN, ENDS]].tolist())
        return stepped

    config = ExitConfig(mode="fixed", depth=1, after_exit="verify")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeRunner, "step", spied)
        run(model, ids, config, 16, eos_token_id=None)
        wrong = [token for token, _ in drafts if token not in plain]
        assert wrong, "every draft was right: choose another seed"
        # An EOS that is drafted, but that full depth never writes: the text must run on past it.
        drafts.clear()
        found = run(model, ids, config, 16, eos_token_id=wrong[0])
    assert found.sequences[0, 3:].tolist() == plain
    assert (wrong[0], True) in drafts


@pytest.mark.parametrize("after_exit", ["finish", "drop", "verify"])
def test_a_stream_keeps_nothing_for_gradients(pocket, after_exit):
    prompt, config = "Mary went to the kitchen. Where is Mary?", {"q": 0.3, "after_exit": after_exit}
    tokens = sigma0.stream(*pocket, prompt, exit_config=config)
    waiting = [tokens._loop.cache.in_flight for _ in tokens]
    kept = [in_flight.hidden.requires_grad for in_flight in waiting if in_flight is not None]
    assert (kept or after_exit == "drop") and not any(kept)


def test_only_checked_tokens_are_streamed():
    model, ids = MODELS[1], torch.tensor([[9, 10, 11]])
    config = ExitConfig(mode="fixed", depth=1, after_exit="verify")
    full = run(model, ids, FULL, 12).sequences[0, 3:].tolist()
    put = []

    class Streamer:
        def put(self, value):
            put.append(value.tolist())

        def end(self):
            put.append("end")

    model.generate(ids, max_new_tokens=12, do_sample=False, exit_config=config, streamer=Streamer())
    assert put[-1] == "end" and [token for chunk in put[1:-1] for token in chunk] == full
    with pytest.raises(ValueError, match="streamer on a batch"):
        model.generate(ids.expand(2, -1), max_new_tokens=2, exit_config=config, streamer=Streamer())


def test_a_cache_goes_on_as_one_of_full_depth():
    model = MODELS[1]
    ids, mask = torch.tensor([[9, 10, 11], [0, 0, 12]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
    texts = []
    for config in (FULL, ExitConfig(mode="fixed", depth=1, after_exit="verify")):
        first = run(model, ids, config, 7, mask, eos_token_id=15)
        longer = torch.cat([first.sequences, torch.tensor([[20, 21], [22, 23]])], 1)
        seen = torch.cat([mask, torch.ones(2, longer.shape[1] - 3, dtype=torch.int64)], 1)
        again = run(model, longer, config, 6, seen, past_key_values=first.past_key_values)
        texts.append(again.sequences.tolist())
        alone = run(model, longer, FULL, 6, seen)
        assert again.sequences.tolist() == alone.sequences.tolist()
    assert texts[0] == texts[1]


class Counting(LogitsProcessor):
    """Remembers how often it was called."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.shape[1])
        return scores


class Bent(LogitsProcessor):
    """Keeps nothing; treats rows of a batch by themselves."""

    def __call__(self, input_ids, scores):
        scores[:, input_ids[0, -1] % 7 :: 7] -= 1.5
        return scores


class Sated(StoppingCriteria):
    def __init__(self):
        self.seen = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.seen += 1
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_what_keeps_state_between_calls_is_refused_by_name():
    model, ids = MODELS[1], torch.tensor([[9, 10, 11]])
    config = ExitConfig(mode="fixed", depth=1, after_exit="verify")
    with pytest.raises(ValueError, match=r"Counting keeps state.*verify"):
        run(model, ids, config, 4, logits_processor=LogitsProcessorList([Counting()]))
    with pytest.raises(ValueError, match=r"Sated keeps state"):
        run(model, ids, config, 4, stopping_criteria=StoppingCriteriaList([Sated()]))


def test_strangers_see_one_sequence_at_a_time():
    model = MODELS[1]
    ids, mask = torch.tensor([[9, 10, 11], [0, 13, 12]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    config = ExitConfig(mode="fixed", depth=2, after_exit="verify")
    found = run(model, ids, config, 9, mask, logits_processor=LogitsProcessorList([Bent()]))
    for row in range(2):
        alone = run(model, ids[[row]], FULL, 9, mask[[row]], logits_processor=LogitsProcessorList([Bent()]))
        assert found.sequences[row].tolist() == alone.sequences[0].tolist()


def test_a_callers_function_gets_the_true_batch_index():
    model = MODELS[1]
    ids = torch.tensor([[9, 10, 11], [14, 13, 12], [20, 21, 22]])
    allowed = {0: list(range(8, 30)), 1: list(range(30, 50)), 2: list(range(50, 61))}
    asked = set()

    def prefix(batch, sent):
        asked.add(batch)
        return allowed[batch]

    config = ExitConfig(mode="fixed", depth=1, after_exit="verify")
    found = run(model, ids, config, 8, prefix_allowed_tokens_fn=prefix)
    full = run(model, ids, FULL, 8, prefix_allowed_tokens_fn=prefix)
    assert found.sequences.tolist() == full.sequences.tolist() and asked == {0, 1, 2}


def test_a_single_step_is_refused_and_a_forward_reads_at_full_depth():
    model, ids = MODELS[1], torch.tensor([[9, 10, 11]])
    config = ExitConfig(mode="fixed", depth=1, after_exit="verify")
    cache = model.new_cache()
    with torch.no_grad():
        logits = model(ids, exit_config=config, past_key_values=cache).logits
        assert torch.equal(logits, model(ids, exit_config=FULL).logits)
        with pytest.raises(ValueError, match="call generate or stream"):
            model(ids[:, :1], exit_config=config, past_key_values=cache)


class Slotted(LogitsProcessor):
    __slots__ = ("step",)

    def __init__(self, step):
        self.step = step

    def __call__(self, input_ids, scores):
        return scores


class Remembering(LogitsProcessor):
    """Counts its calls wherever it is told to."""

    def __init__(self, kind):
        self.kind, self.box, self.array = kind, type("Box", (), {"n": 0})(), np.zeros(2)
        self.queue, self.tensor = deque([0]), torch.zeros(2)
        calls = 0

        def count():
            nonlocal calls
            calls += 1

        self.count = count

    def __call__(self, input_ids, scores):
        if self.kind == "object":
            self.box.n += 1
        elif self.kind == "array":
            self.array[1] += 1
        elif self.kind == "queue":
            self.queue[0] += 1
        elif self.kind == "tensor":
            self.tensor[0] += 1
        elif self.kind == "function":
            self.count()
        return scores


@pytest.mark.parametrize("kind", ["object", "array", "queue", "tensor", "function"])
def test_state_is_found_where_processors_keep_it(kind):
    config = ExitConfig(mode="fixed", depth=1, after_exit="verify")
    with pytest.raises(ValueError, match=r"Remembering keeps state"):
        run(MODELS[1], torch.tensor([[9, 10]]), config, 3, logits_processor=LogitsProcessorList([Remembering(kind)]))


def test_processors_that_hold_things_without_changing_them_are_asked():
    config, ids = ExitConfig(mode="fixed", depth=1, after_exit="verify"), torch.tensor([[9, 10]])
    full = run(MODELS[1], ids, FULL, 4).sequences.tolist()
    with torch.inference_mode():
        holding = Remembering("")
        assert holding.tensor.is_inference()
        for quiet in (holding, Slotted(2)):
            found = run(MODELS[1], ids, config, 4, logits_processor=LogitsProcessorList([quiet]))
            assert found.sequences.tolist() == full


@pytest.mark.parametrize(
    "answer", [bool, torch.tensor, lambda over: torch.tensor([over])], ids=["bool", "0-dim", "1-dim"]
)
def test_criteria_may_answer_in_any_form(answer):
    class Long(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return answer(input_ids.shape[1] >= 6)

    ids, config = torch.tensor([[9, 10]]), ExitConfig(mode="fixed", depth=1, after_exit="verify")
    texts = [
        run(MODELS[1], ids, each, 9, stopping_criteria=StoppingCriteriaList([Long()])).sequences.tolist()
        for each in (FULL, config)
    ]
    assert texts[0] == texts[1] and len(texts[0][0]) == 6


@pytest.mark.parametrize("redraft", [False, True])
def test_functions_that_change_nothing_cost_no_pass(redraft):
    """A draft that Python looks at stands where it would stand without it."""
    model, ids = MODELS[2], torch.tensor([[9, 10, 11]])
    config = ExitConfig(mode="margin", theta=0.05, after_exit="verify", redraft=redraft)
    nothing = {
        "logits_processor": LogitsProcessorList([lambda ids, scores: scores]),
        "stopping_criteria": StoppingCriteriaList([lambda ids, scores, **_: torch.zeros(len(ids), dtype=torch.bool)]),
    }
    plain = run(model, ids, config, 20)
    assert plain.accepted.any() and plain.loop_passes < run(model, ids, FULL, 20).loop_passes
    for some in ({"logits_processor": nothing["logits_processor"]}, nothing):
        found = run(model, ids, config, 20, **some)
        assert torch.equal(found.sequences, plain.sequences) and torch.equal(found.exit_depths, plain.exit_depths)
        assert torch.equal(found.accepted, plain.accepted)
        assert (found.loop_passes, found.loop_rows) == (plain.loop_passes, plain.loop_rows)


def test_ends_that_a_criterion_only_sees_at_drafts_are_taken_back():
    """Scores are kept for told tokens alone: every draft that runs ahead of them seems to be the last."""

    class Ahead(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] - 2 > len(scores)])

    ids, config = torch.tensor([[9, 10]]), ExitConfig(mode="fixed", depth=1, after_exit="verify")
    criteria = {"stopping_criteria": StoppingCriteriaList([Ahead()]), "output_scores": True}
    full = run(MODELS[2], ids, FULL, 9, **criteria)
    found = run(MODELS[2], ids, config, 9, **criteria)
    assert found.sequences.tolist() == full.sequences.tolist() and found.sequences.shape[1] == 11
    assert not found.accepted.all(), "no draft seemed to be the last: that was not tested"


def test_a_criterion_that_changes_its_mind_at_loop_t_is_followed():
    """Scores are kept for told tokens alone, so this one sees an end at T that it did not see at the draft."""

    class Counts(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([len(scores) >= 4])

    ids, config = torch.tensor([[9, 10]]), ExitConfig(mode="fixed", depth=1, after_exit="verify")
    criteria = {"stopping_criteria": StoppingCriteriaList([Counts()]), "output_scores": True}
    full = run(MODELS[2], ids, FULL, 9, **criteria)
    found = run(MODELS[2], ids, config, 9, **criteria)
    assert found.sequences.tolist() == full.sequences.tolist() and found.sequences.shape[1] == 6
    assert found.past_key_values.length == full.past_key_values.length


def test_a_run_that_is_closed_early_leaves_nothing_that_was_not_told():
    model, ids = MODELS[1], torch.tensor([[9, 10, 11]])
    for config in (ExitConfig(mode="fixed", depth=1, after_exit="verify"), FULL):
        cache = model.new_cache()
        loop, first = model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            exit_config=config,
            custom_generate=type(model).open_token_loop,
        )
        told = []
        running = loop.run(first)
        while len(told) < 4:
            told += [emission.token_id for emission in next(running)]
        running.close()
        assert loop.sequences[0, 3:].tolist() == told and cache.length == 3 + len(told) - 1
        longer = torch.tensor([[9, 10, 11, *told, 20, 21]])
        again = run(model, longer, FULL, 6, past_key_values=cache)
        assert again.sequences.tolist() == run(model, longer, FULL, 6).sequences.tolist()


def test_a_cache_whose_last_tokens_were_taken_back_goes_on_without_a_mask():
    model, generator = MODELS[1], torch.Generator().manual_seed(3)
    config, trimmed = ExitConfig(mode="fixed", depth=1, after_exit="verify"), 0
    for _ in range(12):
        ids = torch.randint(8, 61, (2, 4), generator=generator)
        mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
        written = run(model, ids, FULL, 8, mask, eos_token_id=None).sequences[:, 4:]
        # Both sequences end with a token that full depth writes, so that followers of a draft may outlive the text.
        kwargs = {"eos_token_id": [int(written[0, 3]), int(written[1, 4])]}
        full, found = run(model, ids, FULL, 8, mask, **kwargs), run(model, ids, config, 8, mask, **kwargs)
        assert found.sequences.tolist() == full.sequences.tolist()
        caches = [each.past_key_values for each in (full, found)]
        assert caches[1].length == caches[0].length
        trimmed += not found.accepted[found.exit_depths > 0].all()
        nexts = [model(torch.tensor([[33], [34]]), past_key_values=cache, exit_config=FULL).logits for cache in caches]
        torch.testing.assert_close(nexts[0], nexts[1], rtol=1e-4, atol=1e-4)
    assert trimmed
