"""The decode loop of a shipped model, in plain torch and with every kernel: the same tokens, depths and statistics."""

import pytest
import torch

import sigma0
from sigma0 import ExitConfig
from sigma0.ops import operations
from tests.kernels.interpreted.conftest import DEVICE

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
        ExitConfig(mode="qexit", q=0.6),
        ExitConfig(mode="margin", theta=0.9, min_loops=2),
        ExitConfig(mode="converge", eps=0.2),
        ExitConfig(mode="accel", eps=0.3, patience=1),
        ExitConfig(mode="qexit", q=0.4, after_exit="drop"),
        ExitConfig(mode="margin", theta=0.3, after_exit="verify"),
        ExitConfig(mode="fixed", depth=3),
        ExitConfig(mode="full"),
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
    for name in ("loop_statistics", "readings"):
        torch.testing.assert_close(
            getattr(kernels, name), getattr(plain, name), rtol=1e-3, atol=1e-3, equal_nan=True, msg=name
        )
    assert int(plain.loop_statistics.isfinite().sum()) > 100


def test_drawn_tokens_are_the_same_too(pocket):
    outputs = []
    for backend in ("torch", "triton"):
        torch.manual_seed(3)
        outputs.append(run(pocket, backend, ExitConfig(q=0.6), do_sample=True, temperature=1.5))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    torch.testing.assert_close(outputs[0].readings, outputs[1].readings, rtol=1e-3, atol=1e-3, equal_nan=True)


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


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing waits for a CPU")
@pytest.mark.parametrize("after_exit", ["finish", "drop"])
def test_a_pass_waits_for_nothing_but_its_exits(pocket, after_exit):
    """With the debug mode on, whatever waits for the device raises, but for `to_host`."""
    model, tokenizer = pocket
    config = ExitConfig(q=0.6, after_exit=after_exit)
    batch = tokenizer(STORIES, padding=True, return_tensors="pt").to(DEVICE)
    loop, first = model.generate(
        **batch, max_new_tokens=9, do_sample=False, exit_config=config, output_statistics=True,
        custom_generate=type(model).open_token_loop,
    )  # fmt: skip
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
