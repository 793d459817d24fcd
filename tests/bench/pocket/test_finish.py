"""Gate, threshold, model folder, evaluation, free runs and command line, mostly on a tiny untrained model."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig
from typer.testing import CliRunner

import sigma0
from sigma0 import ExitConfig
from sigma0.bench.pocket.__main__ import app
from sigma0.bench.pocket.data import collate, encode, fit
from sigma0.bench.pocket.prompts import Outcome, check_people, evaluate, free_runs, micro_world, people, summarize
from sigma0.bench.pocket.recipe import Recipe, Recurrence, build_model
from sigma0.bench.pocket.train import THRESHOLDS, Readouts, choose_threshold, collect, finish, fit_gate, loop_loss
from sigma0.bench.pocket.world import draw
from sigma0.calibrate.bootstrap import share
from sigma0.calibrate.prompts import read_prompts
from sigma0.models.load import load

TINY = Recipe(batch=2, width=16, intermediate=24, heads=2, loops=3)
RAVEN = replace(TINY, width=32, recurrence=Recurrence(mean=2.0))


def test_the_gate_learns_when_more_loops_change_nothing(tokenizer):
    model = build_model(TINY, tokenizer)
    draw_from = torch.Generator().manual_seed(0)
    states = torch.randn(3, 2000, 16, generator=draw_from)
    # One direction of the state tells whether the token is settled; at the last loop, whether it is right.
    first = torch.randint(0, 3, (2000,), generator=draw_from)
    reported = torch.arange(3)[:, None] >= first
    reported[-1] = torch.rand(2000, generator=draw_from) < 0.5
    states[..., 5] = torch.where(reported, states[..., 5].abs(), -states[..., 5].abs())
    settled, right = reported.clone(), reported
    settled[-1] = True
    answer = torch.arange(2000)
    loss = fit_gate(model, Readouts(states, right, settled, answer))
    assert loss < 0.1
    logits = model.model.early_exit_gate(states).squeeze(-1)
    # At the last loop the target is the right token, not agreement with itself.
    assert ((logits > 0) == right)[-1].float().mean() > 0.93
    # Leaving too early costs more than staying, so that mistake is the rarer one.
    early, late = ((logits > 0) & ~reported).sum(), ((logits < 0) & reported).sum()
    assert early < late / 5
    tried = choose_threshold(model, Readouts(states, right, settled, answer))
    depths = [depth for _, depth, *_ in tried]
    assert depths == sorted(depths) and depths[0] < depths[-2] and (tried[-1][0], depths[-1]) == (1.0, 3.0)
    ((_, depth, fidelity, agreement, _),) = (entry for entry in tried if entry[-1])
    assert fidelity >= 0.99 and agreement >= 0.985 and depth < 2.2
    assert all(entry[2] < 0.99 or entry[3] < 0.985 for entry in tried if entry[1] < depth)
    # nothing is good enough: q is 1
    never = choose_threshold(model, Readouts(states, right, torch.zeros_like(settled), answer))
    assert [entry[0] for entry in never if entry[-1]] == [1.0]


def test_collect_reads_answers_of_the_asked_scenes(tokenizer):
    model = build_model(TINY, tokenizer)
    readouts, tail = (collect(model, tokenizer, TINY, "calibration", range(first, 70)) for first in (10, 60))
    assert readouts.states.shape[0] == 3 and readouts.states.shape[2] == 16 and readouts.same[-1].all()
    answers = readouts.answer[readouts.answer >= 0]
    assert answers.diff().unique().tolist() == [0, 1] and answers[0] == 0
    states, last = (entry.states[:, entry.answer >= 0] for entry in (readouts, tail))
    torch.testing.assert_close(states[:, -last.shape[1] :], last)
    # A fifth of the tokens of prompts is kept as well.
    rows = [fit(tokenizer, draw("calibration", 0, n), n % 2 == 1, TINY.length) for n in range(10, 70)]
    prompts = sum(row.answer[1:].count(False) for row in rows)
    assert (readouts.answer < 0).sum().item() == pytest.approx(prompts / 5, rel=0.1)


@pytest.fixture(scope="module", params=["ouro", "raven"])
def folder(tokenizer, tmp_path_factory, request):
    recipe = TINY if request.param == "ouro" else RAVEN
    out = tmp_path_factory.mktemp(request.param)
    tried = finish(build_model(recipe, tokenizer), tokenizer, recipe, out, range(20), range(20))
    assert len(tried) == (len(THRESHOLDS) if request.param == "ouro" else 0)
    return out


def test_the_folder_holds_what_a_loader_needs(folder):
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["pad_token_id"], generation["bos_token_id"], generation["eos_token_id"]) == (0, 1, 2)
    assert generation.get("_from_model_config") is not True
    assert GenerationConfig.from_pretrained(folder).exit_config == generation["exit_config"]
    model, _ = load(str(folder), device="cpu", dtype="float32")
    exits = model.resolve_exit_config(None)
    assert model.num_loops == 3 and exits.mode == ("qexit" if model.has_gate else "full")
    assert exits.q is None or 0 < exits.q <= 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [TINY, RAVEN], ids=["ouro", "raven"])
def test_evaluation_is_what_runs_that_stop_at_each_loop_write(tokenizer, recipe):
    """Of one that knows a few answers by heart; of a Raven too, whose coda reads what earlier tokens' codas left."""
    model = build_model(recipe, tokenizer)
    known = [encode(tokenizer, [draw("test", 0, n, questions=1).items[0]], n % 2 == 1) for n in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for step in range(60):
        optimizer.zero_grad()
        loop_loss(model, collate(known, pad=0), recipe, recipe.steps - 1 - step)[0].backward()
        optimizer.step()
    model.eval()
    outcomes = evaluate(model, tokenizer, model.exit_rule(ExitConfig(mode="converge", eps=0.3)), 6)
    assert [outcome.item for outcome in outcomes] == [draw("test", 0, n, questions=1).items[0] for n in range(6)]
    assert [outcome.chat for outcome in outcomes] == [False, True] * 3
    assert 0 < sum(outcome.right[-1] for outcome in outcomes) < 6
    for outcome in outcomes:
        encoded = encode(tokenizer, [outcome.item], outcome.chat)
        start = encoded.answer.index(True)
        stop = start + sum(encoded.answer)
        assert 1 <= outcome.exit_depth <= 3
        for loop in range(1, 4):
            ids, depth = encoded.ids[:start], ExitConfig(mode="fixed", depth=loop)
            while len(ids) < stop:
                ids.append(int(model(torch.tensor([ids]), exit_config=depth, use_cache=False).logits[0, -1].argmax()))
            assert outcome.right[loop - 1] == (ids == encoded.ids[:stop])


@pytest.mark.slow
def test_what_people_ask_is_counted_by_kind_and_loop():
    """Of the shipped model: as it writes a reply word by word at each depth, without the library's decoding."""
    model, tokenizer = load("pocket", device="cpu", dtype="float32")
    groups = check_people(model, tokenizer, 8, seed=1)
    asked = list(people(8, seed=1))
    right = [0] * model.num_loops
    for entry in asked:
        content = entry.prompt.content
        if not isinstance(content, str):
            content = tokenizer.apply_chat_template(content, tokenize=False, add_generation_prompt=True)
        for loop in range(model.num_loops):
            ids, depth = tokenizer(content)["input_ids"], ExitConfig(mode="fixed", depth=loop + 1)
            start = len(ids)
            while (len(ids) < start + 24 and ids[-1] != tokenizer.eos_token_id) or len(ids) == start:
                ids.append(int(model(torch.tensor([ids]), exit_config=depth, use_cache=False).logits[0, -1].argmax()))
            right[loop] += tokenizer.decode(ids[start:], skip_special_tokens=True).strip() == entry.prompt.answer
    whole = groups["all"]
    assert whole["loops"] == [count / 8 for count in right] and 0 < right[-1] <= 8 and whole["n"] == 8
    assert len({json.dumps(entry.prompt.content) for entry in people(400)}) == 400
    assert sum(groups[kind]["n"] for kind in ("first turn", "second turn", "later turns") if kind in groups) == 8
    doors = [(row["open"], row["open_right"]) for row in groups.values()]
    assert all(0 <= share <= 1 for pair in doors for share in pair) and any(opened for opened, _ in doors)


def test_groups_count_each_question_once():
    items = [draw("test", 0, n, questions=1).items[0] for n in range(40)]
    outcomes = [
        Outcome(item, n % 2 == 1, (n % 4 == 0, n % 2 == 0, True), n % 2 == 0, 2.5) for n, item in enumerate(items)
    ]
    groups = summarize(outcomes)
    binary = sum(item.binary for item in items)
    expected = {"open, difficulty": 40 - binary, "open, half": 40 - binary, "yes or no, difficulty": binary}
    for name, part in groups.items():
        assert sum(group["n"] for group in part.values()) == expected.get(name, 40)
    assert groups["half"]["hard"]["n"] == sum(item.difficulty > 3 for item in items)
    whole = groups["all"]["all"]
    assert whole["loops"] == [0.25, 0.5, 1.0] and whole["exit"] == 0.5 and whole["exit_depth"] == 2.5
    assert groups["form"]["plain"]["loops"] == [0.5, 1.0, 1.0]
    assert whole["intervals"][1] == whole["exit_interval"] == share(20, 40).interval


def test_the_command_line_evaluates(folder):
    result = CliRunner().invoke(app, ["eval", str(folder), "--n", "10", "--free", "2", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["groups"]["all"]["all"]["n"] == 10 and figures["split"] == "test"
    table = CliRunner().invoke(app, ["eval", str(folder), "--n", "10", "--free", "2"])
    assert table.exit_code == 0 and "read at loop" in table.output
    assert max(len(line) for line in table.stdout.splitlines()) <= 80


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--n", "0"], "--n"),
        (["--free", "0"], "--free"),
        (["--n", "1", "--free", "3"], "--free 3"),
        (["--split", "dev"], "dev"),
    ],
)
def test_bad_numbers_are_one_line(arguments, named):
    result = CliRunner().invoke(app, ["eval", "pocket", *arguments])
    assert result.exit_code == 2 and named in result.output


@pytest.mark.slow
def test_the_command_line_trains_in_pieces(tmp_path):
    arguments = ["train", "pocket-stories", "--out", str(tmp_path), "--minutes", "0"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "run again" in result.output
    assert (tmp_path / "state.safetensors").exists() and not (tmp_path / "final").exists()


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
