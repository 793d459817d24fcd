import pytest

import sigma0
from tests.reference import settled_model


@pytest.fixture(scope="session")
def model():
    """A small model that never ends a text by itself, and a tokenizer."""
    tokenizer = sigma0.load("pocket", device="cpu")[1]
    result = settled_model(3, vocab_size=len(tokenizer), total_ut_steps=4)
    result.generation_config.eos_token_id = None
    return result, tokenizer
