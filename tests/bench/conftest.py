import pytest


@pytest.fixture
def ledger(tmp_path):
    """A new ledger's place."""
    return tmp_path / "ledger.jsonl"
