"""Recurrence and stride as settings of loading, in the library and in every command that loads a model."""

import json
from dataclasses import replace

import pytest
import torch

import sigma0
from sigma0 import ExitConfig
from sigma0.models import NanbeigeConfig
from sigma0.models.loop_settings import set_loops
from sigma0.serve.engine.wire import EngineSpec
from tests.bench.running import bench
from tests.models.raven_reference import save_raven
from tests.test_cli import refused, run

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


def test_a_model_takes_any_number_of_loops_and_several_a_pass(folder, tmp_path):
    usual, more = (loaded(folder, **settings) for settings in ({}, {"recurrence": 12}))
    model, tokenizer = loaded(folder, recurrence=12, stride=3)
    obtained = states(more[0])
    assert (usual[0].num_loops, len(obtained), model.num_loops, model.num_block_layers) == (4, 12, 4, 6)
    assert torch.equal(states(usual[0]), obtained[:4]) and torch.equal(states(model), obtained[2::3])
    one_by_one = sigma0.generate(*more, PROMPT, exit_config=FULL, max_new_tokens=5)
    result = sigma0.generate(model, tokenizer, PROMPT, exit_config=FULL, max_new_tokens=5)
    assert [token.id for token in result.tokens] == [token.id for token in one_by_one.tokens]
    assert {token.depth for token in result.tokens} == {4}
    # it is kept when the model is saved, and a loop that is stored as an exit cannot lie past the last one
    model.generation_config.exit_config = ExitConfig(mode="fixed", depth=4)
    sigma0.export(model, tokenizer, tmp_path / "saved")
    again, _ = loaded(tmp_path / "saved")
    assert again.num_loops == 4 and torch.equal(states(again), obtained[2::3])
    with pytest.raises(ValueError, match=r"generation_config\.json: .*4.*2"):
        loaded(tmp_path / "saved", recurrence=6)


@pytest.mark.parametrize("after_exit", ["finish", "verify"])
def test_a_stride_skips_passes_too(folder, after_exit):
    model, tokenizer = loaded(folder, recurrence=8, stride=2)
    full = sigma0.generate(model, tokenizer, PROMPT, exit_config=FULL, max_new_tokens=12)
    config = ExitConfig(mode="converge", eps=0.8, after_exit=after_exit)
    result = sigma0.generate(model, tokenizer, PROMPT, exit_config=config, max_new_tokens=12)
    assert result.passes_saved > 0
    if after_exit == "verify":
        assert [token.id for token in result.tokens] == [token.id for token in full.tokens]


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


def test_other_families_take_a_recurrence(pocket, tmp_path):
    usual = states(pocket[0])
    for loops in (2, 9):
        model, tokenizer = sigma0.load("pocket", device="cpu", recurrence=loops)
        assert (model.num_loops, model.config.total_ut_steps) == (loops, loops)
        assert torch.equal(states(model)[:6], usual[:loops])
        result = sigma0.generate(model, tokenizer, PROMPT, exit_config=FULL, max_new_tokens=3)
        assert {token.depth for token in result.tokens} == {loops}
    config = NanbeigeConfig(loop_loss_weights=[0.5, 0.5])
    set_loops("x", config, 5, None)
    config.save_pretrained(tmp_path)
    assert NanbeigeConfig.from_pretrained(tmp_path).num_loops == 5


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("config", [FULL, ExitConfig(mode="converge", eps=0.8), ExitConfig(mode="margin", theta=0.2)])
@pytest.mark.parametrize("after", ["finish", "verify", "drop"])
@pytest.mark.parametrize("stride", [1, 2])
def test_steps_of_a_call_are_a_recurrence_of_it(folder, config, after, stride):
    model, tokenizer = loaded(folder, stride=stride)
    config = replace(config, after_exit=after)
    settings = {"exit_config": config, "max_new_tokens": 10, "do_sample": False}
    ids = tokenizer([PROMPT, "John"], padding=True, return_tensors="pt")
    for steps in (2, 12, 2, None):
        other = loaded(folder, stride=stride, recurrence=steps)[0]
        for batch in (ids, tokenizer(PROMPT, return_tensors="pt")):
            expected = other.generate(**batch, **settings)
            assert model.generate(**batch, num_steps=steps, **settings).tolist() == expected.tolist()
        reported = sigma0.generate(model, tokenizer, PROMPT, num_steps=steps, exit_config=config, max_new_tokens=10)
        assert reported == sigma0.generate(other, tokenizer, PROMPT, exit_config=config, max_new_tokens=10)
        read = [item(**ids, exit_config=config, **steps_of).logits for item, steps_of in (
            (model, {"num_steps": steps}), (other, {}),
        )]  # fmt: skip
        assert torch.equal(*read)
    assert model.num_loops == 4 // stride and model.config.recurrence is None


