"""Doors, confidence and drift in `/metrics`, against the verdicts that the answers came with."""

from collections import Counter
from functools import partial

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sigma0.ladder import Always, FidelityLadder, Rung
from sigma0.serve.api import metrics
from sigma0.signals.drift import DriftMonitor
from sigma0.signals.verdict import ReasonVerdict
from tests.calibrated import calibrated, uncalibrated
from tests.serve.api.test_chat import ASKED, LOST, chunks, post
from tests.serve.conftest import served

GAUGES = ("sigma0_confidence_psi", "sigma0_out_of_calibration_share")
STRANGE = [{"role": "user", "content": "Who is the president?"}]


def scraped(server):
    text = httpx.get(f"{server.url}/metrics").text
    families = list(text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    return {family.name for family in families}, {
        (sample.name, *sample.labels.values()): sample.value for sample in samples
    }


def judged(server, **body):
    """The verdicts and doors of an answer's choices."""
    told = post(server, **body).json()["sigma0"]["choices"]
    return [(ReasonVerdict.model_validate(choice["verdict"]), choice["door"]) for choice in told]


def check_histogram(values, confidences):
    for bound in metrics.CONFIDENCES:
        assert values["sigma0_confidence_bucket", str(bound)] == sum(each <= bound for each in confidences)
    assert values["sigma0_confidence_count",] == len(confidences)
    assert values["sigma0_confidence_sum",] == pytest.approx(sum(confidences))


def test_drift_is_that_of_the_verdicts(pocket, monkeypatch):
    monkeypatch.setattr(metrics, "DriftMonitor", partial(DriftMonitor, fewest=5))
    pair = calibrated(pocket, [ASKED])
    drift, seen = DriftMonitor(pair[0].confidence_model, fewest=5), []
    with served(pair) as server:
        names, values = scraped(server)
        assert set(GAUGES) <= names and not {(name,) for name in GAUGES} & set(values)
        for body in ({}, {"n": 2, "temperature": 2.0, "seed": 3}, {"messages": STRANGE}, {"messages": LOST}):
            for verdict, door in judged(server, **body):
                assert (verdict.reason == "out_of_calibration") == (body.get("messages") in (STRANGE, LOST))
                drift.add(verdict)
                seen.append((verdict, door))
            assert ((GAUGES[0],) in scraped(server)[1]) == (len(seen) >= 5)
        (end,) = [chunk for chunk in chunks(server) if "verdict" in chunk["sigma0"]["choices"][0]]
        told = end["sigma0"]["choices"][0]
        drift.add(ReasonVerdict.model_validate(told["verdict"]))
        seen.append((ReasonVerdict.model_validate(told["verdict"]), told["door"]))
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
    told = httpx.get(f"{plain.url}/v1/sigma0").json()["confidence"]
    assert told == {name: getattr(pocket[0].confidence_model, name) for name in told} and told["answers"] > 1000
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
        assert post(server).json()["sigma0"]["choices"][0]["verdict"] is None
        _, values = scraped(server)
    assert not [name for name in values if name[0] in (*GAUGES, "sigma0_doors_total")]
    assert values["sigma0_confidence_count",] == 0


def test_answers_that_a_ladder_replaces_count_as_the_models_own(pocket, monkeypatch):
    monkeypatch.setenv("SIGMA0_ROUTING", "1")
    pair = calibrated(pocket, [ASKED])
    own = []
    with served(pair) as server:
        own += [verdict for messages in (ASKED, STRANGE) for verdict, _ in judged(server, messages=messages)]
    rungs = [Rung.local(*pair, "pocket"), Rung.local(*pocket, "above")]
    for ladder in (FidelityLadder(rungs), FidelityLadder(rungs[1:])):
        with served(pair, ladder=ladder) as server:
            found = [door for messages in (ASKED, STRANGE) for _, door in judged(server, messages=messages)]
            _, values = scraped(server)
        assert found[0] == "converge" and found[1] != "escalate"
        assert values["sigma0_doors_total", "converge"] == found.count("converge")
        assert values[GAUGES[1],] == 0.5
        check_histogram(values, [verdict.confidence for verdict in own])


def test_texts_of_a_ladder_have_doors_and_no_confidence_of_the_model(pocket):
    pair = calibrated(pocket, [ASKED])
    ladder = FidelityLadder([Rung.local(*pair, "pocket"), Rung.local(*pocket, "above")], policy=Always())
    with served(pair, ladder=ladder) as server:
        doors = [door for unit in ("token", "answer") for _, door in judged(server, sigma0={"ladder": unit})]
        _, values = scraped(server)
    assert sum(values["sigma0_doors_total", door] for door in set(doors)) == 2
    assert values["sigma0_confidence_count",] == 0 and (GAUGES[1],) not in values
