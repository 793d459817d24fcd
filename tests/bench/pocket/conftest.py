"""The micro-world's tokenizer, as it ships without tokens beside it: `test_tokenizer.py` tells that it is as built."""

import pytest
from transformers import AutoTokenizer

from sigma0.bench.pocket.tokenizer import CHAT_TEMPLATE
from sigma0.checkpoints import CHECKPOINTS


@pytest.fixture(scope="session")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "pocket-raven")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
