"""The gate benchmark: free runs against single generations, the rules against their thresholds, and the command."""

import json

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from typer.testing import CliRunner

import sigma0
from sigma0.bench.__main__ import app
from sigma0.bench.gate.doubt import LONGEST_ANSWER, read_doubts
from sigma0.bench.gate.measure import measure_gate
from sigma0.bench.gate.rules import compare_rules
from sigma0.bench.pocket.world import draw
from sigma0.calibrate.agreement import GRIDS
from sigma0.calibrate.bootstrap import bootstrap
from sigma0.config import ExitConfig
from tests.reference import tiny_nanbeige


def items_of(count, seed=5):
    return [draw("test", seed, index, questions=1).items[0] for index in range(count)]


def test_doubts_are_those_of_single_generations(pocket):
    model, tokenizer = pocket
    config = ExitConfig(mode="qexit", q=0.9)
    items = items_of(6)
    doubts = read_doubts(model, tokenizer, model.exit_rule(config), items)
    for number, item in enumerate(items):
        prompt = [{"role": "user", "content": item.prompt}] if number % 2 else item.prompt
        full = {"mode": "full"}
        run = sigma0.generate(model, tokenizer, prompt, max_new_tokens=LONGEST_ANSWER, exit_config=full)
        assert doubts.wrong[number] == (run.text.strip() != item.answer)
        text = prompt
        if number % 2:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(text, add_special_tokens=False).input_ids
        ids = torch.tensor([prompt_ids + [token.id for token in run.tokens]])
        with torch.no_grad():
            output = model(ids, exit_config=config, output_loop_states=True)
        span = slice(len(prompt_ids) - 1, ids.shape[1] - 1)
        chances = output.loop_logits[-1, 0, span].softmax(-1)
        scores = {
            "saturated": (~output.exit_met[0, span]).float().mean(),
            "gate survival": (1 - output.gate_logits[:, 0, span].sigmoid()).prod(0).max(),
            "entropy": (-torch.xlogy(chances, chances).sum(-1)).max(),
            "margin": 1 - (-chances.topk(2).values.diff(dim=-1)).min(),
            "length": len(prompt_ids),
        }
        for name, value in scores.items():
            assert doubts.scores[name][number] == pytest.approx(float(value), abs=1e-4), name
        top = output.loop_logits[:, 0, span].argmax(-1).T.tolist()
        assert doubts.oracle[number] == tuple(1 + path.index(path[-1]) for path in top[1:])
        assert all(late >= early for late, early in zip(doubts.settled[number], doubts.oracle[number], strict=True))


@pytest.mark.exhaustive
def test_each_rule_keeps_its_promise_on_the_split_that_chose_it(pocket):
    model, tokenizer = pocket
    rows = compare_rules(model, tokenizer, 6, "test", 0, target=0.5)
    assert set(rows) == set(GRIDS)
    for mode, row in rows.items():
        if row is not None:
            assert ExitConfig(**row.rule) in GRIDS[mode]
            assert 1 <= row.depth <= model.num_loops and row.free.n == 6
    lax, strict = rows["margin"], compare_rules(model, tokenizer, 6, "test", 0, target=1.0)["margin"]
    assert lax is not None
    assert strict is None or strict.depth >= lax.depth


@pytest.mark.parametrize(("split", "target", "named"), [("calibration", 0.9, "calibration"), ("test", 1.5, "1.5")])
def test_rules_refuse_what_makes_no_sense(pocket, split, target, named):
    with pytest.raises(ValueError, match=named):
        compare_rules(*pocket, 3, split, 0, target)


@pytest.mark.exhaustive
def test_the_report_adds_up(pocket):
    steps = []
    report = measure_gate(*pocket, "pocket", n=8, rules_n=3, on_step=steps.append)
    assert steps == sorted(steps) and steps[-1] == 2 * 8 + len(GRIDS)
    kinds = report.by_kind
    assert kinds["key"].tokens == kinds["end"].tokens == 8
    answers = kinds["key"].tokens + kinds["answer"].tokens + kinds["end"].tokens
    assert kinds["answers"].tokens == answers == sum(group.tokens for group in report.by_difficulty.values())
    assert kinds["all"].tokens == answers + kinds["prompt"].tokens
    assert sum(group.tokens for group in report.key_by_difficulty.values()) == 8
    for group in kinds.values():
        assert 1 <= group.oracle <= group.settled <= report.total_loops
    assert report.settled_saved <= report.oracle_saved < 1
    doubts = read_doubts(*pocket, pocket[0].exit_rule(pocket[0].resolve_exit_config(None)), items_of(8, seed=0))
    depths = [depth for answer in doubts.oracle[:3] for depth in answer]
    assert report.oracle_saved == pytest.approx(1 - np.mean(depths) / report.total_loops)
    assert len(report.correlations) == 8 and set(report.abstention) >= {"saturated", "entropy", "margin", "length"}


def test_one_question_is_too_few(pocket):
    with pytest.raises(ValueError, match="n 1 and rules_n 200"):
        measure_gate(*pocket, "pocket", n=1)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_command_prints_tables_and_json(monkeypatch):
    reports = []

    def once(*arguments):
        reports.append(reports[0] if reports else measure_gate(*arguments))
        return reports[-1]

    monkeypatch.setattr("sigma0.bench.gate.measure.measure_gate", once)
    arguments = ["gate", "pocket", "--n", "4", "--rules-n", "2", "--exit-config", '{"mode": "margin", "theta": 0.7}']
    found = CliRunner().invoke(app, [*arguments, "--json"])
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["rule"]["theta"] == 0.7 and report["items"] == 4
    table = CliRunner().invoke(app, arguments)
    assert table.exit_code == 0 and "AUGRC" in table.output and "settled oracle" in table.output
    assert len(reports) == 2
    assert max(len(line) for line in table.stdout.splitlines()) <= 80


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--exit-config", '{"mode": "never"}'], "full"),
        (["--n", "1"], "at least 2"),
        (["--split", "calibration"], "calibration"),
        (["--split", "dev"], "dev"),
        (["nothing"], "nothing"),
    ],
)
def test_bad_input_is_one_line(arguments, named):
    result = CliRunner().invoke(app, ["gate", *arguments])
    assert result.exit_code == 2 and named in result.output


def test_bootstrap_against_known_cases():
    data = np.array([0.0, 1.0] * 200)
    found = bootstrap(lambda drawn: float(data[drawn].mean()), 400)
    assert found is not None and found.value == 0.5
    # The standard error of the mean is 0.5 / sqrt(400).
    assert found.interval == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.01)
    assert bootstrap(lambda drawn: None, 5) is None
    with pytest.raises(ValueError, match="0 units"):
        bootstrap(lambda drawn: 1.0, 0)
    ranks = np.arange(30)
    rho = bootstrap(lambda drawn: float(spearmanr(ranks[drawn], ranks[drawn]).statistic), 30, resamples=20)
    assert rho is not None and rho.value == pytest.approx(1.0) and rho.interval == pytest.approx((1.0, 1.0))


def test_a_model_without_a_gate_is_refused(pocket):
    with pytest.raises(ValueError, match="'flat' has no exit gate to look at: take one that has, or `bench stability`"):
        measure_gate(tiny_nanbeige(0), pocket[1], "flat", n=4, rules_n=2)
