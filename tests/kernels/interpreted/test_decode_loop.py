"""The decode loop of a shipped model, in plain torch and with every kernel: the same tokens, depths and statistics."""

import pytest
import torch

import sigma0
from sigma0 import ExitConfig
from sigma0.decode.ops import operations
from tests.kernels.interpreted.conftest import DEVICE
from tests.marks import slow
from tests.reference import tiny_model, tiny_nanbeige

STORIES = [
    "Mary went to the kitchen. The hat is with Mary. Where is the hat?",
    "John went to the park. Where is John?",
]


@pytest.fixture(scope="module")
def pocket():
    return sigma0.load("pocket", device=DEVICE)


def run(pocket, backend, config, **kwargs):
    model, tokenizer = pocket
    model.backend = backend
    batch = tokenizer(STORIES, padding=True, return_tensors="pt").to(DEVICE)
    settings = {"max_new_tokens": 9, "do_sample": False, "output_statistics": True, "return_dict_in_generate": True}
    try:
        return model.generate(**batch, exit_config=config, **{**settings, **kwargs})
    finally:
        model.backend = "auto"


@pytest.mark.parametrize(
    "config",
    [
        slow(ExitConfig(mode="qexit", q=0.6)),
        slow(ExitConfig(mode="margin", theta=0.9, min_loops=2)),
        slow(ExitConfig(mode="converge", eps=0.2)),
        slow(ExitConfig(mode="accel", eps=0.3, patience=1)),
        ExitConfig(mode="qexit", q=0.4, after_exit="drop"),
        slow(ExitConfig(mode="margin", theta=0.3, after_exit="verify")),
        slow(ExitConfig(mode="fixed", depth=3)),
        slow(ExitConfig(mode="full")),
    ],
    ids=lambda config: f"{config.mode}-{config.after_exit}",
)
def test_both_backends_tell_the_same(pocket, config):
    plain, kernels = (run(pocket, backend, config) for backend in ("torch", "triton"))
    assert torch.equal(plain.sequences, kernels.sequences)
    assert torch.equal(plain.exit_depths, kernels.exit_depths)
    assert plain.exit_reasons == kernels.exit_reasons
    assert torch.equal(plain.loop_fates, kernels.loop_fates)
    assert (plain.loop_passes, plain.loop_rows) == (kernels.loop_passes, kernels.loop_rows)
    for name in ("loop_statistics", "readings", "deepest_readings"):
        torch.testing.assert_close(
            getattr(kernels, name), getattr(plain, name), rtol=1e-3, atol=1e-3, equal_nan=True, msg=name
        )
    assert int(plain.loop_statistics.isfinite().sum()) > 100
    assert torch.equal(kernels.deepest_readings[..., 0].isfinite(), kernels.exit_depths > 0)


