"""A cut decoder is its teacher where nothing is left out; its training resumes; its text follows the chat template."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import sigma0
from sigma0.bench.retrofit.__main__ import BIG_BENCH, app
from sigma0.bench.retrofit.text import read_text, sample_rows, turns, write_text
from sigma0.bench.retrofit.train import HELD_OUT, LOG, Recipe, TeacherStates, agreement, losses, perplexities, train
from sigma0.bench.speed.peer import Stock
from sigma0.models.retrofit import Cut, retrofitted

POCKET = Path(sigma0.__file__).parent / "checkpoints" / "pocket"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(POCKET)


def llama(vocabulary=50, layers=6, **settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = LlamaConfig(
        vocab_size=vocabulary, num_hidden_layers=layers, **sizes, max_position_embeddings=128, **settings
    )
    # of random weights as large as trained ones: else every layer is close to nothing
    config.initializer_range = 0.3
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_with_one_loop_and_no_layer_left_out_it_is_the_teacher(tied):
    teacher = llama(tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 500.0}).double()
    student = retrofitted(teacher, Cut(2, 3, 1, 1)).double()
    ids = torch.randint(50, (2, 17))
    torch.testing.assert_close(student(ids).logits, teacher(ids).logits, rtol=1e-9, atol=1e-9)


def test_a_state_begins_as_the_teachers_after_as_many_layers():
    teacher = llama().double()
    student = retrofitted(teacher, Cut(1, 2, 1, 2)).double()
    ids = torch.randint(50, (1, 9))
    states = student.transformer(input_ids=ids, use_cache=False).loop_states
    hidden = teacher.model(input_ids=ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(states[0], hidden[3], rtol=1e-9, atol=1e-9)
    assert Cut(1, 2, 1, 2).stands_for(6) == [3, 5]


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9), st.integers(1, 30))
def test_loops_stand_for_layers_up_to_where_the_coda_begins(prelude, core, coda, loops, layers):
    cut = Cut(prelude, core, coda, loops)
    assert Cut.parse(str(cut)) == cut
    middle = layers - prelude - coda
    if coda == 0 or core > middle or loops * core > 2 * middle:
        with pytest.raises(ValueError, match=str(cut)):
            cut.stands_for(layers)
        return
    places = [prelude, *cut.stands_for(layers)]
    assert places == sorted(places) and places[-1] == layers - coda


@pytest.mark.parametrize("text", ["", "8/8/6", "8/8x2", "a/b/cx2", "1/2/3/4x5"])
def test_what_is_no_cut_is_refused_by_name(text):
    with pytest.raises(ValueError, match="PRELUDE/CORE/CODAxLOOPS"):
        Cut.parse(text)


@pytest.mark.parametrize(("settings", "word"), [({"attention_bias": True}, "biases"), ({"hidden_act": "gelu"}, "gelu")])
def test_what_a_raven_has_no_place_for_is_refused(settings, word):
    with pytest.raises(ValueError, match=word):
        retrofitted(llama(**settings), Cut(2, 2, 2, 1))


def test_bad_numbers_and_other_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"above 0, got nan"):
        Recipe(Cut(2, 2, 2, 1), rate=float("nan"))
    text = torch.full((HELD_OUT + 2, 4), 50)
    with pytest.raises(ValueError, match="token 50, the teacher a vocabulary of 50"):
        train(llama(), text, Recipe(Cut(2, 2, 2, 1), batch=2), tmp_path)
    (tmp_path / "rows.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="is no file of rows"):
        read_text(tmp_path / "rows.safetensors")


def test_perplexity_is_that_of_the_mean_loss_over_tokens_and_agreement_that_of_the_greedy_ones():
    teacher = llama()
    student = retrofitted(teacher, Cut(2, 2, 2, 1))
    rows = torch.randint(50, (3, 12))
    rows[1, 5:] = -1
    losses = []
    for row in rows:
        ids = row[row >= 0][None]
        losses += torch.nn.functional.cross_entropy(teacher(ids).logits[0, :-1], ids[0, 1:], reduction="none").tolist()
    expected = torch.tensor(losses).double().mean().exp().item()
    states_of = TeacherStates(teacher, rows, [2, 4], None)
    assert perplexities(student, states_of, 3, batch=2) == pytest.approx([expected, expected], rel=1e-4)
    assert agreement(student, states_of, 3, batch=2) == [1.0]
    student.transformer.core_block[0].mlp.proj.weight.data.normal_()
    logits = [model(rows.clamp_min(0)).logits[rows >= 0].argmax(-1) for model in (student, teacher)]
    share = (logits[0] == logits[1]).double().mean().item()
    assert agreement(student, states_of, 3, batch=2) == pytest.approx([share], abs=1e-4) and 0 < share < 1


@pytest.mark.parametrize("is_kept", [False, True])
def test_states_of_a_teacher_are_those_of_its_rows_whatever_the_batch(tmp_path, is_kept):
    teacher = llama()
    text = torch.randint(50, (4, 12), dtype=torch.int32)
    text[1, 5:] = -1
    text[2, 9:] = -1
    path = tmp_path / "states.bin" if is_kept else None
    states_of = TeacherStates(teacher, text, [2, 5], path)
    for numbers in ([2, 1], [3, 2], [1, 2, 0]):
        rows, states = states_of(numbers)
        assert torch.equal(rows, text[numbers, : rows.shape[1]]) and (rows >= 0).any(0).all()
        for place, number in enumerate(numbers):
            ids = text[number][text[number] >= 0][None]
            output = teacher.model(input_ids=ids, output_hidden_states=True)
            expected = torch.cat([output.hidden_states[2], output.hidden_states[5], output.last_hidden_state])
            torch.testing.assert_close(states[:, place, : ids.shape[1]], expected, rtol=1e-4, atol=1e-4)
            # to the bit, since a run that goes on may have another row computed first
            assert not is_kept or torch.equal(states[:, place, : ids.shape[1]], expected)
    if path is not None:
        teacher.model.norm.weight.data.zero_()
        assert torch.equal(TeacherStates(teacher, text, [2, 5], path)([1, 2, 0])[1], states)


def test_the_loss_is_that_of_the_whole_models():
    teacher, cut = llama(), Cut(1, 2, 1, 2)
    student = retrofitted(teacher, cut)
    student.transformer.adapter.weight.data.normal_(std=0.2)
    text = torch.randint(50, (2, 9), dtype=torch.int32)
    text[1, 6:] = -1
    rows, states = TeacherStates(teacher, text, [1, *cut.stands_for(6)], None)([0, 1])
    for seed in range(6):
        distance, divergence = losses(student, rows, states, Random(seed))
        output = student.transformer(input_ids=rows.clamp_min(0), num_loops=len(distance), use_cache=False)
        goals = teacher.model(input_ids=rows.clamp_min(0), output_hidden_states=True).hidden_states
        real = rows >= 0
        for number, layer in enumerate((3, 5)[: len(distance)]):
            apart = (output.loop_states[number] - goals[layer])[real].square().sum(1)
            expected = (apart / goals[layer][real].square().sum(1)).mean()
            torch.testing.assert_close(distance[number], expected, rtol=1e-4, atol=1e-6)
        wanted = teacher(input_ids=rows.clamp_min(0)).logits[real].log_softmax(-1)
        read = student.lm_head(output.last_hidden_state)[real].log_softmax(-1)
        expected = (wanted.exp() * (wanted - read)).sum(-1).mean()
        torch.testing.assert_close(divergence, expected, rtol=1e-4, atol=1e-6)


class KilledError(Exception):
    pass


def kill(report):
    if report.step == 2:
        raise KilledError


def test_a_killed_run_goes_on_to_the_bits_of_a_whole_one(tmp_path):
    teacher, text = llama(), torch.randint(50, (HELD_OUT + 5, 10), dtype=torch.int32)
    text[3::4, 7:] = -1
    recipe = Recipe(Cut(2, 1, 1, 3), batch=2, steps=4, warmup=2, eval_every=2)
    whole = train(teacher, text, recipe, tmp_path / "whole")
    with pytest.raises(KilledError):
        train(teacher, text, recipe, tmp_path / "killed", on_step=kill)
    assert train(teacher, text, recipe, tmp_path / "killed", minutes=0.0) is None
    resumed = train(teacher, text, recipe, tmp_path / "killed")
    begun = dict(retrofitted(teacher, recipe.cut).named_parameters())
    for (name, expected), (_, weight) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(expected, weight), name
        learns = name.startswith(("transformer.adapter", "transformer.core_block"))
        assert torch.equal(expected, begun[name]) != learns, name
    assert (tmp_path / "whole" / LOG).read_text() == (tmp_path / "killed" / LOG).read_text()
    with pytest.raises(ValueError, match="other settings"):
        train(teacher, text.roll(1, 0), recipe, tmp_path / "whole")
    with pytest.raises(ValueError, match="other settings"):
        train(teacher, text, Recipe(Cut(2, 1, 1, 2), batch=2, steps=4), tmp_path / "whole")


def test_what_a_loop_learns_brings_it_nearer(tmp_path):
    teacher, text = llama(), torch.randint(50, (HELD_OUT + 16, 16), dtype=torch.int32)
    reports = []
    recipe = Recipe(Cut(1, 2, 1, 2), batch=8, steps=30, rate=3e-3, warmup=2, eval_every=30)
    train(teacher, text, recipe, tmp_path, on_step=reports.append)
    looks = [report.perplexity for report in reports if report.perplexity is not None]
    assert looks[0][0] == looks[-1][0]
    full = [[report.divergence for report in part if len(report.state) == 2] for part in (reports[:8], reports[-8:])]
    assert sum(full[1]) / len(full[1]) < 0.8 * sum(full[0]) / len(full[0])


def test_both_turns_are_drawn_and_the_template_stands_between(tokenizer):
    teacher = llama(len(tokenizer))
    rows = sample_rows(teacher, tokenizer, 24, 96, 3, 1.0)
    assert torch.equal(rows, sample_rows(teacher, tokenizer, 24, 96, 3, 1.0))
    assert not torch.equal(rows, sample_rows(teacher, tokenizer, 24, 96, 4, 1.0))
    turns = [{"role": "user", "content": "USER"}]
    before, after = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True).split("USER")
    ended = 0
    for row in rows.tolist():
        ids = row[: row.index(-1)] if -1 in row else row
        assert set(row[len(ids) :]) <= {-1}
        head = tokenizer.encode(before, add_special_tokens=False)
        assert ids[: len(head)] == head
        rest = ids[len(head) :]
        if tokenizer.eos_token_id in rest:
            place = rest.index(tokenizer.eos_token_id)
            template = tokenizer.encode(after, add_special_tokens=False)
            assert rest[place : place + len(template)] == template[: len(rest) - place]
            ended += 1
        if len(ids) < 96:
            assert rest[-1] == tokenizer.eos_token_id
    assert ended > 0


def test_a_file_of_rows_is_gone_on_with(tokenizer, tmp_path):
    teacher, path = llama(len(tokenizer)), tmp_path / "rows.safetensors"
    seen: list[int] = []
    write_text(teacher, tokenizer, path, 10, 40, 0, 1.0, seen.append)
    first, _ = read_text(path)
    write_text(teacher, tokenizer, path, int((first >= 0).sum()) + 1, 40, 0, 1.0, seen.append)
    both, _ = read_text(path)
    for row, turn in zip((row for row in both.tolist() if 2 in row), turns(tokenizer, both), strict=True):
        text = tokenizer.apply_chat_template([{"role": "user", "content": turn}], tokenize=False)
        assert tokenizer.decode(row).startswith(text.rstrip())
    assert len(both) == 2 * len(first) and torch.equal(both[: len(first)], first)
    assert not torch.equal(both[len(first) :], first)
    write_text(teacher, tokenizer, tmp_path / "other", 10, 40, 1, 1.0, seen.append)
    assert not torch.equal(read_text(tmp_path / "other")[0], first)
    with pytest.raises(ValueError, match=r"above 0, got 0\.0"):
        write_text(teacher, tokenizer, path, 10, 40, 0, 0.0, seen.append)
    with pytest.raises(ValueError, match="was drawn with"):
        write_text(llama(len(tokenizer), 5), tokenizer, path, 10, 40, 0, 1.0, seen.append)
    with pytest.raises(ValueError, match="was drawn with"):
        write_text(teacher, tokenizer, path, 10, 40, 1, 1.0, seen.append)


def test_the_commands_make_a_model_that_generates(tokenizer, tmp_path):
    teacher, text, run = str(tmp_path / "teacher"), str(tmp_path / "text.safetensors"), str(tmp_path / "run")
    llama(len(tokenizer)).save_pretrained(teacher)
    tokenizer.save_pretrained(teacher)
    runner = CliRunner()
    result = runner.invoke(app, ["text", teacher, text, "--tokens", "4000", "--length", "40"])
    assert result.exit_code == 0, result.output
    settings = ["--cut", "2/2/1x2", "--steps", "3", "--batch", "2"]
    result = runner.invoke(app, ["train", teacher, text, run, *settings])
    assert result.exit_code == 0 and "step      3" in result.output, result.output
    loaded = sigma0.load(f"{run}/final", device="cpu", dtype="float32")
    generation = sigma0.generate(*loaded, "hello", max_new_tokens=4)
    assert generation.total_loops == 2 and generation.tokens
    result = runner.invoke(app, ["curve", run, f"{run}/{LOG}", "--out", str(tmp_path / "curve.png")])
    assert result.exit_code == 0 and (tmp_path / "curve.png").stat().st_size > 10_000
    result = runner.invoke(app, ["eval", teacher, f"{run}/final", text, "--json"])
    assert result.exit_code == 0, result.output
    entry = json.loads((tmp_path / "run" / LOG).read_text().splitlines()[-1])
    report = json.loads(result.stdout)
    assert [report["teacher"], *report["perplexity"]] == entry["perplexity"] and len(report["agreement"]) == 2
    llama(len(tokenizer), 5).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    result = runner.invoke(app, ["eval", str(tmp_path / "other"), f"{run}/final", text])
    assert result.exit_code == 2 and "was not written by" in result.output
    sizes = ["-n", "2", "--context", "16", "--new-tokens", "3", "--rounds", "2", "--json"]
    result = runner.invoke(app, ["speed", teacher, f"{run}/final", text, *sizes])
    assert result.exit_code == 0, result.output
    times = json.loads(result.stdout)
    assert list(times) == ["teacher", "loop 1", "loop 2", "margin, finish", "margin, verify"]
    assert all(0 < time["ms_per_token"]["low"] <= time["ms_per_token"]["high"] for time in times.values())
    result = runner.invoke(app, ["speed", teacher, f"{run}/final", text, "--context", "41"])
    assert result.exit_code == 2 and "has 0 rows of 41 tokens" in result.output
    result = runner.invoke(app, ["pack", teacher, f"{run}/final", str(tmp_path / "parts.safetensors")])
    assert result.exit_code == 0 and "2/2/1x2" in result.output, result.output
    result = runner.invoke(app, ["prompts", teacher, text, "-n", "3"])
    prompts = [json.loads(line)["prompt"][0]["content"] for line in result.stdout.splitlines()]
    assert prompts == list(dict.fromkeys(turns(tokenizer, read_text(Path(text))[0])))[:3] and len(prompts) == 3
    result = runner.invoke(app, ["train", str(POCKET), text, run])
    assert result.exit_code == 2 and "not a Llama-like checkpoint" in result.output


def test_a_teacher_that_is_timed_writes_its_own_text(tokenizer):
    teacher = llama(len(tokenizer))
    teacher.generation_config.eos_token_id = None
    ids = torch.arange(5, 12)[None]
    decoder = Stock(retrofitted(teacher, Cut(2, 2, 2, 2)), ids, 6, stock=teacher)
    expected = teacher.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[:, 7:]
    assert decoder.decode().tokens.tolist() == decoder.decode().tokens.tolist() == expected.tolist()


@pytest.mark.slow
def test_tasks_are_answered_by_the_teacher_and_at_every_loop(tokenizer, tmp_path):
    pytest.importorskip("lm_eval")
    teacher = llama(len(tokenizer))
    for model, name in ((teacher, "teacher"), (retrofitted(teacher, Cut(2, 2, 2, 2)), "student")):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    for number, task in enumerate(BIG_BENCH):
        (tmp_path / task).mkdir()
        scores = [{"one": 1, "two": 0}, {"three": 0, "four": 0, "five": 1}][: 1 + number % 2]
        examples = [{"input": "How many?", "target_scores": item} for item in scores]
        (tmp_path / task / "task.json").write_text(json.dumps({"examples": examples}))
    folders = [str(tmp_path / name) for name in ("teacher", "student", "")]
    result = CliRunner().invoke(app, ["tasks", *folders, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])
    ways = ["teacher", "loop 1", "loop 2", "at its exits"]
    assert [(row["way"], row["task"], row["n"]) for row in rows] == [
        (way, task, 1 + number % 2) for way in ways for number, task in enumerate(BIG_BENCH)
    ]
    answers = {way: [row["right"] for row in rows if row["way"] == way] for way in ways}
    assert answers["loop 2"] == answers["at its exits"]
