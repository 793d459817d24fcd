"""A cache as it is filled, cut, copied and continued, the bytes that it takes, and that it goes once nobody has it."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from sigma0 import DepthCache, ExitConfig
from sigma0.decode.transfer import PendingTokens
from tests.decode.test_conformance import written
from tests.reference import tiny_model

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def filled(model, ids=IDS, config=None, **kwargs):
    cache = model.new_cache(**kwargs)
    with torch.no_grad():
        model(ids, past_key_values=cache, exit_config=config)
    return cache


MARGIN = ExitConfig(mode="margin", theta=0.01)


@pytest.fixture
def waiting():
    """A model, and a cache one of whose tokens waits for its deeper loops."""
    model = tiny_model(seed=0, total_ut_steps=5)
    cache = filled(model, config=MARGIN)
    with torch.no_grad():
        model(IDS[:, :1], past_key_values=cache, exit_config=MARGIN)
    assert cache.in_flight is not None
    return model, cache


def snapshot(cache):
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


def test_planes_are_indexed_by_loop_then_layer(tiny):
    cache = filled(tiny)
    assert len(cache) == 6
    for loop in range(3):
        for layer in range(2):
            assert torch.equal(cache.layers[loop * 2 + layer].keys, cache.planes[layer].keys[loop, :, :, :4])


@pytest.mark.parametrize("config", [{"mode": "full"}, {"q": 0.5}, {"mode": "fixed", "depth": 1}])
def test_a_fixed_cache_is_not_continued_at_another_depth(tiny, config):
    cache = filled(tiny, config={"mode": "fixed", "depth": 2})
    with pytest.raises(ValueError, match="filled 2 loops deep"), torch.no_grad():
        tiny(IDS[:, :1], past_key_values=cache, exit_config=config)
    with pytest.raises(ValueError, match="filled 2 loops deep"), torch.no_grad():
        tiny(IDS, past_key_values=cache, exit_config=config)


def test_fixed_at_full_depth_may_continue_as_full(tiny):
    cache = filled(tiny, config={"mode": "fixed", "depth": 3})
    with torch.no_grad():
        assert tiny(IDS[:, :1], past_key_values=cache, exit_config={"mode": "full"}).logits.shape == (2, 1, 61)


def test_crop_takes_columns_and_their_waiting_tokens():
    model = tiny_model(seed=0, total_ut_steps=5)
    cache = filled(model, config=MARGIN)
    before = snapshot(cache)
    with torch.no_grad():
        for token in (3, 4):
            model(torch.full((2, 1), token), past_key_values=cache, exit_config=MARGIN)
    assert sorted(set(cache.in_flight.cache_positions.tolist())) == [4, 5]
    cache.crop(-1)
    assert (cache.length, set(cache.in_flight.cache_positions.tolist())) == (5, {4})
    cache.crop(-1)
    assert (cache.length, cache.in_flight) == (4, None)
    for layer, (keys, _) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
    with torch.no_grad():
        again = model(torch.full((2, 1), 3), past_key_values=cache, exit_config=MARGIN).logits
        fresh = model(torch.full((2, 1), 3), past_key_values=filled(model), exit_config=MARGIN).logits
    torch.testing.assert_close(again, fresh)


@pytest.mark.parametrize("wrong", [1, -5])
def test_crop_beyond_the_cache_is_refused(tiny, wrong):
    with pytest.raises(ValueError, match=f"-4 to 0, got {wrong}"):
        filled(tiny).crop(wrong)


def test_batch_operations(tiny):
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    cache = tiny.new_cache()
    with torch.no_grad():
        tiny(IDS, attention_mask=mask, past_key_values=cache)
    before = snapshot(cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    cache.batch_select_indices(torch.tensor([0, 1]))
    for layer, (keys, _) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys[[1, 0]])
    assert cache.seen(4).tolist() == [[True] * 4, [False, True, True, True]]


def test_waiting_tokens_are_not_reordered_nor_run_by_the_model_without_a_head(waiting):
    model, cache = waiting
    with pytest.raises(ValueError, match="wait for their deeper loops"):
        cache.reorder_cache(torch.tensor([1, 0]))
    with torch.no_grad(), pytest.raises(ValueError, match="wait for their deeper loops"):
        model.model(IDS, past_key_values=cache)


def generate(model, new, after="finish", batch=1, prompt=5):
    ids = torch.arange(9, 9 + batch * prompt).view(batch, prompt)
    config = ExitConfig(q=0.5, after_exit=after)
    return written(model, ids.tolist(), config, new).past_key_values


@pytest.mark.parametrize("after", ["finish", "drop", "verify"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_bytes_in_use_follow_the_formula(after, batch, kv_heads):
    cache = generate(tiny_model(seed=0, num_key_value_heads=kv_heads), 40, after, batch)
    one = 2 * 3 * 2 * kv_heads * 8 * 4  # layers, loops, keys and values, heads, width, bytes
    tokens = batch * (5 + 40 - 1)  # the last new token is not fed back
    assert cache.bytes_in_use == tokens * one
    held = sum(tensor.nbytes for planes in cache.planes for tensor in (planes.keys, planes.values))
    assert cache.bytes_allocated == held and cache.bytes_in_use <= held <= 1.05 * cache.bytes_in_use


def test_fixed_keeps_planes_for_its_loops_alone(tiny):
    cache = DepthCache(2, 3)
    assert cache.bytes_in_use == cache.bytes_allocated == 0
    tiny(IDS[:1], past_key_values=cache, exit_config=ExitConfig(mode="fixed", depth=2))
    assert cache.bytes_in_use == 4 * (2 * 2 * 2 * 2 * 8 * 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", ["finish", "verify"])
def test_nothing_of_a_generation_outlives_it(after):
    """A hundred generations: every cache and every tensor is gone once its output is."""
    model = tiny_model(seed=0, num_hidden_layers=1, total_ut_steps=2)

    def tensors():
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    for _ in range(3):
        generate(model, 3, after)
    before = tensors()
    caches = weakref.WeakSet()
    for _ in range(100):
        caches.add(generate(model, 3, after))
    assert tensors() == before
    assert len(caches) == 0


@pytest.mark.slow
def test_a_cache_goes_with_its_last_reference(tiny):
    """No cycle: on a GPU several gigabytes would wait for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        cache = filled(tiny)
        watcher = weakref.ref(cache)
        del cache
        assert watcher() is None
    finally:
        gc.enable()


