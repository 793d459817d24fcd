"""Nanbeige4.2 under every rule: against references that run all loops, under other runners, in the server's engine."""

import copy
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from sigma0 import ExitConfig
from sigma0.decode import programs
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, RequestOutput
from tests.marks import exhaustive, needs_compiler, slow
from tests.reference import DroppingReference, finish_rows, run_all_loops, tiny_nanbeige

NEAR_TIE = 1e-5
NEW = 8
FULL = ExitConfig(mode="full")
MODES = {
    "full": FULL,
    "fixed": ExitConfig(mode="fixed", depth=2),
    "margin": ExitConfig(mode="margin", theta=0.3),
    "converge": ExitConfig(mode="converge", eps=0.6),
    "accel": ExitConfig(mode="accel", eps=0.8, patience=1),
    "drop": ExitConfig(mode="margin", theta=0.3, after_exit="drop"),
    "verify": ExitConfig(mode="converge", eps=0.7, after_exit="verify"),
    "verify-margin": ExitConfig(mode="margin", theta=0.3, after_exit="verify"),
}


def written(model, rows, config, new=NEW, **settings):
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    wanted = {"max_new_tokens": new, "do_sample": False, "exit_config": config, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=mask, **wanted | settings)


def drawn(rng, vocabulary, count):
    return [[rng.randrange(1, vocabulary) for _ in range(rng.randrange(1, 12))] for _ in range(count)]


def random_model(rng):
    heads = rng.choice([1, 2, 4, 6])
    return tiny_nanbeige(
        seed=rng.randrange(10**6),
        hidden_size=rng.choice([16, 24, 32]),
        head_dim=rng.choice([6, 12, 16]),
        num_hidden_layers=rng.randrange(1, 4),
        num_attention_heads=heads,
        num_key_value_heads=rng.choice([kv for kv in (1, 2, 3) if heads % kv == 0]),
        num_loops=rng.randrange(1, 6),
        skip_loop_final_norm=rng.random() < 0.4,
        rope_parameters={"rope_type": "default", "rope_theta": rng.choice([1e4, 7e7])},
    )


def random_config(rng, after_exit):
    settings = {"min_loops": rng.choice([1, 1, 2]), "after_exit": after_exit}
    return rng.choice(
        [
            ExitConfig(mode="margin", theta=rng.uniform(0.05, 0.95), **settings),
            ExitConfig(mode="converge", eps=rng.uniform(0.2, 1.5), **settings),
            ExitConfig(mode="accel", eps=rng.uniform(0.3, 1.5), patience=1, **settings),
        ]
    )


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize(
    ("after_exit", "cases"), [("finish", 16), ("drop", 10), exhaustive("finish", 300), exhaustive("drop", 100)]
)
def test_tokens_depths_passes_and_rows_are_those_of_a_run_of_all_loops(after_exit, cases):
    rng = random.Random(f"{after_exit} {cases}")
    compared = skipped = 0
    depths_seen = set()
    for _ in range(cases):
        model = random_model(rng)
        model64, total = copy.deepcopy(model).double(), model.num_loops
        config = random_config(rng, after_exit)
        rows = drawn(rng, 61, rng.randrange(1, 4))
        outputs = written(model, rows, config)
        depths = outputs.exit_depths.tolist()
        for row, prompt in enumerate(rows):
            if after_exit == "finish":
                steps = run_all_loops(model64, prompt, config, NEW)
            else:
                steps = DroppingReference(model64, config).generate(prompt, NEW)
            for index, step in enumerate(steps):
                if step.margin < NEAR_TIE:
                    skipped += 1
                    break
                compared += 1
                depths_seen.add((step.depth, total))
                found = (int(outputs.sequences[row, index - NEW]), depths[row][index])
                assert found == (step.token, step.depth), (config, row, index)
                assert (outputs.exit_reasons[row][index] == "max_depth") == (not step.met)
        spent = [sum(row[1:]) for row in depths]
        assert outputs.loop_passes == max(spent)
        expected = sum(finish_rows(row, total) for row in depths) if after_exit == "finish" else sum(spent)
        assert outputs.loop_rows == expected
    assert compared > 10 * cases and skipped <= 0.001 * (compared + skipped) + 1
    assert any(1 < depth < total for depth, total in depths_seen)


