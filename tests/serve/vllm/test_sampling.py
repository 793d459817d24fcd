"""Sampling with drafts follows full depth's distribution."""

from collections import Counter

import numpy as np
import pytest
import torch

from tests.reference import tiny_model
from tests.serve.vllm.engines import counter, engine, needs_vllm, write

pytestmark = needs_vllm
stats = pytest.importorskip("scipy.stats")

DRAWS = 20_000
TEMPERATURE = 1.25
PROMPT = [5, 3, 7, 1, 6]


def law(model, prompt, tokens):
    """Chances of all continuations of so many tokens at full depth."""
    chances = {(): 1.0}
    for _ in range(tokens):
        texts = list(chances)
        logits = model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1]  # [texts, V]
        shares = (logits.double() / TEMPERATURE).softmax(-1)
        chances = {
            (*text, token): chances[text] * float(share)
            for text, row in zip(texts, shares, strict=True)
            for token, share in enumerate(row)
        }
    return chances


@torch.no_grad()
def test_twenty_thousand_draws_follow_the_law_of_full_depth(tmp_path):
    model = tiny_model(seed=5, vocab_size=9, total_ut_steps=4)
    model.save_pretrained(tmp_path)
    chances = law(model, PROMPT, 4)
    with engine(tmp_path, drafts=3, loops=2, max_num_seqs=256) as llm:
        drawn = Counter(
            tuple(text)
            for _ in range(DRAWS // 1000)
            for text in write(llm, [PROMPT] * 1000, temperature=TEMPERATURE, max_tokens=4)
        )
        accepted = counter(llm, "spec_decode_num_accepted_tokens") / counter(llm, "spec_decode_num_draft_tokens")
    assert drawn.total() == DRAWS and set(drawn) <= set(chances)
    assert 0.1 < accepted < 0.9, "drafts are both accepted and rejected"
    # what is expected less than 5 times is one class
    expected = np.array([DRAWS * chance for chance in chances.values()])
    observed = np.array([drawn[text] for text in chances])
    rare = expected < 5
    pooled = [np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected)]
    p_value = stats.chisquare(*pooled).pvalue
    print(f"{len(pooled[0])} classes, {accepted:.3f} of the drafts accepted, p = {p_value:.3f}")
    assert p_value > 0.001
