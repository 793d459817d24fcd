"""Tokens that are given one by one: what is told of each is what a run of the whole text tells."""

import torch

from sigma0 import ExitConfig
from tests.decode.test_inner_break import wild_model


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
            told = model(text[:, place : place + 1], past_key_values=cache, exit_config=config)
            for name in ("exit_depths", "exit_met", "exit_diverged"):
                assert getattr(told, name)[:, 0].tolist() == getattr(whole, name)[:, place].tolist(), name
            torch.testing.assert_close(told.logits[:, 0], whole.logits[:, place], rtol=1e-4, atol=1e-4)
            seen |= set(zip(told.exit_met[:, 0].tolist(), told.exit_diverged[:, 0].tolist(), strict=True))
    assert {(True, False), (False, True)} <= seen, "a kind of end never came: that was not tested"
