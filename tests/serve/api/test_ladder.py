"""Answers of the ladder: asked for, and routed there by the verdict."""

import copy
import json
import threading
from unittest import mock

import httpx
import pytest
from openai.types.chat import ChatCompletion

from sigma0.ladder import Always, Budget, FidelityLadder, LocalRung, Never, Rung
from sigma0.signals.verdict import DoorPolicy
from tests.serve.api.test_chat import LOST, SAID, STORY, chunks, leaving, post
from tests.serve.api.test_load import until
from tests.serve.api.test_refusals import error_of, send
from tests.serve.conftest import served, two_rungs


def test_tokens_go_up_as_they_come(climbing):
    before = len(climbing.service.tickets)
    raw = post(climbing, sigma0={"ladder": True, "trail": True}).json()
    assert ChatCompletion.model_validate(raw, strict=True).choices[0].message.content == SAID
    (output,) = raw["sigma0"]["choices"]
    assert set(output["rungs"]) == {"above"} and output["door"] in ("converge", "abort") and output["top_rung"]
    assert [cost["name"] for cost in output["costs"]] == ["pocket", "above"] and len(output["trail_id"]) == 16
    assert output["trail"][0]["kind"] == "heading" and output["trail"][0]["unit"] == "token"
    assert raw["usage"]["completion_tokens"] == len(output["depths"]) == 7
    result = chunks(climbing, sigma0={"ladder": "token"})
    assert "".join(item["choices"][0]["delta"].get("content", "") for item in result) == SAID
    up = [item["sigma0"]["choices"][0]["tokens"][0]["handed_up"] for item in result[1:-1]]
    assert len(up) == 7 and all(up)
    last = result[-1]["sigma0"]["choices"][0]
    assert "trail" not in last and last["costs"] == same_but_seconds(output["costs"], last["costs"])
    # nothing of this was asked of the engine
    assert len(climbing.service.tickets) == before


def same_but_seconds(wanted, result):
    return [{**item, "seconds": other["seconds"]} for item, other in zip(wanted, result, strict=True)]


@pytest.mark.parametrize("unit", ["draft", "answer"])
def test_drafts_and_answers_come_in_one_piece(climbing, unit):
    raw = post(climbing, sigma0={"ladder": unit}).json()
    assert raw["choices"][0]["message"]["content"].strip() == SAID
    (output,) = raw["sigma0"]["choices"]
    assert output["depths"] == [] and [cost["name"] for cost in output["costs"]] == ["pocket", "above"]
    assert raw["usage"]["completion_tokens"] == 6
    _, piece, last = chunks(climbing, sigma0={"ladder": unit})
    assert piece["choices"][0]["delta"]["content"].strip() == SAID
    assert piece["sigma0"]["choices"][0]["tokens"] == [] and last["choices"][0]["finish_reason"] == "stop"


def test_drawn_tokens_have_the_seed_of_their_choice(climbing):
    asked = {"messages": LOST, "temperature": 1.5, "max_tokens": 6, "sigma0": {"ladder": "token"}}
    both = post(climbing, n=2, seed=3, **asked).json()
    texts = [item["message"]["content"] for item in both["choices"]]
    alone = [post(climbing, seed=seed, **asked).json()["choices"][0]["message"]["content"] for seed in (3, 4)]
    assert texts == alone and texts[0] != texts[1]


def test_a_stop_string_is_not_in_the_text(climbing):
    for unit in ("token", "answer"):
        said = post(climbing, stop="bedroom", sigma0={"ladder": unit}).json()["choices"][0]
        assert said["message"]["content"].strip() == "Sara is in the" and said["finish_reason"] == "stop"
    result = chunks(climbing, stop="the bedroom", sigma0={"ladder": "token"})
    assert "".join(item["choices"][0]["delta"].get("content", "") for item in result) == "Sara is in "


def test_the_budget_is_the_tighter_of_both(pocket):
    ladder = FidelityLadder(two_rungs(pocket), policy=Always(), budget=Budget(large_tokens=3))
    with served(pocket, ladder=ladder) as server:
        for asked, wrote in ((None, 3), ({"large_tokens": 2}, 2), ({"large_tokens": 9}, 3), ({"calls": 0}, 3)):
            (output,) = post(server, sigma0={"ladder": "token", "budget": asked}).json()["sigma0"]["choices"]
            assert output["rungs"].count("above") == wrote and output["door"] == "abort"
            assert "large_tokens" in output["door_text"]
        text = httpx.get(f"{server.url}/metrics").text
    assert "sigma0_aborts_total 4.0" in text and "sigma0_hand_ups_total 11.0" in text


