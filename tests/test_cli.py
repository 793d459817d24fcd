import io
import json
import re
import sys

import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

import sigma0
from sigma0.cli import app
from sigma0.commands.console import PALETTE, depth_style

STORY = "Mary went to the kitchen. Where is Mary?"


def run(*arguments, **kwargs):
    return CliRunner().invoke(app, list(arguments), **kwargs)


def refused(*arguments, **kwargs):
    """The one line that a command says to what it does not take."""
    result = run(*arguments, **kwargs)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    return result.stderr


def test_generate_prints_text_legend_and_the_three_savings(pocket):
    result = run("generate", STORY, "--max-new-tokens", "8", "--q", "0.4", "--dtype", "float32")
    expected = sigma0.generate(*pocket, STORY, max_new_tokens=8, exit_config={"q": 0.4})
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(expected.text)
    assert re.search(rf"depth_saved\s+{expected.depth_saved:.1%}", result.stdout)
    assert re.search(rf"passes_saved\s+{expected.passes_saved:.1%}.*{expected.loop_passes} passes", result.stdout)
    assert re.search(rf"rows_saved\s+{expected.rows_saved:.1%}.*{expected.loop_rows} rows", result.stdout)
    for depth in range(1, expected.total_loops + 1):
        assert f" {depth}: {sum(token.depth == depth for token in expected.tokens)} " in result.stdout


def test_generate_writes_a_picture(tmp_path):
    picture = tmp_path / "depth.svg"
    result = run("generate", STORY, "--max-new-tokens", "4", "--svg", str(picture))
    assert result.exit_code == 0
    source = picture.read_text()
    assert source.startswith("<svg")
    assert "passes_saved" in source
    assert "kitchen" in source
    assert run("generate", "x", "--svg", str(picture), "--json").exit_code == 2
    # in the colours of the depths, and a terminal of the same process still has its own
    shallow = depth_style(1, 6)
    assert f"fill: {shallow}" in source
    shown = io.StringIO()
    Console(file=shown, force_terminal=True, color_system="truecolor").print(Text("hat", style=shallow))
    assert "\x1b[38;2;69;117;180mhat" in shown.getvalue()


@pytest.mark.parametrize(
    "options, prompt, settings",
    [
        (["--exit", "fixed", "--depth", "2"], STORY, {"exit_config": {"mode": "fixed", "depth": 2}}),
        # mode and threshold stay as the checkpoint has them
        (["--after", "drop"], STORY, {"exit_config": {"mode": "margin", "after_exit": "drop"}}),
        (["--chat"], [{"role": "user", "content": STORY}], {}),
        (["--temperature", "2", "--seed", "3"], STORY, {"do_sample": True, "temperature": 2.0, "seed": 3}),
    ],
)
@pytest.mark.parametrize("piped", [False, True])
def test_generate_tells_as_json_what_generate_returns(pocket, options, prompt, settings, piped):
    words = ["-" if piped else STORY, "--max-new-tokens", "5", "--json", *options]
    result = run("generate", *words, input=STORY + "\n" if piped else None)
    expected = sigma0.generate(*pocket, prompt, max_new_tokens=5, **settings)
    assert json.loads(result.stdout) == {"model": "pocket", **json.loads(json.dumps(expected.to_dict()))}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["x", "--model", "nothing"], "no such model: 'nothing'"),
        (["x", "--q", "1.5"], "q: must lie in (0, 1], got 1.5"),
        ([""], "the prompt is empty"),
        (["x", "--max-new-tokens", "5000"], "exceed the model's context of 2048"),
        (["x", "--exit", "sometimes"], "mode: Input should be 'full'"),
        (["x", "--exit", "fixed", "--depth", "99"], "exceeds the model's"),
        (["x", "--after", "later"], "after_exit: Input should be"),
        (["x", "--temperature", "-1"], "temperature must be a number of at least 0, got -1"),
        (["x", "--seed", "-4"], "seed must lie in"),
        (["x", "--stop", ""], "a stop string must not be empty"),
        (["x", "--exit", "full", "--q", "0.3"], "--q has no effect with exit mode 'full', only with qexit"),
        (["x", "--dtype", "int4"], "dtype must be one of"),
        (["x", "--device", "toaster"], "device 'toaster' cannot be used"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    assert message in refused("generate", *arguments)


def test_broken_input_and_files_are_one_line_too(tmp_path):
    refused("generate", "-", input=b"\xff\xfe")
    refused("export", "pocket", "/proc/nothing/here")
    for name, message in (("model.safetensors", "could not be loaded"), ("tokenizer.json", "no usable tokenizer.json")):
        folder = tmp_path / name
        run("export", "pocket", str(folder))
        (folder / name).write_bytes(b"not what it says")
        assert message in refused("generate", "x", "--model", str(folder))


@pytest.mark.parametrize("name", ["scipy", "sklearn"])
def test_calibrate_says_what_it_needs_before_it_starts(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    said = refused("calibrate", "pocket", "--prompts", str(tmp_path / "nowhere.jsonl"))
    assert said == f"error: {name} is not installed: pip install 'sigma0-lm[calibrate]'\n"


def test_doctor_tells_versions_and_reasons():
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    versions = {finding["name"]: finding for finding in report["versions"]}
    assert versions["sigma0-lm"]["detail"] == sigma0.__version__
    assert versions["transformers"]["ok"]
    assert [finding["name"] for finding in report["models"]] == list(sigma0.shipped_models())
    for section in report.values():
        assert all(finding["ok"] or len(finding["detail"]) > 10 for finding in section), "what is off says why"
    table = run("doctor").stdout
    assert "transformers" in table
    assert "pocket" in table


@pytest.mark.parametrize("total", [1, 2, 3, 6, 8, 12])
def test_colours_run_from_shallow_to_deep(total):
    styles = [depth_style(depth, total) for depth in range(1, total + 1)]
    places = [PALETTE.index(style) for style in styles]
    assert places == sorted(places)
    assert places[0] == 0
    assert total == 1 or places[-1] == len(PALETTE) - 1
