"""A threshold for a model with a coda: readings take earlier tokens at loop T, and the check decodes freely."""

import json

import numpy as np
import pytest
import torch

import sigma0
from sigma0.calibrate.agreement import calibrate, continue_in_full
from sigma0.calibrate.report import print_result
from sigma0.calibrate.teacher_forcing import ForcedText, read_forced
from sigma0.config import ExitConfig
from tests.calibrate.conftest import random_prompts, run
from tests.marks import exhaustive, slow
from tests.models.raven_reference import Reference, save_raven, tiny_raven


@pytest.mark.parametrize("layout", ["sandwich", slow("pre"), slow("post")])
def test_readings_take_earlier_tokens_at_the_last_loop(layout):
    model = tiny_raven(layout, 101)
    reference, ids = Reference(model), (5, 9, 30, 2, 8, 17)
    result = read_forced(model, {}, [ForcedText(ids, 3)])
    with torch.no_grad():
        states = reference.model.transformer(torch.tensor([ids])).loop_states[:, 0]
        for place in range(len(ids) - 1):
            top = [
                int(reference.read(states[:, : place + 1], [model.num_loops] * place + [loop]).argmax())
                for loop in range(1, model.num_loops + 1)
            ]
            assert result.same[:, place].tolist() == [item == top[-1] for item in top]


@pytest.mark.parametrize("mode", ["margin", exhaustive("converge"), exhaustive("accel")])
def test_a_threshold_is_found_and_checked(mode, capsys):
    prompts = random_prompts(60, 3, 5, 1, 53)
    model = tiny_raven("pre", 103, n_layers_in_coda=1)
    model.generation_config.eos_token_id = None
    result = calibrate(model, prompts, mode, agreement=0.6, confidence=0.9, max_new_tokens=6)
    assert result.chosen is not None and result.check is not None
    texts = continue_in_full(model, prompts[:4], 6)
    assert all(text.new == 6 for text in texts)
    readings = read_forced(model, {"rule": model.exit_rule(result.chosen)}, texts)
    kept = readings.same_at(readings.exits["rule"])[readings.is_new]
    assert np.mean(kept) > 0.3
    print_result([result])
    assert "agreement" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_stores_what_it_found(tmp_path, pocket):
    folder = save_raven(tmp_path / "raven", pocket[1], "post", 105, n_layers_in_coda=1)
    lines = [json.dumps({"prompt": f"Where is {name} {number}?"}) for name in ("Mary", "John") for number in range(60)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines))
    arguments = ["--exit", "margin", "--agreement", "0.5", "--confidence", "0.6", "--max-new-tokens", "3"]
    reported = run(folder, "--prompts", file, "--device", "cpu", *arguments)
    assert reported.exit_code == 0, reported.output
    without = run(folder, "--prompts", file)
    assert without.exit_code == 2 and "reads a gate" in without.stderr
    assert "through a coda that sees earlier tokens at loop 4" in " ".join(reported.stdout.split())
    model, _ = sigma0.load(str(folder), device="cpu")
    assert model.exit_thresholds.margin is not None and model.resolve_exit_config(None).mode == "margin"
    assert model.resolve_exit_config(ExitConfig(mode="margin")).theta == model.exit_thresholds.margin.theta
