"""Recurrence and stride as settings of loading, in the library and in every command that loads a model."""

import json

import pytest
import torch
from typer.testing import CliRunner

import sigma0
from sigma0 import ExitConfig
from sigma0.bench.__main__ import app as bench
from sigma0.cli import app
from sigma0.serve.engine.spec import EngineSpec
from tests.models.raven_reference import save_raven

FULL = ExitConfig(mode="full")
PROMPT = "Mary went to the park. Where is Mary?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, pocket):
    return save_raven(tmp_path_factory.mktemp("raven"), pocket[1], "pre", 51)


def loaded(folder, **settings):
    return sigma0.load(str(folder), device="cpu", **settings)


def states(model):
    with torch.no_grad():
        ids = torch.tensor([[7, 9, 30, 4]])
        return model(ids, exit_config=FULL, output_loop_states=True).loop_states


def test_a_model_takes_any_number_of_loops(folder):
    usual, more = (states(loaded(folder, **settings)[0]) for settings in ({}, {"recurrence": 12}))
    assert (len(usual), len(more)) == (4, 12)
    assert torch.equal(usual, more[:4])


def test_a_pass_runs_several(folder):
    model, tokenizer = loaded(folder, recurrence=12, stride=3)
    assert (model.num_loops, model.num_block_layers) == (4, 6)
    assert torch.equal(states(model), states(loaded(folder, recurrence=12)[0])[2::3])
    result = sigma0.generate(model, tokenizer, PROMPT, exit_config=FULL, max_new_tokens=5)
    one_by_one = sigma0.generate(*loaded(folder, recurrence=12), PROMPT, exit_config=FULL, max_new_tokens=5)
    assert [token.id for token in result.tokens] == [token.id for token in one_by_one.tokens]
    assert {token.depth for token in result.tokens} == {4}


@pytest.mark.parametrize("after_exit", ["finish", "verify"])
def test_a_stride_skips_passes_too(folder, after_exit):
    model, tokenizer = loaded(folder, recurrence=8, stride=2)
    full = sigma0.generate(model, tokenizer, PROMPT, exit_config=FULL, max_new_tokens=12)
    config = ExitConfig(mode="converge", eps=0.8, after_exit=after_exit)
    result = sigma0.generate(model, tokenizer, PROMPT, exit_config=config, max_new_tokens=12)
    assert result.passes_saved > 0
    if after_exit == "verify":
        assert [token.id for token in result.tokens] == [token.id for token in full.tokens]


def test_it_is_kept_when_the_model_is_saved(folder, pocket, tmp_path):
    model, tokenizer = loaded(folder, recurrence=12, stride=3)
    saved = sigma0.export(model, tokenizer, tmp_path / "saved")
    again, _ = sigma0.load(str(saved), device="cpu")
    assert again.num_loops == 4 and torch.equal(states(again), states(model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recurrence": 0}, "recurrence must lie in 1 to 4096, got 0"),
        ({"recurrence": 5000}, "recurrence must lie in 1 to 4096, got 5000"),
        ({"recurrence": 12, "stride": 5}, "got 5: take one of 1, 2, 3, 4, 6, 12"),
        ({"stride": 0}, "stride must divide the 4 loops of full depth, got 0: take one of 1, 2, 4"),
    ],
)
def test_wrong_numbers_name_the_way_out(folder, settings, message):
    with pytest.raises(ValueError, match=message):
        loaded(folder, **settings)


@pytest.mark.parametrize("settings", [{"recurrence": 4}, {"stride": 2}, {"recurrence": 4, "stride": 1}])
def test_a_family_of_a_fixed_number_refuses_it(settings):
    asked = " and ".join(f"{name}={value}" for name, value in settings.items())
    with pytest.raises(ValueError, match=f"^{asked} cannot be set for 'pocket': ouro models were trained for one"):
        sigma0.load("pocket", device="cpu", **settings)


def test_stored_settings_are_held_to_it(folder, pocket, tmp_path):
    """A loop that is stored as an exit cannot lie past the last one."""
    model, tokenizer = loaded(folder)
    model.generation_config.exit_config = ExitConfig(mode="fixed", depth=4)
    sigma0.export(model, tokenizer, tmp_path / "fixed")
    with pytest.raises(ValueError, match=r"generation_config\.json: .*4.*2"):
        loaded(tmp_path / "fixed", recurrence=2)


def run(*arguments, program=app):
    return CliRunner().invoke(program, [str(argument) for argument in arguments])


def test_the_commands_take_them(folder, tmp_path):
    told = run(
        "generate", PROMPT, "--model", folder, "--recurrence", 12, "--stride", 3, "--max-new-tokens", 4, "--json"
    )
    assert told.exit_code == 0, told.output
    assert {token["depth"] for token in json.loads(told.stdout)["tokens"]} == {4}
    exported = run("export", folder, tmp_path / "out", "--recurrence", 8)
    assert exported.exit_code == 0, exported.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["recurrence"] == 8
    chat = CliRunner().invoke(app, ["chat", str(folder), "--recurrence", "2", "--max-new-tokens", "3"], input="Hello\n")
    assert chat.exit_code == 0, chat.output
    engine = EngineSpec(str(folder), device="cpu", recurrence=6, stride=2).build()
    assert engine.model.num_loops == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "x", "--model", "pocket"),
        ("chat",),
        ("export", "pocket", "out"),
        ("calibrate", "pocket", "--prompts", "README.md"),
    ],
)
def test_the_commands_refuse_them_in_one_line(arguments):
    told = run(*arguments, "--recurrence", 4)
    assert told.exit_code == 2 and "recurrence=4 cannot be set for 'pocket'" in told.stderr
    assert len(told.stderr.strip().splitlines()) == 1


def test_what_they_do_not_reach_refuses_them():
    ladder = run("generate", "x", "--ladder", "pocket,pocket-large", "--stride", 2)
    assert ladder.exit_code == 2 and "--stride does not reach the rungs of a --ladder" in ladder.stderr
    ray = run("serve", "pocket", "--ray", "--recurrence", 2)
    assert ray.exit_code == 2 and "--recurrence goes with one engine: leave it out with --ray" in ray.stderr
    shape = run("speed", "--shape", "tiny", "--recurrence", 2, program=bench)
    assert shape.exit_code == 2 and "--recurrence and --stride go with a model" in shape.stderr


def test_benches_take_them(folder, tmp_path):
    told = run(
        "speed", folder, "--recurrence", 8, "--stride", 2, "--context", 4, "--new-tokens", 3, "--rounds", 1,
        "--prompt-rounds", 1, "--dtype", "float32", "--ways", "full,finish", "--exit-config", '{"mode": "margin"}',
        "--out", tmp_path / "rows.jsonl", "--json",
        program=bench,
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    rows = [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]
    assert {(row["total_loops"], row["stride"]) for row in rows} == {(4, 2)}
