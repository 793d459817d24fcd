"""The formulas against what the allocators really take, and against the page that quotes them."""

import gc
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import sigma0
from sigma0 import ExitConfig
from sigma0.config import KVConfig
from sigma0.decode.kv_store import BlockShape, PagedPlanes
from sigma0.decode.sampling_params import SamplingParams
from sigma0.models import OuroConfig, OuroForCausalLM, RavenConfig, RavenForCausalLM
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest
from sigma0.serve.sizing import (
    ModelShape,
    Serving,
    block_bytes,
    blocks_for,
    fit,
    parameters,
    pass_bytes,
    sequence_bytes,
    token_bytes,
    weight_bytes,
)
from tests.models.raven_reference import tiny_raven
from tests.test_cli import run as command

DTYPES = (torch.float32, torch.bfloat16)
LAYOUTS = ("sandwich", "pre", "post")
run = partial(command, "size")


def small(**changes):
    values = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2, "total_ut_steps": 3}
    return OuroConfig(**values | {"max_position_embeddings": 1024} | changes)


@st.composite
def configs(draw):
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return small(
        vocab_size=draw(st.integers(7, 70)),
        hidden_size=draw(st.integers(3, 40)),
        intermediate_size=draw(st.integers(1, 60)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 8)),
        total_ut_steps=draw(st.integers(1, 6)),
        tie_word_embeddings=draw(st.booleans()),
    )


@st.composite
def raven_configs(draw):
    """With planes of a prelude and a coda."""
    layout = draw(st.sampled_from(LAYOUTS))
    kv_heads, group = draw(st.integers(1, 3)), 1 if layout == "sandwich" else draw(st.integers(1, 3))
    stride = draw(st.integers(1, 3))
    return RavenConfig(
        block_layout=layout,
        vocab_size=draw(st.integers(7, 40)),
        n_embd=draw(st.integers(3, 40)),
        intermediate_size=draw(st.integers(1, 60)),
        n_layers_in_prelude=draw(st.integers(0, 2)),
        n_layers_in_recurrent_block=draw(st.integers(1, 3)),
        n_layers_in_coda=draw(st.integers(0, 2)),
        n_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 8)),
        mean_recurrence=stride * draw(st.integers(1, 6)),
        stride=stride,
        qk_bias=layout == "sandwich" and draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
    )


@settings(max_examples=50, deadline=None)
@given(st.one_of(configs(), raven_configs()), st.sampled_from(DTYPES), st.integers(1, 40), st.integers(1, 5))
def test_weights_and_pages_are_those_that_are_made(config, dtype, size, pages):
    shape, number = ModelShape.of(config), dtype.itemsize
    model = (OuroForCausalLM if isinstance(config, OuroConfig) else RavenForCausalLM)(config).to(dtype)
    assert parameters(shape) == sum(item.numel() for item in model.parameters())
    assert weight_bytes(shape, number) == sum(item.nbytes for item in model.parameters())
    planes = PagedPlanes(BlockShape.of(model, size), pages, dtype, torch.device("cpu"))
    made = sum(tensor.nbytes for layer in planes.planes for tensor in (layer.keys, layer.values))
    assert made == pages * block_bytes(shape, Serving(number, size)) == pages * planes.shape.bytes_with(dtype)
    assert block_bytes(shape, Serving(number, size)) == size * token_bytes(shape, number)


def test_huginn_is_sized_by_its_published_shape():
    """Held to the modules of that size, which are made without memory."""
    config = RavenConfig(block_layout="sandwich", qk_bias=True, tie_embeddings=True)
    with torch.device("meta"):
        model = RavenForCausalLM(config)
    assert (config.n_embd, config.n_heads, config.head_dim, config.loops) == (5280, 55, 96, 32)
    obtained = told("huginn-0125")
    # a tied head is the embedding
    numbers = {id(item): item.numel() for item in model.parameters()}
    assert obtained["parameters"] == sum(numbers.values()) == obtained["weights"] / 2
    # four core layers with 32 planes, two of a prelude with one, two of a coda with two
    assert obtained["token"] == (4 * 32 + 2 + 4) * 2 * 5280 * 2
    assert "4 layers x 32 loops between 2 and 2 that run once, 55 K/V heads of 96" in run("huginn-0125").stdout