@pytest.mark.exhaustive
def test_steps_of_a_call_under_a_compiled_step_and_in_a_loop_of_ones_own(folder):
    model, tokenizer = loaded(folder, runner="compile")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    for steps in (3, 12):
        other = loaded(folder, recurrence=steps)[0]
        expected = other.generate(ids, exit_config=FULL, max_new_tokens=6, do_sample=False)
        settings = {"num_steps": steps, "exit_config": FULL}
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, **settings), expected)
        cache, text = None, ids
        for _ in range(6):
            out = model(text[:, 0 if cache is None else -1 :], past_key_values=cache, use_cache=True, **settings)
            cache, text = out.past_key_values, torch.cat([text, out.logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(text, expected)
    with pytest.raises(ValueError, match="past_key_values was made for 2 layers, 12 loops"):
        model(text[:, -1:], past_key_values=cache)


@pytest.mark.parametrize("steps", [0, 5000, 2.0, True, "4"])
def test_wrong_steps_are_named_and_leave_nothing(folder, steps):
    model, tokenizer = loaded(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    for call in (model, model.generate):
        with pytest.raises(ValueError, match=r"num_steps must be|recurrence must lie in 1 to 4096"):
            call(ids, num_steps=steps)
    assert model.num_loops == 4


def test_the_commands_take_them(folder, tmp_path):
    asked = ("--recurrence", "12", "--stride", "3", "--max-new-tokens", "4", "--json")
    reported = run("generate", PROMPT, "--model", str(folder), *asked)
    assert reported.exit_code == 0, reported.output
    assert {token["depth"] for token in json.loads(reported.stdout)["tokens"]} == {4}
    exported = run("export", str(folder), str(tmp_path / "out"), "--recurrence", "8")
    assert exported.exit_code == 0, exported.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["recurrence"] == 8
    chat = run("chat", str(folder), "--recurrence", "2", "--max-new-tokens", "3", input="Hello\n")
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
    assert "stride=4 cannot be set for 'pocket'" in refused(*arguments, "--stride", "4")


def test_what_they_do_not_reach_refuses_them():
    ladder = refused("generate", "x", "--ladder", "pocket,pocket-large", "--stride", "2")
    assert "--stride does not reach the rungs of a --ladder" in ladder
    ray = refused("serve", "pocket", "--ray", "--recurrence", "2")
    assert "--recurrence goes with one engine: leave it out with --ray" in ray
    shape = bench("speed", "--shape", "tiny", "--recurrence", 2, code=2)
    assert "--recurrence and --stride go with a model" in shape.stderr


@pytest.mark.slow
def test_benches_take_them(folder, tmp_path):
    reported = bench(
        "speed", folder, "--recurrence", 8, "--stride", 2, "--context", 4, "--new-tokens", 3, "--rounds", 1,
        "--prompt-rounds", 1, "--dtype", "float32", "--ways", "full,finish", "--exit-config", '{"mode": "margin"}',
        "--out", tmp_path / "rows.jsonl", "--json",
    )  # fmt: skip
    rows = [json.loads(line) for line in reported.stdout.splitlines() if line.startswith("{")]
    assert {(row["total_loops"], row["stride"]) for row in rows} == {(4, 2)}
