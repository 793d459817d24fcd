"""Models with a prelude and a coda in plain torch and with every kernel: the same tokens, depths and statistics.

Their rows are strided views of [state; what every loop reads], and their loops end without a norm and without a gate.
"""

import pytest
import torch

from sigma0 import ExitConfig
from tests.kernels.interpreted.conftest import DEVICE
from tests.marks import slow
from tests.models.raven_reference import tiny_raven

IDS = torch.tensor([[0, 0, 7, 31, 9], [10, 44, 12, 3, 14]])
RULES = {
    "margin-finish": ExitConfig(mode="margin", theta=0.1),
    "converge-finish": ExitConfig(mode="converge", eps=0.6),
    "converge-verify": ExitConfig(mode="converge", eps=0.6, after_exit="verify"),
    "margin-drop": ExitConfig(mode="margin", theta=0.1, after_exit="drop"),
    "full": ExitConfig(mode="full"),
    "accel-finish": ExitConfig(mode="accel", eps=0.9, patience=1),
    "margin-verify": ExitConfig(mode="margin", theta=0.1, after_exit="verify"),
}
# every rule, and every layout of a block with three of them: a rule is decided behind the block, whatever its layout
CASES = (
    ("sandwich", "margin-finish"),
    ("pre", "converge-verify"),
    ("post", "margin-drop"),
    slow("sandwich", "accel-finish"),
    slow("sandwich", "converge-verify"),
    slow("pre", "full"),
    slow("pre", "margin-drop"),
    slow("post", "converge-finish"),
    slow("post", "margin-verify"),
)
FEWEST_STATISTICS = 20


def written(model, backend, config, **settings):
    model.backend = backend
    torch.manual_seed(3)
    return model.generate(
        IDS.to(DEVICE),
        attention_mask=(IDS > 0).long().to(DEVICE),
        max_new_tokens=6,
        exit_config=config,
        output_statistics=True,
        return_dict_in_generate=True,
        **{"do_sample": False} | settings,
    )


def assert_same(model, config, **settings):
    plain, kernels = (written(model, backend, config, **settings) for backend in ("torch", "triton"))
    assert torch.equal(plain.sequences, kernels.sequences)
    assert torch.equal(plain.exit_depths, kernels.exit_depths)
    assert plain.exit_reasons == kernels.exit_reasons
    assert torch.equal(plain.loop_fates, kernels.loop_fates)
    assert (plain.loop_passes, plain.loop_rows, plain.head_rows) == (
        kernels.loop_passes,
        kernels.loop_rows,
        kernels.head_rows,
    )
    for name in ("loop_statistics", "readings"):
        torch.testing.assert_close(
            getattr(kernels, name), getattr(plain, name), rtol=1e-3, atol=1e-3, equal_nan=True, msg=name
        )
    assert int(plain.loop_statistics.isfinite().sum()) > FEWEST_STATISTICS
    return plain


@pytest.mark.parametrize(("layout", "rule"), CASES)
def test_both_backends_tell_the_same(layout, rule):
    model = tiny_raven(layout, 61, n_layers_in_coda=1).to(DEVICE)
    assert_same(model, RULES[rule])


@pytest.mark.slow
def test_drawn_tokens_are_the_same_too():
    model = tiny_raven("pre", 63).to(DEVICE)
    assert_same(model, RULES["converge-verify"], do_sample=True, temperature=1.2)


def test_heads_of_awkward_widths_and_a_stride():
    """Heads of 24 and 12 numbers, three query heads for each key head, two loops a pass."""
    model = tiny_raven("pre", 65, n_heads=6, num_key_value_heads=2, head_dim=24, mean_recurrence=8, stride=2)
    depths = assert_same(model.to(DEVICE), RULES["converge-finish"]).exit_depths
    assert int(depths.max()) <= 4


@pytest.mark.slow
def test_drawn_start_states_are_the_same_with_kernels():
    model = tiny_raven("sandwich", 67, init_scale=1.0, state_seed=5).to(DEVICE)
    assert_same(model, RULES["margin-finish"])


def test_rules_stop_at_various_loops():
    depths = {
        depth
        for layout in ("sandwich", "pre", "post")
        for rule in ("margin-finish", "converge-finish")
        for row in written(tiny_raven(layout, 61, n_layers_in_coda=1).to(DEVICE), "torch", RULES[rule]).exit_depths
        for depth in row.tolist()
    }
    assert len(depths) >= 3
