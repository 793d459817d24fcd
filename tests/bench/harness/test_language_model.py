import json

import pytest

import sigma0
from sigma0.config import ExitConfig

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'sigma0-lm[eval]'")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from sigma0.bench.harness.items import TASKS
from sigma0.bench.harness.language_model import MAX_GEN_TOKS, Sigma0LM, write_settings

pytestmark = pytest.mark.slow

CPU = {"device": "cpu", "dtype": "float32"}
FULL, EAGER = {"exit": "full"}, {"exit": "qexit", "q": 0.6}
GREEDY = {"until": ["\n"], "max_gen_toks": 24, "do_sample": False}


@pytest.fixture(scope="module")
def rows():
    return {
        name: [json.loads(line) for line in (TASKS / f"micro_world_{name}.jsonl").read_text().splitlines()[:6]]
        for name in ("choice", "answer")
    }


@pytest.fixture(scope="module")
def full():
    return Sigma0LM("pocket", batch_size=4, **CPU, **FULL)


@pytest.fixture(scope="module")
def hf():
    """lm-eval's own backend on the same weights, whose folder says full depth."""
    model, tokenizer = sigma0.load("pocket", device="cpu", dtype="float32")
    model.generation_config.exit_config = ExitConfig(mode="full")
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)


def asked(kind, arguments, task="task"):
    return [Instance(kind, {}, item, 0, (task, number, 1)) for number, item in enumerate(arguments)]


@pytest.mark.parametrize("setting", [FULL, EAGER], ids=["full", "qexit"])
def test_scores_are_those_of_the_hf_backend_at_the_same_setting(hf, rows, setting, monkeypatch):
    pairs = [(row["prompt"], answer) for row in rows["choice"] for answer in (" Yes", " No")]
    pairs += [(row["prompt"], f" {row['answer']}") for row in rows["answer"]]
    pairs += [("", "Mary went to the kitchen."), ("Where is Mary? ", "Mary is in the kitchen.")]
    ours = Sigma0LM("pocket", batch_size=4, **CPU, **setting)
    monkeypatch.setattr(hf.model.generation_config, "exit_config", ours.exit_config)
    known = hf.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)
    result = ours.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)
    for (logprob, greedy), (known_logprob, known_greedy) in zip(result, known, strict=True):
        assert logprob == pytest.approx(known_logprob, abs=1e-4)
        assert greedy == known_greedy
    assert any(greedy for _, greedy in result)


def test_rolling_scores_are_those_of_the_hf_backend(full, hf, rows):
    texts = [(row["prompt"],) for row in rows["answer"][:2]] + [("Mary went to the kitchen. " * 450,)]
    known = hf.loglikelihood_rolling(asked("loglikelihood_rolling", texts), disable_tqdm=True)
    result = full.loglikelihood_rolling(asked("loglikelihood_rolling", texts), disable_tqdm=True)
    assert len(full.tokenizer(texts[2][0])["input_ids"]) > full.max_length
    assert result == pytest.approx(known, rel=1e-5)


def test_texts_are_those_of_the_hf_backend(full, hf, rows):
    requests = [(row["prompt"], GREEDY) for row in rows["answer"]]
    texts = full.generate_until(asked("generate_until", requests), disable_tqdm=True)
    assert texts == hf.generate_until(asked("generate_until", requests), disable_tqdm=True)


def test_requests_of_different_settings_come_back_in_their_order(full, rows):
    prompt = rows["answer"][0]["prompt"]
    short = {"until": " in", "max_gen_toks": 24}
    texts = full.generate_until(asked("generate_until", [(prompt, GREEDY), (prompt, short), (prompt, GREEDY)]), True)
    assert texts[0] == texts[2] and texts[1] == texts[0].split(" in")[0]


