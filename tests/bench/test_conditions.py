"""What a row says of the run it comes from."""

import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
import torch

import sigma0
from sigma0.bench import conditions
from sigma0.bench.conditions import describe, git_commit, weights_sha256
from sigma0.loading import resolve_model


def git(folder, *arguments):
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a copy of the sources that ask for their commit."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for name in ("bench/conditions.py", "bench/results/rows.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    git(tmp_path, "init", "-q")
    monkeypatch.setattr(conditions, "__file__", str(tmp_path / "bench" / "conditions.py"))
    return tmp_path


def test_a_commit_is_told_with_a_plus_where_sources_differ(repository):
    assert git_commit() is None, "not tracked: somebody else's repository"
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "first")
    found = git_commit()
    assert found is not None and len(found) == 40
    (repository / "bench" / "results" / "rows.jsonl").write_text("more")
    assert git_commit() == found, "results may grow"
    (repository / "bench" / "conditions.py").write_text("other")
    assert git_commit() == f"{found}+"


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
    found = describe(pocket[0], "pocket", "a file", [(1, 2), (3,)], 8)
    assert (found.n, found.batch_size, found.max_new_tokens, found.dtype, found.device) == (2, 1, 8, "float32", "cpu")
    assert found.total_loops == pocket[0].num_loops and found.versions["torch"] == torch.__version__
    assert found.versions["sigma0-lm"] == sigma0.__version__
    assert describe(pocket[0], "pocket", "a file", [(1, 2), (4,)], 8).prompts_sha256 != found.prompts_sha256