@pytest.mark.grid(fast=3, slow=1)
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("mode", ["margin", "converge", "accel"])
def test_a_batch_of_mixed_lengths_is_each_row_alone(mode, skip):
    model = tiny_nanbeige(4, num_loops=4, skip_loop_final_norm=skip)
    rows = drawn(random.Random(mode), 61, 4)
    together = written(model, rows, MODES[mode], 16)
    for row, prompt in enumerate(rows):
        alone = written(model, [prompt], MODES[mode], 16)
        assert torch.equal(alone.sequences[0, -16:], together.sequences[row, -16:])
        assert torch.equal(alone.exit_depths[0], together.exit_depths[row])
    assert len(set(together.exit_depths.flatten().tolist())) > 1


@pytest.mark.grid(fast=2, slow=1)
@pytest.mark.parametrize(
    "config", [MODES["verify"], ExitConfig(mode="margin", theta=0.02), ExitConfig(mode="fixed", depth=1)], ids=str
)
@pytest.mark.parametrize("redraft", [False, True])
def test_verified_texts_are_those_of_full_depth(config, redraft):
    rng, fallen = random.Random(config.mode), 0
    config = replace(config, after_exit="verify", redraft=redraft)
    for _ in range(6):
        model = random_model(rng)
        rows = drawn(rng, 61, 3)
        found = written(model, rows, config, 12, output_scores=True)
        full = written(model, rows, FULL, 12, output_scores=True)
        scores = torch.stack(full.scores, 1).topk(2).values
        # one near tie may be decided otherwise
        assert float((scores[..., 0] - scores[..., 1]).min()) > NEAR_TIE
        assert torch.equal(found.sequences, full.sequences)
        assert found.loop_passes <= full.loop_passes
        fallen += int((~found.accepted).sum())
    assert fallen > 5, "the test needs drafts that fall"


@pytest.mark.parametrize(
    ("config", "draws"),
    [
        (ExitConfig(mode="fixed", depth=1, after_exit="verify"), 4_000),
        exhaustive(ExitConfig(mode="margin", theta=0.05, after_exit="verify"), 20_000),
    ],
)
def test_drawn_texts_follow_the_law_of_full_depth(config, draws):
    model, temperature = tiny_nanbeige(5, vocab_size=6, hidden_size=16, num_hidden_layers=1), 0.7
    ids, counts, accepted = torch.tensor([[1, 4, 2]]).expand(500, -1), Counter(), []
    torch.manual_seed(0)
    while counts.total() < draws:
        found = written(
            model, ids.tolist(), config, 2, do_sample=True, temperature=temperature, top_k=0, eos_token_id=None
        )
        counts.update(map(tuple, found.sequences[:, 3:].tolist()))
        accepted.append(found.accepted.float().mean())
    assert 0.05 < float(torch.stack(accepted).mean()) < 0.99, "the test needs drafts that stand and that fall"
    law = {}
    with torch.no_grad():
        first = (model(ids[:1]).logits[0, -1].double() / temperature).softmax(-1)
        for one in range(6):
            text = torch.cat([ids[:1], torch.tensor([[one]])], dim=1)
            second = (model(text).logits[0, -1].double() / temperature).softmax(-1)
            law |= {(one, two): float(first[one] * second[two]) for two in range(6)}
    cells = [(counts[text], share * draws) for text, share in law.items() if share * draws >= 5]
    rare = [text for text, share in law.items() if share * draws < 5]
    cells += [(sum(counts[text] for text in rare), sum(law[text] for text in rare) * draws)] if rare else []
    statistic = sum((seen - expected) ** 2 / max(expected, 1e-9) for seen, expected in cells)
    assert abs(statistic - (len(cells) - 1)) / math.sqrt(2 * (len(cells) - 1)) < 4


