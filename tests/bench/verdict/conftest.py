"""The small model, and prompts that are not of its world."""

import pytest

import sigma0
from sigma0.bench.verdict.asking import Asker
from sigma0.bench.verdict.strange import StrangePrompt
from sigma0.signals.verdict import DoorPolicy


@pytest.fixture(scope="session")
def pocket():
    return sigma0.load("pocket", dtype="float32")


@pytest.fixture
def asker(pocket):
    model, tokenizer = pocket
    return Asker(model, tokenizer, model.resolve_exit_config(None), DoorPolicy(min_confidence=0.8), lambda: None)


@pytest.fixture
def strange():
    return [StrangePrompt(kind="trivia", prompt="Who is the president?"), StrangePrompt(kind="code", prompt="x = [")]
