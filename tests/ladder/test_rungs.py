"""Rungs: what a model or a server needs to be one, and which two share a tokenizer."""

import copy
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from pydantic import SecretStr
from torch import nn

from sigma0 import ExitConfig
from sigma0.ladder import Price, Rung
from sigma0.ladder.rungs import PROBES, EndpointRung, LocalRung, at_effort, check_same_tokens, declines_nothing
from tests.models.raven_reference import tiny_raven

URL = "http://127.0.0.1:8000/v1"


def test_a_local_rung_and_what_is_none(looped, plain, tokenizer):
    rung = Rung.local(looped[0], tokenizer, "small", exit_config={"q": 0.25}, kv_limit=1)
    assert rung.is_looped and (rung.name, rung.kv_limit, rung.exit_config) == ("small", 1, ExitConfig(q=0.25))
    assert rung.declines is declines_nothing
    assert declines_nothing("") and declines_nothing(" \n") and not declines_nothing(" a ")
    assert rung.to_dict() == {"kind": "local", "name": "small", "model": "OuroForCausalLM", "looped": True}
    other = Rung.local(plain, tokenizer, declines=str.isspace)
    assert not other.is_looped and other.exit_config is other.kv_limit is None and other.declines is str.isspace
    assert other.name == (plain.config.name_or_path or "LlamaForCausalLM") and not other.to_dict()["looped"]
    named = copy.copy(plain)
    named.config = copy.copy(plain.config)
    named.config.name_or_path = "some/model"
    assert Rung.local(named, tokenizer).name == "some/model" and Rung.local(named, tokenizer, "own").name == "own"
    with pytest.raises(ValueError, match="fast tokenizer is needed, got object"):
        Rung.local(looped[0], object())
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"at least 1, got {limit}"):
            Rung.local(looped[0], tokenizer, kv_limit=limit)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no loops to exit from"):
        Rung.local(plain, tokenizer, exit_config=ExitConfig(q=0.5))
    model = copy.copy(looped[0])
    for ends, expected in ((None, set()), (3, {3}), ([3, 4], {3, 4})):
        model.generation_config = SimpleNamespace(eos_token_id=ends)
        assert LocalRung("name", model, None).eos == expected


def test_the_block_of_a_model_is_its_largest_list_of_layers(looped, plain):
    def block(model):
        return LocalRung("name", model, None).block

    assert block(looped[1]) is looped[1].model.layers and block(plain) is plain.model.layers
    both = nn.Module()
    both.few, both.many = nn.ModuleList([nn.Linear(3, 3)] * 1), nn.ModuleList([nn.Linear(2, 2), nn.Linear(3, 3)])
    both.base_model = both
    assert block(both) is both.many
    raven = tiny_raven("sandwich", 1)
    assert list(block(raven)) == [raven.base_model.adapter, *raven.base_model.core_block]
    flat = nn.Linear(2, 2)
    flat.base_model = flat
    with pytest.raises(ValueError, match="rung 'name': Linear has no list of layers"):
        block(flat)


def test_an_endpoint_has_a_plain_address_and_a_key_that_a_header_can_hold():
    rung = Rung.endpoint(URL, "model")
    assert (rung.name, rung.model, rung.base_url, rung.api_key.get_secret_value()) == ("model", "model", URL, "none")
    assert (rung.timeout, rung.attempts, rung.backoff, rung.price) == (60.0, 3, 0.5, Price())
    assert rung.to_dict() == {"kind": "endpoint", "name": "model", "host": "127.0.0.1", "model": "model"}
    plain = ("http://user@host/v1", "http://:pass@host/v1", "http://host/v1?a=1", "http://host/v1#a", "http:///v1")
    for url in (*plain, "host/v1", "ftp://x/v1", ""):
        with pytest.raises(ValueError, match="base_url must be"):
            Rung.endpoint(url, "model")
    for key in ("", "a b", "a\tb", "a\nb", "a\x00"):
        with pytest.raises(ValueError, match="not shown here") as caught:
            EndpointRung("name", URL, "model", SecretStr(key))
        assert not key or key not in str(caught.value)
    named = Rung.endpoint("https://host/v1", "model", " key ", "own", timeout=1.0, attempts=1, backoff=0.0)
    assert (named.name, named.api_key.get_secret_value(), named.declines) == ("own", "key", declines_nothing)
    assert "key=" not in repr(named) and "SecretStr" not in repr(named)