@pytest.mark.grid(fast=0, slow=1)
@needs_compiler
@pytest.mark.parametrize("skip", [False, slow(True)])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_one_graph(mode, skip, monkeypatch):
    monkeypatch.setattr(programs, "generate_code", lambda graph, examples: graph)
    model, rows = tiny_nanbeige(3, num_hidden_layers=1, skip_loop_final_norm=skip), drawn(random.Random(1), 61, 3)
    compiled, eager = (written(model, rows, MODES[mode], runner=runner) for runner in ("compile", "eager"))
    assert (compiled.runner.name, eager.runner.name) == ("compile", "eager")
    assert torch.equal(compiled.sequences, eager.sequences)
    assert torch.equal(compiled.exit_depths, eager.exit_depths)
    assert (compiled.loop_passes, compiled.loop_rows) == (eager.loop_passes, eager.loop_rows)


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize(
    ("mode", "skip"), [("margin", False), slow("verify-margin", True), exhaustive("converge", True)]
)
def test_generated_code_writes_what_the_eager_step_writes(mode, skip):
    model, rows = tiny_nanbeige(3, num_hidden_layers=1, skip_loop_final_norm=skip), drawn(random.Random(2), 61, 1)
    compiled, eager = (written(model, rows, MODES[mode], runner=runner) for runner in ("compile", "eager"))
    assert compiled.runner.name == "compile"
    assert torch.equal(compiled.sequences, eager.sequences)
    assert torch.equal(compiled.exit_depths, eager.exit_depths)


@pytest.mark.parametrize("skip", [False, True])
def test_the_engine_serves_each_request_as_it_is_alone(pocket, skip):
    model = tiny_nanbeige(9, vocab_size=len(pocket[1]), num_loops=4, skip_loop_final_norm=skip)
    rows, rules = drawn(random.Random(3), 61, 8), list(MODES.values())
    engine = Engine(model, pocket[1], "tiny", EngineLimits(max_running=4, page_size=4, kv_bytes=2**22), watch=True)
    keys = [
        engine.submit(EngineRequest(tuple(row), 10, rule, on_collapse="ignore"))
        for row, rule in zip(rows, rules, strict=True)
    ]
    found = {}
    while engine.has_work:
        found |= {key: event for key, event in engine.step() if isinstance(event, RequestOutput)}
    for key, row, rule in zip(keys, rows, rules, strict=True):
        alone = written(model, [row], rule, 10, eos_token_id=None)
        told = [(token.id, token.depth, token.reason) for token in found[key].tokens]
        expected = zip(alone.sequences[0, -10:].tolist(), alone.exit_depths[0].tolist(), strict=True)
        assert told == [(*each, why) for each, why in zip(expected, alone.exit_reasons[0], strict=True)]
        assert (found[key].passes, found[key].rows) == (alone.loop_passes, alone.loop_rows)


@pytest.mark.parametrize("skip", [False, True])
def test_statistics_are_those_of_the_states_and_no_gate_ever_leaves(skip):
    model = tiny_nanbeige(10, num_loops=4, skip_loop_final_norm=skip)
    out = written(model, drawn(random.Random(4), 61, 1), MODES["converge"], 12, output_statistics=True)
    with torch.no_grad():
        states = model(out.sequences[:, :-1], exit_config=FULL, output_loop_states=True).loop_states[:, 0, -12:]
    change = (states[1:] - states[:-1]).norm(dim=-1) / states[:-1].norm(dim=-1)  # [T - 1, new]
    told = out.loop_statistics[0, :, 1:, 0].T
    ran = ~told.isnan()
    assert int(ran.sum()) > 20
    torch.testing.assert_close(told[ran], change[ran], rtol=1e-3, atol=1e-5)
    assert float(out.loop_statistics[0, :, :, 7].nan_to_num().abs().max()) == 0.0


@pytest.mark.parametrize("skips", [False, True])
def test_readable_states_are_what_the_head_reads(skips):
    model = tiny_nanbeige(seed=3, skip_loop_final_norm=skips)
    ids = torch.tensor([[5, 9, 2, 7]])
    with torch.no_grad():
        run = model(ids, exit_config=FULL, output_loop_states=True)
        found = model.head(model.readable(run.loop_states))
    assert torch.allclose(found, run.loop_logits, atol=1e-5)
