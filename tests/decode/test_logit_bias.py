"""`logit_bias`: added wherever the head is read, in drafts and at loop T alike."""

import pytest
import torch

import sigma0
from tests.byte_model import byte_model
from tests.decode.test_grammar import RULES

BIAS = {token_id: 6.0 * (token_id % 3 - 1) for token_id in range(40, 200, 2)}


@pytest.fixture(scope="module")
def byte():
    return byte_model(3)


def written(byte, rule, after="finish", **more):
    return sigma0.generate(*byte, "hello", exit_config={**RULES[rule], "after_exit": after}, max_new_tokens=40, **more)


def test_a_bias_decides(byte):
    assert written(byte, "full", logit_bias={65: 100.0}, on_collapse="ignore").text == byte[1].decode([65]) * 40
    plain = written(byte, "full")
    banned = plain.tokens[0].id
    assert banned not in [token.id for token in written(byte, "full", logit_bias={banned: -100.0}).tokens]
    assert written(byte, "full", logit_bias={}).text == plain.text
    with pytest.raises(ValueError, match="ids from 0 to 259, got 260"):
        written(byte, "full", logit_bias={260: 1.0})


@pytest.mark.parametrize("rule", ["margin", "qexit", "converge", "kl"])
def test_verify_under_a_bias_is_full_depth_under_it(byte, rule):
    full = written(byte, "full", logit_bias=BIAS)
    assert full.text != written(byte, "full").text
    assert [token.id for token in written(byte, rule, "verify", logit_bias=BIAS).tokens] == [
        token.id for token in full.tokens
    ]


@pytest.mark.parametrize("after", ["finish", "verify", "drop"])
def test_the_device_writes_what_transformers_processor_does(byte, after):
    """A processor that settings cannot stand for runs on the host, and adds the same."""
    model = byte[0]
    ids = torch.arange(5)[None]
    exit_config = {"mode": "margin", "theta": 0.3, "after_exit": after}
    settings = {"max_new_tokens": 30, "exit_config": exit_config, "attention_mask": torch.ones_like(ids)}
    single = {(token_id,): bias for token_id, bias in BIAS.items()}
    on_device = model.generate(ids, sequence_bias=single, **settings)
    # a run of ids that never comes needs the host
    on_host = model.generate(ids, sequence_bias={**single, (1, 2, 3): -1.0}, **settings)
    assert torch.equal(on_device, on_host)


def test_it_holds_under_a_grammar(byte):
    for after in ("finish", "verify"):
        done = written(byte, "margin", after, choice=["ab", "cd"], logit_bias={ord("c") - 33: 100.0})
        assert done.text == byte[1].decode([ord("c") - 33]) + "d" == "cd"
