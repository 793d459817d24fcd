"""The smallest codec of K/V that keeps an agreement."""

import json

import pytest
import torch

import sigma0
from sigma0.bench.pocket.prompts import micro_world
from sigma0.calibrate.agreement import continue_in_full
from sigma0.calibrate.kv import calibrate_kv, read_coded
from sigma0.calibrate.prompts import encode_prompts
from sigma0.config import FULL_KV, ExitConfig
from tests.calibrate.conftest import run


@pytest.fixture(scope="module")
def prompts(pocket):
    return list(dict.fromkeys(encode_prompts(*pocket, list(micro_world(20)), 8)))


@pytest.mark.exhaustive
def test_the_smallest_that_passes_is_chosen(pocket, prompts):
    model = pocket[0]
    obtained = calibrate_kv(model, prompts, agreement=0.8, confidence=0.8, max_new_tokens=8, segment=16)
    assert obtained.chosen is not None and obtained.check is not None
    passed = [item for item in obtained.tested if item.passed]
    assert obtained.chosen == passed[-1].kv and passed == list(obtained.tested[: len(passed)])
    assert obtained.prompts + obtained.checked == len(prompts)
    # the agreement of a codec, counted by itself
    last = obtained.tested[-1]
    losses = [
        (read_coded(model, text, last.kv).argmax(-1) != torch.tensor(text.ids[-text.new :])).double().mean()
        for text in continue_in_full(model, prompts, 8)
    ]
    assert abs(1 - last.agreement - float(sum(losses)) / len(losses)) < 0.25
    assert 0.5 < obtained.coded_share < 1


def test_without_a_codec_nothing_is_lost_and_promises_that_cannot_be_made_are_refused(pocket, prompts):
    model = pocket[0]
    for text in continue_in_full(model, prompts[:3], 8):
        assert read_coded(model, text, FULL_KV).argmax(-1).tolist() == list(text.ids[-text.new :])
    with pytest.raises(ValueError, match="prompts cannot promise agreement"):
        calibrate_kv(model, prompts, agreement=0.999)
    with pytest.raises(ValueError, match="every text ends within its first segment of 512 tokens"):
        calibrate_kv(model, prompts, agreement=0.8, confidence=0.8, max_new_tokens=4, segment=512)


@pytest.mark.slow
def test_the_choice_is_stored_with_a_copy_and_used(questions, tmp_path):
    file, copy = questions(20), tmp_path / "copy"
    promise = ("--agreement", "0.8", "--confidence", "0.8", "--max-new-tokens", "8")
    arguments = ("pocket", "--prompts", file, "--objective", "kv", "--segment", "16", *promise)
    result = run(*arguments, "--out", copy, "--json")
    assert result.exit_code == 0, result.output
    reported = json.loads(result.stdout)
    stored = json.loads((copy / "generation_config.json").read_text())["kv_config"]
    assert stored == reported["chosen"] and stored["segment"] == 16
    model, tokenizer = sigma0.load(str(copy))
    ids = torch.tensor([tokenizer("Mary went to the park. Where is Mary?")["input_ids"]])
    cache = model.generate(ids, max_new_tokens=9, return_dict_in_generate=True).past_key_values
    assert cache.segment == 16 and model.resolve_exit_config(None) != ExitConfig(mode="full")
    refused = run(*arguments, "--exit", "margin")
    assert refused.exit_code and "leave --exit and --labels out" in refused.output
    lost = run("pocket", "--prompts", file, "--segment", "16")
    assert lost.exit_code and "--segment belongs to --objective kv" in lost.output