@pytest.mark.parametrize(
    "setting, good, bad",
    [
        ("timeout", [1e-3, 1e6], [0.0, -1.0, float("inf"), float("nan")]),
        ("attempts", [1, 2], [0, -1]),
        ("backoff", [0.0, 3.0], [-0.1, float("inf"), float("nan")]),
    ],
)
def test_numbers_of_an_endpoint_lie_in_their_range(setting, good, bad):
    for value in good:
        assert getattr(Rung.endpoint(URL, "model", **{setting: value}), setting) == value
    for value in bad:
        with pytest.raises(ValueError, match="timeout must be above 0, attempts at least 1 and backoff at least 0"):
            Rung.endpoint(URL, "model", **{setting: value})


def test_an_effort_changes_the_setting_of_looped_models_alone(looped, plain, tokenizer):
    rung = Rung.local(looped[0], tokenizer, "small", exit_config=ExitConfig(mode="margin", theta=0.5))
    more = at_effort(rung, "high")
    assert more == replace(rung, exit_config=ExitConfig(mode="margin", theta=0.5, min_loops=2, after_exit="verify"))
    assert at_effort(rung, "minimal").exit_config == ExitConfig(mode="margin", theta=0.25)
    for other in (Rung.local(plain, tokenizer), Rung.endpoint(URL, "model")):
        assert at_effort(other, "minimal") is other


class Words:
    """A tokenizer of which each part can be changed."""

    def __init__(self, vocabulary=None, ends=(1, 2), ids=None, texts=None):
        self.vocabulary, self.ids, self.texts = vocabulary or {"a": 0, "b": 1}, ids or {}, texts or {}
        self.bos_token_id, self.eos_token_id = ends

    def get_vocab(self):
        return self.vocabulary

    def __call__(self, text, add_special_tokens):
        assert add_special_tokens
        return {"input_ids": self.ids.get(text, [len(text)])}

    def decode(self, ids):
        return self.texts.get(tuple(ids), str(ids))


@pytest.mark.parametrize(
    "other, output",
    [
        ({"vocabulary": {"a": 0, "b": 2}}, "'b' is 1 in one vocabulary and 2 in the other"),
        ({"vocabulary": {"a": 0}}, "'b' is 1 in one vocabulary and None in the other"),
        ({"vocabulary": {"a": 0, "b": 1, "c": 2}}, "'c' is None in one vocabulary and 2 in the other"),
        ({"vocabulary": {"a": 1, "b": 0}}, "'a' is 0 in one vocabulary and 1 in the other"),
        ({"ends": (3, 2)}, "bos_token_id is 1 and 3"),
        ({"ends": (1, 3)}, "eos_token_id is 2 and 3"),
        *[({"ids": {probe: [7, 7]}}, f"{probe[:20]!r} is taken apart otherwise") for probe in PROBES],
        ({"texts": {(len(PROBES[0]),): "other"}}, f"{PROBES[0][:20]!r} is put together otherwise"),
    ],
)
def test_rungs_of_single_tokens_share_a_tokenizer(other, output):
    lower, upper = (SimpleNamespace(name=name, tokenizer=Words()) for name in ("small", "large"))
    check_same_tokens(lower, upper)
    upper.tokenizer = Words(**other)
    with pytest.raises(ValueError, match=f"'small' and 'large' do not share a tokenizer: {re.escape(output)}"):
        check_same_tokens(lower, upper)
