"""Lines of telemetry go to their file and come back, rotate, and are lost rather than an answer is."""

import logging
import threading
from datetime import datetime, timezone

import pytest

from sigma0.commands import telemetry
from sigma0.commands.telemetry import Costs, RequestLine, Route, TelemetryLog, read_telemetry
from sigma0.config import ExitConfig
from sigma0.signals.verdict import ReasonVerdict
from tests.test_cli import run

LINE = RequestLine(
    time=datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc),
    request_id="req-1",
    choice=1,
    kind="chat",
    model="pocket",
    stream=True,
    finish_reason="stop",
    prompt_tokens=12,
    new_tokens=3,
    total_loops=6,
    exit=ExitConfig(mode="margin", theta=0.8),
    effort="low",
    depths=(2, 1, 6),
    reasons=("confident", "confident", "max_depth"),
    proximity=(0.0, None, 0.25),
    verdict=ReasonVerdict(converged=False, depth=3.0, proximity=0.25, grounded=None, stable=None, reason="max_depth"),
    door="escalate",
    route=Route(kind="routed", unit="answer", rungs={"pocket-large": 3}, why=("saturated",)),
    costs=Costs(seconds=0.5, passes=9, rows=11, large_model_tokens=3, rungs=({"name": "pocket", "tokens": 0},)),
)


def test_lines_come_back_as_they_were_and_a_bad_one_is_named(tmp_path):
    path = tmp_path / "log.jsonl"
    # a second run appends
    for choices in (range(5), range(5, 6)):
        log = TelemetryLog(path)
        for choice in choices:
            log.write(lambda choice=choice: LINE.model_copy(update={"choice": choice}))
        log.close()
    obtained = list(read_telemetry(path))
    assert [line.choice for line in obtained] == list(range(6)) and obtained[1] == LINE
    path.write_text(LINE.model_dump_json() + "\n" + LINE.model_dump_json()[:-1] + ',"mood":"fine"}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*mood: Extra inputs are not permitted"):
        list(read_telemetry(path))


def test_a_file_is_rotated_and_few_are_kept(tmp_path):
    size = len(LINE.model_dump_json()) + 1
    log = TelemetryLog(tmp_path / "log.jsonl", max_bytes=3 * size, keep=2)
    for _ in range(20):
        log.write(lambda: LINE)
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["log.jsonl", "log.jsonl.1", "log.jsonl.2"]
    assert all(0 < file.stat().st_size <= 3 * size for file in files)
    assert all(line == LINE for file in files for line in read_telemetry(file))
    for bad in ({"max_bytes": 0}, {"keep": 0}):
        with pytest.raises(ValueError, match="at least 1 byte and 1 kept file"):
            TelemetryLog(tmp_path / "log.jsonl", **bad)


@pytest.mark.parametrize("name", ["no/such/folder/log.jsonl", "."])
def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path, name):
    with pytest.raises(ValueError, match=r"--telemetry '.*' cannot be written: .*; name a file in a folder"):
        TelemetryLog(tmp_path / name)
    for command in (["generate", "Mary went"], ["serve", "pocket", "--port", "0"]):
        result = run(*command, "--telemetry", str(tmp_path / name))
        assert result.exit_code == 2 and "cannot be written" in result.stderr and result.stdout == ""


def test_a_disk_that_fills_up_costs_lines_and_one_warning(tmp_path, caplog):
    log = TelemetryLog(tmp_path / "log.jsonl")
    stream = log._file.stream
    log._file.stream = open("/dev/full", "w")  # noqa: SIM115 - every write to it fails
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            log.write(lambda: LINE)
        log.close()
    stream.close()
    output = [record for record in caplog.records if "telemetry" in record.getMessage()]
    assert len(output) == 1 and "No space left on device" in output[0].getMessage()


def test_a_line_that_cannot_be_made_is_one_warning(tmp_path, caplog):
    log = TelemetryLog(tmp_path / "log.jsonl")
    with caplog.at_level(logging.WARNING):
        log.write(lambda: 1 / 0)
        log.write(lambda: LINE)
        log.close()
    assert "ZeroDivisionError" in caplog.text
    assert list(read_telemetry(tmp_path / "log.jsonl")) == [LINE]


def test_the_command_line_leaves_a_line_without_the_prompt(tmp_path):
    path = tmp_path / "log.jsonl"
    arguments = ["generate", "Mary went to the park. Where is Mary?", "--telemetry", str(path)]
    shown = run(*arguments)
    assert shown.exit_code == 0 and "Mary is in the park." in shown.stdout
    assert run(*arguments, "--json", "--exit", "qexit").exit_code == 0
    first, second = read_telemetry(path)
    assert (first.kind, first.model, first.outcome, first.finish_reason) == ("generate", "pocket", "done", "eos")
    assert len(first.depths) == len(first.reasons) == len(first.proximity) == first.new_tokens > 0
    assert first.verdict is not None and first.door is not None and first.costs.passes > 0
    assert (first.exit.mode, second.exit.mode) == ("margin", "qexit")
    assert "Mary" not in path.read_text() and "park" not in path.read_text()
    refused = run(*arguments, "--ladder", "pocket,pocket-large")
    assert refused.exit_code == 2 and "--telemetry goes with one model" in refused.stderr


def test_a_disk_that_hangs_does_not_keep_the_process_from_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "WAITING_LINES", 3)
    monkeypatch.setattr(telemetry, "CLOSING_S", 0.05)
    log, writing, go_on = TelemetryLog(tmp_path / "log.jsonl", 10**6, 1), threading.Event(), threading.Event()

    def hang():
        writing.set()
        go_on.wait()
        raise OSError("it never came back")

    log.write(hang)
    writing.wait()
    for _ in range(10):
        log.write(hang)
    try:
        log.close()
        assert not go_on.is_set(), "closed while the first line was still being written"
    finally:
        go_on.set()
