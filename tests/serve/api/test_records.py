"""What the server keeps of requests: lines of telemetry, doors and drift in metrics, and the list of those in it."""

import asyncio
import threading
from collections import Counter
from contextlib import closing, contextmanager
from functools import partial

import httpx
import pytest
from pydantic import SecretStr

from sigma0.commands.telemetry import TelemetryLog, read_telemetry
from sigma0.ladder import Always, FidelityLadder, Never
from sigma0.serve.api import metrics
from sigma0.serve.api.access import ServerSettings
from sigma0.signals.drift import DriftMonitor
from sigma0.signals.verdict import DoorPolicy, ReasonVerdict
from tests.calibrated import calibrated, uncalibrated
from tests.serve.api.test_chat import ASKED, LOST, chunks, leaving, post
from tests.serve.api.test_info import scraped
from tests.serve.api.test_load import begin, until
from tests.serve.conftest import held_up, served, two_rungs

KEY = "a-key-of-nobody"


@contextmanager
def logged(pocket, path, **settings):
    """A server whose lines go to a file; they are all there once the block is left."""
    with closing(TelemetryLog(path)) as log, served(pocket, **settings) as server:
        server.app.state.handler.telemetry = log
        yield server
        until(lambda: server.app.state.handler.open == 0)


def test_a_line_says_what_the_response_said(pocket, tmp_path):
    with logged(pocket, tmp_path / "log.jsonl") as server:
        answer = post(server, n=2, seed=1, temperature=1.0, reasoning_effort="low")
        output = chunks(server, max_tokens=3)[-1]["sigma0"]["choices"][0]
        post(server, guided_choice=["garden", "bedroom"])
    text = (tmp_path / "log.jsonl").read_text()
    assert not any(word in text for word in ("Mary", "kitchen", "Where"))
    *both, streamed, chosen = read_telemetry(tmp_path / "log.jsonl")
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
    assert streamed.stream and list(streamed.depths) == output["depths"] and streamed.finish_reason == "length"
    assert chosen.costs.tokens_forced == chosen.reasons.count("forced") > 0


def test_ladders_and_routes_are_told_apart(pocket, tmp_path, monkeypatch):
    with logged(pocket, tmp_path / "log.jsonl", ladder=FidelityLadder(two_rungs(pocket), policy=Always())) as server:
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
        file = tmp_path / f"{door}.jsonl"
        with logged(pocket, file, ladder=FidelityLadder(two_rungs(pocket), policy=policy, doors=strict)) as server:
            output = post(server, messages=LOST, sigma0={"ladder": "answer"}).json()["sigma0"]["choices"][0]
        (line,) = read_telemetry(file)
        assert output["door"] == line.door == door
        assert output["top_rung"] is line.route.top_rung is (door == "abort") and output["not_tried"] == []


def test_a_client_that_leaves_leaves_a_line(pocket, tmp_path):
    with logged(pocket, tmp_path / "log.jsonl") as server:
        with leaving(server, max_tokens=200, sigma0={"exit": {"mode": "full"}}) as response:
            next(line for line in response.iter_lines() if '"fate"' in line)
            server.service.gate.clear()
        until(lambda: server.app.state.handler.open == 0)
        server.service.gate.set()
    (line,) = read_telemetry(tmp_path / "log.jsonl")
    assert (line.outcome, line.error, line.finish_reason, line.verdict) == ("cancelled", None, None, None)
    assert set(line.depths) == {6} and len(line.depths) == line.new_tokens >= 1 and line.costs.seconds > 0


@pytest.mark.parametrize("error, status", [("RequestFailed", 500), ("TimeoutError", 504)])
def test_a_failure_and_time_that_is_over_leave_a_line_without_what_was_said(pocket, tmp_path, error, status):
    settings = ServerSettings(request_timeout=0.2 if status == 504 else 60, api_key=SecretStr(KEY))
    with logged(pocket, tmp_path / "log.jsonl", settings=settings) as server:
        if status == 500:
            server.service.held.fails = RuntimeError("Mary is a secret")
        else:
            server.service.gate.clear()
        # the second one was never begun
        for tokens, output in ((20, status), (-1, 400)):
            assert post(server, {"Authorization": f"Bearer {KEY}"}, max_tokens=tokens).status_code == output
        server.service.gate.set()
    (line,) = read_telemetry(tmp_path / "log.jsonl")
    assert (line.outcome, line.error, line.new_tokens) == ("failed", error, 0)
    text = (tmp_path / "log.jsonl").read_text()
    assert KEY not in text and "secret" not in text


GAUGES = ("sigma0_confidence_psi", "sigma0_out_of_calibration_share")
STRANGE = [{"role": "user", "content": "Who is the president?"}]


