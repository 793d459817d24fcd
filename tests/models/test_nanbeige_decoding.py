"""Nanbeige4.2: the law of its drawn texts, generated code, statistics; its cells are in test_conformance.py."""

import math
import random
from collections import Counter

import pytest
import torch

from sigma0 import ExitConfig
from tests.marks import exhaustive, needs_compiler, slow
from tests.reference import tiny_nanbeige

NEW = 8
FULL = ExitConfig(mode="full")
MODES = {
    "margin": ExitConfig(mode="margin", theta=0.3),
    "converge": ExitConfig(mode="converge", eps=0.6),
    "verify-margin": ExitConfig(mode="margin", theta=0.3, after_exit="verify"),
}


def written(model, rows, config, new=NEW, **settings):
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    wanted = {"max_new_tokens": new, "do_sample": False, "exit_config": config, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=mask, **wanted | settings)


def drawn(rng, vocabulary, count):
    return [[rng.randrange(1, vocabulary) for _ in range(rng.randrange(1, 12))] for _ in range(count)]


@pytest.mark.parametrize(
    ("config", "draws"),
    [
        (ExitConfig(mode="fixed", depth=1, after_exit="verify"), 4_000),
        exhaustive(ExitConfig(mode="margin", theta=0.05, after_exit="verify"), 20_000),
    ],
)
def test_drawn_texts_follow_the_law_of_full_depth(config, draws):
    model, temperature = tiny_nanbeige(5, vocab_size=6, hidden_size=16, num_hidden_layers=1), 0.7
    ids, counts, accepted = torch.tensor([[1, 4, 2]]).expand(500, -1), Counter(), []
    torch.manual_seed(0)
    while counts.total() < draws:
        found = written(
            model, ids.tolist(), config, 2, do_sample=True, temperature=temperature, top_k=0, eos_token_id=None
        )
        counts.update(map(tuple, found.sequences[:, 3:].tolist()))
        accepted.append(found.accepted.float().mean())
    assert 0.05 < float(torch.stack(accepted).mean()) < 0.99, "the test needs drafts that stand and that fall"
    law = {}
    with torch.no_grad():
        first = (model(ids[:1]).logits[0, -1].double() / temperature).softmax(-1)
        for one in range(6):
            text = torch.cat([ids[:1], torch.tensor([[one]])], dim=1)
            second = (model(text).logits[0, -1].double() / temperature).softmax(-1)
            law |= {(one, two): float(first[one] * second[two]) for two in range(6)}
    cells = [(counts[text], share * draws) for text, share in law.items() if share * draws >= 5]
    rare = [text for text, share in law.items() if share * draws < 5]
    cells += [(sum(counts[text] for text in rare), sum(law[text] for text in rare) * draws)] if rare else []
    statistic = sum((seen - expected) ** 2 / max(expected, 1e-9) for seen, expected in cells)
    assert abs(statistic - (len(cells) - 1)) / math.sqrt(2 * (len(cells) - 1)) < 4


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize(
    ("mode", "skip"), [("margin", False), slow("verify-margin", True), exhaustive("converge", True)]
)
def test_generated_code_writes_what_the_eager_step_writes(mode, skip):
    model, rows = tiny_nanbeige(3, num_hidden_layers=1, skip_loop_final_norm=skip), drawn(random.Random(2), 61, 1)
    compiled, eager = (written(model, rows, MODES[mode], runner=runner) for runner in ("compile", "eager"))
    assert compiled.runner.name == "compile"
    assert torch.equal(compiled.sequences, eager.sequences)
    assert torch.equal(compiled.exit_depths, eager.exit_depths)


@pytest.mark.parametrize("skip", [False, True])
def test_statistics_are_those_of_the_states_and_no_gate_ever_leaves(skip):
    model = tiny_nanbeige(10, num_loops=4, skip_loop_final_norm=skip)
    out = written(model, drawn(random.Random(4), 61, 1), MODES["converge"], 12, output_statistics=True)
    with torch.no_grad():
        states = model(out.sequences[:, :-1], exit_config=FULL, output_loop_states=True).loop_states[:, 0, -12:]
    change = (states[1:] - states[:-1]).norm(dim=-1) / states[:-1].norm(dim=-1)  # [T - 1, new]
    told = out.loop_statistics[0, :, 1:, 0].T
    ran = ~told.isnan()
    assert int(ran.sum()) > 20
    torch.testing.assert_close(told[ran], change[ran], rtol=1e-3, atol=1e-5)
    assert float(out.loop_statistics[0, :, :, 7].nan_to_num().abs().max()) == 0.0


@pytest.mark.parametrize("skips", [False, True])
def test_readable_states_are_what_the_head_reads(skips):
    model = tiny_nanbeige(seed=3, skip_loop_final_norm=skips)
    ids = torch.tensor([[5, 9, 2, 7]])
    with torch.no_grad():
        run = model(ids, exit_config=FULL, output_loop_states=True)
        found = model.head(model.readable(run.loop_states))
    assert torch.allclose(found, run.loop_logits, atol=1e-5)
