"""What rows and reports say of what they were made with, and no file of `bench/results` is without."""

import json
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

import sigma0
from sigma0.bench.core import conditions
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.rerun.recipes import recipes
from sigma0.checkpoints import resolve_model
from tests.bench.running import LEDGER, RESULTS, ROOT

# drawn by `report` out of rows and reports that say what they were made with
DRAWN = (".svg", ".png")
# of training runs and of a browser, with what made them in the text that shows them
BESIDE = {"pocket-curve.png", "pocket-large-curve.png", "serve-page.png"}
# rows have conditions of their own, and so do kept samples in their first line
OWN = {"leaderboard.jsonl", "leaderboard.schema.json", "humaneval-smollm2.jsonl"}


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
    assert conditions.git_commit() is None, "not tracked: somebody else's repository"
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "first")
    result = conditions.git_commit()
    assert result is not None and len(result) == 40
    (repository / "bench" / "results" / "rows.jsonl").write_text("more")
    assert conditions.git_commit() == result, "results may grow"
    states = {result}
    for name, text in (("conditions.py", "other"), ("conditions.py", "another"), ("new.py", "x"), ("new.py", "y")):
        (repository / "bench" / name).write_text(text)
        states.add(conditions.git_commit())
    assert len(states) == 5 and all(state.startswith(result) for state in states)
    assert sum(state.startswith(f"{result}+") for state in states) == 4


def test_trouble_with_git_is_an_error_not_an_absence(repository, monkeypatch):
    git(repository, "add", ".")
    with pytest.raises(ValueError, match="git rev-parse HEAD failed"):
        conditions.git_commit()
    git(repository, "commit", "-qm", "first")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    with pytest.raises(ValueError, match="does not tell the commit"):
        conditions.git_commit()


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert conditions.git_commit() is None


def test_weights_are_named_by_their_digest(tmp_path, pocket):
    file = Path(resolve_model("pocket")) / "model.safetensors"
    assert conditions.weights_sha256("pocket") == sha256(file.read_bytes()).hexdigest()
    folder = tmp_path / "parts"
    model, tokenizer = pocket
    model.save_pretrained(folder, max_shard_size="500KB")
    tokenizer.save_pretrained(folder)
    parts = sorted(folder.glob("*.safetensors"))
    assert len(parts) > 1
    lines = "".join(f"{sha256(part.read_bytes()).hexdigest()}  {part.name}\n" for part in parts)
    assert conditions.weights_sha256(str(folder)) == sha256(lines.encode()).hexdigest()
    for part in parts:
        part.unlink()
    with pytest.raises(ValueError, match="has no"):
        conditions.weights_sha256(str(folder))