def judged(server, **body):
    output = post(server, **body).json()["sigma0"]["choices"]
    return [(ReasonVerdict.model_validate(choice["verdict"]), choice["door"]) for choice in output]


def check_histogram(values, confidences):
    for bound in metrics.CONFIDENCES:
        assert values["sigma0_confidence_bucket", str(bound)] == sum(item <= bound for item in confidences)
    assert values["sigma0_confidence_count",] == len(confidences)
    assert values["sigma0_confidence_sum",] == pytest.approx(sum(confidences))


def test_drift_is_that_of_the_verdicts(pocket, monkeypatch):
    monkeypatch.setattr(metrics, "DriftMonitor", partial(DriftMonitor, fewest=5))
    pair = calibrated(pocket, [ASKED])
    drift, seen = DriftMonitor(pair[0].confidence_model, fewest=5), []
    with served(pair) as server:
        names, values = scraped(server)
        assert set(GAUGES) <= names and not {(name,) for name in GAUGES} & set(values)
        for body in ({}, {"n": 2, "temperature": 2.0, "seed": 0}, {"messages": STRANGE}, {"messages": LOST}):
            for verdict, door in judged(server, **body):
                assert (verdict.reason == "out_of_calibration") == (body.get("messages") in (STRANGE, LOST))
                drift.add(verdict)
                seen.append((verdict, door))
            assert ((GAUGES[0],) in scraped(server)[1]) == (len(seen) >= 5)
        (end,) = [chunk for chunk in chunks(server) if "verdict" in chunk["sigma0"]["choices"][0]]
        output = end["sigma0"]["choices"][0]
        drift.add(ReasonVerdict.model_validate(output["verdict"]))
        seen.append((ReasonVerdict.model_validate(output["verdict"]), output["door"]))
        post(server, temperature=9)
        _, values = scraped(server)
    assert values[GAUGES[0],] == pytest.approx(drift.psi) and values[GAUGES[0],] > 0.25
    assert values[GAUGES[1],] == drift.out_of_calibration == 2 / 6
    doors = Counter(door for _, door in seen)
    assert {"converge", "escalate"} == set(doors)
    assert {name[1]: value for name, value in values.items() if name[0] == "sigma0_doors_total"} == doors
    check_histogram(values, [verdict.confidence for verdict, _ in seen])


def test_the_shipped_calibration_knows_questions_of_its_world_from_others(pocket, plain):
    ((verdict, door),) = judged(plain)
    assert door == "converge" and verdict.confidence > 0.9
    for said in (STRANGE, LOST, [{"role": "user", "content": "The hat is with Mary. What is 2 + 2?"}]):
        ((verdict, door),) = judged(plain, messages=said)
        assert (verdict.reason, door) == ("out_of_calibration", "escalate")
    assert set(GAUGES[1:]) <= scraped(plain)[0]


def test_without_a_calibration_there_is_nothing_to_drift_from(pocket):
    with served(uncalibrated(pocket)) as server:
        ((verdict, door),) = judged(server)
        names, values = scraped(server)
    assert not set(GAUGES) & names and values["sigma0_doors_total", door] == 1
    check_histogram(values, [verdict.confidence])


def test_without_verdicts_nothing_is_counted(pocket, monkeypatch):
    monkeypatch.setenv("SIGMA0_VERDICT", "0")
    with served(calibrated(pocket, [ASKED])) as server:
        (choice,) = post(server).json()["sigma0"]["choices"]
        assert choice["verdict"] is choice["door"] is choice["door_text"] is None
        _, values = scraped(server)
    assert not [name for name in values if name[0] in (*GAUGES, "sigma0_doors_total")]
    assert values["sigma0_confidence_count",] == 0


def test_answers_that_a_ladder_replaces_count_as_the_models_own(pocket, monkeypatch):
    monkeypatch.setenv("SIGMA0_ROUTING", "1")
    pair = calibrated(pocket, [ASKED])
    current = []
    with served(pair) as server:
        current += [verdict for messages in (ASKED, STRANGE) for verdict, _ in judged(server, messages=messages)]
    rungs = two_rungs(pair, pocket[0])
    for ladder in (FidelityLadder(rungs), FidelityLadder(rungs[1:])):
        with served(pair, ladder=ladder) as server:
            result = [door for messages in (ASKED, STRANGE) for _, door in judged(server, messages=messages)]
            _, values = scraped(server)
        assert result[0] == "converge" and result[1] != "escalate"
        assert values["sigma0_doors_total", "converge"] == result.count("converge")
        assert values[GAUGES[1],] == 0.5
        check_histogram(values, [verdict.confidence for verdict in current])