def test_copies_are_independent(tiny):
    cache = filled(tiny)
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        before = snapshot(cache)
        with torch.no_grad():
            tiny(IDS, past_key_values=twin)
        assert (cache.length, twin.length) == (4, 8)
        assert all(torch.equal(layer.keys, keys) for layer, (keys, _) in zip(cache.layers, before, strict=True))


def test_another_number_of_sequences_is_refused(tiny):
    for ids in (IDS[:1, :1], IDS[:1], IDS[:, :1].repeat(2, 1)):
        with pytest.raises(ValueError, match="holds 2 sequences and cannot be continued with"), torch.no_grad():
            tiny(ids, past_key_values=filled(tiny))
    with pytest.raises(ValueError, match="holds 1 sequences and cannot be continued with 3"):
        tiny.generate(IDS[:1], past_key_values=filled(tiny, IDS[:1, :2]), num_return_sequences=3, do_sample=True)


@pytest.mark.parametrize("empty", [lambda cache: cache.crop(-4), DepthCache.reset])
def test_an_emptied_cache_is_as_new(tiny, empty):
    cache = filled(tiny, config={"mode": "fixed", "depth": 2})
    empty(cache)
    with torch.no_grad():
        tiny(IDS[:1], past_key_values=cache, exit_config={"mode": "full"})
    assert (cache.length, cache.depth, cache.planes[0].keys.shape[:2]) == (4, 3, (3, 1))


def test_caches_made_under_inference_mode_can_be_continued(tiny):
    settings = {"max_new_tokens": 3, "do_sample": False, "exit_config": {"q": 0.5}, "return_dict_in_generate": True}
    with torch.inference_mode():
        first = tiny.generate(IDS, **settings)
    whole = first.sequences.clone()
    second = tiny.generate(whole, past_key_values=first.past_key_values, **settings)
    assert torch.equal(second.sequences, tiny.generate(whole, **settings).sequences)


