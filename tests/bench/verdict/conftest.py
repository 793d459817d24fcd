import pytest

import sigma0
from sigma0.bench.verdict.scores import VerdictClient
from sigma0.signals.verdict import DoorPolicy


@pytest.fixture(scope="session")
def client():
    model, tokenizer = sigma0.load("pocket", dtype="float32")
    return VerdictClient(
        model, tokenizer, model.resolve_exit_config(None), DoorPolicy(min_confidence=0.8), lambda: None
    )
