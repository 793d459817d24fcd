"""Several processes that hold a model together write what one process writes, and end together."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.generation import StoppingCriteria

import sigma0
from sigma0.decode.exits import ExitRule
from sigma0.decode.ops import no_broadcast
from sigma0.decode.parallel import ParallelSettings, broadcaster, check_heads, init_tensor_parallel, tp_group
from sigma0.models import OuroConfig
from sigma0.serve.engine.engine import Engine
from tests.conftest import Golden
from tests.marks import exhaustive
from tests.processes import commands, in_processes
from tests.reference import tiny_model
from tests.test_cli import refused as refused_line

FEW = (
    {"mode": "full"},
    {"q": 0.5},
    {"q": 0.5, "after_exit": "drop"},
    {"q": 0.4, "after_exit": "verify"},
)
RULES = (
    *FEW,
    {"mode": "fixed", "depth": 2},
    {"q": 0.4, "after_exit": "verify", "redraft": False},
    {"mode": "margin", "theta": 0.03},
    {"mode": "margin", "theta": 0.03, "after_exit": "verify"},
    {"mode": "converge", "eps": 0.6, "after_exit": "drop"},
    {"mode": "accel", "eps": 0.9, "patience": 1},
)
# of a model without a gate
UNGATED = (
    {"mode": "full"},
    {"mode": "margin", "theta": 0.03},
    {"mode": "converge", "eps": 0.6, "after_exit": "drop"},
    {"mode": "margin", "theta": 0.03, "after_exit": "verify"},
)
STORY = "Mary went to the kitchen. John is older than Mary. Where is Mary?"
IDS = torch.tensor([[0, 0, 7, 8, 9], [10, 11, 12, 13, 14], [0, 15, 16, 17, 18]])


class Unlike(StoppingCriteria):
    """Unknown to sigma0, so that a batch goes in lockstep; stops at once where it is told to."""

    def __init__(self, stops: bool) -> None:
        self.stops = stops

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), self.stops)


def written(model, ids, rule, sampled, new=8, **settings):
    """What a batch comes to, left padding told by 0."""
    torch.manual_seed(5)
    outputs = model.generate(
        ids,
        attention_mask=(ids > 0).long(),
        exit_config=rule,
        max_new_tokens=new,
        do_sample=sampled,
        return_dict_in_generate=True,
        **settings,
    )
    accepted = getattr(outputs, "accepted", None)
    return {
        "ids": outputs.sequences.tolist(),
        "depths": outputs.exit_depths.tolist(),
        "reasons": outputs.exit_reasons,
        "accepted": None if accepted is None else accepted.tolist(),
        "counts": [outputs.loop_passes, outputs.loop_rows, outputs.prompt_rows, outputs.head_rows],
    }


def all_written(model, rules):
    """A padded batch by some rules, greedy and sampled, and in lockstep."""
    obtained = [written(model, IDS, rule, sampled) for rule in rules for sampled in (False, True)]
    return [*obtained, written(model, IDS, rules[1], sampled=True, stopping_criteria=[Unlike(stops=False)])]


def texts(model, tokenizer):
    """Texts of one sequence each, with their ends."""
    calls = [({"exit_config": rule}, 10) for rule in FEW]
    calls += [({"exit_config": FEW[1], "do_sample": True, "seed": 3, "temperature": 1.5}, 4), ({"stop": ["kitch"]}, 10)]
    return [
        sigma0.generate(model, tokenizer, STORY, max_new_tokens=new, verdict=False, **settings).to_dict()
        for settings, new in calls
    ]


def planes(model):
    """Heads and bytes of the K/V of a short run."""
    cache = model.generate(IDS, max_new_tokens=4, return_dict_in_generate=True).past_key_values
    return [cache.planes[0].keys.shape[2], cache.bytes_allocated, cache.bytes_in_use]


def load_share(folder):
    spread = DistributedConfig(tp_size=torch.distributed.get_world_size())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=spread).eval()


def share_of(rank, folders, names):
    """What one of several processes writes with its share of each model."""
    obtained = {folder: all_written(load_share(folder), rules) for folder, rules in folders.items()}
    for name in names:
        model, tokenizer = sigma0.load(name, dtype="float32", tensor_parallel=True)
        obtained[name] = [texts(model, tokenizer), planes(model)]
    return obtained


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The golden checkpoints, by name."""
    return {name: Golden(name, tmp_path_factory.mktemp(name)) for name in ("ouro-mha", "ouro-gqa", "nanbeige-a")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "checkpoints", "names"),
    [
        (2, {"ouro-gqa": FEW, "nanbeige-a": UNGATED}, ()),
        exhaustive(2, {"ouro-mha": RULES}, ("pocket",)),
        exhaustive(4, {"ouro-mha": FEW}, ("pocket",)),
        exhaustive(5, {}, ("pocket-large",)),
    ],
    ids=["2", "2, every rule", "4", "5"],
)
def test_together_they_write_what_one_writes(folders, tmp_path, count, checkpoints, names):
    asked = {str(folders[name].folder): rules for name, rules in checkpoints.items()}
    ranks = in_processes(count, share_of, tmp_path, asked, names)
    for name, rules in checkpoints.items():
        expected = all_written(folders[name].model, rules)
        for rank in ranks:
            for obtained, whole in zip(rank[str(folders[name].folder)], expected, strict=True):
                assert obtained == whole
    for name in names:
        model, tokenizer = sigma0.load(name, device="cpu", dtype="float32")
        heads, allocated, used = planes(model)
        for rank in ranks:
            output, current = rank[name]
            assert output == json.loads(json.dumps(texts(model, tokenizer)))
            assert {item["stop_reason"] for item in output} >= {"eos", "stop"}
            assert [item * count for item in current] == [heads, allocated, used]