def test_drop_after_finish_completes_what_waits(waiting):
    """A cache left by `finish` keeps its exact planes when the next token is decoded with `drop`."""
    model, cache = waiting
    with torch.no_grad():
        model(IDS[:, 1:2], past_key_values=cache, exit_config=replace(MARGIN, after_exit="drop"))
        whole = filled(model, torch.cat([IDS, IDS[:, :1]], 1))
    for ours, exact in zip(cache.layers, whole.layers, strict=True):
        torch.testing.assert_close(ours.keys[:, :, :5], exact.keys, rtol=1e-4, atol=1e-5)


def test_trajectories_that_were_not_kept_begin_anew():
    """Under `converge` a loop's differences are kept, under `qexit` not: there is nothing to go on from."""
    model = tiny_model(seed=0, total_ut_steps=8)
    eager, watching = ExitConfig(q=1e-6), ExitConfig(mode="converge", eps=0.9, min_loops=3)
    cache = filled(model, config=eager)

    def loops_remembered(step, config):
        before = 0 if cache.in_flight is None else len(cache.in_flight)
        passes = cache.counts.passes
        with torch.no_grad():
            model(torch.full((2, 1), 7 + step), past_key_values=cache, exit_config=config)
        rows = cache.in_flight.cache_positions < cache.length - 1
        assert before and rows.any()
        return cache.lanes.exit_state.counts[cache.in_flight.lanes[rows], 0].tolist(), cache.counts.passes - passes

    with torch.no_grad():
        model(torch.full((2, 1), 7), past_key_values=cache, exit_config=eager)
    remembered, passes = loops_remembered(1, watching)
    assert passes == 3 and set(remembered) == {3}, "what an earlier run did not keep was taken for kept"
    remembered, passes = loops_remembered(2, watching)
    assert max(remembered) == 3 + passes, "what was kept is gone"


def test_a_token_that_was_never_run_is_run_beside_the_next_one():
    """In its passes, and in none of its own: only those of the next token count as prompt rows."""
    model, full = tiny_model(seed=0, total_ut_steps=4), ExitConfig(mode="full")
    cache, whole = filled(model), filled(model, torch.cat([IDS, torch.full((2, 1), 3)], 1))
    counts = replace(cache.counts)
    cache.extend(5)
    columns = np.full(2, 4)
    cache.add_pending(PendingTokens(np.array([3, 3]), np.arange(2), columns, columns))
    with torch.no_grad():
        logits = [model(torch.full((2, 1), 9), past_key_values=one, exit_config=full).logits for one in (cache, whole)]
    torch.testing.assert_close(*logits)
    assert cache.counts.prompt_rows == counts.prompt_rows and cache.counts.rows == counts.rows + 16


def test_crop_forgets_a_token_that_was_never_run():
    """Right at the crop, and not one further: what comes after reads as if it had never been there."""
    model = tiny_model(seed=0, total_ut_steps=4)
    for removed, left in ((-2, [4]), (-3, [])):
        cache, fresh = filled(model), filled(model)
        with torch.no_grad():
            for token in (3, 4, 5):
                model(torch.full((2, 1), token), past_key_values=cache, exit_config=ExitConfig(mode="full"))
        columns = np.array([4, 5, 6])
        cache.add_pending(PendingTokens(np.array([3, 4, 5]), np.zeros(3, dtype=np.int64), columns, columns))
        cache.crop(removed)
        assert ([] if cache.pending is None else cache.pending.cache_positions.tolist()) == left
        with torch.no_grad():
            if left:
                model(torch.full((2, 1), 3), past_key_values=fresh, exit_config=ExitConfig(mode="full"))
            again = model(IDS, past_key_values=cache).logits
            torch.testing.assert_close(again, model(IDS, past_key_values=fresh).logits)


def test_a_crop_of_nothing_changes_nothing(tiny):
    cache = filled(tiny)
    before = snapshot(cache)
    cache.crop(0)
    assert cache.length == 4
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


@pytest.mark.parametrize("shape", [(2, 5), (2, 7), (1, 6), (3, 6), (6, 2)])
def test_a_mask_is_of_all_positions(tiny, shape):
    cache = filled(tiny)
    assert cache.join_mask(torch.ones(2, 6), 2, 2) is None
    with pytest.raises(ValueError, match="4 cached and 2 new tokens of 2 sequences need"):
        cache.join_mask(torch.ones(shape), 2, 2)
