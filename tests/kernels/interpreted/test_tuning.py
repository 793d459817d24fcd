"""What `python -m sigma0.bench kernels --tune` times: the products of a pass, as tilings of all kinds divide them."""

import pytest
import torch

from sigma0.bench.kernels.tune import Trial, candidates, products_of
from sigma0.kernels.row_product import preferring, tiling_of
from tests.kernels.interpreted.conftest import DEVICE


@pytest.mark.parametrize("product", products_of("tiny"), ids=lambda product: product.name)
def test_it_is_the_product_and_another_is_found_out(product):
    device, dtype = torch.device(DEVICE), torch.float32 if DEVICE == "cpu" else torch.bfloat16
    capability = 0 if DEVICE == "cpu" else int("".join(map(str, torch.cuda.get_device_capability(device))))
    trial = Trial(product, device, dtype, capability, weight_bytes=0)
    arguments = (trial.hidden, trial.weights[0], product.split)
    for tiling in candidates(product, dtype, tiling_of(*arguments))[:6]:
        with preferring(trial.row(tiling, 0)):
            assert tiling_of(*arguments) == tiling and trial.is_right()
    exact = trial.exact(trial.weights[-1])
    trial.exact = lambda weight: 1.1 * exact
    assert not trial.is_right()
