"""Free runs against sums made here from single generations."""

import pytest

import sigma0
from sigma0.bench.pocket.free import free_runs
from sigma0.bench.pocket.world import draw


def test_figures_are_ratios_of_sums(pocket) -> None:
    model, tokenizer = pocket
    runs = free_runs(model, tokenizer, 4, "test", 7)
    passes = rows = depths = tokens = same = right = 0
    for index in range(4):
        item = draw("test", 7, index, questions=1).items[0]
        prompt = [{"role": "user", "content": item.prompt}] if index % 2 else item.prompt
        early = sigma0.generate(model, tokenizer, prompt, max_new_tokens=24)
        full = sigma0.generate(model, tokenizer, prompt, max_new_tokens=24, exit_config={"mode": "full"})
        passes, rows = passes + early.loop_passes, rows + early.loop_rows
        depths += sum(token.depth for token in early.tokens[1:])
        tokens += len(early.tokens) - 1
        same += early.text == full.text
        right += early.text.strip() == item.answer
    whole = model.num_loops * tokens
    assert runs.passes_saved == pytest.approx(1 - passes / whole)
    assert runs.depth_saved == pytest.approx(runs.passes_saved) == pytest.approx(1 - depths / whole)
    assert runs.rows_saved == pytest.approx(1 - rows / whole)
    assert (runs.same, runs.right) == (same / 4, right / 4)
