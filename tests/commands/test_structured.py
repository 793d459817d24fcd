"""`sigma0 generate` with `--schema`, `--regex`, `--choice` and `--grammar`."""

import json

import jsonschema
import pytest

from tests.schemas import record
from tests.test_cli import run

SCHEMA = record({"where": {"enum": ["park", "barn"]}, "sure": {"type": "boolean"}})
ASKED = "Mary went to the park. Where is Mary?"


def test_a_schema_is_a_file_or_itself(tmp_path):
    path = tmp_path / "place.json"
    path.write_text(json.dumps(SCHEMA))
    texts = []
    for given in (str(path), json.dumps(SCHEMA)):
        result = run("generate", ASKED, "--schema", given, "--json")
        assert result.exit_code == 0, result.output
        done = json.loads(result.stdout)
        jsonschema.validate(json.loads(done["text"]), SCHEMA)
        assert done["stop_reason"] == "eos" and done["tokens_forced"] > 10
        texts.append(done["text"])
    assert texts[0] == texts[1]


def test_the_summary_says_what_was_forced():
    result = run("generate", ASKED, "--schema", json.dumps(SCHEMA), "--exit", "full")
    assert "tokens_forced" in result.stdout and "passes fewer than at full depth" in result.stdout
    assert "tokens_forced" not in run("generate", ASKED).stdout


def test_other_kinds_are_followed(tmp_path):
    path = tmp_path / "answer.lark"
    path.write_text('start: "yes" | "no"')
    for arguments, allowed in (
        (["--regex", "(Mary|John) is here"], ("Mary is here", "John is here")),
        (["--choice", "park", "--choice", "barn"], ("park", "barn")),
        (["--grammar", str(path)], ("yes", "no")),
        (["--grammar", 'root ::= "a" | "b"'], ("a", "b")),
    ):
        assert json.loads(run("generate", ASKED, "--json", *arguments).stdout)["text"] in allowed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--schema", "nowhere.json"], "nowhere.json"),
        (["--schema", '{"type": "strin"}'], "Invalid type: strin"),
        (["--regex", "a", "--choice", "b"], "exclude each other"),
        (["--choice", "a", "--ladder", "pocket,pocket-large"], "--choice does not reach the rungs"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, message):
    result = run("generate", ASKED, *arguments)
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.strip().splitlines()) == 1
