"""Free runs against sums made here from single generations, and the questions as prompts."""

import json

import pytest
from typer.testing import CliRunner

import sigma0
from sigma0.bench.pocket.__main__ import app
from sigma0.bench.pocket.prompts import free_runs, micro_world
from sigma0.bench.pocket.world import draw
from sigma0.calibrate.prompts import read_prompts


def test_figures_are_ratios_of_sums(pocket):
    model, tokenizer = pocket
    runs = free_runs(model, tokenizer, 4, "test", 7)
    early, full = [], []
    for index, prompt in enumerate(micro_world(4, "test", 7)):
        item = draw("test", 7, index, questions=1).items[0]
        assert prompt.answer == item.answer
        assert prompt.content == ([{"role": "user", "content": item.prompt}] if index % 2 else item.prompt)
        early.append(sigma0.generate(model, tokenizer, prompt.content, max_new_tokens=24))
        full.append(sigma0.generate(model, tokenizer, prompt.content, max_new_tokens=24, exit_config={"mode": "full"}))
    whole = model.num_loops * sum(len(run.tokens) - 1 for run in early)
    depths = sum(token.depth for run in early for token in run.tokens[1:])
    assert runs["passes_saved"] == pytest.approx(1 - sum(run.loop_passes for run in early) / whole)
    assert runs["depth_saved"] == pytest.approx(runs["passes_saved"]) == pytest.approx(1 - depths / whole)
    assert runs["rows_saved"] == pytest.approx(1 - sum(run.loop_rows for run in early) / whole)
    answers = [prompt.answer for prompt in micro_world(4, "test", 7)]
    right = [sum(run.text.strip() == known for run, known in zip(of, answers, strict=True)) / 4 for of in (early, full)]
    assert [runs["right"], runs["right_at_full_depth"]] == right
    assert runs["same"] == sum(one.text == other.text for one, other in zip(early, full, strict=True)) / 4


def test_the_command_prints_what_read_prompts_reads_in_forms_where_that_is_wanted(tmp_path):
    result = CliRunner().invoke(app, ["prompts", "--n", "5", "--split", "calibration", "--seed", "3"])
    (tmp_path / "q.jsonl").write_text(result.stdout)
    assert read_prompts(tmp_path / "q.jsonl") == list(micro_world(5, "calibration", 3))
    assert CliRunner().invoke(app, ["prompts", "--split", "none"]).exit_code == 2
    for more, formed in ((["--forms", "1"], True), ([], False)):
        lines = CliRunner().invoke(app, ["prompts", "--n", "60", *more]).stdout.splitlines()
        answers = [json.loads(line)["answer"] for line in lines]
        assert len(answers) == 60 and any(answer.startswith('{"L1"') for answer in answers) == formed