def test_fewer_loops_take_fewer_planes():
    whole, half = (told("huginn-0125", *more) for more in ((), ("--recurrence", "16")))
    assert whole["token"] - half["token"] == 16 * 4 * 2 * 5280 * 2
    strided = told("huginn-0125", "--stride", "4")
    assert strided["token"] == whole["token"] and strided["shape"]["loops"] == 8
    ouro, fewer = (told("ouro-1.4b", *more) for more in ((), ("--recurrence", "2")))
    assert fewer["token"] * 2 == ouro["token"]
    refused = run("ouro-1.4b", "--stride", "2")
    assert refused.exit_code == 2 and "stride=2 cannot be set for 'ouro-1.4b'" in refused.output


def test_the_planes_of_a_prelude_and_a_coda_are_counted_in_few_bits():
    shape = BlockShape(16, 8, 55, 96, 16, (2, 2))
    planes = PagedPlanes(shape, 3, torch.bfloat16, torch.device("cpu"), kv=KVConfig.parse("residual")).planes
    made = [tensor.nbytes for layer in planes for coded in layer.coded for tensor in (coded.codes, coded.scales)]
    assert sum(made) == 3 * 16 * told("huginn-0125", "--kv", "residual", "--stride", "4")["token"]


@pytest.mark.parametrize("kv", ["residual", "int4", '{"codec": "residual", "bits": [1, 2, 4, 8], "group": 32}'])
def test_k_v_in_few_bits_are_those_that_are_made(kv):
    """In Ouro-1.4B's shape: what `size` computes beside the tensors of blocks and of segments under way."""
    obtained, stored = told("ouro-1.4b", "--kv", kv, "--max-running", "2"), KVConfig.parse(kv)
    shape = BlockShape(24, 4, 16, 128, 16)
    planes = PagedPlanes(shape, 3, torch.bfloat16, torch.device("cpu"), 2, kv=stored).planes
    made = [tensor.nbytes for layer in planes for coded in layer.coded for tensor in (coded.codes, coded.scales)]
    assert sum(made) == 3 * 16 * obtained["token"]
    under_way = [tensor[:, :-1].nbytes for layer in planes for tensor in (layer.flat_keys, layer.flat_values)]
    assert sum(under_way) == obtained["fits"][0]["under_way"] == 2 * 64 * 768 * 1024
    plain = told("ouro-1.4b")
    bits = sum(stored.bits_of(4)) / 4 + 16 / stored.group
    assert obtained["token"] == plain["token"] * bits / 16
    assert obtained["fits"][0]["sequences"] > 3 * plain["fits"][0]["sequences"]


@settings(max_examples=15, deadline=None)
@given(
    configs(),
    st.sampled_from(["full", "finish", "drop", "verify", "fixed"]),
    st.integers(2, 20),
    st.integers(2, 20),
    st.integers(1, 3),
)
def test_a_depth_cache_takes_what_the_formula_says(config, way, prompt, new, batch):
    """All planes whatever becomes of deeper loops, under `drop` too; k of them under `fixed`."""
    model = OuroForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    set_before = {"full": ExitConfig(mode="full"), "fixed": ExitConfig(mode="fixed", depth=1)}
    exits = set_before.get(way) or ExitConfig(q=0.5, after_exit=way)
    planes = 1 if way == "fixed" else config.total_ut_steps
    ids = torch.ones((batch, prompt), dtype=torch.long)
    cache = model.new_cache(prompt + new)
    model.generate(ids, max_new_tokens=new, do_sample=False, exit_config=exits, past_key_values=cache)
    tensors = [tensor for layer in cache.planes for tensor in (layer.keys, layer.values)]
    expected = batch * (prompt + new) * token_bytes(ModelShape.of(config), 4, planes)
    assert sum(tensor.nbytes for tensor in tensors) == cache.bytes_allocated
    assert cache.bytes_allocated == pytest.approx(expected, rel=0.05)
    # the last token is told and never fed back
    assert cache.bytes_in_use == batch * (prompt + new - 1) * token_bytes(ModelShape.of(config), 4, planes)


