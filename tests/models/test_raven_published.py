"""Huginn's published exits and cache policies, whose outputs are in tests/golden; and how ours differ."""

import pytest
import torch

from sigma0.models.raven_published import generate_as_published, read_as_published
from tests.conftest import Golden
from tests.models.raven_reference import tiny_raven

NAMES = ("huginn-a", "huginn-m4")


@pytest.fixture(scope="module", params=NAMES)
def published(request, tmp_path_factory):
    return Golden(request.param, tmp_path_factory.mktemp(request.param))


def settings_of(published, kind):
    """Policy, criterion and threshold of every run of a kind that is stored, and the prefix of its names."""
    names = {name.rpartition(".")[0] for name in published.tensors if name.startswith(f"{kind}.")}
    for name in sorted(names):
        _, policy, criterion, threshold = name.split(".", 3)
        yield name, policy, criterion, float(threshold)


@pytest.mark.exhaustive
def test_every_stored_exit_is_met(published):
    runs = list(settings_of(published, "exits"))
    assert len(runs) >= 8
    for name, policy, criterion, threshold in runs:
        for index in range(3):
            result = generate_as_published(
                published.model, published[f"greedy.prompt{index}"], 24, criterion, threshold, policy
            )
            assert torch.equal(result.tokens, published[f"{name}.tokens"][index]), name
            assert torch.equal(result.steps, published[f"{name}.steps"][index]), name
            values = published[f"{name}.values"][index]
            assert torch.allclose(result.values, values, atol=3e-5, rtol=1e-4, equal_nan=True), name


def test_tokens_with_exits_of_their_own_are_met(published):
    runs = list(settings_of(published, "varied"))
    assert runs
    for name, policy, criterion, threshold in runs:
        for row in range(2):
            result = read_as_published(
                published.model, published["single.input_ids"][row], criterion, threshold, policy
            )
            assert torch.equal(result.steps, published[f"{name}.steps"][row]), name
            assert torch.allclose(result.logits, published[f"{name}.logits"][row], atol=1e-4, rtol=0), name


def test_policies_differ_where_tokens_stop_early():
    model, ids = tiny_raven("sandwich", 1), torch.arange(3, 20)
    holes, latest = (
        read_as_published(model, ids, "latent-diff", 0.7, policy).logits for policy in ("full", "latest-m4")
    )
    assert not torch.allclose(holes, latest, atol=1e-3)
    never = [read_as_published(model, ids, "latent-diff", 0.0, policy).logits for policy in ("full", "latest-m4")]
    assert torch.equal(*never)
    with torch.no_grad():
        full = model(ids[None], exit_config={"mode": "full"}).logits[0]
    assert torch.allclose(never[0], full, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"criterion": "entropy"}, "criterion is one of entropy"),
        ({"policy": "skip"}, "policy is full or latest-m4"),
    ],
)
def test_unknown_names_are_refused(values, message):
    given = {"criterion": "kl", "threshold": 0.1, "policy": "full"} | values
    with pytest.raises(ValueError, match=message):
        read_as_published(tiny_raven("pre", 1), torch.tensor([1]), **given)
