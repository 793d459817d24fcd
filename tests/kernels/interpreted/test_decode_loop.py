"""The decode loop of every family, in plain torch and with every kernel: the same tokens, depths and statistics."""

import pytest
import torch

import sigma0
from sigma0 import ExitConfig
from sigma0.decode.ops import operations
from tests.kernels.interpreted.conftest import DEVICE
from tests.marks import slow
from tests.models.raven_reference import tiny_raven
from tests.reference import tiny_model, tiny_nanbeige

STORIES = [
    "Mary went to the kitchen. The hat is with Mary. Where is the hat?",
    "John went to the park. Where is John?",
]


@pytest.fixture(scope="module")
def pocket():
    return sigma0.load("pocket", device=DEVICE)


# random models beside `pocket`: Nanbeige's heads of 12 numbers without norms after attention and MLP, and each layout
# of Raven, whose rows are strided views of [state; what every loop reads]; neither has a gate
MODELS = {
    "ouro": lambda: tiny_model(5, total_ut_steps=5),
    "nanbeige": lambda: tiny_nanbeige(5, num_loops=4, num_hidden_layers=1),
    "nanbeige, no norm": lambda: tiny_nanbeige(5, num_loops=4, num_hidden_layers=1, skip_loop_final_norm=True),
    "sandwich": lambda: tiny_raven("sandwich", 61, n_layers_in_coda=1),
    "pre": lambda: tiny_raven("pre", 61, n_layers_in_coda=1),
    "post": lambda: tiny_raven("post", 61, n_layers_in_coda=1),
    "drawn start": lambda: tiny_raven("sandwich", 67, init_scale=1.0, state_seed=5),
    # three query heads for each key head, two loops a pass
    "heads of 24": lambda: tiny_raven("pre", 65, n_heads=6, head_dim=24, mean_recurrence=8, stride=2),
}
IDS = torch.tensor([[0, 0, 7, 31, 9], [10, 44, 12, 3, 14]])


def run(pocket, name, backend, config, **kwargs):
    if name == "pocket":
        model, tokenizer = pocket
        batch = tokenizer(STORIES, padding=True, return_tensors="pt").to(DEVICE)
    else:
        model, ids = MODELS[name]().to(DEVICE), IDS.to(DEVICE)
        batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    model.backend = backend
    settings = {"max_new_tokens": 6, "do_sample": False, "output_statistics": True, "return_dict_in_generate": True}
    torch.manual_seed(3)
    try:
        return model.generate(**batch, exit_config=config, **{**settings, **kwargs})
    finally:
        model.backend = "auto"


RULES = {
    "full": ExitConfig(mode="full"),
    "fixed": ExitConfig(mode="fixed", depth=3),
    "qexit": ExitConfig(mode="qexit", q=0.6),
    "qexit-drop": ExitConfig(mode="qexit", q=0.4, after_exit="drop"),
    "margin": ExitConfig(mode="margin", theta=0.1),
    "late margin": ExitConfig(mode="margin", theta=0.9, min_loops=2),
    "margin-drop": ExitConfig(mode="margin", theta=0.1, after_exit="drop"),
    "margin-verify": ExitConfig(mode="margin", theta=0.3, after_exit="verify"),
    "converge": ExitConfig(mode="converge", eps=0.6),
    "converge-drop": ExitConfig(mode="converge", eps=0.6, after_exit="drop"),
    "converge-verify": ExitConfig(mode="converge", eps=0.6, after_exit="verify"),
    "accel": ExitConfig(mode="accel", eps=0.9, patience=1),
}
DRAWN = {"do_sample": True, "temperature": 1.5}


# every rule, and every model with several: a rule is decided after the block, whatever its family
@pytest.mark.parametrize(
    ("name", "rule", "settings"),
    [
        ("pocket", "qexit-drop", {}),
        ("nanbeige", "margin-verify", {}),
        ("sandwich", "margin", {}),
        ("pre", "converge-verify", {}),
        ("post", "margin-drop", {}),
        ("heads of 24", "converge", {}),
        *(slow("pocket", rule, {}) for rule in ("full", "fixed", "qexit", "late margin", "margin-verify", "accel")),
        slow("pocket", "converge", {}),
        slow("pocket", "qexit", DRAWN),
        slow("nanbeige, no norm", "converge", {}),
        slow("nanbeige", "converge-drop", {}),
        slow("sandwich", "accel", {}),
        slow("sandwich", "converge-verify", {}),
        slow("pre", "full", {}),
        slow("pre", "margin-drop", {}),
        slow("pre", "converge-verify", DRAWN),
        slow("post", "converge", {}),
        slow("post", "margin-verify", {}),
        slow("drawn start", "margin", {}),
    ],
)
def test_both_backends_tell_the_same(pocket, name, rule, settings):
    plain, kernels = (run(pocket, name, backend, RULES[rule], **settings) for backend in ("torch", "triton"))
    assert torch.equal(plain.sequences, kernels.sequences)
    assert torch.equal(plain.exit_depths, kernels.exit_depths)
    assert plain.exit_reasons == kernels.exit_reasons
    assert torch.equal(plain.loop_fates, kernels.loop_fates)
    for counted in ("loop_passes", "loop_rows", "head_rows"):
        assert getattr(plain, counted) == getattr(kernels, counted), counted
    for output in ("loop_statistics", "readings", "deepest_readings"):
        theirs, ours = getattr(plain, output), getattr(kernels, output)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3, equal_nan=True, msg=output)
    assert int(plain.loop_statistics.isfinite().sum()) > 20
    if name == "pocket":
        assert torch.equal(kernels.deepest_readings[..., 0].isfinite(), kernels.exit_depths > 0)


