import sys

import pytest

from sigma0.bench.commands import COMMANDS, with_record
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.core.options import LEDGER, OWN
from sigma0.commands.lazy_group import LazyCommand
from tests.bench.running import bench, refused


def test_a_missing_library_is_one_line_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sigma0.bench.lossless.command", None)
    result = bench("lossless", "--help", code=2)
    assert result.stderr.startswith("error:") and result.stderr.endswith("pip install 'sigma0-lm[bench]'\n")
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)


def recording(command):
    """The commands of a tree that write into a folder of the caller's."""
    with_record(command)
    nested = [item for part in getattr(command, "commands", {}).values() for item in recording(part)]
    return [*nested, *([command] if any(option.name == "record" for option in command.params) else [])]


def test_every_bench_with_rows_takes_record():
    loaded = {name: LazyCommand(name, target, None).load() for name, target in COMMANDS.items()}
    obtained = {name for name, command in loaded.items() if recording(command)}
    assert obtained == {
        "fidelity", "speed", "quantization", "kv", "overhead", "ladder", "distill", "agent", "outer", "strategyqa",
        "serve", "vllm", "humaneval", "passes", "simulate", "course",
    }  # fmt: skip
    tracked = [option for command in loaded.values() for option in command.params if "results" in str(option.default)]
    assert {option.name for option in tracked} <= {"inputs", "results", "ledger"}, "nothing is written there unasked"


@pytest.mark.slow
def test_rows_are_the_callers_unless_they_are_to_be_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["speed", "pocket", "--context", 4, "--new-tokens", 3, "--rounds", 1, "--prompt-rounds", 1]
    words += ["--ways", "full", "--dtype", "float32"]
    assert bench(*words).stdout.rstrip().endswith("1 rows in sigma0-bench/leaderboard.jsonl")
    assert "run it at the root of the repository" in refused(*words, "--record")
    (tmp_path / "bench" / "results").mkdir(parents=True)
    bench(*words, "--record", "--out", "mine.jsonl")
    assert len(read_rows(OWN)) == len(read_rows(tmp_path / "mine.jsonl")) == 1 and not LEDGER.exists()
    bench(*words, "--record")
    assert len(read_rows(OWN)) == len(read_rows(LEDGER)) == 1
