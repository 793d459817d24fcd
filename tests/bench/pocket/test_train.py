"""Training of both families: the loss, the checkpoint, resuming to the same bits, refusing other settings."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional
from typer.testing import CliRunner

from sigma0 import ExitConfig
from sigma0.bench.pocket.__main__ import app
from sigma0.bench.pocket.data import collate, fit, note_row
from sigma0.bench.pocket.recipe import RECIPES, Lesson, Recipe, Recurrence, build_model
from sigma0.bench.pocket.tokenizer import build_tokenizer
from sigma0.bench.pocket.train import LOG, STATE, Report, draw_curve, loop_loss, read_log, train
from sigma0.bench.pocket.world import LOOK_UPS, MIX, PEOPLE, Mix, draw

SIZES = {"batch": 2, "width": 16, "intermediate": 24, "heads": 2, "warmup": 2, "note_steps": 3, "note_batch": 2}
TINY = Recipe(
    lessons=(Lesson("ways", 2, 2), Lesson("answers", 1, 3, trails=False)), loops=3, note_loops=2, chat=0.5, **SIZES
)
RAVEN = replace(
    TINY,
    lessons=(Lesson("ways", 2, 2), Lesson("answers", 20, 3, trails=False)),
    loops=4,
    recurrence=Recurrence(mean=2.0, backprop=2, drawn=0.5, reads=3),
)
# steps: notes up to 2, ways up to 4, answers
WAYS, ANSWERS = 3, 5


class KilledError(Exception):
    pass


def kill(report):
    if report.step == 4:
        raise KilledError


@pytest.mark.parametrize("recipe", [TINY, replace(RAVEN, lessons=TINY.lessons)], ids=["ouro", "raven"])
def test_resuming_gives_the_bits_of_an_uninterrupted_run(tokenizer, recipe, tmp_path):
    whole = train(recipe, tokenizer, tmp_path / "whole")
    with pytest.raises(KilledError):
        # Killed after step 4 with a checkpoint at 4: step 4 is run again.
        train(recipe, tokenizer, tmp_path / "killed", save_every=2, on_step=kill)
    assert len(list(read_log(tmp_path / "killed" / LOG))) == 5
    with (tmp_path / "killed" / LOG).open("a") as log:
        log.write('{"step": 5, "lo')
    assert train(recipe, tokenizer, tmp_path / "killed", minutes=0.0) is None
    resumed = train(recipe, tokenizer, tmp_path / "killed")
    before = dict(build_model(recipe, tokenizer).named_parameters())
    for (name, expected), (_, obtained) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(expected, obtained), name
        assert torch.equal(expected, before[name]) == ("early_exit_gate" in name), name
    saved, again = (load_file(tmp_path / run / STATE) for run in ("whole", "killed"))
    assert saved.keys() == again.keys() and all(torch.equal(saved[name], again[name]) for name in saved)
    log = list(read_log(tmp_path / "whole" / LOG))
    assert log == list(read_log(tmp_path / "killed" / LOG)) and [report.step for report in log] == list(range(6))
    assert all(report.loss > 0 for report in log)
    if recipe is TINY:
        assert [list(report.answers) for report in log] == [[1, 2]] * 3 + [[1, 2, 3]] * 3


@pytest.mark.parametrize(
    "changed", [replace(TINY, lessons=TINY.lessons[:1]), replace(TINY, seed=1), replace(TINY, peak_rate=1e-3)]
)
def test_other_settings_and_damaged_checkpoints_are_refused(tokenizer, changed, tmp_path):
    assert train(TINY, tokenizer, tmp_path, minutes=0.0) is None
    with pytest.raises(ValueError, match="other settings"):
        train(changed, tokenizer, tmp_path)
    (tmp_path / STATE).write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"state\.safetensors is no checkpoint"):
        train(TINY, tokenizer, tmp_path)


@pytest.mark.parametrize("stage", range(3))
def test_data_of_every_stage_are_in_the_fingerprint(tokenizer, stage, monkeypatch):
    before, first, whole = TINY.fingerprint(tokenizer), TINY.stages()[stage][0], Recipe.train_batch
    monkeypatch.setattr(Recipe, "train_batch", lambda self, of, step: whole(self, of, step + (step == first)))
    assert TINY.fingerprint(tokenizer) != before


@pytest.mark.exhaustive
def test_other_data_is_refused(tokenizer):
    assert TINY.fingerprint(build_tokenizer(seed=1)) != TINY.fingerprint(tokenizer)


def test_the_loss_weighs_tokens_and_loops_as_it_says(tokenizer):
    model, batch = build_model(TINY, tokenizer), TINY.train_batch(tokenizer, ANSWERS)
    loss, right, read = loop_loss(model, batch, TINY, ANSWERS)
    states = model.model(input_ids=batch.ids, use_cache=False).loop_states
    total, weight, hits = torch.zeros(()), 0.0, []
    for row, place in batch.real.nonzero().tolist():
        if place == 0:
            continue
        target = batch.ids[row, place]
        logits = model.lm_head(states[:, row, place - 1])  # [T, V]
        losses = functional.cross_entropy(logits, target.expand(3), reduction="none")
        if batch.answer[row, place]:
            total = total + 20 * (1 * losses[0] + 2 * losses[1] + 3 * losses[2]) / 6
            hits.append(logits.argmax(-1) == target)
        else:
            total = total + losses[2]
        weight += 20 if batch.answer[row, place] else 1
    torch.testing.assert_close(loss, total / weight)
    assert torch.equal(right, torch.stack(hits, 1)) and read == [1, 2, 3]


@pytest.mark.parametrize("recipe", [TINY, RAVEN], ids=["ouro", "raven"])
def test_on_trails_each_loop_is_asked_for_the_next_step(tokenizer, recipe):
    model, batch = build_model(recipe, tokenizer), recipe.train_batch(tokenizer, WAYS)
    loss, right, read = loop_loss(model, batch, recipe, WAYS)
    assert recipe.train_loops(WAYS) == recipe.loops
    assert read == [1, 2, 3] or (read[0], read[-1], len(read)) == (1, 4, 3)
    depths = [ExitConfig(mode="fixed", depth=loop) for loop in range(1, recipe.loops + 1)]
    logits = torch.stack([model(batch.ids, exit_config=depth, use_cache=False).logits for depth in depths])
    said = logits[:, :, :-1].log_softmax(-1)  # [T, B, S - 1, V]
    marks, rest = batch.answer[:, 1:], batch.real[:, 1:] & ~batch.answer[:, 1:]
    total = -said[-1][rest].gather(-1, batch.ids[:, 1:][rest][:, None]).sum()
    for loop in read:
        asked = batch.trails[:, min(loop - 1, batch.trails.shape[1] - 1)]
        total = total - 20 * loop / sum(read) * said[loop - 1][marks].gather(-1, asked[:, None]).sum()
    reported = batch.subjects[:, :-1] >= 0
    hint = -said[0][reported].gather(-1, batch.subjects[:, :-1][reported][:, None]).mean()
    torch.testing.assert_close(loss, total / (20 * marks.sum() + rest.sum()) + recipe.subject_weight * hint)
    hits = logits[:, :, :-1].argmax(-1) == batch.ids[:, 1:]
    assert right.tolist() == [hits[loop - 1][marks].tolist() for loop in read]


def test_deciding_tokens_weigh_more(tokenizer):
    model, batch = build_model(TINY, tokenizer), TINY.train_batch(tokenizer, ANSWERS)
    answers = batch.ids[batch.answer]
    weighed = replace(TINY, note_steps=0, lessons=(Lesson("decisions", 9, 3, trails=False, emphasis=9.0),))
    plain, none, every, one = (
        loop_loss(model, batch, weighed, 0, deciding)[0]
        for deciding in (None, torch.tensor([-1]), answers.unique(), answers[:1])
    )
    assert none == plain and every > one > plain
    assert loop_loss(model, batch, TINY, ANSWERS, answers)[0] == plain


def test_the_last_lesson_of_a_raven_reads_the_last_of_the_drawn_loops(tokenizer):
    recipe = replace(RAVEN, recurrence=replace(RAVEN.recurrence, drawn=0.0))
    model, batch = build_model(recipe, tokenizer), recipe.train_batch(tokenizer, ANSWERS)
    depths = set()
    for step in range(ANSWERS, ANSWERS + 8):
        loss, right, (loop,) = loop_loss(model, batch, recipe, step)
        depths.add(loop)
        output = model(batch.ids, exit_config=ExitConfig(mode="fixed", depth=loop), use_cache=False)
        losses = functional.cross_entropy(output.logits[:, :-1].transpose(1, 2), batch.ids[:, 1:], reduction="none")
        weights = torch.where(batch.answer[:, 1:], 20.0, batch.real[:, 1:].float())
        torch.testing.assert_close(loss, (weights * losses).sum() / weights.sum())
        hits = output.logits[:, :-1].argmax(-1) == batch.ids[:, 1:]
        assert right.tolist() == [hits[batch.answer[:, 1:]].tolist()]
    assert len(depths) > 2


def test_gradients_go_through_the_last_loops_alone(tokenizer):
    model, ids = build_model(RAVEN, tokenizer).transformer, RAVEN.train_batch(tokenizer, ANSWERS).ids
    given = torch.randn(*ids.shape, RAVEN.width, generator=torch.Generator().manual_seed(0), requires_grad=True)
    whole, cut = (
        model(input_ids=ids, loops_without_grad=without, num_loops=3, use_cache=False, initial_state=given)
        for without in (0, 1)
    )
    torch.testing.assert_close(cut.last_hidden_state, whole.last_hidden_state)
    assert not cut.loop_states[0].isnan().any()
    (gradient,) = torch.autograd.grad(whole.last_hidden_state.square().sum(), given, allow_unused=True)
    assert gradient is not None and gradient.abs().max() > 0
    of_all = [given, model.prelude[0].attn.Wqkv.weight]
    none, injected = torch.autograd.grad(cut.last_hidden_state[..., 0].sum(), of_all, allow_unused=True)
    assert none is None and injected.abs().max() > 0


def test_batches_run_the_loops_and_start_from_the_states_that_the_recipe_says(tokenizer):
    model, batch = build_model(RAVEN, tokenizer), RAVEN.train_batch(tokenizer, ANSWERS)
    seen = []
    hook = model.transformer.register_forward_pre_hook(lambda *given: seen.append(given[2]), with_kwargs=True)
    for step in (WAYS, ANSWERS, ANSWERS + 1, ANSWERS + 1):
        read = loop_loss(model, batch, RAVEN, step)[2]
        without = 0 if step == WAYS else max(0, read[-1] - RAVEN.recurrence.backprop)
        assert (seen[-1]["num_loops"], seen[-1]["loops_without_grad"]) == (read[-1], without)
    hook.remove()
    hints, one, other, again = (entry["initial_state"] for entry in seen)
    assert hints is None and not one[0].any()
    assert one[1].std().item() == pytest.approx(model.config.state_std, rel=0.1)
    assert not torch.equal(one, other) and torch.equal(other, again)


def test_loops_are_drawn_around_their_mean_and_first_and_last_are_always_read():
    rng = Random(0)
    drawn = [Recurrence().draw(rng, 64) for _ in range(4000)]
    # one more than a Poisson number whose rate has the mean 8
    assert sum(drawn) / len(drawn) == pytest.approx(9.0, abs=0.3) and min(drawn) >= 1
    variance = sum((entry - 9.0) ** 2 for entry in drawn) / len(drawn)
    # of the Poisson number, and of the rate: 8^2 (exp(0.25) - 1)
    assert variance == pytest.approx(8 + 64 * 0.284, rel=0.15)
    capped = Counter(Recurrence().draw(rng, 16) for _ in range(2000))
    assert set(capped) <= set(range(1, 17)) and capped[16] > 100
    for loops in (1, 2, 3, 9):
        read = Recurrence(reads=3).read_at(Random(loops), loops)
        assert read == sorted(set(read)) and read[0] == 1 and read[-1] == loops and len(read) == min(3, loops)


def test_initial_weights_are_as_the_recipe_says(tokenizer):
    wide = {"width": 64, "heads": 4, "intermediate": 96}
    model = build_model(replace(TINY, **wide), tokenizer)
    weights = dict(model.named_parameters())
    assert weights["model.embed_tokens.weight"].std().item() == pytest.approx(1.0, rel=0.02)
    assert weights["lm_head.weight"].std().item() == pytest.approx(TINY.init_std, rel=0.02)
    for name in ("input_layernorm_2", "post_attention_layernorm_2"):
        assert weights[f"model.layers.0.{name}.weight"].unique().tolist() == pytest.approx([0.3])
    assert weights["model.layers.0.input_layernorm.weight"].unique().tolist() == [1.0]
    assert model.config.total_ut_steps == 3 and model.config.num_hidden_layers == 1
    raven = build_model(replace(RAVEN, **wide), tokenizer)
    assert raven.transformer.embed(torch.arange(len(tokenizer))).std().item() == pytest.approx(1.0, rel=0.02)
    assert raven.lm_head.weight is raven.transformer.wte.weight
    diagonal = raven.transformer.adapter.weight.view(64, 2, 64).diagonal(dim1=0, dim2=2)  # [2, D]
    assert diagonal.mean(1).tolist() == pytest.approx([0.9, 0.3], abs=0.02)
    assert raven.num_loops == 4 and raven.config.layout == "sandwich"


def test_rate_and_loops_follow_the_step():
    lessons = (Lesson("a", 100, 1), Lesson("b", 200, 2), Lesson("c", 50, 6), Lesson("d", 350, 6, trails=False))
    recipe = Recipe(lessons=lessons, warmup=100, decay=0.4, last_rate=0.1, note_steps=300, note_loops=3, loops=6)
    assert recipe.steps == 1000
    rates = [recipe.rate(step) for step in (0, 99, 599, 800, 1000)]
    assert rates == pytest.approx([0.01, 1.0, 1.0, 0.1 + 0.9 * 0.5, 0.1])
    assert [recipe.train_loops(step) for step in (0, 299, 300, 399, 400, 600, 650)] == [3, 3, 4, 4, 5, 6, 6]
    assert [recipe.on_trails(step) for step in (0, 300, 649, 650, 999)] == [True, True, True, False, False]
    taught = [recipe.lesson(step) for step in (299, 300, 399, 400, 600, 650, 999, 1000)]
    assert [lesson and lesson.name for lesson in taught] == [None, "a", "a", "b", "c", "d", "d", None]
    assert recipe.stages() == [(0, "notes"), (300, "a"), (400, "b"), (600, "c"), (650, "d")]
    # in every lesson anew, where that is set
    lessons = (Lesson("one", 40, 1), Lesson("two", 20, 1, rate=0.5))
    recipe = replace(TINY, lessons=lessons, note_steps=0, warmup=4, decay=0.5, anew=True)
    alone = replace(recipe, lessons=lessons[:1])
    assert [recipe.rate(step) for step in range(40)] == [alone.rate(step) for step in range(40)]
    assert [recipe.rate(step) for step in (40, 43, 49)] == pytest.approx([0.125, 0.5, 0.5])
    assert recipe.rate(59) < 0.1


def test_data_follow_the_step(tokenizer):
    notes = TINY.train_batch(tokenizer, 1)
    assert notes.ids.tolist() == collate([note_row(tokenizer, 0, index) for index in (2, 3)], 0).ids.tolist()
    mix = Mix(moves=0, families=0, ages=1, binary=1)
    recipe = replace(TINY, batch=4, seed=1, lessons=(Lesson("ages", 2, 2, mix), Lesson("all", 2, 6)))
    for step, hardest, mixed in ((3, 2, mix), (4, 2, mix), (5, 6, MIX), (6, 6, MIX)):
        scenes = [draw("train", 1, 4 * (step - 3) + place, hardest=hardest, mix=mixed) for place in range(4)]
        rows = [fit(tokenizer, scene, place < 2, TINY.length, hints=True) for place, scene in enumerate(scenes)]
        assert torch.equal(recipe.train_batch(tokenizer, step).ids, collate(rows, 0).ids)


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_teach_everything_in_the_end(name):
    recipe = RECIPES[name]
    last = recipe.lessons[-1]
    # a Raven is taught look-ups alone
    mixes = {"pocket-raven": LOOK_UPS, "pocket-people": PEOPLE, "pocket-large-people": PEOPLE}
    asked = replace(PEOPLE, short=0.45, absent=0.05, gap=0.2)
    mixes |= {"pocket": asked, "pocket-large": asked}
    assert (last.hardest, last.mix) == (3 if recipe.recurrence else 6, mixes.get(name, MIX)) and not last.trails
    # one that goes on from another's weights needs no hints
    assert recipe.quoted or all(lesson.trails == (recipe.start is None) for lesson in recipe.lessons[:-1])
    assert (recipe.loops, recipe.recurrence) == (16, Recurrence()) or name != "pocket-raven"


@pytest.mark.slow
def test_a_run_that_goes_on_begins_with_the_weights_of_a_folder(tmp_path):
    first, recipe = RECIPES["pocket-stories"], RECIPES["pocket"]
    before, tokenizer = build_model(first, first.tokenizer()), recipe.tokenizer()
    before.save_pretrained(tmp_path)
    model = build_model(recipe, tokenizer, tmp_path)
    known = dict(before.named_parameters())
    for name, weight in model.named_parameters():
        if "early_exit_gate" not in name:
            assert torch.equal(weight[: len(known[name])], known[name]), name
    assert model.lm_head.weight.shape[0] == len(tokenizer) > len(known["lm_head.weight"])
    park = [tokenizer.convert_tokens_to_ids(piece) for piece in ('"park', "\u0120park")]
    assert torch.equal(*model.lm_head.weight[park]) and torch.equal(*model.model.embed_tokens.weight[park])


@pytest.mark.exhaustive
def test_a_few_steps_of_a_raven_lower_the_loss(tokenizer, tmp_path):
    recipe = replace(RAVEN, width=32, note_steps=60, note_batch=8, lessons=(Lesson("answers", 1, 1, trails=False),))
    train(replace(recipe, peak_rate=1e-2), tokenizer, tmp_path)
    losses = [report.loss for report in read_log(tmp_path / LOG)][:60]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_a_run_becomes_a_picture(tmp_path):
    recipe = replace(TINY, note_steps=300)
    reports = [Report(step, 1.0, {1: 0.1, 2: 0.5} | ({3: 0.9} if step >= 5 else {})) for step in range(300)]
    draw_curve(reports, recipe, tmp_path / "curve.png")
    with Image.open(tmp_path / "curve.png") as picture:
        assert picture.format == "PNG" and picture.width >= 800
    draw_curve(reports[:1], recipe, tmp_path / "curve.svg")
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    with pytest.raises(ValueError, match="no step"):
        draw_curve([], recipe, tmp_path / "curve.png")
    with pytest.raises(ValueError, match="4 loops"):
        draw_curve([Report(0, 1.0, dict.fromkeys((1, 2, 3, 4), 0.5))], TINY, tmp_path / "curve.png")


def test_the_command_draws_a_log(tmp_path):
    def curve(run, *arguments):
        return CliRunner().invoke(app, ["curve", str(run), "--out", str(tmp_path / "picture.png"), *arguments])

    (tmp_path / LOG).write_text('{"step": 0, "loss": 2.0, "answers": {"1": 0.5, "2": 0.25, "3": 0.125}}\n')
    assert curve(tmp_path).exit_code == 0 and (tmp_path / "picture.png").stat().st_size > 1000
    for result, named in ((curve(tmp_path / "none"), "none"), (curve(tmp_path, "--name", "purse"), "purse")):
        assert result.exit_code == 2 and named in result.output
