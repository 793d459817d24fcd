"""The commands of the page, as they stand there, in processes of their own and without a network."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sigma0.bench.harness.items import QUESTIONS, TASKS, files
from sigma0.bench.pocket.items import split_of

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "bench" / "harness" / "README.md").read_text()
COMMANDS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NEEDED = {"lm_eval": "lm-eval", "inspect_ai": "Inspect"}
MISSING = [name for module, name in NEEDED.items() if find_spec(module) is None]
WHY = f"{' and '.join(MISSING)} not installed: pip install 'sigma0-lm[eval]'"
needs_harnesses = pytest.mark.skipif(bool(MISSING), reason=WHY)


def run(command, work):
    surroundings = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "WORK": str(work),
        "HF_HOME": str(work / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # a proxy where nobody listens: what looks for a network fails
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    script = ["bash", "-euo", "pipefail", "-c", command]
    done = subprocess.run(script, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def results_in(folder):
    (path,) = folder.glob("*/results_*.json")
    return json.loads(path.read_text())


def test_there_is_a_command_for_each_way():
    said = ("\nlm_eval --model hf ", "python -m sigma0.bench.harness --model sigma0 ", "inspect eval bench/harness/")
    assert len(COMMANDS) == len(said)
    assert all(way in command for way, command in zip(said, COMMANDS, strict=True))


@pytest.mark.exhaustive
@needs_harnesses
def test_lm_eval_runs_the_exported_folder(tmp_path):
    run(COMMANDS[0], tmp_path)
    result = results_in(tmp_path / "hf")
    assert result["n-samples"]["micro_world_choice"]["effective"] == QUESTIONS
    assert result["results"]["micro_world_answer"]["exact_match,strip"] > 0.6
    assert len(list((tmp_path / "hf").glob("*/samples_*.jsonl"))) == 2


@pytest.mark.exhaustive
@needs_harnesses
def test_lm_eval_runs_our_model_and_keeps_its_depths(tmp_path):
    run(COMMANDS[1], tmp_path)
    result = results_in(tmp_path / "sigma0")
    assert result["results"]["micro_world_answer"]["exact_match,strip"] > 0.6
    output = result["config"]["sigma0"]
    assert (output["exit_config"]["mode"], output["exit_config"]["q"]) == ("qexit", 0.6)
    assert output["requests"]["generate_until"]["passes_saved"] > 0.3
    assert output["tasks"]["micro_world_choice"]["requests"] == 2 * QUESTIONS
    assert len((tmp_path / "depths.jsonl").read_text().splitlines()) == 3 * QUESTIONS


@pytest.mark.exhaustive
@needs_harnesses
def test_inspect_runs_our_model_and_keeps_its_verdicts(tmp_path):
    run(COMMANDS[2], tmp_path)
    (path,) = (tmp_path / "inspect").glob("*.json")
    result = json.loads(path.read_text())
    assert result["status"] == "success" and len(result["samples"]) == 10
    for sample in result["samples"]:
        output = sample["output"]["metadata"]["sigma0"]
        assert output["effort"] == "low" and output["exit_config"]["q"] == 0.45
        assert output["door"] in ("converge", "escalate")
        assert set(output["verdict"]) >= {"converged", "stable", "grounded"}
    assert result["results"]["scores"][0]["metrics"]["accuracy"]["value"] > 0.4


def test_the_committed_questions_are_the_generators_of_stories_that_no_model_was_trained_on():
    for name, text in files().items():
        assert (TASKS / name).read_text() == text
        rows = [json.loads(line) for line in text.splitlines()]
        assert len({row["id"] for row in rows}) == QUESTIONS
        assert {split_of(row["prompt"].rpartition(". ")[0] + ".") for row in rows} == {"test"}
        assert "yes" not in rows[0] or 10 <= sum(row["yes"] for row in rows) <= 30
