"""vLLM with the plugin, at full depth and with drafts, against sigma0's full depth: token for token."""

import json
import shutil
from collections import Counter

import numpy as np
import pytest
import torch

from sigma0.models.load import checkpoint_folder, load
from tests.reference import tiny_model, tiny_nanbeige
from tests.serve.vllm.engines import counter, engine, full_depth, needs_vllm, random_prompts, write

pytestmark = needs_vllm


def together_and_alone(llm, prompts):
    return write(llm, prompts), [write(llm, [prompt])[0] for prompt in prompts]


def test_a_published_checkpoint_is_written_as_at_full_depth(golden):
    prompts = random_prompts(golden.model.config.vocab_size)
    expected = full_depth(golden.model, prompts)
    with engine(golden.folder) as llm:
        assert together_and_alone(llm, prompts) == (expected, expected)
        assert counter(llm, "prefix_cache_hits") == 0, "no block of 128 positions is shared as yet"
    with engine(golden.folder, drafts=3, loops=2, block_size=32) as llm:
        assert together_and_alone(llm, prompts) == (expected, expected)
        assert counter(llm, "prefix_cache_hits") > 0
        assert 0 < counter(llm, "spec_decode_num_accepted_tokens") < counter(llm, "spec_decode_num_draft_tokens")


@pytest.mark.parametrize("name", ["pocket", "pocket-large"])
def test_shipped_models_take_fewer_full_passes_with_drafts(name):
    from sigma0.bench.pocket.prompts import micro_world

    model, tokenizer = load(name, device="cpu", dtype="float32")
    texts = [prompt.content for prompt in micro_world(32) if isinstance(prompt.content, str)]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    expected = full_depth(model, prompts)
    with engine(checkpoint_folder(name)) as llm:
        assert together_and_alone(llm, prompts) == (expected, expected)
    with engine(checkpoint_folder(name), drafts=4, loops=2) as llm:
        assert together_and_alone(llm, prompts) == (expected, expected)
        passes = counter(llm, "spec_decode_num_drafts")
        accepted_length = 1 + counter(llm, "spec_decode_num_accepted_tokens") / passes
        drafter = llm.collective_rpc(lambda worker: worker.model_runner.drafter)[0]
    print(f"{name}: {1 / accepted_length:.3f} full passes a token, {accepted_length:.2f} tokens a full pass")
    assert accepted_length > 2
    assert 0 < drafter.passes <= passes * 4 * 2


def test_a_fixed_loop_and_fewer_loops_are_taken_from_overrides(golden):
    prompts = random_prompts(golden.model.config.vocab_size, count=4)
    expected = full_depth(golden.model, prompts, exit_config={"mode": "fixed", "depth": 2})
    assert expected != full_depth(golden.model, prompts)
    for overrides in ({"early_exit_step": 1}, {"total_ut_steps": 2}):
        with engine(golden.folder, hf_overrides=overrides) as llm:
            assert write(llm, prompts) == expected


@pytest.mark.parametrize("without_norm", [False, True])
def test_nanbeige(tmp_path, without_norm):
    model = tiny_nanbeige(seed=3, skip_loop_final_norm=without_norm)
    model.save_pretrained(tmp_path)
    prompts = random_prompts(model.config.vocab_size)
    expected = full_depth(model, prompts)
    with engine(tmp_path, drafts=2, loops=1) as llm:
        assert write(llm, prompts) == expected


def test_long_prompts_in_chunks_and_drafts_up_to_the_longest_text(golden):
    prompts = [prompt * 3 for prompt in random_prompts(golden.model.config.vocab_size, count=6)]
    room = {len(prompt): 256 - len(prompt) for prompt in prompts}
    settings = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "block_size": 32}
    with engine(golden.folder, drafts=5, loops=2, **settings) as llm:
        for prompt in prompts:
            expected = full_depth(golden.model, [prompt], max_new_tokens=room[len(prompt)])
            assert write(llm, [prompt], max_tokens=None) == expected


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"drafts": 2, "loops": 0}, "draft_loops"),
        ({"drafts": 2, "loops": 4}, "must be below the"),
        ({"hf_overrides": {"early_exit_step": 7}}, "early_exit_step counts from 0"),
        ({"hf_overrides": {"total_ut_steps": 0}}, "at least 1 loop"),
    ],
)
def test_bad_settings_are_named(golden, settings, message):
    with pytest.raises((ValueError, RuntimeError), match=message), engine(golden.folder, **settings):
        pass


def test_a_damaged_checkpoint_is_refused(golden, tmp_path):
    folder = shutil.copytree(golden.folder, tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    with pytest.raises(ValueError, match=r"not initialized|missing"), engine(folder):
        pass


DRAWS = 20_000
TEMPERATURE = 1.25
PROMPT = [5, 3, 7, 1, 6]


def law(model, prompt, tokens):
    """Chances of all continuations of so many tokens at full depth."""
    chances = {(): 1.0}
    for _ in range(tokens):
        texts = list(chances)
        logits = model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1]  # [texts, V]
        shares = (logits.double() / TEMPERATURE).softmax(-1)
        chances = {
            (*text, token): chances[text] * float(share)
            for text, row in zip(texts, shares, strict=True)
            for token, share in enumerate(row)
        }
    return chances


@torch.no_grad()
def test_twenty_thousand_draws_follow_the_law_of_full_depth(tmp_path):
    stats = pytest.importorskip("scipy.stats")
    model = tiny_model(seed=5, vocab_size=9, total_ut_steps=4)
    model.save_pretrained(tmp_path)
    chances = law(model, PROMPT, 4)
    with engine(tmp_path, drafts=3, loops=2, max_num_seqs=256) as llm:
        drawn = Counter(
            tuple(text)
            for _ in range(DRAWS // 1000)
            for text in write(llm, [PROMPT] * 1000, temperature=TEMPERATURE, max_tokens=4)
        )
        accepted = counter(llm, "spec_decode_num_accepted_tokens") / counter(llm, "spec_decode_num_draft_tokens")
    assert drawn.total() == DRAWS and set(drawn) <= set(chances)
    assert 0.1 < accepted < 0.9, "drafts are both accepted and rejected"
    # what is expected less than 5 times is one class
    expected = np.array([DRAWS * chance for chance in chances.values()])
    observed = np.array([drawn[text] for text in chances])
    rare = expected < 5
    pooled = [np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected)]
    p_value = stats.chisquare(*pooled).pvalue
    print(f"{len(pooled[0])} classes, {accepted:.3f} of the drafts accepted, p = {p_value:.3f}")
    assert p_value > 0.001
