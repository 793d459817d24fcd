"""An exported folder, opened by a process that never imports sigma0 itself."""

import json
import subprocess
import sys

import pytest

import sigma0
from sigma0.config import ExitConfig
from tests.test_cli import run

READER = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
assert "sigma0" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("Where is Mary?", return_tensors="pt")
print(model.generate(**ids, max_new_tokens=6, do_sample=False)[0].tolist())
model.save_pretrained(sys.argv[2])
"""


@pytest.mark.slow
def test_the_shim_finds_the_installed_package(pocket, tmp_path):
    model, tokenizer = pocket
    folder = sigma0.export(model, tokenizer, tmp_path / "out")
    assert len((folder / "shim.py").read_text().splitlines()) == 2
    command = [sys.executable, "-c", READER, str(folder), str(tmp_path / "again")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    expected = model.generate(**tokenizer("Where is Mary?", return_tensors="pt"), max_new_tokens=6, do_sample=False)
    assert json.loads(done.stdout) == expected[0].tolist()
    assert not list((tmp_path / "again").glob("*.py")), "saving must not copy source into a checkpoint"


def test_full_folders_are_left_alone(pocket, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        sigma0.export(*pocket, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_command_writes_an_exit_setting_into_the_folder(tmp_path):
    setting = '{"mode": "fixed", "depth": 2}'
    result = run("export", "pocket", str(tmp_path / "out"), "--exit-config", setting)
    assert result.exit_code == 0, result.output
    model, _ = sigma0.load(str(tmp_path / "out"), device="cpu")
    assert model.resolve_exit_config(None) == ExitConfig(mode="fixed", depth=2)


@pytest.mark.parametrize(
    ("setting", "why"),
    [("{", "Expecting"), ('{"mode": "deep"}', "mode"), ('{"mode": "fixed", "depth": 7}', "exceeds"), ("3", "mapping")],
)
def test_the_command_refuses_a_bad_exit_setting(tmp_path, setting, why):
    result = run("export", "pocket", str(tmp_path / "out"), "--exit-config", setting)
    assert result.exit_code == 2 and why in result.output
    assert not (tmp_path / "out").exists()
