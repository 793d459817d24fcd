"""What the head says at the deepest loop of each token, against a run of all loops in float64 without a cache."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sigma0
from sigma0 import ExitConfig
from sigma0.config import DEEPEST_ROWS
from sigma0.decode.stats import Deepest, DeepestQueue, deepest_of, deepest_reader
from tests.models.raven_reference import tiny_raven
from tests.reference import DroppingReference, logits_of, tiny_model, tiny_nanbeige

PROMPTS = [[5, 9, 2, 7, 3], [0, 0, 0, 11, 3], [0, 8, 8, 8, 2]]
CONFIGS = (
    ExitConfig(q=0.6),
    ExitConfig(q=0.3, min_loops=2),
    ExitConfig(mode="margin", theta=0.05),
    ExitConfig(mode="full"),
    ExitConfig(mode="fixed", depth=2),
    ExitConfig(mode="converge", eps=0.5),
    ExitConfig(q=0.4, after_exit="verify"),
    ExitConfig(mode="margin", theta=0.02, after_exit="verify", redraft=False),
    ExitConfig(mode="fixed", depth=2, after_exit="verify"),
)


def name(config):
    return f"{config.mode}-{config.after_exit}-{config.min_loops}"


def by_definition(logits, token_id):
    """The four numbers of one row of logits, in float64."""
    wide = np.asarray(logits, dtype=np.float64)
    log_p = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    p = np.sort(np.exp(log_p))
    return -log_p[token_id], -(np.exp(log_p) * log_p).sum(), p[-1] - p[-2], float(wide.argmax() == token_id)


def write(model, prompts, config, new, **kwargs):
    ids = torch.tensor(prompts)
    return model.generate(
        ids, attention_mask=(ids != 0).long(), max_new_tokens=new, exit_config=config, return_dict_in_generate=True,
        **{"output_statistics": True, "do_sample": False, **kwargs},
    )  # fmt: skip


def deepest_loops(depths, config, total):
    """Of every token, by what a sequence has run when its last token is read."""
    if config.after_exit == "verify":
        return [total] * len(depths)
    total = config.depth if config.mode == "fixed" else total
    current = depths if config.after_exit == "drop" else [min(total, sum(depths[i:])) for i in range(len(depths))]
    return [total, *current[1:]]


def check(model, out, prompts, config):
    """Compares every token; returns how many had run deeper than their exits, and how many of those disagree."""
    model64, total = copy.deepcopy(model).double(), model.num_loops
    width, deeper, against = len(prompts[0]), 0, 0
    for row, prompt in enumerate(prompts):
        depths = [depth for depth in out.exit_depths[row].tolist() if depth]
        text = out.sequences[row][sum(token == 0 for token in prompt) : width + len(depths)]
        with torch.no_grad():
            states = model64.model(input_ids=text[None], use_cache=False, num_loops=total).loop_states[:, 0]
            logits = logits_of(model64, states).numpy()[:, -len(depths) - 1 : -1]
        loops = deepest_loops(depths, config, total)
        ran = out.loop_statistics[row, : len(depths), :, 0].isfinite().sum(-1).tolist()
        assert ran == loops
        for token, loop in enumerate(loops):
            expected = by_definition(logits[loop - 1, token], int(text[token - len(depths)]))
            output = out.deepest_readings[row, token].numpy()
            np.testing.assert_allclose(output[:3], expected[:3], rtol=2e-4, atol=2e-5)
            top = np.sort(logits[loop - 1, token])
            assert output[3] == expected[3] or top[-1] - top[-2] < 1e-5
            deeper += loop > depths[token]
            against += loop > depths[token] and not expected[3]
        assert out.deepest_readings[row, len(depths) :].isnan().all()
    return deeper, against


@pytest.mark.grid(fast=10, slow=6)
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_every_token_is_read_at_its_deepest_loop(config, backend):
    model = tiny_model(5, total_ut_steps=5)
    model.backend = backend
    out = write(model, PROMPTS, config, 9)
    deeper, against = check(model, out, PROMPTS, config)
    if config.after_exit == "finish" and config.mode not in ("full", "fixed"):
        assert deeper > 6 and against > 0
    # what loop T of `verify` says is what is told
    assert against == 0 or config.after_exit == "finish"


@pytest.mark.parametrize("skip", [True, False])
def test_the_head_gets_what_it_reads_at_an_exit(skip):
    """Also where loops end without a norm."""
    model = tiny_nanbeige(3, num_loops=4, skip_loop_final_norm=skip)
    config = ExitConfig(mode="margin", theta=0.3)
    check(model, write(model, PROMPTS, config, 8), PROMPTS, config)


@pytest.mark.parametrize("sampled", [False, True])
def test_long_answers_are_read_in_parts(sampled):
    """Over more tokens than are kept, than wait, and than the record has room for."""
    model, config = tiny_model(7, total_ut_steps=4, max_position_embeddings=512), ExitConfig(q=0.5)
    torch.manual_seed(2)
    new = 3 * DEEPEST_ROWS + 5
    kwargs = {"do_sample": True, "temperature": 2.0, "repetition_penalty": 1.5} if sampled else {}
    deeper, against = check(model, write(model, PROMPTS, config, new, **kwargs), PROMPTS, config)
    assert deeper > new and against > 20 * sampled


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(1, 12),
    st.sampled_from(CONFIGS),
    st.integers(0, 2**16),
)
def test_batches_of_any_shape_that_end_anywhere(total, width, batch, new, config, seed):
    if config.mode == "fixed" and config.depth > total:
        return
    rng = np.random.default_rng(seed)
    model = tiny_model(seed % 7, total_ut_steps=total)
    prompts = rng.integers(5, 61, (batch, width))
    for row in prompts:
        row[: rng.integers(0, width)] = 0
    eos = rng.integers(1, 61, 8).tolist()
    check(model, write(model, prompts.tolist(), config, new, eos_token_id=eos), prompts.tolist(), config)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_under_drop_it_is_the_exit(backend):
    model, config, new = tiny_model(5, total_ut_steps=5), ExitConfig(q=0.6, after_exit="drop"), 9
    model.backend = backend
    for prompt in ([5, 9, 2, 7], [11, 3]):
        out = write(model, [prompt], config, new)
        reference = DroppingReference(copy.deepcopy(model).double(), config)
        for token in prompt:
            reference.read(token, prompt=True)
        ids = out.sequences[0, len(prompt) :].tolist()
        for index in range(1, new):
            reference.read(ids[index - 1], prompt=False)
            output = out.deepest_readings[0, index].numpy()
            np.testing.assert_allclose(output, by_definition(reference.logits, ids[index]), rtol=2e-4, atol=2e-5)
            assert output[3] == 1
        np.testing.assert_allclose(out.deepest_readings[0, 1:, 1:3], out.readings[0, 1:, :2], rtol=1e-4, atol=1e-5)
        # of the first token it is the prompt's last loop
        first = write(model, [prompt], ExitConfig(mode="full"), 1)
        np.testing.assert_allclose(out.deepest_readings[0, 0, 1:3], first.readings[0, 0, :2], rtol=1e-4, atol=1e-5)


def test_what_is_asked_while_a_text_is_written_is_of_the_loops_so_far():
    """A record may be looked at after every pass, and at the end says what it says at the end alone."""
    model, config = tiny_model(5, total_ut_steps=5), ExitConfig(q=0.6)
    asked = {"max_new_tokens": 9, "do_sample": False, "exit_config": config, "output_statistics": True}
    ids = torch.tensor([PROMPTS[0]])
    loop, first = model.generate(ids, custom_generate=type(model).open_token_loop, **asked)
    seen = set()
    for _ in loop.run(first):
        count = len(loop.new_ids[0])
        output = loop.record.deepest[0]
        assert output[:count].isfinite().all() and output[count:].isnan().all()
        seen.add(round(float(output[1, 1]), 4))
    assert len(seen - {float("nan")}) > 2
    torch.testing.assert_close(loop.record.deepest[0], write(model, PROMPTS[:1], config, 9).deepest_readings[0])


def test_without_statistics_the_head_reads_nothing_more(monkeypatch):
    model, config = tiny_model(5, total_ut_steps=5), ExitConfig(q=0.6)
    monkeypatch.setattr(sigma0.models.hf_generate, "deepest_reader", None)
    out = write(model, PROMPTS, config, 9, output_statistics=False)
    assert out.deepest_readings is None


def test_a_reading_that_needs_a_coda_is_not_known():
    model = tiny_raven("sandwich", 3)
    assert deepest_reader(model) is None
    out = model.generate(
        torch.tensor([[5, 9, 2]]), max_new_tokens=4, do_sample=False, exit_config=ExitConfig(mode="margin", theta=0.1),
        return_dict_in_generate=True, output_statistics=True, eos_token_id=None,
    )  # fmt: skip
    assert out.deepest_readings.shape == (1, 4, 4) and out.deepest_readings.isnan().all()


@pytest.mark.parametrize("rows, ids", [(1, 2), (3, 61), (7, 50257), (DEEPEST_ROWS + 1, 131)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_formula(rows, ids, dtype):
    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, ids, generator=generator) * 5).to(dtype)
    token_ids = torch.randint(0, ids, (rows,), generator=generator)
    token_ids[::2] = logits[::2].argmax(-1)
    expected = [
        by_definition(row.float().numpy(), token) for row, token in zip(logits, token_ids.tolist(), strict=True)
    ]
    np.testing.assert_allclose(deepest_of(logits, token_ids).numpy(), np.array(expected), rtol=1e-4, atol=2e-5)
    strided = torch.stack([logits, logits], dim=-1)[..., 0]
    assert torch.equal(deepest_of(strided, token_ids), deepest_of(logits, token_ids))


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_of_logits_that_are_not_finite_nothing_is_known(number):
    logits = torch.randn(3, 61, generator=torch.Generator().manual_seed(1))
    logits[1, 7] = number
    numbers = deepest_of(logits, torch.tensor([7, 7, 7]))
    assert numbers.isnan().all(-1).tolist() == [False, True, False]
    assert Deepest.of(numbers[1].tolist()) == Deepest()
    assert None not in Deepest.of(numbers[0].tolist()) and Deepest.of(numbers[0].tolist()).agrees is False


def read_by_sum(states, token_ids):
    """A reader whose numbers tell which state and id they are of."""
    assert len(states) <= 64
    return torch.stack([states.sum(-1), token_ids.float(), states[:, 0], torch.ones(len(states))], dim=-1)


def test_a_queue_is_read_as_it_fills():
    sizes = []
    queue = DeepestQueue(lambda states, ids: sizes.append(len(ids)) or read_by_sum(states, ids))
    for index in range(64):
        assert sizes == []
        output = queue.add(torch.ones(1, 1), [index], [index])
    assert sizes == [64] and [where for where, _ in output] == list(range(64)) and not queue.take()
    output = queue.add(torch.ones(129, 1), list(range(129)), list(range(129)))
    assert sizes[1:] == [64, 64, 1] and [numbers[1] for _, numbers in output] == list(range(129))