def test_texts_of_a_ladder_have_doors_and_no_confidence_of_the_model(pocket):
    pair = calibrated(pocket, [ASKED])
    ladder = FidelityLadder(two_rungs(pair, pocket[0]), policy=Always())
    with served(pair, ladder=ladder) as server:
        doors = [door for unit in ("token", "answer") for _, door in judged(server, sigma0={"ladder": unit})]
        _, values = scraped(server)
    assert sum(values["sigma0_doors_total", door] for door in set(doors)) == 2
    assert values["sigma0_confidence_count",] == 0 and (GAUGES[1],) not in values


def slots(server):
    return httpx.get(f"{server.url}/slots", timeout=60)


def test_what_runs_and_what_waits(pocket):
    with served(pocket, limit=1) as server:
        service = server.service
        service.held.tokens = threading.Semaphore(3)
        exit_setting = {"mode": "margin", "theta": 0.9, "after_exit": "drop"}
        first = begin(server, sigma0={"exit": exit_setting}, max_tokens=12)
        until(lambda: service.status().tokens == 3)
        second = begin(server, messages=LOST, max_tokens=5)
        until(lambda: service.status().waiting)
        output = slots(server)
        running, waiting = output.json()
        prompts = [len(ticket.request.prompt_ids) for ticket in service.tickets]
        assert running["id"] != waiting["id"] and running["id"].endswith("-0") and len(running["id"]) == 10
        assert running.pop("seconds") > waiting.pop("seconds") > 0 and 1 <= running["depth"] <= 6
        known = {"state": "decode", "lane": 0, "prompt_tokens": prompts[0], "new_tokens": 3, "max_new_tokens": 12}
        known |= {"pages": -(-(prompts[0] + 3) // 16), "exit": "margin", "after_exit": "drop", "preemptions": 0}
        assert running == known | {"id": running["id"], "depth": running["depth"], "engine": None}
        known = {"state": "waiting", "lane": None, "pages": 0, "depth": None, "prompt_tokens": prompts[1]}
        assert waiting == waiting | known | {"new_tokens": 0}
        # no word of what was asked or written
        assert not any(word in output.text for word in ("Sara", "bedroom", "park", "Once"))
        service.held.tokens.release(1000)
        assert first.result().status_code == second.result().status_code == 200
        # the list names requests as the header does, as far as it goes
        assert first.result().headers["x-request-id"].startswith(running["id"].partition("-")[0])
        assert slots(server).json() == []


def test_a_prompt_that_is_being_read(pocket):
    with served(pocket) as server:
        server.service.gate.clear()
        answer = begin(server, n=2)
        until(lambda: server.service.status().running == 2)
        output = [(item["state"], item["lane"], item["id"][-2:]) for item in slots(server).json()]
        server.service.gate.set()
        assert output == [("prefill", 0, "-0"), ("prefill", 1, "-1")] and answer.result().status_code == 200


def test_an_engine_that_does_not_answer_or_is_gone(pocket, monkeypatch):
    monkeypatch.setattr("sigma0.serve.engine.client.LOOKING", 0.05)
    with served(pocket) as server:
        stuck, entered, go_on = held_up(lambda: [])
        monkeypatch.setattr(server.service.held, "step", stuck)
        answer = begin(server)
        try:
            assert entered.wait(60)
            late = slots(server)
            assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        finally:
            monkeypatch.undo()
            go_on.set()
            answer.result()
        assert slots(server).json() == []
        server.service.close()
        assert slots(server).status_code == 503


async def test_many_who_ask_at_once_cost_the_engine_one_look(pocket, monkeypatch):
    with served(pocket) as server:
        looked, go_on = [], threading.Event()
        monkeypatch.setattr(server.service.held, "slots", lambda: looked.append(go_on.wait(60)) or ())
        asked = [asyncio.create_task(server.service.slots()) for _ in range(20)]
        await asyncio.sleep(0.05)
        go_on.set()
        assert await asyncio.gather(*asked) == [()] * 20
        assert len(looked) == 1


def test_times_of_a_request(pocket, monkeypatch):
    with served(pocket, limit=1) as server:
        service = server.service
        service.gate.clear()
        first = begin(server)
        until(lambda: service.status().running)
        second = begin(server)
        until(lambda: service.status().waiting)
        finish, ends = service.held._outputs.finish, []
        monkeypatch.setattr(service.held._outputs, "finish", lambda *given: ends.append(finish(*given)) or ends[-1])
        service.gate.set()
        assert first.result().status_code == second.result().status_code == 200
    one, other = (end.times for end in ends)
    assert min(*one, *other) >= 0
    # the second one waited for all of the first one's passes
    assert other.queue >= one.decode > 0 and one.queue < other.queue
