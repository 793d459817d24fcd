"""What a row says of the run it comes from."""

import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
import torch

import sigma0
from sigma0.bench.core import conditions
from sigma0.bench.core.conditions import describe, git_commit, weights_sha256
from sigma0.checkpoints import resolve_model


def git(folder, *arguments):
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a copy of the sources that ask for their commit."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for name in ("bench/core/conditions.py", "bench/results/rows.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    git(tmp_path, "init", "-q")
    monkeypatch.setattr(conditions, "__file__", str(tmp_path / "bench" / "core" / "conditions.py"))
    return tmp_path


def test_a_commit_is_told_with_a_plus_where_sources_differ(repository):
    assert git_commit() is None, "not tracked: somebody else's repository"
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "first")
    found = git_commit()
    assert found is not None and len(found) == 40
    (repository / "bench" / "results" / "rows.jsonl").write_text("more")
    assert git_commit() == found, "results may grow"
    states = {found}
    for name, text in (("conditions.py", "other"), ("conditions.py", "another"), ("new.py", "x"), ("new.py", "y")):
        (repository / "bench" / name).write_text(text)
        states.add(git_commit())
    assert len(states) == 5 and all(state.startswith(found) for state in states)
    assert sum(state.startswith(f"{found}+") for state in states) == 4


def test_trouble_with_git_is_an_error_not_an_absence(repository, monkeypatch):
    git(repository, "add", ".")
    with pytest.raises(ValueError, match="git rev-parse HEAD failed"):
        git_commit()
    git(repository, "commit", "-qm", "first")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    with pytest.raises(ValueError, match="does not tell the commit"):
        git_commit()


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert git_commit() is None


def test_weights_are_named_by_their_digest(tmp_path, pocket):
    file = Path(resolve_model("pocket")) / "model.safetensors"
    assert weights_sha256("pocket") == sha256(file.read_bytes()).hexdigest()
    folder = tmp_path / "parts"
    model, tokenizer = pocket
    model.save_pretrained(folder, max_shard_size="500KB")
    tokenizer.save_pretrained(folder)
    parts = sorted(folder.glob("*.safetensors"))
    assert len(parts) > 1
    lines = "".join(f"{sha256(part.read_bytes()).hexdigest()}  {part.name}\n" for part in parts)
    assert weights_sha256(str(folder)) == sha256(lines.encode()).hexdigest()
    for part in parts:
        part.unlink()
    with pytest.raises(ValueError, match="has no"):
        weights_sha256(str(folder))


def test_conditions_describe_model_and_prompts(pocket):
    found = describe(pocket[0], "pocket", "a file", [(1, 2), (3,)], ["x", None], 8)
    assert (found.n, found.batch_size, found.max_new_tokens, found.dtype) == (2, 1, 8, "float32")
    assert found.device.startswith("cpu (")
    assert found.total_loops == pocket[0].num_loops and found.versions["torch"] == torch.__version__
    assert found.versions["sigma0-lm"] == sigma0.__version__
    for ids, answers in (([(1, 2), (4,)], ["x", None]), ([(1, 2), (3,)], ["y", None])):
        assert describe(pocket[0], "pocket", "a file", ids, answers, 8).prompts_sha256 != found.prompts_sha256


def test_other_settings_beside_the_same_weights_are_told(tmp_path, pocket):
    digests = []
    for name in ("one", "two"):
        shutil.copytree(resolve_model("pocket"), tmp_path / name)
        if name == "two":
            config = tmp_path / name / "config.json"
            config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
        digests.append(describe(pocket[0], str(tmp_path / name), "a file", [(1, 2)], ["x"], 8))
    assert digests[0].model_sha256 == digests[1].model_sha256
    assert digests[0].settings_sha256 != digests[1].settings_sha256