def otherwise_calibrated(pocket, theta, exit_config):
    """The same weights with a calibration and a setting of their own."""
    model = copy.deepcopy(pocket[0])
    promise = {"agreement": 0.99, "confidence": 0.95, "prompts": 9, "mean_depth": 6.0}
    model.generation_config.exit_thresholds = {"margin": {**promise, "theta": theta}}
    model.generation_config.exit_config = exit_config
    return Rung.local(model, pocket[1], "above")


FULL, HALF = {"mode": "full"}, {"mode": "margin", "theta": 0.5}


@pytest.mark.grid(fast=3, slow=5)
@pytest.mark.parametrize(
    "unit, stored, fields, setting",
    [
        ("token", FULL, {"sigma0": {"exit": {"mode": "margin"}}}, {"mode": "margin", "theta": 1.0}),
        ("answer", FULL, {"sigma0": {"exit": {"mode": "margin"}}}, {"mode": "margin", "theta": 1.0}),
        ("token", FULL, {"sigma0": {"exit": HALF}}, HALF),
        ("token", FULL, {"reasoning_effort": "minimal"}, {"mode": "fixed", "depth": 3}),
        ("answer", FULL, {"reasoning_effort": "minimal"}, {"mode": "fixed", "depth": 3}),
        ("answer", {"mode": "fixed", "depth": 2}, {"reasoning_effort": "high"}, FULL),
        ("token", {"mode": "fixed", "depth": 2}, {"reasoning_effort": "medium"}, {"mode": "fixed", "depth": 2}),
        # a setting wins over an effort
        ("token", FULL, {"reasoning_effort": "low", "sigma0": {"exit": HALF}}, HALF),
    ],
)
def test_each_rung_takes_its_own_thresholds_and_its_own_effort(pocket, unit, stored, fields, setting):
    ladder = FidelityLadder([Rung.local(*pocket, "pocket"), otherwise_calibrated(pocket, 1.0, stored)], policy=Always())
    runs = []
    with served(pocket, ladder=ladder) as server:
        for body in (fields, {"sigma0": {"exit": setting}}):
            raw = post(server, **{**body, "sigma0": {**body.get("sigma0", {}), "ladder": unit}}).json()
            (choice,) = raw["sigma0"]["choices"]
            above = choice["costs"][1]
            runs.append((raw["choices"][0]["message"]["content"], choice["depths"], above["rows"], above["passes"]))
    assert runs[0] == runs[1] and runs[0][2] > 0


