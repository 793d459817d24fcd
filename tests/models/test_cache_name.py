"""A cache has two names, and a release of transformers has one of them: both are taken and given whichever that is."""

import inspect
import warnings
from functools import partial

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.generation import GenerationMixin
from transformers.utils import generic

from sigma0.bench.overhead.measure import empty_plain
from sigma0.bench.speed.peer import StockLoopedModel
from sigma0.models.cache_name import CACHE_NAME, CACHE_NAMES, cache_argument, named_cache
from sigma0.models.outputs import DepthGenerateOutput, LoopedCausalLMOutput, LoopedModelOutput
from tests.models.raven_reference import tiny_raven
from tests.reference import tiny_model, tiny_nanbeige

IDS = torch.tensor([[5, 6, 7, 8]])
SETTINGS = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
OUTPUTS = [LoopedModelOutput, LoopedCausalLMOutput, partial(DepthGenerateOutput, sequences=None)]

each_name = pytest.mark.parametrize("name", CACHE_NAMES)


@pytest.fixture(scope="module", params=["ouro", "nanbeige", "raven"])
def model(request):
    if request.param == "raven":
        return tiny_raven("sandwich", seed=0)
    return (tiny_model if request.param == "ouro" else tiny_nanbeige)(seed=0)


@pytest.fixture
def deprecations(monkeypatch):
    """What transformers says once a process, said each time."""
    said = []
    monkeypatch.setattr(generic.logger, "warning_once", said.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        yield said


@each_name
@torch.no_grad()
def test_every_way_in_takes_both_names_without_a_warning(model, deprecations, name):
    base = getattr(model, model.base_model_prefix)
    for call in (model, base):
        cache = model.new_cache()
        outputs = call(IDS, **{name: cache})
        assert outputs.past_key_values is outputs.cache is cache and cache.length == 4
    expected = model.generate(IDS, **SETTINGS)
    cache = model.new_cache()
    out = model.generate(IDS, **{name: cache}, **SETTINGS)
    assert out.past_key_values is out.cache is cache and cache.length == 8
    assert torch.equal(out.sequences, expected.sequences)
    longer = torch.cat([out.sequences, IDS], 1)
    assert torch.equal(
        model.generate(longer, **{name: cache}, **SETTINGS).sequences, model.generate(longer, **SETTINGS).sequences
    )
    assert model.generate(IDS, **{name: None}, **SETTINGS).cache.length == 8
    assert deprecations == []


@torch.no_grad()
def test_the_stock_loop_takes_and_gives_it_without_a_warning(model, deprecations):
    """A processor that may look at all rows keeps a batch in transformers' own loop."""
    batch, cache = IDS.repeat(2, 1), model.new_cache()
    out = model.generate(batch, past_key_values=cache, logits_processor=[lambda ids, scores: scores], **SETTINGS)
    assert out.runner is None and out.cache is cache and cache.length == 8
    assert torch.equal(out.sequences, model.generate(batch, **SETTINGS).sequences)
    full = SETTINGS | {"exit_config": {"mode": "full"}}
    assert model.generate(IDS, cache=model.new_cache(), num_beams=2, **full).sequences.shape == (1, 9)
    assert deprecations == []


def test_both_names_at_once_are_refused(model):
    both = {name: model.new_cache() for name in CACHE_NAMES}
    for call in (model, getattr(model, model.base_model_prefix), model.generate):
        with pytest.raises(TypeError, match="two names of one argument"):
            call(IDS, **both)
    with pytest.raises(TypeError, match="takes no argument cache_params"):
        model(IDS, cache_params=model.new_cache())


@pytest.mark.parametrize("kind", OUTPUTS, ids=["model", "forward", "generate"])
def test_an_output_holds_one_cache_under_both_names(deprecations, kind):
    empty, held = kind(), object()
    assert [name in empty for name in CACHE_NAMES] == [False, False]
    assert [empty.get(name, 3) for name in CACHE_NAMES] == [3, 3] and empty.cache is empty.past_key_values is None
    output = kind(**named_cache(held))
    assert list(output.keys()) == [CACHE_NAME] and output.to_tuple() == (held,)
    for name in CACHE_NAMES:
        assert getattr(output, name) is output[name] is output.get(name) is held and name in output
        other = object()
        setattr(output, name, other)
        assert output.cache is output["cache"] is output.past_key_values is output["past_key_values"] is other
        output[name] = held
    assert list(output.keys()) == [CACHE_NAME] and deprecations == []


@each_name
def test_models_of_the_benches_take_both(name, deprecations):
    stock, plain = StockLoopedModel(tiny_model(seed=0)).eval(), empty_plain(400, 64)
    for item in (stock, plain):
        cache = DynamicCache()
        outputs = item(IDS, position_ids=torch.arange(4)[None], logits_to_keep=1, **{name: cache})
        assert outputs[CACHE_NAME] is cache and cache.get_seq_length() == 4
        cache = DynamicCache()
        out = item.generate(IDS, **named_cache(cache), **SETTINGS)
        assert out[CACHE_NAME] is cache and cache.get_seq_length() == 8
    assert deprecations == []


def test_a_forward_is_asked_for_its_name():
    def former(input_ids, past_key_values=None): ...

    def later(input_ids, cache=None): ...

    def other(input_ids, state=None): ...

    assert [cache_argument(forward) for forward in (former, later, other)] == [*CACHE_NAMES, CACHE_NAME]
    assert cache_argument(LlamaForCausalLM.forward) == CACHE_NAME


def test_generate_shows_the_arguments_of_transformers_own(model):
    shown = inspect.signature(model.generate).parameters
    assert list(shown) == [name for name in inspect.signature(GenerationMixin.generate).parameters if name != "self"]
    assert "generation_config" in shown and "exit_config" in type(model).generate.__doc__


def test_layers_that_are_checkpointed_leave_the_cache_out(model):
    """Without gradients transformers asks for one from 5.24 on, which the layers of 5.23 would not fill."""
    base = getattr(model, model.base_model_prefix)
    expected = model(IDS, exit_config={"mode": "full"}).logits
    model.train().gradient_checkpointing_enable()
    try:
        with torch.no_grad():
            assert base(IDS).cache is None
            torch.testing.assert_close(model(IDS, exit_config={"mode": "full"}).logits, expected)
    finally:
        model.gradient_checkpointing_disable()
        model.eval()
