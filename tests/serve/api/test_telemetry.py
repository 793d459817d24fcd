"""One line for each choice that was asked for over HTTP, however it ended; none holds a prompt, an answer or a key."""

from contextlib import contextmanager

import httpx
import pytest
from pydantic import SecretStr

from sigma0.commands.telemetry import TelemetryLog, read_telemetry
from sigma0.ladder import Always, FidelityLadder, Never, Rung
from sigma0.serve.api.access import ServerSettings
from sigma0.signals.verdict import DoorPolicy
from tests.serve.api.test_chat import ASKED, LOST, chunks, post
from tests.serve.api.test_load import until
from tests.serve.conftest import served

KEY = "a-key-of-nobody"
FULL = {"mode": "full"}


@contextmanager
def logged(pocket, path, **settings):
    """A server whose lines go to a file; they are all there once the block is left."""
    log = TelemetryLog(path)
    try:
        with served(pocket, **settings) as server:
            server.app.state.handler.telemetry = log
            yield server
            until(lambda: server.app.state.handler.open == 0)
    finally:
        log.close()


def test_a_line_says_what_the_response_said(pocket, tmp_path):
    with logged(pocket, tmp_path / "log.jsonl") as server:
        answer = post(server, n=2, seed=1, temperature=1.0, reasoning_effort="low")
        told = chunks(server, max_tokens=3)[-1]["sigma0"]["choices"][0]
    text = (tmp_path / "log.jsonl").read_text()
    assert not any(word in text for word in ("Mary", "kitchen", "Where"))
    *both, streamed = read_telemetry(tmp_path / "log.jsonl")
    raw = answer.json()
    assert [line.choice for line in both] == [0, 1]
    for line, said in zip(both, raw["sigma0"]["choices"], strict=True):
        assert line.request_id == answer.headers["x-request-id"] and line.outcome == "done" and line.error is None
        assert (line.kind, line.model, line.stream, line.effort) == ("chat", "pocket", False, "low")
        assert list(line.depths) == said["depths"] and list(line.reasons) == said["reasons"]
        assert list(line.proximity) == pytest.approx(said["proximity"])
        assert line.verdict.to_dict() == said["verdict"] and line.door == said["door"]
        assert line.exit.to_dict() == raw["sigma0"]["exit"] and line.total_loops == 6
        assert line.prompt_tokens == raw["usage"]["prompt_tokens"] and line.new_tokens == len(said["depths"])
        costs = line.costs
        assert (costs.passes, costs.rows, costs.passes_saved) == (said["passes"], said["rows"], said["passes_saved"])
        assert 0 < costs.first_token_seconds <= costs.seconds and costs.large_model_tokens == 0
        assert line.route.kind == "engine" and line.route.rungs == {"pocket": line.new_tokens}
    assert streamed.stream and list(streamed.depths) == told["depths"] and streamed.finish_reason == "length"


def test_ladders_and_routes_are_told_apart(pocket, tmp_path, monkeypatch):
    rungs = [Rung.local(*pocket, "pocket"), Rung.local(*pocket, "above")]
    with logged(pocket, tmp_path / "log.jsonl", ladder=FidelityLadder(rungs, policy=Always())) as server:
        post(server, sigma0={"ladder": "token"})
        post(server, sigma0={"ladder": "answer"})
        monkeypatch.setenv("SIGMA0_ROUTING", "1")
        post(server)
        routed = post(server, messages=LOST).json()["sigma0"]["choices"][0]
    token, answer, kept, climbed = read_telemetry(tmp_path / "log.jsonl")
    assert (token.route.kind, token.route.unit, token.route.rungs) == ("ladder", "token", {"above": token.new_tokens})
    assert token.route.why and token.costs.large_model_tokens == token.new_tokens > 0
    assert [cost["name"] for cost in token.costs.rungs] == ["pocket", "above"]
    assert (answer.route.unit, answer.depths) == ("answer", ()) and answer.new_tokens > 0
    assert (kept.route.kind, kept.costs.rungs) == ("engine", ())
    assert routed["costs"] and climbed.route.kind == "routed" and climbed.route.why and climbed.costs.rungs


def test_no_door_of_a_ladder_loses_its_line(pocket, tmp_path):
    """What its caller's policy lets stand, and what the highest rung is no surer of."""
    strict = DoorPolicy(require_grounding=True)
    for policy, door in ((Never(), "escalate"), (Always(), "abort")):
        rungs = [Rung.local(*pocket, "pocket"), Rung.local(*pocket, "above")]
        file = tmp_path / f"{door}.jsonl"
        with logged(pocket, file, ladder=FidelityLadder(rungs, policy=policy, doors=strict)) as server:
            told = post(server, messages=LOST, sigma0={"ladder": "answer"}).json()["sigma0"]["choices"][0]
        (line,) = read_telemetry(file)
        assert told["door"] == line.door == door
        assert told["top_rung"] is line.route.top_rung is (door == "abort") and told["not_tried"] == []


def test_a_client_that_leaves_leaves_a_line(pocket, tmp_path):
    with logged(pocket, tmp_path / "log.jsonl") as server:
        with httpx.Client() as client:
            asked = {"model": "pocket", "messages": ASKED, "stream": True, "max_tokens": 200, "sigma0": {"exit": FULL}}
            with client.stream("POST", f"{server.url}/v1/chat/completions", json=asked) as response:
                next(line for line in response.iter_lines() if '"fate"' in line)
                server.service.gate.clear()
        until(lambda: server.app.state.handler.open == 0)
        server.service.gate.set()
    (line,) = read_telemetry(tmp_path / "log.jsonl")
    assert (line.outcome, line.error, line.finish_reason, line.verdict) == ("cancelled", None, None, None)
    assert set(line.depths) == {6} and len(line.depths) == line.new_tokens >= 1 and line.costs.seconds > 0


def test_a_failure_leaves_a_line_without_its_message(pocket, tmp_path):
    with logged(pocket, tmp_path / "log.jsonl") as server:
        server.service.fails = RuntimeError("Mary is a secret")
        assert post(server).status_code == 500
        assert post(server, max_tokens=-1).status_code == 400, "which was never begun"
    (line,) = read_telemetry(tmp_path / "log.jsonl")
    assert (line.outcome, line.error) == ("failed", "RequestFailed")
    assert "secret" not in (tmp_path / "log.jsonl").read_text()


def test_time_that_is_over_leaves_a_line(pocket, tmp_path):
    settings = ServerSettings(request_timeout=0.2, api_key=SecretStr(KEY))
    with logged(pocket, tmp_path / "log.jsonl", settings=settings) as server:
        server.service.gate.clear()
        asked = {"model": "pocket", "messages": ASKED}
        headers = {"Authorization": f"Bearer {KEY}"}
        found = httpx.post(f"{server.url}/v1/chat/completions", json=asked, headers=headers, timeout=30)
        assert found.status_code == 504
        server.service.gate.set()
    (line,) = read_telemetry(tmp_path / "log.jsonl")
    assert (line.outcome, line.error, line.new_tokens) == ("failed", "TimeoutError", 0)
    assert KEY not in (tmp_path / "log.jsonl").read_text()


def test_a_full_disk_costs_no_answer(pocket, tmp_path):
    with logged(pocket, tmp_path / "log.jsonl") as server:
        log = server.app.state.handler.telemetry
        log._file.close()
        # every write to it fails
        log._file._open = lambda: open("/dev/full", "w")  # noqa: SIM115
        for _ in range(3):
            assert post(server).status_code == 200
