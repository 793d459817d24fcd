"""SIGMA0_INNER_BREAK: a loop that diverges on two loops running stops its token."""

import pytest
import torch
from torch import nn

from sigma0 import ExitConfig
from sigma0.config import Switches
from tests.decode.captures import called_by
from tests.decode.test_conformance import written
from tests.marks import slow
from tests.reference import tiny_model


def run(model, config, **kwargs):
    return written(model, [[5, 9, 2, 7], [4, 3, 11, 8]], config, 6, **kwargs)


class Growing(nn.Module):
    """A layer that does nothing to the K/V and scales what comes in."""

    def __init__(self, layer):
        super().__init__()
        self.inner = layer

    def forward(self, hidden_states, **kwargs):
        self.inner(hidden_states, **kwargs)
        return 1.3 * hidden_states + 1.0


def linear_model(total_loops=8):
    """A double whose block is linear with radius 1.3 and which has no norm after its loops."""
    model = tiny_model(3, total_ut_steps=total_loops, num_hidden_layers=1)
    model.model.layers[0] = Growing(model.model.layers[0])
    model.model.norm = nn.Identity()
    return model


def wild_model():
    """An Ouro whose post-norm gains are five times as large."""
    model = tiny_model(3, total_ut_steps=8)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm_2.weight.mul_(5)
            layer.post_attention_layernorm_2.weight.mul_(5)
    return model


@pytest.mark.parametrize("way", ["eager", "torch", "late", "python", slow("captured"), slow("compile")])
@pytest.mark.parametrize("config", [ExitConfig(q=1.0), ExitConfig(mode="margin", theta=1.0, after_exit="drop")])
def test_a_growing_map_is_broken_at_its_second_divergence(monkeypatch, config, way):
    model = linear_model()
    assert run(model, config).exit_depths.eq(8).all()
    monkeypatch.setenv("SIGMA0_INNER_BREAK", "1")
    with called_by(way, model) as (asked, _):
        out = run(model, config, output_statistics=way != "late", **asked)
    # the first two loops have no fate, so the fourth is the second that can diverge
    assert out.exit_depths.eq(4).all()
    assert out.exit_reasons == [["divergence"] * 6] * 2
    assert way == "late" or (out.loop_fates[:, :, 2:4] == 3).all()
    if out.runner is not None:
        assert out.loop_passes == 4 * 5 and (config.after_exit == "finish" or out.loop_rows == 4 * 5 * 2)


@pytest.mark.parametrize("config", [ExitConfig(mode="full"), ExitConfig(mode="converge", eps=1e-6)])
def test_every_rule_breaks_and_verify_writes_full_depths_text(monkeypatch, config):
    model = linear_model()
    full = run(model, ExitConfig(mode="full"))
    monkeypatch.setenv("SIGMA0_INNER_BREAK", "1")
    assert run(model, config).exit_depths.eq(4).all()
    assert run(model, ExitConfig(q=1.0, after_exit="verify")).sequences.equal(full.sequences)


def test_a_token_at_a_time_has_the_logits_depths_and_flags_of_the_whole_text(monkeypatch):
    monkeypatch.setenv("SIGMA0_INNER_BREAK", "1")
    model = wild_model()
    model.generation_config.fate_config = {"growth": 0.0}
    generator, seen = torch.Generator().manual_seed(1), set()
    for theta in (0.02, 0.1, 0.3):
        config = ExitConfig(mode="margin", theta=theta, min_loops=2)
        text = torch.randint(3, 60, (2, 9), generator=generator)
        whole = model(text, exit_config=config)
        cache = model(text[:, :3], exit_config=config).past_key_values
        for place in range(3, 9):
            output = model(text[:, place : place + 1], past_key_values=cache, exit_config=config)
            for name in ("exit_depths", "exit_met", "exit_diverged"):
                assert getattr(output, name)[:, 0].tolist() == getattr(whole, name)[:, place].tolist(), name
            torch.testing.assert_close(output.logits[:, 0], whole.logits[:, place], rtol=1e-4, atol=1e-4)
            seen |= set(zip(output.exit_met[:, 0].tolist(), output.exit_diverged[:, 0].tolist(), strict=True))
    assert {(True, False), (False, True)} <= seen, "a kind of end never came: that was not tested"


def test_at_the_last_loop_there_is_nothing_left_to_break(monkeypatch):
    """The second divergence is at loop T: those tokens ran out of loops, whether read from the prompt or later."""
    monkeypatch.setenv("SIGMA0_INNER_BREAK", "1")
    out = run(linear_model(total_loops=4), ExitConfig(q=1.0), output_statistics=True)
    assert (out.loop_fates[:, :, 2:] == 3).all() and out.exit_depths.eq(4).all()
    assert out.exit_reasons == [["max_depth"] * 6] * 2


def test_large_gains_are_broken_somewhere_and_never_later_than_without(monkeypatch):
    """Under `finish` the break reads tokens early, and what it reads is what a run of all loops has there."""
    model = wild_model()
    plain = run(model, ExitConfig(q=1.0), output_statistics=True)
    monkeypatch.setenv("SIGMA0_INNER_BREAK", "1")
    out = run(model, ExitConfig(q=1.0), output_statistics=True)
    broken = [reason for row in out.exit_reasons for reason in row].count("divergence")
    diverged = (plain.loop_fates[:, 0] == 3).int()
    assert broken == int((out.exit_depths < 8).sum())
    # at the last loop nothing is left to break
    twice = (diverged[:, 1:-1] + diverged[:, :-2]).eq(2).any(-1)
    assert (out.exit_depths[:, 0] < 8).tolist() == twice.tolist()


def test_switches(monkeypatch):
    assert Switches().model_dump() == {"verdict": True, "inner_break": False, "ladder": False, "routing": False}
    monkeypatch.setenv("SIGMA0_VERDICT", "0")
    monkeypatch.setenv("SIGMA0_LADDER", "1")
    assert Switches().model_dump() == {"verdict": False, "inner_break": False, "ladder": True, "routing": False}
    monkeypatch.setenv("SIGMA0_ROUTING", "perhaps")
    with pytest.raises(ValueError, match="routing"):
        Switches()


@pytest.mark.slow
def test_verify_reads_its_prompt_at_full_depth_whatever_breaks(monkeypatch):
    model = wild_model()
    model.generation_config.fate_config = {"growth": 0.0}
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 60, (1, 5), generator=generator) for _ in range(12)]

    def write(prompt, **config):
        out = model.generate(prompt, max_new_tokens=3, do_sample=False, exit_config=config)
        return out[0, 5:].tolist()

    full = [write(prompt, mode="full") for prompt in prompts]
    monkeypatch.setenv("SIGMA0_INNER_BREAK", "1")
    assert [write(prompt, mode="full") for prompt in prompts] != full, "nothing broke: that was not tested"
    assert [write(prompt, q=0.9, after_exit="verify") for prompt in prompts] == full