def test_what_was_read_where_is_in_the_results_and_in_the_log(tmp_path, rows):
    log = tmp_path / "depths.jsonl"
    model = Sigma0LM("pocket", batch_size=2, depth_log=str(log), **CPU, **EAGER)
    prompts = [row["prompt"] for row in rows["answer"][:3]]
    model.generate_until(asked("generate_until", [(prompt, GREEDY) for prompt in prompts], "written"), True)
    model.loglikelihood(asked("loglikelihood", [(prompts[0], " No one")], "scored"), True)
    output = json.loads(json.dumps(model.get_model_info()))["sigma0"]
    assert (output["exit_config"]["mode"], output["exit_config"]["q"], output["total_loops"]) == ("qexit", 0.6, 6)
    assert set(output["requests"]) == {"generate_until", "loglikelihood"}
    assert set(output["tasks"]) == {"written", "scored"}
    written = output["requests"]["generate_until"]
    assert (written["requests"], written["batches"]) == (3, 2)
    assert 0 < written["passes_saved"] < 1 and written["mean_depth"] == output["tasks"]["written"]["mean_depth"]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["task"], line["doc_id"]) for line in lines[-1:]] == [("scored", 0)]
    assert sorted(line["doc_id"] for line in lines[:3]) == [0, 1, 2]
    assert sum(len(line["depths"]) for line in lines[:3]) == written["tokens"]


def test_a_whole_evaluation_keeps_the_depths(tmp_path, monkeypatch, rows):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.chdir(TASKS.parents[2])
    model = Sigma0LM("pocket", batch_size=4, **CPU, **EAGER)
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    tasks = ["micro_world_choice", "micro_world_answer"]
    result = lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, limit=4, bootstrap_iters=0)
    assert result["config"]["sigma0"]["tasks"]["micro_world_choice"]["requests"] == 8
    assert result["results"]["micro_world_answer"]["exact_match,strip"] >= 0.5


@pytest.mark.parametrize(
    ("asked_for", "sampling"),
    [
        ({}, {"do_sample": False}),
        ({"temperature": 0.0, "do_sample": True}, {"do_sample": False}),
        ({"temperature": 0.7}, {"do_sample": True, "temperature": 0.7}),
        ({"temperature": 0.7, "do_sample": False, "top_p": 0.9}, {"do_sample": False}),
        ({"do_sample": True, "top_k": 5}, {"do_sample": True, "top_k": 5}),
        ({"repetition_penalty": 1.2}, {"do_sample": False, "repetition_penalty": 1.2}),
    ],
)
def test_sampling_is_what_a_task_asks_for(full, asked_for, sampling):
    assert write_settings(asked_for, full).sampling == sampling


def test_lengths_and_stop_strings_have_several_spellings(full):
    assert write_settings({}, full).max_new_tokens == MAX_GEN_TOKS
    assert write_settings({"max_tokens": 5, "max_gen_toks": 7}, full).max_new_tokens == 7
    assert write_settings({"until": "x"}, full).until == ("x",)
    assert write_settings({"until": None}, full).until == ()


def test_a_setting_that_it_does_not_have_is_refused(full):
    for asked_for, output in (
        ({"num_beams": 2}, "without num_beams"),
        ({"until": [""]}, "not empty"),
        ({"until": [3]}, "not empty"),
        ({"max_gen_toks": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=output):
            write_settings(asked_for, full)
    for size in ("auto", 0, "-1"):
        with pytest.raises(ValueError, match="batch_size"):
            Sigma0LM("pocket", batch_size=size)


def test_messages_go_through_the_chat_template(full):
    said = [{"role": "user", "content": "Where is Mary?"}]
    prompt = full.apply_chat_template(said)
    known = full.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert full._encode(prompt) == known
    assert full.chat_template(True) and full.chat_template(False) is None


def test_the_device_of_the_model_s_arguments_wins():
    assert get_model("sigma0") is Sigma0LM
    named = Sigma0LM.create_from_arg_string("model=pocket,device=cpu", {"device": "cuda:0", "batch_size": 2})
    assert (named.device.type, named.batch_size) == ("cpu", 2)
    assert Sigma0LM.create_from_arg_obj({"model": "pocket"}, {"device": "cpu", "batch_size": None}).batch_size == 1
    with pytest.raises(ValueError, match="device 'nowhere' cannot be used"):
        Sigma0LM.create_from_arg_obj({"model": "pocket"}, {"device": "nowhere"})
