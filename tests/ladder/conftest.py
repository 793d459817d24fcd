"""Small random models with one tokenizer: looped ones, and one that is not."""

import pytest

import sigma0
from sigma0.ladder import Rung
from tests.reference import tiny_llama, tiny_model


@pytest.fixture(scope="session")
def tokenizer():
    return sigma0.load("pocket", dtype="float32")[1]


@pytest.fixture(scope="session")
def looped(tokenizer):
    """Two looped models, the second larger."""
    models = [
        tiny_model(seed=4, vocab_size=len(tokenizer), total_ut_steps=4),
        tiny_model(seed=5, vocab_size=len(tokenizer), total_ut_steps=6, num_hidden_layers=3),
    ]
    for model in models:
        model.generation_config.eos_token_id = None
    return models


@pytest.fixture(scope="session")
def plain(tokenizer):
    return tiny_llama(6, len(tokenizer))


@pytest.fixture
def rungs(looped, tokenizer):
    return [Rung.local(looped[0], tokenizer, "small"), Rung.local(looped[1], tokenizer, "large")]
