"""Raven as a checkpoint like any other: exported, read by a fresh process, by a pipeline and by lm-eval."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
from typer.testing import CliRunner

import sigma0
from sigma0 import ExitConfig
from sigma0.cli import app
from tests.marks import exhaustive
from tests.models.raven_reference import save_raven
from tests.models.test_export import READER

STORY = "Mary went to the park. The hat is with Mary. Where is the hat?"
MARGIN = ExitConfig(mode="margin", theta=0.1)
HERE = """
import sys, sigma0
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=False)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("Where is Mary?", return_tensors="pt")
print(model.generate(**ids, max_new_tokens=6, do_sample=False)[0].tolist())
"""


@pytest.fixture(scope="module", params=["sandwich", exhaustive("pre"), exhaustive("post")])
def loaded(request, tmp_path_factory, pocket):
    folder = save_raven(tmp_path_factory.mktemp(request.param), pocket[1], request.param, 71)
    model, tokenizer = sigma0.load(str(folder), device="cpu", dtype="float32")
    model.generation_config.exit_config = MARGIN
    return model, tokenizer


@pytest.fixture(scope="module")
def exported(loaded, tmp_path_factory):
    return sigma0.export(*loaded, tmp_path_factory.mktemp("exported") / "folder")


def run(program, *arguments, cwd):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.exhaustive
def test_a_fresh_process_writes_the_same(loaded, exported, tmp_path):
    model, tokenizer = loaded
    ids = tokenizer("Where is Mary?", return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=6, do_sample=False)[0].tolist()
    assert run(HERE, exported, cwd=tmp_path) == expected
    # through the folder's own file, in a process that never imports sigma0 itself
    assert run(READER, exported, tmp_path / "again", cwd=tmp_path) == expected
    assert not list((tmp_path / "again").glob("*.py"))
    named = json.loads((exported / "config.json").read_text())["auto_map"]
    assert named["AutoModel"] == "shim.RavenModel" and named["AutoModelForCausalLM"] == "shim.RavenForCausalLM"


def test_the_folder_is_loaded_by_every_auto_class(loaded, exported):
    model, _ = loaded
    again = AutoModelForCausalLM.from_pretrained(exported)
    assert again.resolve_exit_config(None) == MARGIN
    ids = torch.tensor([[5, 9, 30, 2, 8]])
    base = AutoModel.from_pretrained(exported).eval()
    with torch.no_grad():
        assert torch.equal(base(ids).loop_states, model.base_model(ids).loop_states)
        assert torch.equal(again.eval()(ids).logits, model(ids).logits)


def test_a_pipeline_writes_what_generate_writes(loaded):
    model, tokenizer = loaded
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (result,) = generator(STORY, max_new_tokens=8, do_sample=False, return_full_text=False)
    assert result["generated_text"] == sigma0.generate(model, tokenizer, STORY, max_new_tokens=8).text
    batch = generator([STORY, "John"], max_new_tokens=4, do_sample=False, batch_size=2, return_full_text=False)
    assert [row[0]["generated_text"] for row in batch] == [
        sigma0.generate(model, tokenizer, prompt, max_new_tokens=4).text for prompt in (STORY, "John")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [{"exit": "full"}, exhaustive({"exit": "margin", "theta": 0.1})], ids=["full", "margin"]
)
def test_lm_eval_scores_an_exported_folder(loaded, exported, setting):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'sigma0-lm[eval]'")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from sigma0.bench.harness.language_model import Sigma0LM

    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    ours = Sigma0LM(str(exported), batch_size=2, device="cpu", dtype="float32", **setting)
    model.generation_config.exit_config = ours.exit_config
    theirs = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(exported), batch_size=2)
    pairs = [(STORY, " Mary is in the park."), ("Where is Mary?", " No"), ("Where is Mary?", " Yes")]
    asked = [Instance("loglikelihood", {}, pair, 0, ("task", number, 1)) for number, pair in enumerate(pairs)]
    known, found = (each.loglikelihood(asked, disable_tqdm=True) for each in (theirs, ours))
    for (logprob, greedy), (known_logprob, known_greedy) in zip(found, known, strict=True):
        assert logprob == pytest.approx(known_logprob, abs=1e-4) and logprob < 0
        assert greedy == known_greedy


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory, pocket):
    return save_raven(tmp_path_factory.mktemp("plain"), pocket[1], "pre", 73)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_key_value_heads": 3}, "n_heads=4 is no multiple of num_key_value_heads=3"),
        ({"num_key_value_heads": 1}, "(n_heads + 2 num_key_value_heads) head_dim = 48, but transformer.core_block.0"),
        ({"stride": 3}, "stride must divide the 4 loops of full depth, got 3"),
        ({"injection_type": "add"}, "injection_type='add' is not implemented"),
        ({"test_time_noise": 1}, "test_time_noise=1 is not implemented"),
        ({"n_layers_in_coda": 1}, "n_layers_in_coda = 1, but the weights have 2 such layers"),
        ({"auto_map": "file"}, "auto_map must be a mapping, got 'file'"),
        ({"init_values": {"embed_scale": "large"}}, "init_values: embed_scale must be a finite number, got 'large'"),
        ({"sigma0_prompts": "poems"}, "sigma0_prompts must be instructions or bare, got 'poems'"),
        (None, "the checkpoint has no transformer.adapter.weight"),
    ],
)
def test_a_wrong_folder_is_one_line_and_an_error_of_load(plain_folder, tmp_path, wrong, message):
    folder = tmp_path / "wrong"
    shutil.copytree(plain_folder, folder)
    if wrong is None:
        weights = load_file(folder / "model.safetensors")
        del weights["transformer.adapter.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    result = CliRunner().invoke(app, ["generate", "Mary went", "--model", str(folder), "--device", "cpu"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1 and message in result.stderr
    with pytest.raises(ValueError, match=re.escape(message)):
        sigma0.load(str(folder), device="cpu")
