"""Gate, threshold, model folder, evaluation and command line, all on a tiny untrained model."""

import json
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from sigma0 import ExitConfig
from sigma0.bench.pocket.__main__ import app
from sigma0.bench.pocket.data import collate, encode, fit
from sigma0.bench.pocket.evaluate import Outcome, evaluate, summarize
from sigma0.bench.pocket.finish import finish
from sigma0.bench.pocket.gate import Readouts, choose_threshold, collect, exit_depths, fit_gate
from sigma0.bench.pocket.recipe import Recipe, build_ouro
from sigma0.bench.pocket.train import loop_loss
from sigma0.bench.pocket.world import draw
from sigma0.calibrate.bootstrap import share
from sigma0.models.load import load_tokenizer
from sigma0.models.ouro import OuroForCausalLM

TINY = Recipe(batch=2, width=16, intermediate=24, heads=2, loops=3)


def test_exit_depths_equal_the_definition() -> None:
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(0)) - 1
    for q in (0.05, 0.3, 0.6, 0.9, 1.0):
        for place, depth in enumerate(exit_depths(logits, q).tolist()):
            stay, total, expected = 1.0, 0.0, 6
            for loop, chance in enumerate(logits[:, place].sigmoid().tolist(), start=1):
                total += chance * stay
                stay *= 1 - chance
                if total >= q:
                    expected = loop
                    break
            assert depth == expected


def test_the_gate_learns_when_more_loops_change_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_ouro(TINY, tokenizer)
    draw_from = torch.Generator().manual_seed(0)
    states = torch.randn(3, 2000, 16, generator=draw_from)
    # One direction of the state tells whether the token is settled; at the last loop, whether it is right.
    first = torch.randint(0, 3, (2000,), generator=draw_from)
    told = torch.arange(3)[:, None] >= first
    told[-1] = torch.rand(2000, generator=draw_from) < 0.5
    states[..., 5] = torch.where(told, states[..., 5].abs(), -states[..., 5].abs())
    settled, right = told.clone(), told
    settled[-1] = True
    answer = torch.arange(2000)
    loss = fit_gate(model, Readouts(states, right, settled, answer))
    assert loss < 0.1
    logits = model.model.early_exit_gate(states).squeeze(-1)
    # At the last loop the target is the right token, not agreement with itself.
    assert ((logits > 0) == right)[-1].float().mean() > 0.93
    # Leaving too early costs more than staying, so that mistake is the rarer one.
    early, late = ((logits > 0) & ~told).sum(), ((logits < 0) & told).sum()
    assert early < late / 5
    chosen, tried = choose_threshold(model, Readouts(states, right, settled, answer))
    assert chosen.fidelity >= 0.99 and chosen.mean_depth < 2.2
    assert [each.mean_depth for each in tried] == sorted(each.mean_depth for each in tried)
    assert tried[-1].q == 1.0


