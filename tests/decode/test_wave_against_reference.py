"""Random models, prompts and rules: the wave decoder against references that never skip or share anything."""

import copy
import random

import pytest
import torch
from transformers import LogitsProcessorList

from sigma0 import ExitConfig
from tests.reference import DroppingReference, finish_rows, run_all_loops, setting, tiny_model

NEAR_TIE = 1e-5
CASES = 24
NEW = 8


def random_model(rng: random.Random):
    heads = rng.choice([1, 2, 4, 6])
    return tiny_model(
        seed=rng.randrange(10**6),
        vocab_size=rng.randrange(11, 80),
        hidden_size=heads * 8,
        intermediate_size=rng.randrange(9, 70),
        num_hidden_layers=rng.randrange(1, 4),
        num_attention_heads=heads,
        num_key_value_heads=rng.choice([kv for kv in (1, 2, 3, 6) if heads % kv == 0]),
        total_ut_steps=rng.randrange(1, 7),
        rope_parameters={"rope_type": "default", "rope_theta": rng.choice([1e4, 1e6])},
    )


def random_config(rng: random.Random, after_exit: str, total: int) -> ExitConfig:
    mode = rng.choice(["full", "fixed", "qexit", "qexit", "converge", "accel", "margin"])
    return setting(
        mode,
        q=rng.uniform(0.05, 1.0),
        eps=rng.uniform(0.2, 1.2),
        patience=rng.randrange(1, 3),
        theta=rng.uniform(0.05, 0.95),
        depth=rng.randrange(1, total + 1) if mode == "fixed" else None,
        min_loops=rng.choice([1, 1, 2, 9]),
        accel_scale=rng.choice(["states", "steps"]),
        after_exit=after_exit,
    )


def random_prompts(rng: random.Random, vocabulary: int) -> list[list[int]]:
    return [[rng.randrange(1, vocabulary) for _ in range(rng.randrange(1, 12))] for _ in range(rng.randrange(1, 5))]


def padded(prompts):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def generate(model, prompts, config, new=NEW, **kwargs):
    ids, mask = padded(prompts)
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        exit_config=config,
        return_dict_in_generate=True,
        **kwargs,
    )


@pytest.mark.cpu(6)
@pytest.mark.parametrize("after_exit", ["finish", "drop"])
def test_tokens_depths_passes_and_rows(after_exit):
    rng = random.Random(after_exit)
    compared = skipped = 0
    for _ in range(CASES):
        model = random_model(rng)
        model64 = copy.deepcopy(model).double()
        total = model.num_loops
        config = random_config(rng, after_exit, total)
        prompts = random_prompts(rng, model.config.vocab_size)
        new = rng.randrange(1, 14)
        outputs = generate(model, prompts, config, new)
        tokens = outputs.sequences[:, -new:].tolist()
        depths = outputs.exit_depths.tolist()
        limit = config.depth if config.mode == "fixed" else total
        for row, prompt in enumerate(prompts):
            if after_exit == "finish":
                steps = run_all_loops(model64, prompt, config, new)
            else:
                steps = DroppingReference(model64, config).generate(prompt, new)
            for index, step in enumerate(steps):
                if step.margin < NEAR_TIE:
                    skipped += 1
                    break
                compared += 1
                assert (tokens[row][index], depths[row][index]) == (step.token, step.depth), (config, row, index)
                expected = {"full": "fixed", "fixed": "fixed"}.get(config.mode, "max_depth")
                assert (outputs.exit_reasons[row][index] == expected) == (config.mode == "fixed" or not step.met)
        spent = [sum(row[1:]) for row in depths]
        assert outputs.loop_passes == max(spent)
        if after_exit == "finish":
            assert outputs.loop_rows == sum(finish_rows(row, limit) for row in depths)
        else:
            assert outputs.loop_rows == sum(spent)
        assert outputs.prompt_rows == limit * sum(map(len, prompts))
        per_loop = config.mode == "margin"
        assert outputs.head_rows == (sum(spent) if per_loop else len(prompts) * (new - 1))
    assert compared > 300
    assert skipped <= 0.001 * (compared + skipped) + 1, f"{skipped} near ties among {compared}"


@pytest.mark.cpu(4)
@pytest.mark.parametrize("after_exit", ["finish", "drop"])
def test_second_turn_continues_the_cache(after_exit):
    rng = random.Random(f"turns {after_exit}")
    for _ in range(CASES // 2):
        model = random_model(rng)
        config = random_config(rng, after_exit, model.num_loops)
        prompt, addition = (
            [rng.randrange(1, model.config.vocab_size) for _ in range(n)] for n in (5, rng.randrange(4))
        )
        first = generate(model, [prompt], config)
        whole = [*first.sequences[0].tolist(), *addition]
        second = generate(model, [whole], config, past_key_values=first.past_key_values)
        if after_exit == "finish":
            expected = generate(model, [whole], config)
            tokens, depths = expected.sequences[0, len(whole) :].tolist(), expected.exit_depths[0].tolist()
        else:
            reference = DroppingReference(copy.deepcopy(model).double(), config)
            reference.generate(prompt, NEW)
            steps = reference.generate(whole[len(prompt) + NEW - 1 :], NEW)
            tokens, depths = [step.token for step in steps], [step.depth for step in steps]
        assert second.sequences[0, len(whole) :].tolist() == tokens, config
        assert second.exit_depths[0].tolist() == depths, config


def test_second_turn_of_a_padded_batch():
    model, config = tiny_model(seed=3, total_ut_steps=4), ExitConfig(q=0.5)
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12]]
    first = generate(model, prompts, config)
    _, mask = padded(prompts)
    addition = torch.tensor([[20, 21, 22], [23, 24, 25]])
    whole = torch.cat([first.sequences, addition], 1)
    whole_mask = torch.cat([mask, torch.ones(2, NEW + 3, dtype=mask.dtype)], 1)
    settings = {"max_new_tokens": NEW, "do_sample": False, "exit_config": config, "return_dict_in_generate": True}
    second = model.generate(whole, attention_mask=whole_mask, past_key_values=first.past_key_values, **settings)
    fresh = model.generate(whole, attention_mask=whole_mask, **settings)
    assert torch.equal(second.sequences, fresh.sequences)
    assert torch.equal(second.exit_depths, fresh.exit_depths)


