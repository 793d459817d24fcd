"""The micro-world's tokenizer, as it ships: that it is what is built, `test_tokenizer.py` tells."""

import pytest
from transformers import AutoTokenizer

from sigma0.checkpoints import CHECKPOINTS


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINTS / "pocket")
