"""Statistics of generated tokens, against the definitions applied to a run of all loops."""

import copy

import numpy as np
import pytest
import torch

from sigma0 import ExitConfig
from sigma0.decode.ops import FATES, LOGIT_STATS, STATISTICS, ExitParams
from sigma0.decode.stats import PathReader
from sigma0.kernels.path_fates import path_fates
from tests.decode.test_conformance import written
from tests.kernels import definitions
from tests.marks import needs_compiler
from tests.reference import tiny_model

MASK = [[1, 1, 1, 1], [0, 0, 1, 1]]
NEW = 7


def run(model, config, **kwargs):
    rows = [[5, 9, 2, 7], [11, 3]]
    return written(model, rows, config, NEW, **{"output_statistics": True, **kwargs})


def trajectories(model64, out, row):
    """Loop states `[T, new, D]`, gate logits and logits of the positions that the new tokens are read from."""
    ids = out.sequences[row][MASK[row].index(1) :]
    with torch.no_grad():
        outputs = model64.model(input_ids=ids[None], use_cache=False)
        states = outputs.loop_states[:, 0, -NEW - 1 : -1]
        return states.numpy(), outputs.gate_logits[:, 0, -NEW - 1 : -1].numpy(), model64.lm_head(states).numpy()


@pytest.mark.parametrize(
    "config",
    [
        ExitConfig(q=0.6),
        ExitConfig(mode="margin", theta=0.5),
        ExitConfig(mode="full"),
        ExitConfig(mode="accel", eps=0.7, patience=1),
        ExitConfig(q=0.5, after_exit="verify"),
    ],
    ids=lambda config: f"{config.mode}-{config.after_exit}",
)
def test_statistics_are_those_of_a_run_of_all_loops(config):
    model = tiny_model(5, total_ut_steps=5)
    model64 = copy.deepcopy(model).double()
    out = run(model, config)
    assert out.loop_statistics.shape == (2, NEW, 5, len(STATISTICS)) and out.readings.shape[:2] == (2, NEW)
    assert out.readings.shape[2] == len(LOGIT_STATS)
    output = 0
    for row in range(2):
        states, gates, logits = trajectories(model64, out, row)
        ids, entropies = [], []
        for token in range(NEW):
            depth = int(out.exit_depths[row, token])
            read = logits[(4 if config.after_exit == "verify" else depth - 1), token]
            chosen = int(out.sequences[row, 4 + token])
            expected, _, ids = definitions.collapse(read, ids, chosen, entropies)
            entropies.append(expected[0])
            np.testing.assert_allclose(out.readings[row, token, :7], expected, rtol=1e-3, atol=1e-3)
            ran = out.loop_statistics[row, token, :, 0].isfinite().sum()
            assert ran >= depth and out.loop_statistics[row, token, :ran].isfinite().all()
            for loop in range(1, int(ran) + 1):
                eps = torch.finfo(torch.float32).eps
                mode = "accel" if config.mode == "accel" else "none"
                expected, fate, _ = definitions.loop_end(
                    states[:loop, token], gates[:loop, token], mode, config.eps or 0.05, 5, eps=eps
                )
                np.testing.assert_allclose(out.loop_statistics[row, token, loop - 1], expected, rtol=5e-3, atol=5e-3)
                assert FATES[int(out.loop_fates[row, token, loop - 1])] == fate
                output += 1
    assert output > 2 * NEW * 2


@pytest.mark.parametrize("after_exit", ["finish", "drop"])
def test_transformers_own_loop_tells_the_same(after_exit):
    model = tiny_model(5, total_ut_steps=5)
    config = ExitConfig(q=0.6, after_exit=after_exit)
    wave, stock = run(model, config), run(model, config, logits_processor=[lambda ids, scores: scores])
    assert torch.equal(wave.sequences, stock.sequences) and torch.equal(wave.exit_depths, stock.exit_depths)
    torch.testing.assert_close(wave.readings, stock.readings, rtol=1e-4, atol=1e-4)
    reached = torch.arange(5) < wave.exit_depths[..., None]  # after the exits the two run unlike numbers of loops
    torch.testing.assert_close(wave.loop_statistics[reached], stock.loop_statistics[reached], rtol=1e-4, atol=1e-4)
    assert torch.equal(wave.loop_fates[reached], stock.loop_fates[reached])
    ran = [out.loop_statistics[..., 0].isfinite().sum(-1) for out in (wave, stock)]
    same = ran[0] == ran[1]
    assert same.sum() > 6
    torch.testing.assert_close(wave.deepest_readings[same], stock.deepest_readings[same], rtol=1e-4, atol=1e-5)
    assert not stock.deepest_readings.isnan().any()


@pytest.mark.parametrize("after_exit", ["finish", "verify", "drop"])
def test_asking_changes_no_token(after_exit):
    model = tiny_model(8, total_ut_steps=4)
    config = ExitConfig(mode="margin", theta=0.4, after_exit=after_exit)
    asked, plain = run(model, config), run(model, config, output_statistics=False)
    assert torch.equal(asked.sequences, plain.sequences) and torch.equal(asked.exit_depths, plain.exit_depths)
    assert (asked.loop_passes, asked.loop_rows) == (plain.loop_passes, plain.loop_rows)
    assert plain.loop_statistics is None and plain.readings is None


