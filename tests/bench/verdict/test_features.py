"""What features are worth, on answers whose law is known."""

from types import SimpleNamespace

import numpy as np
import pytest

from sigma0.bench.verdict.features import feature_uses
from sigma0.bench.verdict.picture import draw_features
from sigma0.calibrate.confidence import fit_confidence
from sigma0.signals.evidence import FEATURES


def answers(n, seed):
    rng = np.random.default_rng(seed)
    evidence = np.exp(rng.normal(-2, 1.5, (n, len(FEATURES))))
    evidence[:, FEATURES.index("length")] = rng.integers(1, 20, n)
    doubt = np.log(evidence[:, FEATURES.index("mean_entropy")]) + 0.3 * np.log(
        evidence[:, FEATURES.index("most_doubt")]
    )
    return SimpleNamespace(evidence=evidence, right=rng.random(n) < 1 / (1 + np.exp(doubt + 1)))


@pytest.mark.exhaustive
def test_what_is_read_loses_and_what_is_not_does_not(tmp_path):
    fit, held = answers(2000, 0), answers(1000, 1)
    fitted = fit_confidence(fit.evidence, fit.right, [[1, 2]] * 2000)
    held.evidence[0, FEATURES.index("mean_depth")] = np.nan
    uses = {use.name: use for use in feature_uses(held, fitted.model)}
    assert list(uses) == list(FEATURES)
    assert {name for name, use in uses.items() if use.stored} == set(fitted.model.features)
    first, second = uses["mean_entropy"], uses["most_doubt"]
    assert first.drop.value > second.drop.value > 0.0 and first.drop.interval[0] <= first.drop.value
    assert first.auroc > second.auroc > 0.55
    assert uses["length"].drop is None and uses["length"].auroc == pytest.approx(0.5, abs=0.06)
    assert uses["mean_depth"].auroc is None
    assert not any(use.stored for use in feature_uses(held, None))
    file = tmp_path / "features.svg"
    draw_features(list(uses.values()), fitted.figures, file, "pocket")
    assert file.stat().st_size > 10_000
