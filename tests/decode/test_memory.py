"""K/V take what the formula says, and a process does not grow with what it has generated."""

import gc
import weakref

import pytest
import torch

from sigma0 import ExitConfig
from sigma0.decode.kv_cache import DepthCache
from tests.reference import tiny_model


def generate(model, new, after="finish", batch=1, prompt=5):
    ids = torch.arange(9, 9 + batch * prompt).view(batch, prompt)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        exit_config=ExitConfig(q=0.5, after_exit=after),
        return_dict_in_generate=True,
    )


@pytest.mark.parametrize("after", ["finish", "drop", "verify"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_bytes_in_use_follow_the_formula(after, batch, kv_heads):
    model = tiny_model(seed=0, num_key_value_heads=kv_heads)
    cache = generate(model, 40, after, batch).past_key_values
    one = 2 * 3 * 2 * kv_heads * 8 * 4  # layers, loops, keys and values, heads, width, bytes
    tokens = batch * (5 + 40 - 1)  # the last new token is not fed back
    assert cache.bytes_in_use == tokens * one
    held = sum(tensor.nbytes for planes in cache.planes for tensor in (planes.keys, planes.values))
    assert cache.bytes_allocated == held and cache.bytes_in_use <= held <= 1.05 * cache.bytes_in_use


def test_fixed_keeps_planes_for_its_loops_alone():
    model = tiny_model(seed=0)
    ids = torch.tensor([[9, 10, 11]])
    cache = DepthCache(2, 3)
    model(ids, past_key_values=cache, exit_config=ExitConfig(mode="fixed", depth=2))
    assert cache.bytes_in_use == 3 * (2 * 2 * 2 * 2 * 8 * 4)
    assert DepthCache(2, 3).bytes_in_use == DepthCache(2, 3).bytes_allocated == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", ["finish", "verify"])
def test_nothing_of_a_generation_outlives_it(after):
    """A hundred generations: every cache and every tensor is gone once its output is."""
    model = tiny_model(seed=0, num_hidden_layers=1, total_ut_steps=2)

    def tensors():
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    for _ in range(3):
        generate(model, 3, after)
    before = tensors()
    caches = weakref.WeakSet()
    for _ in range(100):
        caches.add(generate(model, 3, after).past_key_values)
    assert tensors() == before
    assert len(caches) == 0