def test_an_end_leaves_the_rest_untold():
    model = tiny_model(5, total_ut_steps=5)
    plain = run(model, ExitConfig(q=0.6))
    model.generation_config.eos_token_id = int(plain.sequences[0, 4 + 2])
    out = run(model, ExitConfig(q=0.6), eos_token_id=model.generation_config.eos_token_id)
    alive = out.exit_depths > 0
    assert not alive.all() and torch.equal(out.readings[..., 0].isfinite(), alive)
    torch.testing.assert_close(out.readings[alive], plain.readings[:, : alive.shape[1]][alive])


def test_a_continued_cache_tells_of_the_new_tokens_alone():
    model = tiny_model(5, total_ut_steps=5)
    first = run(model, ExitConfig(q=0.6))
    ids = torch.cat([first.sequences, torch.tensor([[3, 4], [8, 1]])], dim=1)
    mask = torch.cat([torch.tensor(MASK), torch.ones(2, NEW + 2, dtype=torch.long)], dim=1)
    settings = {
        "attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "exit_config": ExitConfig(q=0.6),
        "return_dict_in_generate": True, "output_statistics": True,
    }  # fmt: skip
    continued = model.generate(ids, past_key_values=first.past_key_values, **settings)
    afresh = model.generate(ids, **settings)
    assert torch.equal(continued.sequences, afresh.sequences)
    torch.testing.assert_close(continued.loop_statistics, afresh.loop_statistics, rtol=1e-3, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(continued.readings, afresh.readings, rtol=1e-3, atol=1e-4)


def test_tokens_that_verify_took_back_are_not_told():
    """After the end of a sequence nothing is told, though proposals had run there."""
    model = tiny_model(5, total_ut_steps=5)
    config, checked = ExitConfig(q=0.4, after_exit="verify"), 0
    for eos in range(2, 40):
        ids = torch.randint(0, 61, (3, 4), generator=torch.Generator().manual_seed(3))
        out = model.generate(
            ids, max_new_tokens=10, do_sample=False, exit_config=config, eos_token_id=eos, pad_token_id=0,
            output_statistics=True, return_dict_in_generate=True,
        )  # fmt: skip
        over = out.exit_depths == 0
        checked += int(over.sum())
        assert out.loop_statistics[over].isnan().all() and out.readings[over].isnan().all()
        assert (out.loop_fates[over] == 0).all()
    assert checked > 20


def test_statistics_may_be_asked_for_in_the_generation_config():
    model = tiny_model(5, total_ut_steps=5)
    model.generation_config.output_statistics = True
    assert run(model, ExitConfig(q=0.6), output_statistics=None).loop_statistics is not None
    assert run(model, ExitConfig(q=0.6), output_statistics=False).loop_statistics is None


@pytest.mark.parametrize("kind", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}])
def test_where_there_are_none_they_are_refused(kind):
    model = tiny_model(5, total_ut_steps=5)
    with pytest.raises(ValueError, match="tells no statistics"):
        model.generate(
            torch.tensor([[5, 9, 2]]),
            max_new_tokens=4,
            exit_config=ExitConfig(mode="full"),
            output_statistics=True,
            **kind,
        )


@pytest.mark.parametrize("after_exit", ["finish", "verify", "drop"])
def test_what_was_begun_in_inference_mode_goes_on_outside(after_exit):
    model = tiny_model(5, total_ut_steps=5)
    config = ExitConfig(q=0.6, after_exit=after_exit)
    settings = {"max_new_tokens": 6, "do_sample": False, "exit_config": config, "output_statistics": True}
    with torch.inference_mode():
        loop, first = model.generate(torch.tensor([[5, 9, 2]]), custom_generate=type(model).open_token_loop, **settings)
    output = [emission.token_id for emissions in loop.run(first) for emission in emissions]
    plain = model.generate(torch.tensor([[5, 9, 2]]), **settings)
    assert output == plain[0, 3:].tolist()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_fates_in_cpp_are_those_of_whole_paths(dtype):
    """The mildest of the last ones, of paths of every kind and length, three numbers wide and more than a vector."""
    generator, total = torch.Generator().manual_seed(5), 9
    rule = ExitParams(mode="none", threshold=0.0, last_loop=total)
    reader = PathReader(lambda states: states[:, 0], rule)
    for width in (3, 37):
        gain = torch.rand(400, 1, generator=generator) + 0.3
        mixing = torch.randn(400, width, width, generator=generator) / width**0.5
        blend = torch.rand(400, 1, generator=generator) * torch.randint(0, 2, (400, 1), generator=generator)
        state, step = torch.ones(400, width), torch.randn(400, width, generator=generator)
        states = []
        for _ in range(total):
            states.append(state)
            state = state + step
            step = gain * (blend * step + (1 - blend) * torch.einsum("nij,nj->ni", mixing, step))
        paths = torch.stack(states, dim=1).to(dtype)  # [N, T, D]
        paths[:10] = paths[:10, :1]
        fates = reader.read(paths)[1]
        assert set(fates.flatten().tolist()) == {0, 1, 2, 3}
        places = torch.randperm(400, generator=generator)
        for running in (1, 2, 3):
            for loops in range(running, total + 1):
                output = path_fates(paths, places, torch.full((400,), loops), running, rule)
                assert torch.equal(output, fates[places, loops - running : loops].amin(1).long()), (running, loops)