def test_collect_reads_answers_of_the_asked_scenes(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_ouro(TINY, tokenizer)
    readouts = collect(model, tokenizer, "calibration", 0, 10, 60, TINY.length)
    assert readouts.states.shape[0] == 3 and readouts.states.shape[2] == 16
    assert readouts.same[-1].all()
    answers = readouts.answers()
    assert answers.answer.tolist() == sorted(answers.answer.tolist())
    assert set(answers.answer.tolist()) == set(range(int(answers.answer[-1]) + 1))
    tail = collect(model, tokenizer, "calibration", 0, 60, 10, TINY.length)
    torch.testing.assert_close(answers.states[:, -tail.answers().states.shape[1] :], tail.answers().states)
    # A fifth of the tokens of prompts is kept as well.
    rows = [fit(tokenizer, draw("calibration", 0, n), n % 2 == 1, TINY.length) for n in range(10, 70)]
    prompts = sum(row.answer[1:].count(False) for row in rows)
    assert (readouts.answer < 0).sum().item() == pytest.approx(prompts / 5, rel=0.1)


@pytest.fixture(scope="module")
def folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pocket")
    finish(build_ouro(TINY, tokenizer), tokenizer, TINY, out, fit_scenes=20, calibration_scenes=20)
    return out


def test_the_folder_holds_what_a_loader_needs(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["pad_token_id"], generation["bos_token_id"], generation["eos_token_id"]) == (0, 1, 2)
    assert generation["exit_config"]["mode"] == "qexit"
    assert 0 < generation["exit_config"]["q"] <= 1
    assert generation.get("_from_model_config") is not True
    assert GenerationConfig.from_pretrained(folder).exit_config == generation["exit_config"]
    model = OuroForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.total_ut_steps == 3


@pytest.mark.slow
def test_evaluation_equals_greedy_writing_token_by_token(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A model that knows a few answers by heart is right in the evaluation exactly where it writes them itself."""
    model = OuroForCausalLM.from_pretrained(folder, dtype=torch.float32)
    known = [encode(tokenizer, [draw("test", 0, n, questions=1).items[0]], n % 2 == 1) for n in range(4)]
    batch = collate(known, pad=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loop_loss(model, batch, 20.0)[0].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.eval()
    outcomes = evaluate(model, load_tokenizer(str(folder)), model.exit_rule(ExitConfig(q=0.5)), 12)
    assert [outcome.item for outcome in outcomes] == [draw("test", 0, n, questions=1).items[0] for n in range(12)]
    assert [outcome.chat for outcome in outcomes] == [False, True] * 6
    assert 0 < sum(outcome.right[-1] for outcome in outcomes) < 12
    for outcome in outcomes:
        encoded = encode(tokenizer, [outcome.item], outcome.chat)
        start = encoded.answer.index(True)
        stop = start + sum(encoded.answer)
        for loop in range(3):
            ids = encoded.ids[:start]
            with torch.no_grad():
                while len(ids) < stop:
                    state = model.model(input_ids=torch.tensor([ids]), use_cache=False).loop_states[loop, 0, -1]
                    ids.append(int(model.lm_head(state).argmax()))
            assert outcome.right[loop] == (ids == encoded.ids[:stop])


def test_groups_count_each_question_once() -> None:
    items = [draw("test", 0, n, questions=1).items[0] for n in range(40)]
    outcomes = [
        Outcome(item, n % 2 == 1, (n % 4 == 0, n % 2 == 0, True), n % 2 == 0, 2.5) for n, item in enumerate(items)
    ]
    groups = summarize(outcomes)
    binary = sum(item.binary for item in items)
    expected = {"open, difficulty": 40 - binary, "open, half": 40 - binary, "yes or no, difficulty": binary}
    for name, part in groups.items():
        assert sum(group.n for group in part.values()) == expected.get(name, 40)
    assert groups["half"]["hard"].n == sum(item.difficulty > 3 for item in items)
    whole = groups["all"]["all"]
    assert whole.loops == (0.25, 0.5, 1.0) and whole.exit == 0.5 and whole.exit_depth == 2.5
    assert groups["form"]["plain"].loops == (0.5, 1.0, 1.0)
    assert whole.intervals[1] == share(20, 40).interval


def test_the_command_line_evaluates(folder: Path) -> None:
    result = CliRunner().invoke(app, ["eval", str(folder), "--n", "10", "--free", "2", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["groups"]["all"]["all"]["n"] == 10 and figures["split"] == "test"
    table = CliRunner().invoke(app, ["eval", str(folder), "--n", "10", "--free", "2"])
    assert table.exit_code == 0 and "read at loop" in table.output
    assert max(len(line) for line in table.stdout.splitlines()) <= 80


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--n", "0"], "--n"),
        (["--free", "0"], "--free"),
        (["--n", "1", "--free", "3"], "--free 3"),
        (["--split", "dev"], "dev"),
    ],
)
def test_bad_numbers_are_one_line(folder: Path, arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["eval", str(folder), *arguments])
    assert result.exit_code == 2 and named in result.output


@pytest.mark.slow
def test_the_command_line_trains_in_pieces(tmp_path: Path) -> None:
    arguments = ["train", "--out", str(tmp_path), "--minutes", "0"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "run again" in result.output
    assert (tmp_path / "state.safetensors").exists() and not (tmp_path / "final").exists()
