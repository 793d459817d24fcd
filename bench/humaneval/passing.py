"""pass@k: the share of problems that at least one of k samples solves, estimated without bias from n >= k samples."""

from collections.abc import Sequence

import numpy as np

from sigma0.calibrate.bootstrap import Estimate, clustered_share

KS = (1, 10, 100)


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold one that passed (Chen et al., 2021, equation 1).

    That is 1 - C(n - passed, k) / C(n, k), as a product whose factors lie between 0 and 1.

    Args:
        n: Samples of the problem.
        passed: How many of them passed.
        k: How many are drawn.

    Raises:
        ValueError: Unless 0 <= passed <= n and 1 <= k <= n.
    """
    if not 0 <= passed <= n or not 1 <= k <= n:
        raise ValueError(
            f"pass@{k} of {n} samples of which {passed} passed: 0 <= passed <= n and 1 <= k <= n are needed"
        )
    if n - passed < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - passed + 1, n + 1)))


def estimates(n: int, passed: Sequence[int]) -> dict[int, Estimate]:
    """Mean pass@k over problems for each k in `KS` that n samples allow, with intervals over problems.

    Args:
        n: Samples of each problem.
        passed: How many passed, for each problem; at least one problem.
    """
    found, ones = {}, np.ones(len(passed))
    for k in KS:
        if k <= n:
            estimate = clustered_share([pass_at_k(n, each, k) for each in passed], ones, n * ones)
            assert estimate is not None
            found[k] = estimate
    return found
