"""Rotary embeddings looked up equal those computed."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from sigma0.models import OuroConfig
from sigma0.models.rotary_table import RotaryTable


@pytest.fixture
def rotary():
    return Qwen3RotaryEmbedding(OuroConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_module(rotary, dtype):
    table, like = RotaryTable(rotary), torch.zeros((), dtype=dtype)
    for positions in ([0], [5, 5, 0], [300, 2], [700], [1, 699]):
        rows = torch.tensor(positions)
        for mine, theirs in zip(table.rows(rows, max(positions), like), rotary(like, rows[:, None]), strict=True):
            assert mine.dtype == dtype and torch.equal(mine, theirs)


def test_another_dtype_makes_another_table(rotary):
    table = RotaryTable(rotary)
    with torch.inference_mode():
        table.rows(torch.tensor([3]), 3, torch.zeros(()))
    cos, _ = table.rows(torch.tensor([3]), 3, torch.zeros((), dtype=torch.float16))
    assert cos.dtype == torch.float16 and not cos.is_inference()
