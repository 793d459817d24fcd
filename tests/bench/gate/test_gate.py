import numpy as np
import pytest
import torch

import sigma0
from sigma0.bench.gate.doubt import LONGEST_ANSWER, read_doubts
from sigma0.bench.gate.measure import agreement, compare_rules, measure_gate, read_items
from sigma0.bench.pocket.data import encode
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.pocket.world import draw
from sigma0.calibrate.agreement import GRIDS
from sigma0.config import ExitConfig
from tests.bench.running import bench, refused, reported
from tests.reference import tiny_nanbeige


def test_kinds_follow_the_text(pocket):
    model, tokenizer = pocket
    items = [draw("test", 3, index, questions=1).items[0] for index in range(27)]
    rules = {"full": model.exit_rule(ExitConfig(mode="full")), "early": model.exit_rule(ExitConfig(q=0.5))}
    readings, kinds = read_items(model, tokenizer, rules, items)
    for number, item in enumerate(items):
        encoded = encode(tokenizer, [item], number % 2 == 1)
        ids, current = encoded.ids[1:], kinds[readings.text == number].tolist()
        assert current.count("key") == current.count("end") == 1
        assert item.key.endswith(tokenizer.decode([ids[current.index("key")]]).strip())
        assert ids[current.index("end")] == tokenizer.eos_token_id
        assert [kind != "prompt" for kind in current] == encoded.answer[1:]
    assert agreement(readings, "full")["value"] == 1.0
    keys = kinds == "key"
    early, same = agreement(readings, "early", keys), readings.same_at(readings.exits["early"])
    assert early["value"] == pytest.approx(same[keys].mean())
    assert early["interval"][0] <= early["value"] <= early["interval"][1]


def test_doubts_are_those_of_single_generations(pocket):
    model, tokenizer = pocket
    config = ExitConfig(mode="qexit", q=0.9)
    prompts = list(micro_world(6, seed=5))
    doubts = read_doubts(model, tokenizer, model.exit_rule(config), prompts)
    for known, doubt in zip(prompts, doubts, strict=True):
        full, text = {"mode": "full"}, known.content
        run = sigma0.generate(model, tokenizer, text, max_new_tokens=LONGEST_ANSWER, exit_config=full)
        assert doubt.wrong == (run.text.strip() != known.answer)
        if not isinstance(text, str):
            text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
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
            assert doubt.scores[name] == pytest.approx(float(value), abs=1e-4), name
        top = output.loop_logits[:, 0, span].argmax(-1).T.tolist()
        assert doubt.oracle == tuple(1 + path.index(path[-1]) for path in top[1:])
        assert all(late >= early for late, early in zip(doubt.settled, doubt.oracle, strict=True))


@pytest.mark.exhaustive
def test_each_rule_keeps_its_promise_on_the_split_that_chose_it(pocket):
    model, tokenizer = pocket
    rows = compare_rules(model, tokenizer, 6, "test", 0, target=0.5)
    assert set(rows) == set(GRIDS)
    for mode, row in rows.items():
        if row is not None:
            assert ExitConfig(**row["rule"]) in GRIDS[mode]
            assert 1 <= row["depth"] <= model.num_loops and row["free"]["n"] == 6
    lax, strict = rows["margin"], compare_rules(model, tokenizer, 6, "test", 0, target=1.0)["margin"]
    assert lax is not None
    assert strict is None or strict["depth"] >= lax["depth"]


def test_a_target_that_is_no_share_is_refused(pocket):
    with pytest.raises(ValueError, match=r"1\.5"):
        compare_rules(*pocket, 3, "test", 0, target=1.5)


@pytest.mark.exhaustive
def test_the_command_prints_a_report_that_adds_up_and_tables(pocket, monkeypatch):
    made, steps = [], []

    def once(*arguments):
        made.append(made[0] if made else measure_gate(*arguments[:-1], steps.append))
        return made[-1]

    monkeypatch.setattr("sigma0.bench.gate.measure.measure_gate", once)
    arguments = ["gate", "pocket", "--n", "8", "--rules-n", "3", "--exit-config", '{"mode": "margin", "theta": 0.7}']
    report = reported(*arguments)
    table = bench(*arguments).stdout
    assert "AUGRC" in table and "settled oracle" in table
    assert len(made) == 2 and max(map(len, table.splitlines())) <= 80
    assert report["rule"]["theta"] == 0.7 and report["items"] == 8
    assert steps == sorted(steps) and steps[-1] == 2 * 8 + len(GRIDS)
    kinds = report["by_kind"]
    tokens = {kind: group["tokens"] for kind, group in kinds.items()}
    assert tokens["key"] == tokens["end"] == 8 and tokens["all"] == tokens["answers"] + tokens["prompt"]
    assert tokens["answers"] == sum(group["tokens"] for group in report["by_difficulty"].values())
    assert sum(group["tokens"] for group in report["key_by_difficulty"].values()) == 8
    for group in kinds.values():
        assert 1 <= group["oracle"] <= group["settled"] <= report["total_loops"]
    assert report["settled_saved"] <= report["oracle_saved"] < 1
    doubts = read_doubts(*pocket, pocket[0].exit_rule(pocket[0].resolve_exit_config(None)), list(micro_world(3)))
    depths = [depth for doubt in doubts for depth in doubt.oracle]
    assert report["oracle_saved"] == pytest.approx(1 - np.mean(depths) / report["total_loops"])
    assert len(report["correlations"]) == 8 and set(report["abstention"]) >= {"saturated", "entropy", "length"}


def test_a_model_without_a_gate_is_refused(pocket):
    with pytest.raises(ValueError, match="'flat' has no exit gate to look at: take one that has, or `bench stability`"):
        measure_gate(tiny_nanbeige(0), pocket[1], "flat", n=4, rules_n=2)


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
    assert named in refused("gate", *arguments)
