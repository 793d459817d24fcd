"""Rotary embeddings looked up equal those computed."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from sigma0.models import OuroConfig
from sigma0.models.ouro_block import rotated
from sigma0.models.rotary_table import RotaryTable


@pytest.fixture
def rotary():
    return Qwen3RotaryEmbedding(OuroConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_module(rotary, dtype):
    table, like = RotaryTable(rotary), torch.zeros((), dtype=dtype)
    for positions in ([0], [5, 5, 0], [300, 2], [700], [1, 699]):
        rows = torch.tensor(positions)
        cos, sin = rotary(like, rows[:, None])
        sin[..., : sin.shape[-1] // 2].neg_()  # as `rotated` takes it
        for mine, theirs in zip(table.rows(rows, max(positions) + 1, like), (cos, sin), strict=True):
            assert mine.dtype == dtype and torch.equal(mine, theirs)
        heads = torch.randn(len(positions), 3, cos.shape[-1]).to(dtype)
        queries = heads.transpose(0, 1)[None]  # [1, H, R, d]
        expected = apply_rotary_pos_emb(queries, queries, *rotary(like, rows[None]))[0][0].transpose(0, 1)
        turned = rotated(heads, *table.rows(rows, max(positions) + 1, like))
        # rounded once, where the module rounds every product
        rtol = torch.finfo(dtype).eps
        torch.testing.assert_close(turned, expected, rtol=rtol, atol=4 * rtol)


def test_another_dtype_makes_another_table(rotary):
    table = RotaryTable(rotary)
    with torch.inference_mode():
        table.rows(torch.tensor([3]), 3, torch.zeros(()))
    cos, _ = table.rows(torch.tensor([3]), 3, torch.zeros((), dtype=torch.float16))
    assert cos.dtype == torch.float16 and not cos.is_inference()