def test_rules_stop_at_various_loops(pocket):
    cases = [(name, rule) for name in ("sandwich", "pre", "post") for rule in ("margin", "converge")]
    depths = [run(pocket, name, "torch", RULES[rule]).exit_depths for name, rule in cases]
    assert len(torch.stack(depths).unique()) >= 3
    assert int(run(pocket, "heads of 24", "torch", RULES["converge"]).exit_depths.max()) <= 4


@pytest.mark.slow
def test_a_dropping_cache_is_continued_by_the_other_backend(pocket):
    """Exits that the kernels only wrote down are copied once somebody reads whole planes."""
    model, tokenizer = pocket
    config = ExitConfig(mode="qexit", q=0.4, after_exit="drop")
    more = tokenizer(" Where is Mary?", return_tensors="pt", add_special_tokens=False)["input_ids"].to(DEVICE)
    result = []
    for backends in (("torch", "torch"), ("triton", "torch"), ("triton", "triton")):
        ids, cache = tokenizer(STORIES[0], return_tensors="pt")["input_ids"].to(DEVICE), model.new_cache()
        for backend in backends:
            model.backend = backend
            out = model.generate(
                ids, past_key_values=cache, max_new_tokens=5, do_sample=False, exit_config=config,
                return_dict_in_generate=True,
            )  # fmt: skip
            ids = torch.cat([out.sequences, more], dim=1)
        result.append(out.sequences)
    model.backend = "auto"
    assert torch.equal(result[0], result[1]) and torch.equal(result[0], result[2])


def on_both(use, model=None):
    """What `use` returns with either backend."""
    result, model = [], model or MODELS["ouro"]().to(DEVICE)
    for backend in ("torch", "triton"):
        model.backend = backend
        result.append(use(model))
    return result


@pytest.mark.slow
def test_a_cache_that_dropped_is_decoded_on_under_another_rule():
    """Longer than it was when the last token was dropped: the table of exits has to grow with it."""
    drop, finish = ExitConfig(q=0.6, after_exit="drop"), ExitConfig(q=0.6)
    ids = torch.tensor([[5, 9, 2], [4, 3, 11]], device=DEVICE)

    def use(model):
        cache, result = model.new_cache(), []
        with torch.no_grad():
            model(ids, past_key_values=cache, exit_config=drop)
            for step in range(9):
                token = torch.tensor([[7 + step], [20 + step]], device=DEVICE)
                result.append(model(token, past_key_values=cache, exit_config=drop if step < 2 else finish).logits)
        return torch.cat(result)

    plain, kernels = on_both(use)
    torch.testing.assert_close(kernels, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_masks_with_holes_in_any_layout(layout):
    ids = torch.tensor([[5, 9, 2, 8, 30], [4, 3, 11, 6, 9]], device=DEVICE)
    mask = torch.tensor([[1, 0, 1, 1, 1, 1], [0, 0, 1, 0, 1, 1]], device=DEVICE)
    if layout == "transposed":
        mask = mask.t().contiguous().t()

    def use(model):
        cache = model.new_cache()
        with torch.no_grad():
            model(ids, attention_mask=mask[:, :5], past_key_values=cache, exit_config=ExitConfig(q=0.6))
            token = torch.tensor([[7], [20]], device=DEVICE)
            return model(token, attention_mask=mask, past_key_values=cache, exit_config=ExitConfig(q=0.6)).logits

    plain, kernels = on_both(use)
    torch.testing.assert_close(kernels, plain, rtol=1e-4, atol=1e-4)


def test_a_cache_that_dropped_in_inference_mode_can_be_cropped():
    ids = torch.tensor([[5, 9, 2]], device=DEVICE)

    def use(model):
        with torch.inference_mode():
            out = model.generate(
                ids, max_new_tokens=4, do_sample=False, exit_config=ExitConfig(q=0.6, after_exit="drop"),
                return_dict_in_generate=True,
            )  # fmt: skip
        out.past_key_values.crop(-1)
        return out.past_key_values.length

    assert on_both(use) == [5, 5]


@pytest.mark.parametrize("asked", [False, True])
def test_a_broken_model_is_named_by_both(asked):
    model = MODELS["ouro"]().to(DEVICE)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    ids = torch.tensor([[5, 9, 2]], device=DEVICE)
    settings = {"max_new_tokens": 3, "do_sample": False, "exit_config": ExitConfig(q=0.6), "output_statistics": asked}

    def use(broken):
        with pytest.raises(FloatingPointError, match="the model's logits are NaN or infinite"):
            broken.generate(ids, **settings)

    on_both(use, model)


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing waits for a CPU")
@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("after_exit", ["finish", "verify", "drop"])
def test_a_pass_waits_for_nothing_but_what_is_read(pocket, after_exit, statistics):
    """With the debug mode on, whatever waits for the device raises, but for `to_host` and an `AsyncCopy` being read."""
    model, tokenizer = pocket
    config = ExitConfig(q=0.6, after_exit=after_exit)
    batch = tokenizer(STORIES, padding=True, return_tensors="pt").to(DEVICE)
    loop, first = model.generate(
        **batch, max_new_tokens=9, do_sample=False, exit_config=config, output_statistics=statistics,
        custom_generate=type(model).open_token_loop,
    )  # fmt: skip
    assert loop.runner.chosen.late is not statistics
    torch.cuda.set_sync_debug_mode("error")
    try:
        emitted = [emission for emissions in loop.run(first) for emission in emissions]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(emitted) > 6


def test_the_names():
    assert operations("auto", torch.device("cpu")).backend == "torch"
    assert operations("auto", torch.device("cuda")).backend == "triton"
