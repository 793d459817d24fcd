"""The micro-world's tokenizer, built once for all tests of this folder."""

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.tokenizer import build_tokenizer


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()