@pytest.mark.parametrize(
    "body, param, output",
    [
        ({"logprobs": True}, "sigma0.ladder", "logprobs"),
        ({"presence_penalty": 1}, "sigma0.ladder", "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "sigma0.ladder", "logit_bias"),
        ({"guided_choice": ["a"]}, "sigma0.ladder", "schema"),
        ({"temperature": 1, "sigma0": {"ladder": "answer"}}, "sigma0.ladder", "temperature"),
        ({"sigma0": {"ladder": "token", "exit": {"after_exit": "verify"}}}, "sigma0.ladder", "takes tokens back"),
        ({"sigma0": {"ladder": "token", "budget": {"seconds": "x"}}}, "sigma0.budget.seconds", "number"),
        ({"sigma0": {"ladder": True, "special_tokens": True}}, "sigma0.special_tokens", "as text"),
        ({"sigma0": {"ladder": "answer", "on_collapse": "ignore"}}, "sigma0.on_collapse", "does not reach"),
        ({"prompt": STORY, "echo": True}, "echo", "does not reach"),
        ({"prompt": STORY, "ignore_eos": True}, "ignore_eos", "does not reach"),
        ({"prompt": [5, 6]}, "prompt", "texts, not ids"),
    ],
)
def test_what_a_ladder_cannot(climbing, body, param, output):
    error = error_of(send(climbing, {"sigma0": {"ladder": "token"}, **body}), 400)
    assert error["param"] == param and output in error["message"]


def test_a_completion_goes_up(climbing):
    answer = send(climbing, {"prompt": STORY, "max_tokens": 20, "sigma0": {"ladder": True}}).json()
    assert answer["choices"][0]["text"] == " " + SAID


def test_a_rung_elsewhere_makes_answers_the_unit(pocket):
    far = Rung.endpoint("http://127.0.0.1:9/v1", "far", timeout=1.0, attempts=1)
    with served(pocket, ladder=FidelityLadder([Rung.local(*pocket, "pocket"), far], policy=Never())) as server:
        output = post(server, sigma0={"ladder": True, "trail": True}).json()["sigma0"]["choices"][0]
        assert output["trail"][0]["unit"] == "answer"
        refused = post(server, sigma0={"ladder": "token"})
        assert refused.status_code == 400 and "is an endpoint" in refused.json()["error"]["message"]
        assert httpx.get(f"{server.url}/v1/sigma0").json()["ladder"] == ["pocket", "far"]


def test_routing_hands_up_what_the_verdict_does_not_let_pass(climbing, monkeypatch):
    hinted = post(climbing, messages=LOST).json()
    assert hinted["sigma0"]["choices"][0]["door"] == "escalate" and "costs" not in hinted["sigma0"]["choices"][0]
    monkeypatch.setenv("SIGMA0_ROUTING", "1")
    before = len(climbing.service.tickets)
    sure = post(climbing).json()["sigma0"]["choices"][0]
    assert sure["door"] == "converge" and "costs" not in sure and set(sure["rungs"]) == {"pocket"}
    kept = post(climbing, messages=LOST, sigma0={"ladder": False}).json()["sigma0"]["choices"][0]
    assert kept["door"] == "escalate" and "costs" not in kept, "who asks for no ladder gets none"
    routed = post(climbing, messages=LOST, sigma0={"trail": True}).json()["sigma0"]["choices"][0]
    assert routed["costs"][1]["tokens"] > 0 and routed["trail"][0]["unit"] == "answer"
    assert routed["door"] in ("converge", "abort") and routed["top_rung"]
    assert len(climbing.service.tickets) == before + 3
    pieces = chunks(climbing, messages=LOST)
    output = [token["depth"] for item in pieces for token in item["sigma0"]["choices"][0]["tokens"]]
    assert output == pieces[-1]["sigma0"]["choices"][0]["depths"] and len(output) > 1
    pieces = chunks(climbing)
    assert [len(item["sigma0"]["choices"][0]["tokens"]) for item in pieces] == [0, *[1] * 7, 0]
    unrouted = post(climbing, messages=LOST, logprobs=True).json()
    assert "costs" not in unrouted["sigma0"]["choices"][0] and unrouted["choices"][0]["logprobs"]["content"]
    assert "costs" not in send(climbing, {"prompt": [5, 6]}).json()["sigma0"]["choices"][0]


def test_what_the_lowest_rung_cannot_hold(pocket, monkeypatch, caplog):
    short = copy.deepcopy(pocket[0])
    short.config.max_position_embeddings = 20
    ladder = FidelityLadder([Rung.local(short, pocket[1], "short"), Rung.local(*pocket, "pocket")], policy=Always())
    with served(pocket, ladder=ladder) as server:
        for unit in ("token", "draft", "answer"):
            refused = post(server, sigma0={"ladder": unit})
            assert refused.status_code == 400 and "context of 20" in refused.json()["error"]["message"]
        monkeypatch.setenv("SIGMA0_ROUTING", "1")
        # nobody asked for the ladder: the engine's answer stands
        output = post(server, messages=LOST).json()["sigma0"]["choices"][0]
        assert output["door"] == "escalate" and set(output["rungs"]) == {"pocket"} and "refused" in caplog.text


def test_who_leaves_ends_a_run_of_tokens(pocket):
    written, left = [], threading.Event()

    class Watched(FidelityLadder):
        def stream(self, prompt, **settings):
            run = super().stream(prompt, **settings)
            for step in run:
                written.append(step)
                yield step
                assert len(written) < 3 or left.wait(60)
            self.generations = run.generations

    ladder = Watched([LocalRung("pocket", *pocket)], policy=Never())
    with served(pocket, ladder=ladder) as server:
        with leaving(server, messages=LOST, max_tokens=15, sigma0={"ladder": "token"}) as answer:
            output = (line for line in answer.iter_lines() if '"tokens": [{' in line)
            assert json.loads(next(output).removeprefix("data: "))["sigma0"]["choices"][0]["passes"] > 0
        until(lambda: server.app.state.handler.open == 0)
        left.set()
        # the thread is free for the next request
        assert post(server, max_tokens=1, sigma0={"ladder": "answer"}).status_code == 200
        assert len(written) < 6


def counted(model, monkeypatch):
    """Says, when it is called, for how many passes a model's block was asked, whoever asked."""
    loop, forward = mock.Mock(wraps=model.loop), mock.Mock(wraps=model.model.forward)
    monkeypatch.setattr(model, "loop", loop)
    # so that every pass calls it
    monkeypatch.setattr(model, "plain_block", lambda *given: None)
    monkeypatch.setattr(model.model, "forward", forward)
    return lambda: (
        loop.call_count + sum(call.kwargs.get("num_loops") or model.num_loops for call in forward.call_args_list)
    )


def test_routing_reads_and_writes_nothing_twice(pocket, monkeypatch):
    """What the batch wrote is the lowest rung's answer: the small model runs as often as without a ladder."""
    large = copy.deepcopy(pocket[0])
    ladder = FidelityLadder(two_rungs(pocket, large))
    monkeypatch.setenv("SIGMA0_ROUTING", "1")
    with served(pocket, ladder=ladder) as server:
        small, above = counted(pocket[0], monkeypatch), counted(large, monkeypatch)
        raw = post(server, messages=LOST, max_tokens=9, sigma0={"trail": True}).json()
        (routed,) = raw["sigma0"]["choices"]
        batched = server.service.status().passes
    assert small() == batched > 0 and above() > 0
    assert routed["door"] == "abort" and routed["top_rung"] and set(routed["rungs"]) == {"above"}
    assert routed["not_tried"] == [] and routed["door_text"].endswith("there is no rung above.")
    assert len(routed["depths"]) == len(routed["reasons"]) == raw["usage"]["completion_tokens"] == 9
    assert all(depth >= 1 for depth in routed["depths"]) and None not in routed["entropies"]
    below, top = routed["costs"]
    assert (below["name"], below["tokens"]) == ("pocket", 9)
    assert 0 < below["passes"] <= batched
    assert top["tokens"] == 9 and routed["passes"] == below["passes"] + top["passes"]
    assert [line["outcome"] for line in routed["trail"] if line["kind"] == "decision"] == ["hand_up", "top_rung"]


def test_a_routed_answer_that_the_budget_keeps_is_told_with_its_depths(pocket, monkeypatch):
    rungs = two_rungs(pocket, copy.deepcopy(pocket[0]))
    monkeypatch.setenv("SIGMA0_ROUTING", "1")
    with served(pocket, ladder=FidelityLadder(rungs, Budget(large_tokens=3))) as server:
        raw = post(server, messages=LOST, max_tokens=9).json()
        output = raw["sigma0"]["choices"][0]
        assert output["door"] == "abort" and set(output["rungs"]) == {"pocket"} and len(output["depths"]) == 9
        assert output["not_tried"] == ["above: large_tokens"] and not output["top_rung"]
        told_metrics = httpx.get(f"{server.url}/metrics").text
        assert "sigma0_aborts_total 1.0" in told_metrics and "sigma0_top_rung_total 0.0" in told_metrics
        assert output["costs"][0]["tokens"] == 9 and output["costs"][1]["passes"] == 0
        pieces = chunks(server, messages=LOST, max_tokens=9)
        text = "".join(item["choices"][0]["delta"].get("content", "") for item in pieces)
        assert text == raw["choices"][0]["message"]["content"]
        assert pieces[-1]["sigma0"]["choices"][0]["depths"] == output["depths"]


def test_a_whole_answer_of_tokens_goes_up_where_its_verdict_does_not_pass(pocket, monkeypatch):
    # no single token is to blame: none is too unsure, and nothing in the text can be checked
    monkeypatch.setattr("sigma0.ladder.ladder.TOKEN_CONFIDENCE", 0.0)
    rungs = two_rungs(pocket, copy.deepcopy(pocket[0]))
    doors = DoorPolicy(require_grounding=True)
    with served(pocket, ladder=FidelityLadder(rungs, doors=doors)) as server:
        sigma0_fields = {"ladder": "token", "exit": {"mode": "margin", "theta": 1e-6}}
        asked = {"messages": LOST, "max_tokens": 6, "sigma0": sigma0_fields}
        whole = post(server, **asked).json()["sigma0"]["choices"][0]
        streamed = chunks(server, **asked)[-1]["sigma0"]["choices"][0]
    assert whole["door"] == "abort" and whole["top_rung"] and set(whole["rungs"]) == {"above"}
    # what was streamed cannot be taken back
    assert streamed["door"] == "escalate" and not streamed["top_rung"] and set(streamed["rungs"]) == {"pocket"}


def test_a_door_is_explained_by_the_thresholds_that_it_was_decided_by(pocket):
    strict = copy.deepcopy(pocket[0])
    strict.generation_config.door_policy = {"min_confidence": 1.0}
    with served(pocket, ladder=FidelityLadder([Rung.local(strict, pocket[1], "pocket")])) as server:
        for unit, word in (("token", "converge: confidence 0."), ("answer", "abort: its confidence is 0.")):
            # a limit makes a ladder of its own
            for budget in (None, {"large_tokens": 90}):
                output = post(server, sigma0={"ladder": unit, "budget": budget}).json()["sigma0"]["choices"][0]
                assert output["door_text"].startswith(word) and output["door"] == word.split(":")[0]
