"""Training: the loss, the checkpoint, resuming to the same bits, refusing other settings."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.data import Batch, collate, fit, train_batch
from sigma0.bench.pocket.notes import note_row
from sigma0.bench.pocket.recipe import RECIPES, Lesson, Recipe, build_model, build_ouro
from sigma0.bench.pocket.subjects import NONE
from sigma0.bench.pocket.tokenizer import build_tokenizer
from sigma0.bench.pocket.train import LOG, STATE, Report, loop_loss, read_log, train
from sigma0.bench.pocket.world import LOOK_UPS, MIX, Mix, draw
from sigma0.models.load import load

TINY = Recipe(
    batch=2,
    width=16,
    intermediate=24,
    heads=2,
    loops=3,
    warmup=2,
    lessons=(Lesson("ways", 2, 2), Lesson("answers", 1, 3, trails=False)),
    note_steps=3,
    note_batch=2,
    note_loops=2,
)


class KilledError(Exception):
    pass


def killed_after(step: int) -> object:
    def on_step(report: Report) -> None:
        if report.step == step:
            raise KilledError

    return on_step


def test_resuming_gives_the_bits_of_an_uninterrupted_run(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    whole = train(TINY, tokenizer, tmp_path / "whole")
    with pytest.raises(KilledError):
        # Killed after step 4 with a checkpoint at 4: step 4 is run again.
        train(TINY, tokenizer, tmp_path / "killed", save_every=2, on_step=killed_after(4))  # type: ignore[arg-type]
    assert len(list(read_log(tmp_path / "killed" / LOG))) == 5
    assert train(TINY, tokenizer, tmp_path / "killed", minutes=0.0) is None
    resumed = train(TINY, tokenizer, tmp_path / "killed")
    assert whole is not None and resumed is not None
    for (name, expected), (_, found) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(expected, found), name
    assert list(read_log(tmp_path / "whole" / LOG)) == list(read_log(tmp_path / "killed" / LOG))
    saved, again = (load_file(tmp_path / run / STATE) for run in ("whole", "killed"))
    assert saved.keys() == again.keys() and all(torch.equal(saved[name], again[name]) for name in saved)


def test_training_changes_every_weight_but_the_gate(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    before = dict(build_model(TINY, tokenizer).named_parameters())
    after = train(TINY, tokenizer, tmp_path)
    assert after is not None
    for name, weight in after.named_parameters():
        assert torch.equal(weight, before[name]) == ("early_exit_gate" in name), name


@pytest.mark.parametrize(
    "changed", [replace(TINY, lessons=TINY.lessons[:1]), replace(TINY, seed=1), replace(TINY, peak_rate=1e-3)]
)
def test_other_settings_are_refused(tokenizer: PreTrainedTokenizerFast, changed: Recipe, tmp_path: Path) -> None:
    assert train(TINY, tokenizer, tmp_path, minutes=0.0) is None
    with pytest.raises(ValueError, match="other settings"):
        train(changed, tokenizer, tmp_path)


def test_a_damaged_checkpoint_is_named(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / STATE).write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"state\.safetensors is no checkpoint"):
        train(TINY, tokenizer, tmp_path)


def test_a_log_torn_by_a_kill_is_mended(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        train(TINY, tokenizer, tmp_path, save_every=2, on_step=killed_after(4))  # type: ignore[arg-type]
    with (tmp_path / LOG).open("a") as log:
        log.write('{"step": 5, "lo')
    train(TINY, tokenizer, tmp_path)
    assert [report.step for report in read_log(tmp_path / LOG)] == list(range(6))


@pytest.mark.parametrize("stage", range(3))
def test_data_of_every_stage_are_in_the_fingerprint(
    tokenizer: PreTrainedTokenizerFast, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = TINY.fingerprint(tokenizer)
    first = TINY.stages()[stage][0]
    whole = Recipe.train_batch

    def changed(self: Recipe, tokenizer: PreTrainedTokenizerFast, step: int) -> Batch:
        return whole(self, tokenizer, step + (step == first))

    monkeypatch.setattr(Recipe, "train_batch", changed)
    assert TINY.fingerprint(tokenizer) != before


@pytest.mark.exhaustive
def test_other_data_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    assert train(TINY, tokenizer, tmp_path, minutes=0.0) is None
    with pytest.raises(ValueError, match="other settings"):
        train(TINY, build_tokenizer(seed=1), tmp_path)


def test_the_loss_weighs_tokens_and_loops_as_it_says(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_ouro(TINY, tokenizer)
    batch = train_batch(tokenizer, 0, 0, 3, 224, 0.5)
    loss, right = loop_loss(model, batch, 20.0)
    states = model.model(input_ids=batch.ids, use_cache=False).loop_states
    total, weight = torch.zeros(()), 0.0
    hits = []
    for row in range(3):
        for place in range(1, batch.ids.shape[1]):
            if not batch.real[row, place]:
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
    assert torch.equal(right, torch.stack(hits, 1))


def test_on_trails_each_loop_is_asked_for_the_next_step(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_ouro(TINY, tokenizer)
    rows = [fit(tokenizer, draw("train", 0, index, difficulty=3), False, 224, hints=True) for index in range(2)]
    batch = collate(rows, 0)
    plain = loop_loss(model, batch, 20.0)[0]
    hinted, right = loop_loss(model, batch, 20.0, trails=True)
    states = model.model(input_ids=batch.ids, use_cache=False).loop_states
    logits = model.lm_head(states).log_softmax(-1)  # [T, B, S, V]
    changed, weight, about = torch.zeros(()), 0, []
    for number, row in enumerate(rows):
        trails = iter(row.trails)
        weight += len(row.ids) - 1
        for place in range(1, len(row.ids)):
            said = logits[:, number, place - 1]  # [T, V]
            if row.subjects[place - 1] != NONE:
                about.append(-said[0, row.subjects[place - 1]])
            if row.answer[place]:
                weight += 19
                trail = next(trails)
                for loop in range(3):
                    step = trail[min(loop, len(trail) - 1)]
                    changed = changed + 20 * (loop + 1) / 6 * (said[loop, row.ids[place]] - said[loop, step])
    torch.testing.assert_close(hinted, plain + changed / weight + TINY.subject_weight * torch.stack(about).mean())
    assert torch.equal(right, loop_loss(model, batch, 20.0)[1])


def test_initial_weights_are_as_the_recipe_says(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model(replace(TINY, width=64, heads=4, intermediate=96), tokenizer)
    weights = dict(model.named_parameters())
    assert weights["model.embed_tokens.weight"].std().item() == pytest.approx(1.0, rel=0.02)
    assert weights["lm_head.weight"].std().item() == pytest.approx(TINY.init_std, rel=0.02)
    for name in ("input_layernorm_2", "post_attention_layernorm_2"):
        assert weights[f"model.layers.0.{name}.weight"].unique().tolist() == pytest.approx([0.3])
    assert weights["model.layers.0.input_layernorm.weight"].unique().tolist() == [1.0]
    assert model.config.total_ut_steps == 3 and model.config.num_hidden_layers == 1


def test_rate_and_loops_follow_the_step() -> None:
    lessons = (Lesson("a", 100, 1), Lesson("b", 200, 2), Lesson("c", 50, 6), Lesson("d", 350, 6, trails=False))
    recipe = Recipe(lessons=lessons, warmup=100, decay=0.4, last_rate=0.1, note_steps=300, note_loops=3, loops=6)
    assert recipe.steps == 1000
    assert recipe.rate(0) == pytest.approx(0.01)
    assert recipe.rate(99) == recipe.rate(599) == 1.0
    assert recipe.rate(800) == pytest.approx(0.1 + 0.9 * 0.5)
    assert recipe.rate(1000) == pytest.approx(0.1)
    assert [recipe.train_loops(step) for step in (0, 299, 300, 399, 400, 600, 650)] == [3, 3, 4, 4, 5, 6, 6]
    assert [recipe.on_trails(step) for step in (0, 300, 649, 650, 999)] == [True, True, True, False, False]
    taught = [recipe.lesson(step) for step in (299, 300, 399, 400, 600, 650, 999, 1000)]
    assert [lesson and lesson.name for lesson in taught] == [None, "a", "a", "b", "c", "d", "d", None]
    assert recipe.stages() == [(0, "notes"), (300, "a"), (400, "b"), (600, "c"), (650, "d")]


def test_data_follow_the_step(tokenizer: PreTrainedTokenizerFast) -> None:
    notes = TINY.train_batch(tokenizer, 0)
    assert notes.ids.tolist() == collate([note_row(tokenizer, 0, index) for index in (0, 1)], 0).ids.tolist()
    mix = Mix(moves=0, families=0, ages=1, binary=1)
    scenes = replace(TINY, batch=12, lessons=(Lesson("ages", 2, 2, mix), Lesson("all", 2, 6)))
    for step, hardest, mixed in ((3, 2, mix), (4, 2, mix), (5, 6, MIX), (6, 6, MIX)):
        expected = train_batch(tokenizer, 0, step - 3, 12, TINY.length, TINY.chat, hardest, mixed)
        assert torch.equal(scenes.train_batch(tokenizer, step).ids, expected.ids)
    assert all("older than" in text for text in tokenizer.batch_decode(scenes.train_batch(tokenizer, 3).ids))


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_teach_everything_in_the_end(name: str) -> None:
    last = RECIPES[name].lessons[-1]
    # a Raven is taught look-ups alone
    taught = (3, LOOK_UPS) if RECIPES[name].recurrence else (6, MIX)
    assert (last.hardest, last.mix) == taught and not last.trails
    # one that goes on from a shipped model needs no hints
    assert all(lesson.trails for lesson in RECIPES[name].lessons[:-1]) != (RECIPES[name].start is not None)


@pytest.mark.parametrize(("name", "value"), [("batch", 0), ("chat", 1.5), ("length", 4096), ("loops", -1)])
def test_bad_settings_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} {value}"):
        replace(TINY, **{name: value})  # type: ignore[arg-type]


def test_the_log_is_json_lines(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    train(TINY, tokenizer, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert [len(line["answers"]) for line in lines] == [2, 2, 2, 3, 3, 3]
    assert all(line["loss"] > 0 for line in lines)


def test_rates_rise_and_fall_in_every_lesson_where_that_is_set() -> None:
    lessons = (Lesson("one", 40, 1), Lesson("two", 20, 1, rate=0.5))
    recipe = replace(TINY, lessons=lessons, note_steps=0, warmup=4, decay=0.5, anew=True)
    alone = replace(recipe, lessons=lessons[:1])
    assert [recipe.rate(step) for step in range(40)] == [alone.rate(step) for step in range(40)]
    assert [recipe.rate(step) for step in (40, 43, 49)] == pytest.approx([0.125, 0.5, 0.5])
    assert recipe.rate(59) < 0.1


def test_deciding_tokens_weigh_more(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_ouro(TINY, tokenizer)
    batch = TINY.train_batch(tokenizer, TINY.note_steps)
    answers = batch.ids[batch.answer]
    plain, _ = loop_loss(model, batch, 20.0)
    none, _ = loop_loss(model, batch, 20.0, emphasis=9.0, deciding=torch.tensor([-1]))
    every, _ = loop_loss(model, batch, 20.0, emphasis=9.0, deciding=answers.unique())
    one, _ = loop_loss(model, batch, 20.0, emphasis=9.0, deciding=answers[:1])
    assert none == plain and every > one > plain


@pytest.mark.slow
def test_a_run_that_goes_on_begins_with_the_shipped_weights() -> None:
    recipe = RECIPES["pocket-solver"]
    tokenizer = recipe.tokenizer()
    model, shipped = build_model(recipe, tokenizer), load("pocket", device="cpu", dtype="float32")[0]
    known = dict(shipped.named_parameters())
    for name, weight in model.named_parameters():
        if "early_exit_gate" not in name:
            assert torch.equal(weight[: len(known[name])], known[name]), name
    assert model.lm_head.weight.shape[0] == len(tokenizer) > len(known["lm_head.weight"])
