"""Reports say what they were made with, and no file of `bench/results` is without."""

import json
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from sigma0.bench.core import conditions as module
from sigma0.bench.core.conditions import Conditions, Provenance, read_report, stale_mark, weights_sha256, write_report
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.rerun.recipes import recipes

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "bench" / "results"
# drawn by `report` out of rows and reports that say what they were made with
DRAWN = (".svg", ".png")
# of training runs and of a browser, with what made them in the text that shows them
BESIDE = {"pocket-curve.png", "pocket-large-curve.png", "serve-page.png"}
# rows have conditions of their own, and so do kept samples in their first line
OWN = {"leaderboard.jsonl", "leaderboard.schema.json", "humaneval-smollm2.jsonl"}


def made(**changes: object) -> Provenance:
    told = {
        "command": "python -m sigma0.bench effort --json",
        "commit": "0" * 40,
        "device": "cpu (one)",
        "threads": 1,
        "versions": {"python": "3.11.7"},
        "models": {"pocket": {"weights_sha256": "a", "settings_sha256": "b"}},
        "time": "2026-11-26T01:00:00Z",
    }
    return Provenance.model_validate({**told, **changes})


def files(*endings: str) -> list[Path]:
    return sorted(path for path in RESULTS.rglob("*") if path.suffix in endings and path.name not in OWN)


@pytest.mark.parametrize("path", files(".json"), ids=lambda path: str(path.relative_to(RESULTS)))
def test_every_report_says_what_it_was_made_with(path: Path) -> None:
    if path.name.endswith(".provenance.json"):
        assert Provenance.model_validate_json(path.read_text()).models
        return
    content = json.loads(path.read_text())
    if "conditions" in content:
        told = Conditions.model_validate(content["conditions"])
        assert told.commit and not stale_mark({told.model: told.model_sha256})
        return
    provenance, report = read_report(path)
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
    assert not {name for name in left if not name.startswith(".")} and {each.name for each in files(*DRAWN)} >= BESIDE


def known_commits() -> set[str]:
    """Of this history; nothing outside a whole clone."""
    told = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if told.returncode or told.stdout.strip() != "false":
        pytest.skip("no whole clone of the repository")
    return set(subprocess.run(["git", "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.split())


def test_every_commit_that_is_named_is_in_this_history() -> None:
    known = known_commits()
    named = {str(number): row.commit for number, row in enumerate(read_rows(RESULTS / "leaderboard.jsonl"), start=1)}
    for path in files(".json"):
        content = json.loads(path.read_text())
        named[path.name] = content.get("provenance", content.get("conditions", content))["commit"]
    lost = {place: commit for place, commit in named.items() if commit is None or commit[:40] not in known}
    assert not lost


def test_a_report_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    write_report(path, made(), {"a": [1, 2.5, None]})
    assert read_report(path) == (made(), {"a": [1, 2.5, None]})


@pytest.mark.parametrize("content", [{"a": 1}, [1], {"report": 1}, {"provenance": {}, "report": 1, "more": 2}])
def test_a_report_without_provenance_is_refused(tmp_path: Path, content: object) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"one\.json has no provenance"):
        read_report(path)


def test_a_provenance_that_lacks_something_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    for field in Provenance.model_fields:
        if Provenance.model_fields[field].is_required():
            told = {name: value for name, value in made().model_dump(mode="json").items() if name != field}
            path.write_text(json.dumps({"provenance": told, "report": 1}))
            with pytest.raises(ValueError, match=field):
                read_report(path)
    for bad in ({"commit": "unknown"}, {"threads": 0}, {"device": ""}, {"surplus": 1}):
        with pytest.raises(ValidationError):
            made(**bad)


def test_it_is_refused_where_the_code_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "git_commit", lambda: None)
    with pytest.raises(ValueError, match="commit of these sources is unknown"):
        Provenance.here("python -m one", ["pocket"])


def test_it_holds_digests_of_models_and_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "git_commit", lambda: "1" * 40)
    (tmp_path / "text").write_bytes(b"abc")
    told = Provenance.here("python -m one", ["pocket"], {"text": tmp_path / "text"})
    assert told.inputs == {"text": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
    assert told.models["pocket"].weights_sha256 == weights_sha256("pocket")


def test_weights_that_do_not_ship_any_more_are_marked_and_others_are_not() -> None:
    now = weights_sha256("pocket")
    assert stale_mark({"pocket": now, "random 100m": "f" * 64, "SmolLM2-135M-Instruct": "e" * 64}) == ""
    mark = stale_mark({"pocket": "0" * 64, "pocket-large": weights_sha256("pocket-large"), "pocket-raven": "1" * 64})
    assert mark == " (**stale: other weights of pocket and pocket-raven ship now**)"


def test_a_row_of_other_weights_is_marked_where_its_model_is_named() -> None:
    row = next(row for row in read_rows(RESULTS / "leaderboard.jsonl") if row.model == "pocket")
    assert row.named == "pocket"
    other = row.model_copy(update={"model_sha256": "0" * 64})
    assert other.named == "pocket (**stale: other weights of pocket ship now**)"