@pytest.mark.slow
def test_drawn_tokens_are_the_same_too(pocket):
    outputs = []
    for backend in ("torch", "triton"):
        torch.manual_seed(3)
        outputs.append(run(pocket, backend, ExitConfig(q=0.6), do_sample=True, temperature=1.5))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    torch.testing.assert_close(outputs[0].readings, outputs[1].readings, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.slow
def test_a_dropping_cache_is_continued_by_the_other_backend(pocket):
    """Exits that the kernels only wrote down are copied once somebody reads whole planes."""
    model, tokenizer = pocket
    config = ExitConfig(mode="qexit", q=0.4, after_exit="drop")
    more = tokenizer(" Where is Mary?", return_tensors="pt", add_special_tokens=False)["input_ids"].to(DEVICE)
    found = []
    for backends in (("torch", "torch"), ("triton", "torch"), ("triton", "triton")):
        ids, cache = tokenizer(STORIES[0], return_tensors="pt")["input_ids"].to(DEVICE), model.new_cache()
        for backend in backends:
            model.backend = backend
            out = model.generate(
                ids, past_key_values=cache, max_new_tokens=5, do_sample=False, exit_config=config,
                return_dict_in_generate=True,
            )  # fmt: skip
            ids = torch.cat([out.sequences, more], dim=1)
        found.append(out.sequences)
    model.backend = "auto"
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def small(seed=5, **overrides):
    return tiny_model(seed, total_ut_steps=5, **overrides).to(DEVICE)


def on_both(model, use):
    """What `use` returns with either backend."""
    found = []
    for backend in ("torch", "triton"):
        model.backend = backend
        found.append(use(model))
    return found


@pytest.mark.slow
def test_a_cache_that_dropped_is_decoded_on_under_another_rule():
    """Longer than it was when the last token was dropped: the table of exits has to grow with it."""
    drop, finish = ExitConfig(q=0.6, after_exit="drop"), ExitConfig(q=0.6)
    ids = torch.tensor([[5, 9, 2], [4, 3, 11]], device=DEVICE)

    def use(model):
        cache, found = model.new_cache(), []
        with torch.no_grad():
            model(ids, past_key_values=cache, exit_config=drop)
            for step in range(9):
                token = torch.tensor([[7 + step], [20 + step]], device=DEVICE)
                found.append(model(token, past_key_values=cache, exit_config=drop if step < 2 else finish).logits)
        return torch.cat(found)

    plain, kernels = on_both(small(), use)
    torch.testing.assert_close(kernels, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "skip"),
    [
        (ExitConfig(mode="margin", theta=0.3, after_exit="verify"), False),
        slow(ExitConfig(mode="converge", eps=0.6), True),
        slow(ExitConfig(mode="converge", eps=0.6, after_exit="drop"), False),
    ],
)
def test_models_without_a_gate_tell_the_same(config, skip):
    """Heads of 12 numbers, no norms behind attention and MLP, and with `skip` none at the end of a loop."""
    model = tiny_nanbeige(5, num_loops=4, num_hidden_layers=1, skip_loop_final_norm=skip).to(DEVICE)
    ids = torch.tensor([[0, 0, 5, 9, 2], [4, 3, 11, 6, 9]], device=DEVICE)
    settings = {"do_sample": False, "output_statistics": True, "return_dict_in_generate": True}

    def use(model):
        return model.generate(ids, attention_mask=(ids > 0).long(), max_new_tokens=5, exit_config=config, **settings)

    plain, kernels = on_both(model, use)
    assert torch.equal(plain.sequences, kernels.sequences)
    assert torch.equal(plain.exit_depths, kernels.exit_depths)
    assert plain.exit_reasons == kernels.exit_reasons
    assert (plain.loop_passes, plain.loop_rows) == (kernels.loop_passes, kernels.loop_rows)
    torch.testing.assert_close(kernels.loop_statistics, plain.loop_statistics, rtol=1e-3, atol=1e-3, equal_nan=True)


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

    plain, kernels = on_both(small(), use)
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

    assert on_both(small(), use) == [5, 5]


@pytest.mark.parametrize("asked", [False, True])
def test_a_broken_model_is_named_by_both(asked):
    model = small()
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    ids = torch.tensor([[5, 9, 2]], device=DEVICE)
    settings = {"max_new_tokens": 3, "do_sample": False, "exit_config": ExitConfig(q=0.6), "output_statistics": asked}

    def use(broken):
        with pytest.raises(FloatingPointError, match="the model's logits are NaN or infinite"):
            broken.generate(ids, **settings)

    on_both(model, use)


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing waits for a CPU")
@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("after_exit", ["finish", "verify", "drop"])
def test_a_pass_waits_for_nothing_but_what_is_read(pocket, after_exit, statistics):
    """With the debug mode on, whatever waits for the device raises, but for `to_host`, and a `Landing` that is read."""
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
    with pytest.raises(ValueError, match="no such backend: 'cuda'"):
        operations("cuda", torch.device("cpu"))
