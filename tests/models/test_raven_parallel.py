"""Processes that share a Raven: the tokens, gradients and files of one process, in each of the three layouts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import sigma0
from sigma0 import ExitConfig
from sigma0.models.raven_parallel import whole_tensors
from tests.conftest import Golden
from tests.decode.test_parallel import IDS, STORY, UNGATED, all_written, load_share
from tests.models.raven_reference import tiny_raven
from tests.processes import in_processes
from tests.reference import tiny_model

# what processes share is shown in CI by tests.decode.test_parallel
pytestmark = pytest.mark.exhaustive
# checkpoints of the published code, and grouped heads of each layout that has them
CHECKPOINTS = {"sandwich": "huginn-a", "pre": "retro-tinyllama", "post": "retro-olmo"}
FULL = ExitConfig(mode="full")
RULES = (*UNGATED, {"mode": "margin", "theta": 0.1, "after_exit": "verify", "redraft": False}, {"mode": "kl"})


def tiny_folder(folder, layout):
    """Of odd vocabulary and an MLP whose width is no multiple of 3."""
    tiny_raven(layout, 0, num_key_value_heads=4 if layout == "sandwich" else 2).save_pretrained(folder)
    return str(folder)


def loss_of(model):
    """Of a short text, whose gradients are then in the parameters."""
    model.train()
    loss = model(IDS, attention_mask=(IDS > 0).long(), labels=IDS).loss
    loss.backward()
    return loss.item()


def whole_gradients(model):
    """Gradients by name, put together from all processes."""
    return whole_tensors(
        model,
        {
            name: weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
            for name, weight in model.named_parameters()
        },
    )


def share_of(rank, folders, goldens, target):
    """What one of several processes writes, saves and learns with its share of each model."""
    result = {}
    for layout, folder in folders.items():
        model = load_share(folder)
        heads = (
            model.generate(IDS, max_new_tokens=2, return_dict_in_generate=True).past_key_values.planes[0].keys.shape[2]
        )
        result[layout] = {"written": all_written(model, RULES), "kv_heads": heads}
        model.save_pretrained(f"{target}/{layout}")
        result[layout]["loss"] = loss_of(model)
        gradients = whole_gradients(model)
        if rank == 0:
            torch.save(gradients, f"{target}/{layout}.grads")
    load_share(f"{target}/ouro-whole").save_pretrained(f"{target}/ouro")
    for layout, (folder, prompts) in goldens.items():
        model = load_share(folder)
        result[layout] |= {
            "golden": [
                model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, exit_config=FULL)[
                    0, len(prompt) :
                ].tolist()
                for prompt in prompts
            ]
        }
    return result


@pytest.fixture(scope="module", params=[2, 4])
def shared(request, tmp_path_factory):
    """The folders, and what each process found."""
    target, count = tmp_path_factory.mktemp("shared"), request.param
    layouts = [layout for layout in CHECKPOINTS if layout == "sandwich" or count == 2]
    folders = {layout: tiny_folder(target / f"{layout}-whole", layout) for layout in layouts}
    tiny_model(0, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True).save_pretrained(
        target / "ouro-whole"
    )
    published = {layout: Golden(CHECKPOINTS[layout], tmp_path_factory.mktemp(layout)) for layout in layouts}
    goldens = {
        layout: (str(entry.folder), [entry[f"greedy.prompt{index}"].tolist() for index in range(3)])
        for layout, entry in published.items()
    }
    return target, folders, published, in_processes(count, share_of, target, folders, goldens, str(target))


def test_together_they_write_what_one_writes(shared):
    _, folders, published, ranks = shared
    for layout, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        expected = all_written(model, RULES)
        assert len({depth for entry in expected for row in entry["depths"] for depth in row}) > 2
        for rank in ranks:
            assert rank[layout]["written"] == expected
            assert rank[layout]["kv_heads"] * len(ranks) == model.config.num_key_value_heads
            assert rank[layout]["golden"] == published[layout]["greedy.new_tokens"].tolist()


def test_what_they_save_is_what_they_loaded(shared):
    target, folders, _, _ = shared
    for layout, folder in [*folders.items(), ("ouro", str(target / "ouro-whole"))]:
        before, after = (load_file(f"{path}/model.safetensors") for path in (folder, target / layout))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        configs = [json.loads(Path(path, "config.json").read_text()) for path in (folder, target / layout)]
        assert configs[0] == configs[1]


def test_gradients_are_those_of_one_process(shared):
    target, folders, _, ranks = shared
    for layout, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        loss = loss_of(model)
        assert all(abs(rank[layout]["loss"] - loss) < 1e-5 for rank in ranks)
        result = torch.load(target / f"{layout}.grads")
        for name, weight in model.named_parameters():
            assert torch.allclose(result[name], weight.grad, atol=1e-5, rtol=1e-4), (layout, name)


def odd_share(rank, folder):
    with pytest.raises(ValueError, match="2 processes cannot share the 1 key/value heads") as error:
        load_share(folder)
    return str(error.value)


def test_heads_that_do_not_divide_are_refused(tmp_path):
    tiny_raven("post", 0).save_pretrained(tmp_path / "odd")
    first, second = in_processes(2, odd_share, tmp_path, str(tmp_path / "odd"))
    assert first == second and "start 1 of them" in first


def shipped_texts(**settings):
    model, tokenizer = sigma0.load("pocket-raven", dtype="float32", **settings)
    return [
        sigma0.generate(model, tokenizer, STORY, max_new_tokens=8, exit_config=rule, verdict=False).to_dict()
        for rule in UNGATED
    ]


def shipped_share(rank):
    return shipped_texts(tensor_parallel=True)


def test_the_shipped_one_is_shared_too(tmp_path):
    expected = json.loads(json.dumps(shipped_texts(device="cpu")))
    assert in_processes(2, shipped_share, tmp_path) == [expected, expected]
