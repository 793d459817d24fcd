"""K/V in few bits: an answer is what `generate` gives under the same codec, whatever runs beside it."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0 import ExitConfig, load
from sigma0.config import KVConfig
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, RequestFailed, RequestOutput
from tests.decode.test_conformance import written
from tests.reference import settled_model
from tests.serve.engine.spied_worker import KV
from tests.serve.engine.test_engine import (
    CONFIGS,
    FULL,
    SAMPLINGS,
    alone,
    ask,
    check_company,
    check_preempted,
    drain,
    jobs,
    outcome,
    poisoned,
)
from tests.serve.engine.test_engine import job as any_job

FEW_BITS = KVConfig(codec="residual", group=8, segment=16)
# of a position in few bits, and as it is computed
CODED_BYTES = 2 * 2 * 2 * ((3 * 2 + 4) * 8 // 8 + 4 * 2)
COMPUTED_BYTES = 2 * 2 * 4 * 2 * 8 * 4


@pytest.fixture(scope="module")
def model(pocket):
    result = settled_model(3, vocab_size=len(pocket[1]), total_ut_steps=4)
    result.generation_config.eos_token_id = None
    result.generation_config.kv_config = FEW_BITS
    return result


def kv_bytes(slots, blocks, page):
    """Of so many blocks, and the segments under way."""
    return slots * FEW_BITS.segment * COMPUTED_BYTES + blocks * page * CODED_BYTES


job = partial(any_job, on_collapse="ignore")


@pytest.mark.exhaustive
@settings(max_examples=12, deadline=None)
@given(st.lists(jobs(), min_size=2, max_size=5), st.integers(0, 2**16), st.sampled_from([4, 16]), st.booleans())
def test_company_changes_nothing(model, pocket, asked, seed, page, crowded):
    asked = [replace(item, max_new_tokens=item.max_new_tokens * 4) for item in asked]
    check_company(model, pocket[1], asked, seed, page, crowded, kv_bytes)


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_alone_is_what_generate_says(pocket, monkeypatch, config):
    """Of a trained model: two prefills round otherwise, a code may flip, and turn the near ties of a random one."""
    model, tokenizer = pocket
    monkeypatch.setattr(model.generation_config, "kv_config", replace(FEW_BITS, group=16), raising=False)
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    story = tokenizer("Mary went to the park. Leo took the book. The book is in the box. Where is Mary?")["input_ids"]
    for length in (1, 16, len(story)):
        asked = EngineRequest(tuple(story[:length]), 33, config, on_collapse="ignore")
        done = alone(model, tokenizer, asked)[-1]
        out = written(model, [story[:length]], config, 33)
        assert [token.id for token in done.tokens] == out.sequences[0, length:].tolist()
        assert [token.depth for token in done.tokens] == out.exit_depths[0].tolist()
        assert (done.passes, done.rows) == (out.loop_passes, out.loop_rows)


@pytest.mark.grid(fast=1, slow=3)
@pytest.mark.parametrize("config", [*CONFIGS[6:9], FULL], ids=str)
def test_codas_are_read_in_few_bits_as_generate_reads_them(config):
    """A prompt's last token, which may end a segment, is read after the others: no earlier is that segment stored."""
    model, tokenizer = load("pocket-raven", dtype="float32")
    model.generation_config.kv_config, model.generation_config.eos_token_id = KVConfig(codec="int8", segment=16), None
    ids = tokenizer("Mary went to the park. Leo took the book. The book is in the box. Where is Mary?")["input_ids"]
    lengths, engine = (16, 21), Engine(model, tokenizer, "raven", EngineLimits(3, 8, 64, 16, KV))
    asked = [EngineRequest(tuple(ids[:length]), 30, config, on_collapse="ignore") for length in lengths]
    keys = [engine.submit(item) for item in asked]
    together = drain(engine)
    for length, key in zip(lengths, keys, strict=True):
        done = together[key][-1]
        out = written(model, [ids[:length]], config, 30)
        assert [token.id for token in done.tokens] == out.sequences[0, length:].tolist()
        assert [token.depth for token in done.tokens] == out.exit_depths[0].tolist()


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[1], CONFIGS[2], CONFIGS[5]], ids=str)
def test_requests_that_are_preempted_again_and_again(model, pocket, config):
    asked = [job(10, 60, seed, exit_config=config, sampling=SAMPLINGS[seed % 2]) for seed in range(3)]
    check_preempted(model, pocket[1], asked, kv_bytes(3, 20, 4))


def test_whole_segments_are_found_again(model, pocket):
    """Of a prompt and of an answer, since both are the same function of the ids before them."""
    engine = Engine(model, pocket[1], "tiny", EngineLimits(2, 8, 64, 4, KV), watch=True)
    asked = job(37, 30, exit_config=ExitConfig(mode="margin", theta=0.3))
    done = ask(engine, asked)[-1]
    ids = (*asked.prompt_ids, *(token.id for token in done.tokens))
    turn = replace(asked, prompt_ids=(*ids[:64], 7, 8), max_new_tokens=20)
    warm = ask(engine, turn)[-1]
    assert done.cached_tokens == 0 and warm.cached_tokens == 64, "two segments hold tokens of the answer"
    assert outcome([warm]) == outcome(alone(model, pocket[1], turn))


def test_what_was_dropped_is_never_found(model, pocket):
    engine = Engine(model, pocket[1], "tiny", EngineLimits(2, 8, 64, 4, KV), watch=True)
    asked = job(32, 40, exit_config=ExitConfig(q=0.01, after_exit="drop"))
    done = ask(engine, asked)[-1]
    assert any(token.depth < 4 for token in done.tokens)
    turn = EngineRequest((*asked.prompt_ids, *(token.id for token in done.tokens)), 3, FULL)
    assert ask(engine, turn)[-1].cached_tokens == 16, "the second segment holds the prompt's last token"


def test_numbers_that_are_none_end_their_request_alone(model, pocket):
    """One is in a prompt, whose states nobody reads before its segment is encoded."""
    engine = Engine(model, pocket[1], "tiny", EngineLimits(2, 8, 64, 4, KV), watch=True)
    other, odd = job(20, 40, 2), EngineRequest((701, *range(5, 40)), 4, FULL)
    with poisoned(model, 701):
        broken = engine.submit(odd)
        kept = engine.submit(other)
        result = drain(engine)
    assert isinstance(result[broken][-1], RequestFailed) and isinstance(result[kept][-1], RequestOutput)
    assert outcome(result[kept]) == outcome(alone(model, pocket[1], other))
    assert outcome(ask(engine, odd)) == outcome(alone(model, pocket[1], odd)), "nothing of the broken one is found"


def test_memory_holds_the_segments_under_way_too(model, pocket):
    memory = kv_bytes(3, 20, 16)
    engine = Engine(model, pocket[1], "tiny", EngineLimits(3, kv_bytes=memory))
    assert engine.pool.total == 20
    assert sum(layer.bytes_allocated for layer in engine._batch.planes.planes) == memory
    with pytest.raises(ValueError, match="the segments under way take"):
        Engine(model, pocket[1], "tiny", EngineLimits(3, kv_bytes=memory - 20 * 16 * CODED_BYTES))
