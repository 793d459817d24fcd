"""Raven under every runner: compiled, a whole step at once and read late, captured; drawn texts; statistics."""

from collections import Counter
from dataclasses import replace
from itertools import cycle

import pytest
import torch

from sigma0 import ExitConfig
from sigma0.decode import graph_runner, programs, runners
from sigma0.decode.ops import TORCH, depth_attention_reference
from tests.decode.captures import RepeatedCapture
from tests.decode.test_stages import drawn
from tests.marks import exhaustive, fast_if, needs_compiler
from tests.models.raven_reference import SHAPES, tiny_raven

MODES = {
    "full": ExitConfig(mode="full"),
    "fixed": ExitConfig(mode="fixed", depth=2),
    "margin": ExitConfig(mode="margin", theta=0.1),
    "converge": ExitConfig(mode="converge", eps=0.6),
    "accel": ExitConfig(mode="accel", eps=0.9, patience=1),
    "drop": ExitConfig(mode="margin", theta=0.1, after_exit="drop"),
    "verify": ExitConfig(mode="converge", eps=0.6, after_exit="verify"),
    "verify-once": ExitConfig(mode="converge", eps=0.6, after_exit="verify", redraft=False),
    "verify-margin": ExitConfig(mode="margin", theta=0.1, after_exit="verify"),
}


def written(model, runner, config, batch, **settings):
    rows = drawn(31, batch)
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    torch.manual_seed(7)
    wanted = {"max_new_tokens": 8, "exit_config": config, "runner": runner, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=mask, **wanted | settings)


def assert_same(one, other):
    assert torch.equal(one.sequences, other.sequences)
    assert torch.equal(one.exit_depths, other.exit_depths)
    assert one.exit_reasons == other.exit_reasons
    for counted in ("loop_passes", "loop_rows", "head_rows", "prompt_rows"):
        assert getattr(one, counted) == getattr(other, counted), counted


@pytest.mark.grid(fast=0, slow=1)
@needs_compiler
@pytest.mark.parametrize(
    ("layout", "mode", "batch"),
    [
        *(fast_if(mode in ("full", "margin", "drop"), "sandwich", mode, 1) for mode in MODES),
        *(exhaustive(layout, mode, 4) for layout, mode in zip(cycle(SHAPES), MODES)),
        ("sandwich", "verify", 2),
    ],
)
def test_every_mode_is_one_graph(layout, mode, batch, monkeypatch):
    monkeypatch.setattr(programs, "generate_code", lambda graph, examples: graph)
    model = tiny_raven(layout, 33)
    compiled, eager = (written(model, runner, MODES[mode], batch) for runner in ("compile", "eager"))
    assert (compiled.runner.name, eager.runner.name) == ("compile", "eager")
    assert_same(compiled, eager)


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize(
    ("layout", "mode", "batch"),
    [
        ("pre", "margin", 1),
        exhaustive("sandwich", "margin", 4),
        exhaustive("pre", "verify", 4),
        exhaustive("post", "converge", 4),
    ],
)
def test_generated_code_writes_the_same(layout, mode, batch):
    model = tiny_raven(layout, 35, n_layers_in_coda=1, n_layers_in_recurrent_block=1)
    compiled, eager = (written(model, runner, MODES[mode], batch) for runner in ("compile", "eager"))
    assert compiled.runner.name == "compile"
    assert_same(compiled, eager)


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_at_once_is_the_eager_step(mode, captured, monkeypatch):
    model = tiny_raven("post", 37).double()
    ops = replace(TORCH, depth_attention=depth_attention_reference)
    monkeypatch.setattr(type(model), "operations", property(lambda self: ops))
    eager = written(model, "eager", MODES[mode], 3)
    monkeypatch.setattr(runners, "LATE_DEVICES", frozenset({"cpu"}))
    if captured:
        monkeypatch.setattr(runners, "CAPTURES", {"cpu": RepeatedCapture})
        monkeypatch.setattr(graph_runner, "_SHORTEST", 1)
    whole = written(model, "auto" if captured else "eager", MODES[mode], 3)
    assert whole.runner.late and whole.runner.captured == captured
    assert torch.equal(whole.sequences, eager.sequences)
    assert torch.equal(whole.exit_depths, eager.exit_depths)


@pytest.mark.grid(fast=1, slow=1)
@pytest.mark.parametrize("config", [MODES["full"], MODES["verify"], MODES["verify-margin"]])
@pytest.mark.cpu(3)
def test_drawn_texts_follow_the_law_of_full_depth(config):
    model = tiny_raven("pre", 39, vocab_size=5, n_layers_in_coda=1)
    torch.manual_seed(0)
    ids, draws = torch.tensor([[1, 4, 2]]).expand(500, -1), 4000
    counts = Counter()
    while counts.total() < draws:
        out = model.generate(
            ids, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=2, eos_token_id=None, exit_config=config
        )
        counts.update(map(tuple, out[:, 3:].tolist()))
    expected = {}
    with torch.no_grad():
        first = model(ids[:1], exit_config=MODES["full"]).logits[0, -1].double().softmax(-1)
        for one in range(5):
            text = torch.cat([ids[:1], torch.tensor([[one]])], dim=1)
            second = model(text, exit_config=MODES["full"]).logits[0, -1].double().softmax(-1)
            expected |= {(one, two): float(first[one] * second[two]) for two in range(5)}
    statistic = sum((counts[text] - draws * chance) ** 2 / (draws * chance) for text, chance in expected.items())
    # 99.9 % of a chi-square of 24 degrees
    assert statistic < 51.2


@pytest.mark.parametrize("mode", ["margin", "verify", "drop"])
def test_a_request_draws_the_same_alone_and_in_company(mode):
    model = tiny_raven("sandwich", 41)
    settings = {"do_sample": True, "temperature": 0.9, "top_k": 20}
    assert_same(written(model, "eager", MODES[mode], 1, **settings), written(model, "auto", MODES[mode], 1, **settings))
    many = written(model, "eager", MODES[mode], 5, **settings)
    one = written(model, "eager", MODES[mode], 1, **settings)
    # the seeds of a batch come from one call, the first sequence's first
    assert many.sequences[0, -8:].tolist() == one.sequences[0, -8:].tolist()


@pytest.mark.parametrize("mode", ["margin", "converge", "drop", "verify"])
def test_statistics_are_those_of_the_states(mode):
    model = tiny_raven("sandwich", 43)
    out = written(model, "eager", MODES[mode], 1, output_statistics=True)
    ids = out.sequences[:, :-1]
    with torch.no_grad():
        states = model(ids, exit_config=MODES["full"], output_loop_states=True).loop_states[:, 0]  # [T, S, D]
    new = out.exit_depths.shape[1]
    path = states[:, -new:]
    change = (path[1:] - path[:-1]).norm(dim=-1) / path[:-1].norm(dim=-1)  # [T - 1, new]
    told = out.loop_statistics[0, :, 1:, 0].T
    ran = ~told.isnan()
    if mode != "drop":
        assert torch.allclose(told[ran], change[ran], rtol=1e-3, atol=1e-5)
    assert int(ran.sum()) > 8
    # no gate: nothing is ever left
    assert float(out.loop_statistics[0, :, :, 7].nan_to_num().abs().max()) == 0.0