def test_what_a_report_read_is_named_by_its_content(tmp_path):
    for name in ("one/task", "two/task"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    given = {"data": tmp_path, "file": tmp_path / "one" / "task", "model": Path(resolve_model("pocket"))}
    first = conditions.Provenance.here("x", [], given)
    assert set(first.models) == {"model"} and first.inputs["file"] == sha256(b"one/task").hexdigest()
    (tmp_path / "one" / "task").rename(tmp_path / "one" / "other")
    second = conditions.Provenance.here("x", [], {"data": tmp_path})
    assert second.inputs["data"] != first.inputs["data"]


def test_conditions_describe_model_and_prompts(pocket):
    result = conditions.describe(pocket[0], "pocket", "a file", [(1, 2), (3,)], ["x", None], 8)
    assert (result.n, result.batch_size, result.max_new_tokens, result.dtype) == (2, 1, 8, "float32")
    assert result.device.startswith("cpu (")
    assert result.total_loops == pocket[0].num_loops and result.versions["torch"] == torch.__version__
    assert result.versions["sigma0-lm"] == sigma0.__version__
    for ids, answers in (([(1, 2), (4,)], ["x", None]), ([(1, 2), (3,)], ["y", None])):
        assert (
            conditions.describe(pocket[0], "pocket", "a file", ids, answers, 8).prompts_sha256 != result.prompts_sha256
        )


def test_other_settings_beside_the_same_weights_are_told(tmp_path, pocket):
    digests = []
    for name, epsilon in (("one", "1e-06"), ("two", "1e-05")):
        shutil.copytree(resolve_model("pocket"), tmp_path / name)
        config = tmp_path / name / "config.json"
        config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', f'"rms_norm_eps": {epsilon}'))
        digests.append(conditions.describe(pocket[0], str(tmp_path / name), "a file", [(1, 2)], ["x"], 8))
    assert digests[0].model_sha256 == digests[1].model_sha256
    assert digests[0].settings_sha256 != digests[1].settings_sha256


def made(**changes: object) -> conditions.Provenance:
    output, _ = conditions.read_report(RESULTS / "effort-simulation.json")
    return conditions.Provenance.model_validate({**output.model_dump(mode="json"), **changes})


def files(*endings: str) -> list[Path]:
    return sorted(path for path in RESULTS.rglob("*") if path.suffix in endings and path.name not in OWN)


@pytest.mark.parametrize("path", files(".json"), ids=lambda path: str(path.relative_to(RESULTS)))
def test_every_report_says_what_it_was_made_with(path: Path) -> None:
    if path.name.endswith(".provenance.json"):
        assert conditions.Provenance.model_validate_json(path.read_text()).models
        return
    content = json.loads(path.read_text())
    if "conditions" in content:
        output = conditions.Conditions.model_validate(content["conditions"])
        # texts that show it say where other weights ship now
        assert output.commit and output.model_sha256
        return
    provenance, report = conditions.read_report(path)
    assert report and set(provenance.versions) >= {"python", "sigma0-lm", "torch", "transformers"}
    recipe = recipes()[path.stem]
    assert set(provenance.models) >= set(recipe.models) and set(provenance.inputs) <= set(recipe.inputs)
    for name in recipe.models:
        digests = provenance.models[name]
        assert len(digests.weights_sha256) == len(digests.settings_sha256) == 64


def test_every_other_file_is_drawn_from_rows_or_has_its_provenance_beside_it() -> None:
    for path in files(".jsonl"):
        assert path.with_name(f"{path.stem}.provenance.json").exists(), path.name
    left = {path.name for path in RESULTS.rglob("*") if path.is_file() and path.name not in OWN}
    left -= {path.name for path in files(".json", ".jsonl", ".md", *DRAWN)}
    assert not {name for name in left if not name.startswith(".")} and {item.name for item in files(*DRAWN)} >= BESIDE


def test_every_commit_that_is_named_is_in_this_history() -> None:
    output = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if output.returncode or output.stdout.strip() != "false":
        pytest.skip("no whole clone of the repository")
    known = subprocess.run(["git", "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    named = {str(number): row.commit for number, row in enumerate(read_rows(LEDGER), start=1)}
    for path in files(".json"):
        content = json.loads(path.read_text())
        named[path.name] = content.get("provenance", content.get("conditions", content))["commit"]
    lost = {place: commit for place, commit in named.items() if commit is None or commit[:40] not in {*known}}
    assert not lost


def test_a_report_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    conditions.write_report(path, made(), {"a": [1, 2.5, None]})
    assert conditions.read_report(path) == (made(), {"a": [1, 2.5, None]})


@pytest.mark.parametrize("content", [{"a": 1}, [1], {"report": 1}, {"provenance": {}, "report": 1, "more": 2}])
def test_a_report_without_provenance_is_refused(tmp_path: Path, content: object) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"one\.json has no provenance"):
        conditions.read_report(path)


def test_a_provenance_that_lacks_something_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    for field in conditions.Provenance.model_fields:
        if conditions.Provenance.model_fields[field].is_required():
            output = {name: value for name, value in made().model_dump(mode="json").items() if name != field}
            path.write_text(json.dumps({"provenance": output, "report": 1}))
            with pytest.raises(ValueError, match=field):
                conditions.read_report(path)
    for bad in ({"commit": "unknown"}, {"threads": 0}, {"device": ""}, {"surplus": 1}):
        with pytest.raises(ValidationError):
            made(**bad)


def test_it_holds_digests_of_models_and_files_where_the_code_is_known(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(conditions, "git_commit", lambda: None)
    with pytest.raises(ValueError, match="commit of these sources is unknown"):
        conditions.Provenance.here("python -m one", ["pocket"])
    monkeypatch.setattr(conditions, "git_commit", lambda: "1" * 40)
    (tmp_path / "text").write_bytes(b"abc")
    output = conditions.Provenance.here("python -m one", ["pocket"], {"text": tmp_path / "text"})
    assert output.inputs == {"text": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
    assert output.models["pocket"].weights_sha256 == conditions.weights_sha256("pocket")


def test_weights_that_do_not_ship_any_more_are_marked_and_others_are_not() -> None:
    now = conditions.weights_sha256("pocket")
    assert conditions.stale_mark({"pocket": now, "random 100m": "f" * 64, "SmolLM2-135M-Instruct": "e" * 64}) == ""
    mark = conditions.stale_mark(
        {"pocket": "0" * 64, "pocket-large": conditions.weights_sha256("pocket-large"), "pocket-raven": "1" * 64}
    )
    assert mark == " (**stale: other weights of pocket and pocket-raven ship now**)"


def test_a_row_of_other_weights_is_marked_where_its_model_is_named() -> None:
    row = next(row for row in read_rows(LEDGER) if row.model == "pocket-raven")
    assert row.named == "pocket-raven"
    other = row.model_copy(update={"model_sha256": "0" * 64})
    assert other.named == "pocket-raven (**stale: other weights of pocket-raven ship now**)"