@settings(max_examples=15, deadline=None)
@given(configs(), st.integers(1, 20), st.integers(1, 60), st.integers(0, 40))
def test_as_many_sequences_fit_as_an_engine_of_that_memory_runs(config, size, context, sequences):
    """An engine whose K/V are what a memory leaves holds that many whole texts at once, and not one more."""
    shape, serving = ModelShape.of(config), Serving(4, size, spare=0.0)
    around = weight_bytes(shape, 4) + pass_bytes(shape, serving, context)
    memory = around + sequences * sequence_bytes(shape, Serving(4, size), context)
    obtained = fit(shape, serving, memory + sequence_bytes(shape, Serving(4, size), context) - 1, context)
    assert obtained.sequences == sequences
    if not sequences:
        return
    model = OuroForCausalLM(config)
    engine = Engine(model, None, "tiny", EngineLimits(page_size=size, kv_bytes=memory - around))
    assert engine.pool.total // engine.pool.blocks_for(context) == sequences
    assert all(blocks_for(tokens, size) == engine.pool.blocks_for(tokens) for tokens in range(1, 100))
    assert engine.pool.total * size == fit(shape, serving, memory, context).tokens


class Living(TorchDispatchMode):
    """Bytes of the tensors that are made inside and still there, and the most there were."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._sizes = {}

    @property
    def now(self):
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        return sum(self._sizes.values())

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        given = {id_of(item) for item in tree_iter((arguments, keywords)) if isinstance(item, torch.Tensor)}
        fresh = [item for item in tree_iter(result) if isinstance(item, torch.Tensor) and id_of(item) not in given]
        for tensor in fresh:
            self._sizes.setdefault(StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes())
        if fresh:
            self.peak = max(self.peak, self.now)
        return result


def id_of(tensor):
    return tensor.untyped_storage()._cdata


# With so many, tokens wait for the head at their deepest loops until as many are there as it reads at once.
NEW = 12


def _most_of_a_pass(model, tokenizer, requests, prompt, exits):
    engine = Engine(model, tokenizer, "tiny", EngineLimits(max_running=requests, pass_rows=64), watch=True)
    rng = np.random.default_rng(0)
    for _ in range(requests):
        ids = tuple(rng.integers(5, 500, prompt).tolist())
        engine.submit(EngineRequest(prompt_ids=ids, max_new_tokens=NEW, exit_config=exits, sampling=SamplingParams()))
    most = 0
    # a collection in between, which comes when other tests have left enough after, would hide some of it
    gc.collect()
    gc.disable()
    try:
        with Living() as living:
            while engine.has_work:
                before = living.peak = living.now
                engine.step()
                most = max(most, living.peak - before)
    finally:
        gc.enable()
    return most


def _ouro(**changes):
    return OuroForCausalLM(small(**{"vocab_size": 600, **changes})).eval()


def _raven(layout, **changes):
    return tiny_raven(layout, 81, **{"vocab_size": 600, "block_size": 1024, **changes})


MARGIN = ExitConfig(mode="margin", theta=1e-6)


@pytest.mark.grid(fast=0, slow=2)
@pytest.mark.parametrize(
    "model, requests, prompt",
    [
        (partial(_ouro, hidden_size=256, intermediate_size=512), 1, 300),
        *((partial(_raven, layout, n_embd=256, intermediate_size=512), 1, 300) for layout in LAYOUTS),
        (partial(_ouro, hidden_size=128, intermediate_size=32, num_key_value_heads=4), 8, 100),
        (partial(_ouro, vocab_size=20000), 16, 20),
        (partial(_ouro, intermediate_size=2048), 4, 30),
        (partial(_ouro, head_dim=32), 6, 700),
        *((partial(_raven, layout, n_embd=128, n_heads=8, num_key_value_heads=8), 8, 100) for layout in LAYOUTS),
        *((partial(_raven, layout, intermediate_size=2048), 4, 30) for layout in LAYOUTS),
    ],
)
def test_no_pass_takes_more_than_the_estimate(pocket, model, requests, prompt, monkeypatch):
    is_ouro, model = model.func is _ouro, model()
    # as `sigma0.load` leaves it
    model.pack_weights()
    # layers one by one, and statistics of logits in plain torch, which take the most
    plain = replace(model.operations, certainty_rows=None, **{"run_block": None} if is_ouro else {})
    monkeypatch.setattr(type(model), "operations", property(lambda self: plain))
    model.generation_config.eos_token_id = None
    # every token exits at loop 1, so that as many rows as can be are in flight, whatever the weights
    most = _most_of_a_pass(model, pocket[1], requests, prompt, ExitConfig(q=0.01) if is_ouro else MARGIN)
    estimate = pass_bytes(ModelShape.of(model.config), Serving(4, 16, requests, 64), prompt + NEW)
    assert most <= estimate <= (2 if is_ouro else 3) * most, f"{most} of {estimate}"


def told(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_published_shapes_are_those_of_the_speed_bench():
    from sigma0.bench.speed.shapes import settings_of

    for name in ("ouro-1.4b", "ouro-2.6b"):
        obtained = told(name)
        assert ModelShape(**obtained["shape"]) == ModelShape.of(OuroConfig(**settings_of(name)))
        assert obtained["kind"] == "computed" and obtained["fits"][0]["tokens"] % 16 == 0
    assert obtained["token"] == 1536 * 1024 and obtained["parameters"] == 2_667_974_657


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("ByteDance/Ouro-1.4B", 1.435),
        ("ByteDance/Ouro-2.6B-Thinking", 2.67),
        ("tomg-group-umd/huginn-0125", 3.56),
        ("nanbeige4.2-3b", 4.17),
    ],
)
def test_every_published_family_is_sized_without_its_checkpoint(name, parameters):
    result = run(name, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["parameters"] == pytest.approx(parameters * 1e9, rel=3e-3)
    assert ("assumed" in result.stderr) == (name == "nanbeige4.2-3b")
    assert all(known in run("--help").output for known in ("ouro-2.6b", "huginn-0125", "nanbeige4.2-3b", "retrofit"))


def test_a_checkpoint_is_sized_by_its_configuration_and_at_its_whole_context_by_default():
    obtained = told("pocket", "--memory", "1GiB", "--dtype", "float32")
    model, _ = sigma0.load("pocket", dtype="float32", device="cpu")
    assert obtained["weights"] == sum(item.nbytes for item in model.parameters())
    (only,) = obtained["fits"]
    assert (only["memory"], only["context"]) == (2**30, 2048) and only["sequences"] == only["tokens"] // 2048


def test_a_model_that_does_not_fit_is_told_so():
    (only,) = told("ouro-2.6b", "--memory", "4GB")["fits"]
    assert only["sequences"] == only["tokens"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ouro-9b",), "no such model: 'ouro-9b'"),
        (("ouro-1.4b", "--memory", "much"), "--memory 'much' is no amount of memory"),
        (("ouro-1.4b", "--memory", "0B"), "--memory '0B' is 0 bytes: give a unit"),
        (("ouro-1.4b", "--memory", "24"), "--memory '24' is 24 bytes: give a unit"),
        (("ouro-1.4b", "--context", "4k"), "--context '4k'"),
        (("ouro-1.4b", "--context", "0"), "1 to 65536"),
        (("pocket", "--context", "4096"), "1 to 2048"),
        (("ouro-1.4b", "--dtype", "int4"), "--dtype 'int4' is none of float32"),
        (("ouro-1.4b", "--spare", "1"), "spare must lie in [0, 1)"),
        (("ouro-1.4b", "--page-size", "0"), "page_size must be at least 1"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and result.output.count("\n") == 1 and message in result.output, result.output


def test_a_model_without_loops_is_refused():
    from transformers import LlamaConfig

    with pytest.raises(ValueError, match="'llama' model has no loops"):
        ModelShape.of(LlamaConfig())