@pytest.mark.parametrize(("kind", "device"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda:0")])
def test_another_device_than_each_process_takes_is_refused_by_name(monkeypatch, kind, device):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    with pytest.raises(ValueError, match=f"takes the {kind} device of its own number, not '{device}'"):
        init_tensor_parallel(torch.device(device))


def test_the_rules_are_worth_comparing(folders):
    """Tokens stop at every loop, for every reason, and some proposals fall."""
    obtained = all_written(folders["ouro-mha"].model, RULES)
    depths = {depth for item in obtained for row in item["depths"] for depth in row}
    reasons = {reason for item in obtained for row in item["reasons"] for reason in row}
    assert depths >= {1, 2, 3, 4}
    assert reasons >= {"threshold_met", "confident", "fixed_point", "max_depth", "fixed"}
    assert any(item["accepted"] and not all(map(all, item["accepted"])) for item in obtained)


def asked_to_stop(model, stops):
    """With a processor and a stranger's criterion: one sequence, a batch in lockstep, and a batch under `verify`."""
    rules = ((1, {"q": 0.5}), (3, {"q": 0.5}), (3, {"q": 0.4, "after_exit": "verify"}))
    settings = {"stopping_criteria": [Unlike(stops)], "repetition_penalty": 1.3}
    return [written(model, IDS[:batch], rule, False, **settings) for batch, rule in rules]


def forced_apart(rank, folder):
    """What a process writes whose gate, head, thresholds, dice and criteria are not the first one's."""
    model = load_share(folder)
    generator = torch.Generator().manual_seed(rank)
    whole = type(model).exit_rule
    manual_seed = torch.manual_seed

    def other_rule(self, config):
        rule = whole(self, config)
        if rank == 0:
            return rule
        q, theta, eps = torch.rand(3, generator=generator).clamp(0.01, 0.99).tolist()
        return ExitRule(replace(config, q=q, theta=theta, eps=eps), self.num_loops, fates=self.fate_config)

    torch.manual_seed = lambda seed: manual_seed(seed + rank)
    type(model).exit_rule = other_rule
    with torch.no_grad():
        if rank:
            model.model.early_exit_gate.bias.add_(torch.randn(1, generator=generator))
            # whole in every process, since 2 does not divide the vocabulary
            model.lm_head.weight.normal_(generator=generator)
    obtained = all_written(model, RULES)
    return [*obtained, *asked_to_stop(model, rank != 0)]


@pytest.mark.exhaustive
def test_decisions_that_are_forced_apart_are_the_first_ones(folders, tmp_path):
    golden = folders["ouro-mha"]
    first, second = in_processes(2, forced_apart, tmp_path, str(golden.folder))
    whole = all_written(golden.model, RULES) + asked_to_stop(golden.model, stops=False)
    for mine, theirs, expected in zip(first, second, whole, strict=True):
        assert mine == theirs == expected


def refused(rank, folder, odd):
    """Messages of what must be refused, and that work goes on after them."""
    model, obtained = load_share(folder), []
    calls = [
        lambda: written(model, IDS + rank, {"q": 0.5}, sampled=False),
        lambda: written(model, IDS, {"q": 0.5 + rank / 10}, sampled=False),
        lambda: written(model, IDS, {"q": 0.5}, sampled=rank == 0),
        lambda: written(model, IDS, {"q": 0.5}, sampled=False, eos_token_id=[7 + rank]),
        lambda: written(model, IDS, {"mode": "full"}, sampled=False, num_beams=2),
        lambda: Engine(model, None, "golden"),
        lambda: load_share(odd),
    ]
    for call in calls:
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the messages are looked at by the caller
            call()
        obtained.append(str(error.value))
    return [*obtained, written(model, IDS, {"q": 0.5}, sampled=False)]


@pytest.mark.slow
def test_what_cannot_be_done_together_is_refused_everywhere(folders, tmp_path):
    odd = tmp_path / "odd"
    tiny_model(seed=0, num_attention_heads=3, num_key_value_heads=3, hidden_size=24, vocab_size=61).save_pretrained(odd)
    golden = folders["ouro-gqa"]
    first, second = in_processes(2, refused, tmp_path, str(golden.folder), str(odd))
    assert first == second
    *unlike, beams, engine, heads, afterwards = first
    assert len(unlike) == 4 and all("process 1 was given another prompt or other settings" in item for item in unlike)
    assert "beam search cannot be agreed on" in beams
    assert "tensor_parallel" in engine
    assert "2 processes cannot share the 3 key/value heads" in heads and "start 1 or 3" in heads
    assert afterwards == written(golden.model, IDS, {"q": 0.5}, sampled=False)


@given(heads=st.integers(1, 64), groups=st.integers(1, 4), count=st.integers(1, 70))
def test_heads_are_dealt_out_evenly_or_not_at_all(heads, groups, count):
    config = OuroConfig(num_attention_heads=heads * groups, num_key_value_heads=heads, hidden_size=heads * groups)
    check_heads(config)
    config.distributed_config = DistributedConfig(tp_size=count)
    if heads % count == 0:
        check_heads(config)
        return
    with pytest.raises(ValueError, match=rf"^{count} processes cannot share the {heads} key/value heads") as error:
        check_heads(config)
    possible = map(int, re.findall(r"\d+", str(error.value).split("start")[1]))
    assert list(possible) == [number for number in range(1, heads + 1) if heads % number == 0]


def test_a_whole_model_agrees_with_nobody(tiny):
    assert tp_group(tiny) is None
    assert broadcaster(tiny) is tiny.operations.broadcast is no_broadcast


def test_torchrun_must_have_started_the_processes(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        sigma0.load("pocket", tensor_parallel=True, device="cpu")
    with pytest.raises(ValueError, match="device of its own number, not 'meta'"):
        sigma0.load("pocket", tensor_parallel=True, device="meta")


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("endless")
    model, tokenizer = sigma0.load("pocket", device="cpu", dtype="float32")
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def wait_for(obtained, what):
    """The first true answer; fails after two minutes."""
    deadline = time.monotonic() + 120
    while not (answer := obtained()):
        assert time.monotonic() < deadline, f"no {what} within two minutes"
        time.sleep(0.05)
    return answer


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf"])
def test_processes_wait_for_each_other_some_seconds(monkeypatch, timeout):
    monkeypatch.setenv("SIGMA0_PARALLEL_TIMEOUT", timeout)
    with pytest.raises(ValueError, match="parallel_timeout"):
        ParallelSettings()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "blow", "timeout"),
    [(1, signal.SIGKILL, "300"), exhaustive(0, signal.SIGKILL, "300"), exhaustive(1, signal.SIGSTOP, "8")],
    ids=["the other dies", "the first dies", "the other stands still"],
)
def test_a_lost_process_ends_the_others_with_one_line(endless, tmp_path, victim, blow, timeout):
    arguments = ["generate", "Mary", "--model", endless, "--device", "cpu", "--tensor-parallel", "--exit", "full"]
    started = commands(2, tmp_path, [*arguments, "--max-new-tokens", "1900"], SIGMA0_PARALLEL_TIMEOUT=timeout)
    survivor = started[1 - victim]
    try:
        wait_for(lambda: (tmp_path / "0.out").exists() and (tmp_path / "0.out").stat().st_size > 20, "text")
        os.kill(started[victim].pid, blow)
        survivor.join(120)
        assert survivor.exitcode == 2
    finally:
        for item in started:
            item.kill()
            item.join()
    (output,) = (tmp_path / f"{1 - victim}.err").read_text().strip().splitlines()
    assert output.startswith(f"error: process {1 - victim}: another process of this job has ended, or has not answered")
    assert f"for {timeout} seconds" in output
    assert not (tmp_path / "1.out").read_text()


@pytest.mark.slow
def test_only_the_first_process_prints(pocket, tmp_path):
    started = commands(
        2, tmp_path, ["generate", STORY, "--device", "cpu", "--dtype", "float32", "--tensor-parallel", "--json"]
    )
    for item in started:
        item.join(120)
    assert [item.exitcode for item in started] == [0, 0]
    obtained = json.loads((tmp_path / "0.out").read_text())
    expected = json.loads(json.dumps(sigma0.generate(*pocket, STORY).to_dict()))
    assert [(item["id"], item["depth"], item["reason"]) for item in obtained["tokens"]] == [
        (item["id"], item["depth"], item["reason"]) for item in expected["tokens"]
    ]
    assert obtained["verdict"]["reason"] == expected["verdict"]["reason"]
    assert [(tmp_path / name).read_text() for name in ("0.err", "1.out", "1.err")] == ["", "", ""]


@pytest.mark.parametrize("arguments", [["-"], ["x", "--ladder", "pocket,pocket-large"]])
def test_what_processes_cannot_share_is_refused(arguments):
    said = refused_line("generate", *arguments, "--tensor-parallel")
    assert "--tensor-parallel goes with one model and a prompt that is an argument" in said


@pytest.mark.exhaustive
def test_torchrun_ends_all_when_one_dies(endless):
    psutil = pytest.importorskip("psutil")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "sigma0.cli", "generate"]
    command += ["Mary", "--model", endless, "--tensor-parallel", "--device", "cpu", "--exit", "full"]
    job = subprocess.Popen(
        [*command, "--max-new-tokens", "1900"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert job.stdout is not None
    assert job.stdout.read(20)
    workers = [item for item in psutil.Process(job.pid).children() if "--tensor-parallel" in item.cmdline()]
    assert len(workers) == 2
    workers[1].kill()
    _, output = job.communicate(timeout=120)
    assert job.returncode != 0
    assert "SIGKILL" in output
    assert not any(item.is_running() for item in workers)
