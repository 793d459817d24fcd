"""Engine: whatever runs beside a request, or breaks in it, its output is what it would be alone."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sigma0
from sigma0 import ExitConfig
from sigma0.decode.sampling_params import SamplingParams
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import Busy, EngineLimits, EngineRequest, RequestFailed, RequestOutput, TokenOutput
from sigma0.serve.engine.scheduler import ScheduledStep
from sigma0.signals.canary import Tighten
from tests.reference import settled_model
from tests.serve.engine.spied_worker import KV

FULL = ExitConfig(mode="full")
CONFIGS = (
    ExitConfig(q=0.5),
    ExitConfig(q=0.5, after_exit="drop"),
    ExitConfig(q=0.5, after_exit="verify"),
    ExitConfig(q=0.5, after_exit="verify", redraft=False),
    FULL,
    ExitConfig(mode="fixed", depth=2),
    ExitConfig(mode="margin", theta=0.3),
    ExitConfig(mode="margin", theta=0.3, after_exit="verify"),
    ExitConfig(mode="margin", theta=0.3, after_exit="drop", min_loops=2),
    ExitConfig(mode="converge", eps=0.4),
    ExitConfig(mode="accel", eps=0.5, patience=1),
)
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=1.0, top_k=5, top_p=0.9, seed=6),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.5),
)
POSITION_BYTES = 2 * 2 * 4 * 2 * 8 * 4  # bytes of K/V of one position of the model below


@pytest.fixture(scope="module")
def model(pocket):
    result = settled_model(3, vocab_size=len(pocket[1]), total_ut_steps=4)
    result.generation_config.eos_token_id = None
    return result


def step(engine, result):
    """One pass, whose events are added to those that were found, by request."""
    for key, event in engine.step():
        result.setdefault(key, []).append(event)


def drain(engine, result=None):
    """All events, by request."""
    result = {} if result is None else result
    for _ in range(5000):
        if not engine.has_work:
            return result
        step(engine, result)
    raise AssertionError(f"the engine does not end: {engine.status()}")


def ask(engine, job):
    key = engine.submit(job)
    return drain(engine)[key]


def alone(model, tokenizer, job):
    return ask(Engine(model, tokenizer, "tiny", EngineLimits(max_running=1, kv_bytes=KV), watch=True), job)


def outcome(events):
    """What must not depend on other requests, near ties apart."""
    done = events[-1]
    assert isinstance(done, RequestOutput)
    tokens = [
        (token.id, token.depth, token.reason, token.text, token.rung, [item.id for item in token.alternatives])
        for token in done.tokens
    ]
    fates = [(token.fate, token.deepest_agrees) for token in done.tokens]
    return tokens, fates, done.text, done.finish_reason, done.passes, done.rows, done.verdict.reason, done.door


def deepest(events):
    """What the head says of each token after its last loop, `[n, 3]`; all of it is known."""
    tokens = events[-1].tokens
    assert all(token.deepest_surprise is None for token in events[:-1]), "what may still change is not told"
    return np.array([(token.deepest_surprise, token.deepest_entropy, token.deepest_margin) for token in tokens])


@contextmanager
def poisoned(model, token_id):
    """An id whose states are no numbers."""
    weights = model.get_input_embeddings().weight
    kept = weights[token_id].clone()
    with torch.no_grad():
        weights[token_id] = torch.nan
    try:
        yield
    finally:
        with torch.no_grad():
            weights[token_id] = kept


def is_near(model, ids, config):
    """Whether any decision over a text is so near a tie that rounding may turn it."""
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_loop_states=True, exit_config=FULL)
    best = out.loop_logits.float().softmax(-1).topk(2, dim=-1).values
    lead = best[..., 0] - best[..., 1]
    hazard = torch.sigmoid(out.gate_logits.float())
    cumulative = 1 - torch.cumprod(1 - hazard, dim=0)
    distances = lead, (lead - config.theta).abs(), (cumulative - config.q).abs()
    return any(bool((distance < 1e-5).any()) for distance in distances)


def job(length=5, new=6, seed=1, **settings):
    ids = np.random.default_rng(seed).integers(5, 60, length).tolist()
    return EngineRequest(tuple(ids), new, settings.pop("exit_config", ExitConfig(q=0.5)), **settings)


@st.composite
def jobs(draw):
    return job(
        draw(st.integers(1, 40)),
        draw(st.integers(1, 12)),
        draw(st.integers(0, 50)),
        exit_config=draw(st.sampled_from(CONFIGS)),
        sampling=draw(st.sampled_from(SAMPLINGS)),
        logprobs=draw(st.sampled_from([None, 2])),
    )


def check_company(model, tokenizer, asked, seed, page, crowded, bytes_of):
    """Arrivals, cancellations, preemptions and prefixes found: each request as if it were alone."""
    rng = np.random.default_rng(seed)
    columns = max(len(job.prompt_ids) + job.max_new_tokens for job in asked) + (page if crowded else 400)
    limits = EngineLimits(4, 16, int(rng.integers(3, 40)), page, bytes_of(4, -(-columns // page) + 1, page))
    engine = Engine(model, tokenizer, "tiny", limits, watch=True)
    queue, keys, result, cancelled = list(enumerate(asked)), {}, {}, set()
    for _ in range(3000):
        if queue and rng.random() < 0.4:
            number, job = queue.pop(0)
            keys[engine.submit(job)] = number
        if keys and rng.random() < 0.02:
            key = int(rng.choice(list(keys)))
            engine.cancel(key)
            if key not in result or not isinstance(result[key][-1], RequestOutput):
                cancelled.add(key)
        for key, event in engine.step():
            assert key not in cancelled
            result.setdefault(key, []).append(event)
        if not queue and not engine.has_work:
            break
    assert not engine.has_work and engine.pool.used == 0
    for key, number in keys.items():
        if key in cancelled:
            continue
        job = asked[number]
        expected = alone(model, tokenizer, job)
        if outcome(result[key]) != outcome(expected):
            ids = [*job.prompt_ids, *(token.id for token in expected[-1].tokens)]
            assert is_near(model, ids, job.exit_config), f"{job} differs in company"


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(jobs(), min_size=2, max_size=6), st.integers(0, 2**16), st.sampled_from([4, 7, 16]), st.booleans())
def test_company_changes_nothing(model, pocket, asked, seed, page, crowded):
    check_company(
        model, pocket[1], asked, seed, page, crowded, lambda slots, blocks, page: POSITION_BYTES * page * blocks
    )


@pytest.mark.parametrize("config", (*CONFIGS, ExitConfig(mode="full", after_exit="verify")), ids=str)
@pytest.mark.parametrize("number", range(2))
def test_alone_is_what_generate_says(pocket, config, number):
    """The very depths, reasons, fates, passes, rows and verdict of `sigma0.generate`, greedy and drawn."""
    model, tokenizer = pocket
    story = "Mary went to the park. Leo took the book. The book is in the box. Tom went to the office. Where is Mary?"
    ids = tuple(tokenizer(story)["input_ids"])
    sampling = SamplingParams(temperature=1.0, seed=3) if number else SamplingParams()
    done = alone(model, tokenizer, EngineRequest(ids, 12, config, sampling, context=(story,)))[-1]
    asked = {"do_sample": True, "seed": 3} if number else {}
    expected = sigma0.generate(model, tokenizer, story, exit_config=config, max_new_tokens=12, verdict=True, **asked)
    fields = ("id", "depth", "reason", "fate", "deepest_agrees", "would_have_met")
    mine, theirs = ([[getattr(token, name) for name in fields] for token in item.tokens] for item in (done, expected))
    assert mine == theirs
    for name in ("proximity", "margin", "entropy", "deepest_surprise", "deepest_entropy", "deepest_margin"):
        mine, theirs = ([getattr(token, name) for token in item.tokens] for item in (done, expected))
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert done.text == expected.text
    assert (done.passes, done.rows) == (expected.loop_passes, expected.loop_rows)
    assert done.savings.passes_saved == expected.passes_saved and done.savings.rows_saved == expected.rows_saved
    assert done.door == expected.door and done.verdict.reason == expected.verdict.reason


@pytest.mark.grid(fast=1, slow=2)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_long_answers_are_read_at_their_deepest_loops_as_generate_reads_them(model, pocket, config):
    """Over more tokens than are kept of a request, among others that are cancelled, or fail, before they are read."""
    engine = Engine(model, pocket[1], "tiny", EngineLimits(4, 16, 64, 4, 4 * KV), watch=True)
    asked = [job(6, 90, seed, exit_config=config, sampling=SAMPLINGS[0], on_collapse="ignore") for seed in range(3)]
    keys = [engine.submit(item) for item in asked]
    result, others = {}, []
    with poisoned(model, 60):
        for turn in range(60):
            if turn % 7 == 0:
                ids = (5, 60, 7) if turn % 2 else (5, 7, 9)
                others.append(engine.submit(EngineRequest(ids, 8, config)))
            if turn % 7 == 4:
                engine.cancel(others[-1])
            step(engine, result)
        drain(engine, result)
    given = {"do_sample": False, "exit_config": config, "output_statistics": True, "return_dict_in_generate": True}
    for key, item in zip(keys, asked, strict=True):
        out = model.generate(torch.tensor([item.prompt_ids]), max_new_tokens=90, **given)
        assert [token.id for token in result[key][-1].tokens] == out.sequences[0, 6:].tolist()
        np.testing.assert_allclose(deepest(result[key]), out.deepest_readings[0, :, :3], rtol=1e-3, atol=1e-4)
        agrees = [float(token.deepest_agrees) for token in result[key][-1].tokens]
        assert agrees == out.deepest_readings[0, :, 3].tolist()


@pytest.mark.grid(fast=1, slow=2)
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[1], CONFIGS[2], CONFIGS[6]], ids=str)
def test_rules_that_keep_more_of_a_token_come_and_go(model, pocket, config):
    """Beside `qexit` and `margin`, a request whose rule needs differences begins and ends, again and again."""
    engine = Engine(model, pocket[1], "tiny", EngineLimits(8, 16, 64, 4, KV), watch=True)
    asked = [job(6, 40, seed, exit_config=config, sampling=SAMPLINGS[seed % 2]) for seed in range(4)]
    keys, result, turn = [engine.submit(item) for item in asked], {}, 0
    while any(key not in result or not isinstance(result[key][-1], RequestOutput) for key in keys):
        if turn % 9 == 0:
            engine.submit(job(2, 1 + turn % 2, turn, exit_config=CONFIGS[9 + turn % 2]))
        turn += 1
        step(engine, result)
    for key, item in zip(keys, asked, strict=True):
        expected = alone(model, pocket[1], item)
        assert outcome(result[key]) == outcome(expected)
        np.testing.assert_allclose(deepest(result[key]), deepest(expected), rtol=1e-4, atol=1e-5)


def test_a_prompt_begun_alike_is_found(model, pocket):
    engine = Engine(model, pocket[1], "tiny", EngineLimits(page_size=4, kv_bytes=KV), watch=True)
    ids = tuple(np.random.default_rng(1).integers(5, 60, 30).tolist())
    again = EngineRequest((*ids[:20], 7, 8, 9), 4, ExitConfig(q=0.5, after_exit="drop"))
    (*_, cold), (*_, warm) = ask(engine, EngineRequest(ids, 4, FULL)), ask(engine, again)
    assert cold.cached_tokens == 0 and warm.cached_tokens == 20
    assert outcome([warm]) == outcome(alone(model, pocket[1], again))


def test_a_salt_outlasts_preemption(model, pocket):
    """What a salted request wrote before and after is found by its salt alone."""
    engine = Engine(model, pocket[1], "tiny", EngineLimits(3, 8, 8, 4, POSITION_BYTES * 4 * 14), watch=True)
    asked = [job(10, 30, seed, exit_config=FULL, cache_salt="a") for seed in range(3)]
    for item in asked:
        engine.submit(item)
    drain(engine)
    assert engine.status().preemptions > 0
    cached = {"a": 0, None: 0}
    for item in asked:
        for salt in cached:
            cached[salt] += ask(engine, replace(item, max_new_tokens=1, cache_salt=salt))[-1].cached_tokens
    assert cached["a"] > 0 and cached[None] == 0


def test_what_was_dropped_is_never_found(model, pocket):
    """The blocks of the prompt are exact, those of the answer are not: the next turn finds the former alone."""
    engine = Engine(model, pocket[1], "tiny", EngineLimits(page_size=4, kv_bytes=KV), watch=True)
    asked = job(8, 12, exit_config=ExitConfig(q=0.01, after_exit="drop"))
    done = ask(engine, asked)[-1]
    assert any(token.depth < 4 for token in done.tokens)
    turn = EngineRequest((*asked.prompt_ids, *(token.id for token in done.tokens), 9, 9), 3, FULL)
    assert ask(engine, turn)[-1].cached_tokens == 8


def check_preempted(model, tokenizer, asked, kv_bytes):
    engine = Engine(model, tokenizer, "tiny", EngineLimits(3, 8, 8, 4, kv_bytes), watch=True)
    keys = [engine.submit(item) for item in asked]
    result = drain(engine)
    assert engine.status().preemptions > 0
    assert sum(result[key][-1].preemptions for key in keys) == engine.status().preemptions
    for key, item in zip(keys, asked, strict=True):
        expected = alone(model, tokenizer, item)
        assert outcome(result[key]) == outcome(expected)
        np.testing.assert_allclose(deepest(result[key]), deepest(expected), rtol=1e-4, atol=1e-5)
        assert result[key][-1].cached_tokens == 0, "its own blocks, found again, are no prompt's"


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[1], CONFIGS[2]], ids=str)
def test_a_request_that_is_preempted_again_and_again(model, pocket, config):
    asked = [job(10, 30, seed, exit_config=config, sampling=SAMPLINGS[seed % 2]) for seed in range(3)]
    check_preempted(model, pocket[1], asked, POSITION_BYTES * 4 * 14)


def test_fates_outlast_a_preemption_during_recomputation(model, pocket):
    """Preempted after its positions have entered again and before they have run: their fates are kept."""
    engine = Engine(model, pocket[1], "tiny", EngineLimits(page_size=4, kv_bytes=KV), watch=True)
    asked = job(6, 20, exit_config=FULL)
    key = engine.submit(asked)
    state = engine._states[key]
    while len(state.outputs) < 8:
        engine.step()
    saved = []
    for _ in range(2):
        slot = state.entry.slot
        engine.scheduler.preempt(state.entry)
        engine._apply(ScheduledStep(preempted=((state.entry, slot),)))
        saved.append(state.fates.copy())
        state.entry.cacheable = 0
        engine._schedule()
    assert saved[0].any() and (saved[0] == saved[1]).all()
    done = drain(engine)[key][-1]
    assert outcome([done]) == outcome(alone(model, pocket[1], asked))


def test_the_first_token_does_not_wait_for_the_last_loop(model, pocket):
    engine = Engine(model, pocket[1], "tiny", watch=True)
    engine.submit(job(5, 1, exit_config=ExitConfig(mode="fixed", depth=1)))
    assert isinstance(engine.step()[0][1], TokenOutput)


@pytest.mark.parametrize(
    "config, loops",
    [(CONFIGS[5], 2), (ExitConfig(mode="fixed", depth=2, after_exit="verify"), 4), (CONFIGS[0], 4)],
    ids=str,
)
def test_a_prompt_runs_as_many_loops_as_its_tokens_may(model, pocket, config, loops):
    engine = Engine(model, pocket[1], "tiny", EngineLimits(kv_bytes=KV), watch=True)
    ask(engine, job(9, 3, exit_config=config))
    # the last token of a prompt runs in a lane
    assert engine.counts.prompt_rows == loops * 8


def test_decoding_is_not_held_up_by_a_long_prompt(model, pocket):
    engine = Engine(model, pocket[1], "tiny", EngineLimits(pass_rows=8, kv_bytes=KV), watch=True)
    engine.submit(job(2, 40, exit_config=ExitConfig(mode="fixed", depth=1)))
    engine.step()
    engine.submit(job(150, 1, 2))
    gaps = [len(engine.step()) for _ in range(20)]
    assert gaps == [1] * 20, "a token in every pass"


def test_what_cannot_run_is_refused(model, pocket):
    engine = Engine(model, pocket[1], "tiny", EngineLimits(1, 1, 8, 4, POSITION_BYTES * 4 * 4), watch=True)
    for wrong, message in (
        (job(10, 7), "17 tokens exceed the 16 that this engine's K/V hold"),
        (job(10, 250), "exceed the model's context of 256"),
        (EngineRequest((), 4, ExitConfig()), "at least one prompt id"),
        *((EngineRequest((5, odd), 4, ExitConfig()), "an id outside of the model's") for odd in (10_000, -1)),
        (job(2, 2, exit_config=ExitConfig(mode="fixed", depth=9)), "depth=9 exceeds the model's 4 loops"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(wrong)
    for _ in range(2):
        engine.submit(job(2, 2))
    with pytest.raises(Busy, match="2 requests are waiting already"):
        engine.submit(job(2, 2))
    with pytest.raises(ValueError, match="hold no block"):
        Engine(model, pocket[1], "tiny", EngineLimits(kv_bytes=100))


def test_log_probabilities_are_the_models(model, pocket):
    asked = job(6, 3, logprobs=3, sampling=SamplingParams(temperature=0.5, seed=1), exit_config=FULL)
    done = alone(model, pocket[1], asked)[-1]
    ids = [*asked.prompt_ids, *(token.id for token in done.tokens)]
    with torch.no_grad():
        expected = model(torch.tensor([ids]), exit_config=FULL).logits[0].log_softmax(-1)
    for place, token in enumerate(done.tokens, start=len(asked.prompt_ids) - 1):
        assert token.logprob == pytest.approx(float(expected[place, token.id]), abs=1e-4)
        best = expected[place].topk(3)
        assert [item.id for item in token.alternatives] == best.indices.tolist()
        assert [item.logprob for item in token.alternatives] == pytest.approx(best.values.tolist(), abs=1e-4)


OWN = (
    ExitConfig(q=0.6),
    ExitConfig(q=0.97, min_loops=4),
    ExitConfig(mode="margin", theta=0.9),
    ExitConfig(mode="converge", eps=0.35),
    ExitConfig(mode="accel", eps=0.5, patience=1),
    ExitConfig(mode="accel", eps=0.5, patience=1, accel_scale="steps"),
)
STORIES = (
    "Sara went to the bedroom. John went to the park. Where is Sara?",
    "The key was taken by Leo. Leo went to the hallway. Hugo went to the barn. Is the key in the barn?",
)


@pytest.mark.grid(fast=2, slow=4)
@pytest.mark.parametrize("current", OWN, ids=str)
def test_what_the_models_rule_would_have_said_is_the_librarys(pocket, monkeypatch, current):
    monkeypatch.setattr(pocket[0].generation_config, "exit_config", current)
    seen = set()
    modes = ({"mode": "full"}, {"mode": "fixed", "depth": 3})
    for mode, after_exit, story in product(modes, ("finish", "verify"), STORIES):
        config = ExitConfig(**mode, after_exit=after_exit)
        done = alone(*pocket, EngineRequest(tuple(pocket[1](story)["input_ids"]), 12, config))[-1]
        expected = sigma0.generate(*pocket, story, exit_config=config, max_new_tokens=12)
        output = [token.would_have_met for token in done.tokens]
        assert output == [token.would_have_met for token in expected.tokens]
        seen |= set(output)
    assert seen >= {True, None}


@pytest.mark.parametrize(
    "blocks, config, asked", [(10, CONFIGS[0], [job(9, 8)]), (400, FULL, [job(9, 12), job(2, 12, 2)])]
)
def test_numbers_that_are_none_fail_one_request_alone(model, pocket, blocks, config, asked):
    """Its blocks do no harm to the next, nor do they pad a row of few blocks up to those of the longest."""
    engine = Engine(model, pocket[1], "tiny", EngineLimits(4, 8, 64, 4, POSITION_BYTES * 4 * blocks), watch=True)
    with poisoned(model, 60):
        bad, *good = [engine.submit(item) for item in (EngineRequest((5, 60, 7, 8, 9), 8, config), *asked)]
        result = drain(engine)
        afterwards = [outcome(ask(engine, item)) for item in asked]
    assert isinstance(result[bad][-1], RequestFailed) and len(result[bad]) == 1
    expected = [outcome(alone(model, pocket[1], item)) for item in asked]
    assert [outcome(result[key]) for key in good] == expected == afterwards


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_numbers_that_are_none_stay_with_a_request_that_is_cancelled(model, pocket, passes):
    engine = Engine(model, pocket[1], "tiny", EngineLimits(1, 4, 64, 4, POSITION_BYTES * 4 * 3), watch=True)
    with poisoned(model, 60):
        bad = engine.submit(EngineRequest((5, 7, 8, 60, 60, 60), 2, FULL))
        for _ in range(passes):
            engine.step()
        engine.cancel(bad)
        asked = job(1, 7, 4)
        result = ask(engine, asked)
    assert outcome(result) == outcome(alone(model, pocket[1], asked))


def test_a_failure_leaves_the_prefix_that_others_share(model, pocket):
    engine = Engine(model, pocket[1], "tiny", EngineLimits(page_size=4, kv_bytes=KV), watch=True)
    shared = tuple(np.random.default_rng(1).integers(5, 59, 12).tolist())
    good = EngineRequest((*shared, 7, 8, 9), 16, FULL)
    with poisoned(model, 60):
        key = engine.submit(good)
        result = [event for _ in range(8) for _, event in engine.step()]
        bad = engine.submit(EngineRequest((*shared, 60), 4, FULL))
        rest = drain(engine)
    assert isinstance(rest[bad][-1], RequestFailed)
    expected = outcome(alone(model, pocket[1], good))
    assert outcome([*result, *rest[key]]) == outcome(ask(engine, good)) == expected


@pytest.mark.parametrize("breaks", [False, True])
def test_a_processor_of_one_request_changes_or_fails_that_one_alone(model, pocket, monkeypatch, breaks):
    def only_seven(_, ids, scores):
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([7]), 0.0)

    monkeypatch.setattr(Tighten, "__call__", mock.Mock(side_effect=RuntimeError) if breaks else only_seven)
    engine, asked = Engine(model, pocket[1], "tiny", watch=True), [job(), job(on_collapse="tighten"), job(seed=2)]
    keys, result = [engine.submit(item) for item in asked], drain(engine)
    first, own, last = map(result.get, keys)
    assert [outcome(first), outcome(last)] == [outcome(alone(model, pocket[1], item)) for item in asked[::2]]
    if breaks:
        assert isinstance(own[-1], RequestFailed) and "RuntimeError" in str(own[-1])
    else:
        assert [token.id for token in own[-1].tokens[1:]] == [7] * 5
    assert engine.pool.used == 0


@pytest.mark.grid(fast=5, slow=4)
@pytest.mark.parametrize("steps", [1, 3, 9])
@pytest.mark.parametrize("breaks", ["admit", "run", "remove"])
def test_what_a_broken_step_leaves_is_dropped(model, pocket, monkeypatch, steps, breaks):
    """Also where the scheduler has admitted a request that the batch never got."""
    asked = [job(5 + seed, 9, seed, exit_config=CONFIGS[seed]) for seed in range(6)]
    expected = [outcome(alone(model, pocket[1], item)) for item in asked]
    engine = Engine(model, pocket[1], "tiny", EngineLimits(2, 16, 64, 4, POSITION_BYTES * 4 * 40))
    for item in asked:
        engine.submit(item)
    for _ in range(steps):
        engine.step()
    whole = getattr(engine._batch, breaks)

    def broken(*arguments):
        if breaks == "remove":
            # half of it
            whole(*arguments)
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(engine._batch, breaks, broken)
        with pytest.raises(MemoryError):
            drain(engine)
    engine.reset()
    assert not engine.has_work and engine.status().running == engine.status().blocks_used == engine.pool.cached == 0
    keys = [engine.submit(item) for item in asked]
    events = drain(engine)
    assert [outcome(events[key]) for key in keys] == expected and engine.status().blocks_used == 0