@pytest.mark.grid(fast=4, slow=1)
@pytest.mark.parametrize("hide_the_end", [False, True])
@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("after_exit", ["finish", "drop"])
def test_second_turn_after_one_sequence_ended_early(after_exit, lockstep, hide_the_end):
    """The token that ended a row was never run, yet its column counts as cached: it has to be run before it is read."""
    rng = random.Random(f"ends {after_exit}")
    for _ in range(6):
        model = tiny_model(seed=rng.randrange(10**6), total_ut_steps=4)
        config = random_config(rng, after_exit, 4)
        prompts = [[rng.randrange(1, 61) for _ in range(length)] for length in (6, 2, 4)]
        free = generate(model, prompts, config).sequences[:, -NEW:]
        eos = int(free[1, 2])
        settings = {"eos_token_id": eos, "pad_token_id": 0}
        if lockstep:
            settings["logits_processor"] = LogitsProcessorList([lambda ids, scores: scores])
        first = generate(model, prompts, config, **settings)
        new = first.exit_depths.shape[1]
        ended = first.exit_depths == 0
        assert ended.any()
        _, mask = padded(prompts)
        live = (~ended).long()
        if hide_the_end:
            live[ended.any(1).nonzero()[:, 0], (~ended).sum(1)[ended.any(1)] - 1] = 0
        addition = torch.tensor([[20, 21], [22, 23], [24, 25]])
        whole = torch.cat([first.sequences, addition], 1)
        whole_mask = torch.cat([mask, live, torch.ones(3, 2, dtype=mask.dtype)], 1)
        cache = first.past_key_values
        with torch.no_grad():
            continued = model(
                whole[:, cache.length :], attention_mask=whole_mask, past_key_values=cache, exit_config=config
            ).logits[:, -1]
        assert new == whole.shape[1] - 2 - mask.shape[1]
        if after_exit == "finish":
            with torch.no_grad():
                fresh = model(whole, attention_mask=whole_mask, exit_config=config).logits[:, -1]
            torch.testing.assert_close(continued, fresh, rtol=1e-3, atol=1e-4)
            continue
        limit = config.depth if config.mode == "fixed" else 4
        for row, prompt in enumerate(prompts):
            reference = DroppingReference(copy.deepcopy(model).double(), config)
            depths = [depth for depth in first.exit_depths[row].tolist() if depth]
            said = first.sequences[row, mask.shape[1] :][: len(depths)].tolist()
            for token in prompt:
                reference.read(token, prompt=True)
            for index, token in enumerate(said[:-1]):
                reference.read(token, prompt=False)
                assert reference.exits[-1] == depths[index + 1]
            behind = (
                addition[row].tolist() if hide_the_end and len(depths) < new else [said[-1], *addition[row].tolist()]
            )
            for token in behind:
                reference.read(token, prompt=True)
            assert reference.exits[-1] == limit
            torch.testing.assert_close(continued[row].double(), reference.logits, rtol=1e-3, atol=1e-4)


def test_finish_equals_full_depth_planes():
    """Once completed, the planes of generated tokens are those of a run of all loops over the whole text."""
    model, config = tiny_model(seed=4, total_ut_steps=4), ExitConfig(q=0.4)
    outputs = generate(model, [[5, 6, 7]], config)
    cache, sequence = outputs.past_key_values, outputs.sequences
    assert cache.in_flight is not None, "the test needs tokens that wait for their deeper loops"
    fresh = model.new_cache()
    with torch.no_grad():
        model(sequence[:, -1:], past_key_values=cache, exit_config=config)
        model(torch.tensor([[1, 2]]), past_key_values=cache, exit_config=config)
        model(torch.cat([sequence, torch.tensor([[1, 2]])], 1), past_key_values=fresh, exit_config=config)
    assert cache.length == fresh.length
    for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-5)


def test_sequences_do_not_wait_for_each_other():
    """A batch takes as many passes as its slowest member alone."""
    model, config = tiny_model(seed=5, total_ut_steps=5), ExitConfig(q=0.5)
    prompts = [[7, 8, 9], [10, 11], [12, 13, 14, 15]]
    alone = [generate(model, [prompt], config) for prompt in prompts]
    together = generate(model, prompts, config)
    assert together.loop_passes == max(outputs.loop_passes for outputs in alone)
    assert together.loop_rows == sum(outputs.loop_rows for outputs in alone)
    for row, outputs in enumerate(alone):
        assert torch.equal(together.exit_depths[row], outputs.exit_depths[0])
        assert torch.equal(together.sequences[row, -NEW:], outputs.sequences[0, -NEW:])
