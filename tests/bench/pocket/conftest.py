"""The micro-world's tokenizer, as it ships: that it is what is built, `test_tokenizer.py` tells."""

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sigma0.checkpoints import CHECKPOINTS


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(CHECKPOINTS / "pocket")
