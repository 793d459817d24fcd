"""Questions as prompts for other benchmarks."""

from typer.testing import CliRunner

from sigma0.bench.pocket.__main__ import app
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.pocket.world import draw
from sigma0.calibrate.prompts import read_prompts


def test_every_other_question_is_a_chat():
    found = list(micro_world(4, "test", 7))
    for index, prompt in enumerate(found):
        item = draw("test", 7, index, questions=1).items[0]
        content = [{"role": "user", "content": item.prompt}] if index % 2 else item.prompt
        assert prompt.content == content and prompt.answer == item.answer


def test_the_command_prints_what_read_prompts_reads(tmp_path):
    result = CliRunner().invoke(app, ["prompts", "--n", "5", "--split", "calibration", "--seed", "3"])
    assert result.exit_code == 0
    (tmp_path / "q.jsonl").write_text(result.stdout)
    assert read_prompts(tmp_path / "q.jsonl") == list(micro_world(5, "calibration", 3))
    assert CliRunner().invoke(app, ["prompts", "--split", "none"]).exit_code == 2
