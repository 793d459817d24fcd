import json

from sigma0.bench.harness.items import QUESTIONS, TASKS, files
from sigma0.bench.pocket.items import split_of


def test_the_committed_questions_are_those_of_the_generator():
    for name, text in files().items():
        assert (TASKS / name).read_text() == text


def test_the_questions_are_of_stories_that_no_model_was_trained_on():
    for name in files():
        rows = [json.loads(line) for line in (TASKS / name).read_text().splitlines()]
        assert len({row["id"] for row in rows}) == QUESTIONS
        assert {split_of(row["prompt"].rpartition(". ")[0] + ".") for row in rows} == {"test"}


def test_both_answers_occur():
    rows = [json.loads(line) for line in (TASKS / "micro_world_choice.jsonl").read_text().splitlines()]
    assert 10 <= sum(row["yes"] for row in rows) <= 30
