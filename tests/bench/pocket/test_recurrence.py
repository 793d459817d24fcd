"""A Raven of the micro-world: loops drawn, gradients cut, what is read, training that resumes, evaluation."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from sigma0 import ExitConfig
from sigma0.bench.pocket.data import Batch, encode, train_batch
from sigma0.bench.pocket.evaluate import evaluate
from sigma0.bench.pocket.finish import finish
from sigma0.bench.pocket.recipe import RECIPES, Lesson, Recipe, build_model
from sigma0.bench.pocket.recurrence import Recurrence, build_raven, recurrent_loss
from sigma0.bench.pocket.train import LOG, Report, read_log, train
from sigma0.bench.pocket.world import draw
from sigma0.models.load import load
from sigma0.models.raven_causal import RavenForCausalLM

RECURRENCE = Recurrence(mean=2.0, backprop=2, drawn=0.5, reads=3)
TINY = Recipe(
    batch=2,
    width=16,
    intermediate=24,
    heads=2,
    loops=4,
    warmup=2,
    lessons=(Lesson("ways", 2, 2), Lesson("answers", 3, 3, trails=False)),
    note_steps=3,
    note_batch=2,
    note_loops=2,
    recurrence=RECURRENCE,
)


class KilledError(Exception):
    pass


def test_loops_are_drawn_around_their_mean_and_never_above_the_most() -> None:
    rng = Random(0)
    drawn = [Recurrence().draw(rng, 64) for _ in range(4000)]
    # one more than a Poisson number whose rate has the mean 8
    assert sum(drawn) / len(drawn) == pytest.approx(9.0, abs=0.3)
    variance = sum((each - 9.0) ** 2 for each in drawn) / len(drawn)
    # of the Poisson number, and of the rate: 8^2 (exp(0.25) - 1)
    assert variance == pytest.approx(8 + 64 * 0.284, rel=0.15)
    assert min(drawn) >= 1
    capped = Counter(Recurrence().draw(rng, 16) for _ in range(2000))
    assert set(capped) <= set(range(1, 17)) and capped[16] > 100


def test_first_and_last_loop_are_always_read() -> None:
    for loops in (1, 2, 3, 9):
        read = Recurrence(reads=3).read_at(Random(loops), loops)
        assert read == sorted(set(read)) and read[0] == 1 and read[-1] == loops and len(read) == min(3, loops)


@pytest.mark.parametrize(
    ("name", "value"), [("backprop", 0), ("core", 0), ("mean", 0.0), ("spread", -1.0), ("drawn", 1.5), ("reads", 1)]
)
def test_bad_settings_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} {value}"):
        replace(Recurrence(), **{name: value})  # type: ignore[arg-type]


def test_weights_start_as_they_should(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model(replace(TINY, width=64, heads=4, intermediate=96), tokenizer)
    assert isinstance(model, RavenForCausalLM)
    ids = torch.arange(len(tokenizer))
    assert model.transformer.embed(ids).std().item() == pytest.approx(1.0, rel=0.02)
    assert model.lm_head.weight is model.transformer.wte.weight
    diagonal = model.transformer.adapter.weight.view(64, 2, 64).diagonal(dim1=0, dim2=2)  # [2, D]
    assert diagonal.mean(1).tolist() == pytest.approx([0.9, 0.3], abs=0.02)
    assert model.num_loops == 4 and model.config.layout == "sandwich"


@pytest.fixture(scope="module")
def batch(tokenizer: PreTrainedTokenizerFast) -> Batch:
    return train_batch(tokenizer, 0, 0, 2, 224, 0.5, hardest=3)


def test_the_last_lesson_reads_the_last_of_the_drawn_loops(tokenizer: PreTrainedTokenizerFast, batch: Batch) -> None:
    recurrence = replace(RECURRENCE, drawn=0.0)
    model = build_raven(TINY, recurrence, tokenizer)
    recipe = replace(TINY, lessons=(Lesson("answers", 20, 3, trails=False),))
    depths = set()
    for step in range(5, 13):
        loss, right, (loop,) = recurrent_loss(model, batch, recipe, recurrence, step)
        depths.add(loop)
        output = model(batch.ids, exit_config=ExitConfig(mode="fixed", depth=loop), use_cache=False)
        losses = functional.cross_entropy(output.logits[:, :-1].transpose(1, 2), batch.ids[:, 1:], reduction="none")
        weights = torch.where(batch.answer[:, 1:], 20.0, batch.real[:, 1:].float())
        torch.testing.assert_close(loss, (weights * losses).sum() / weights.sum())
        hits = output.logits[:, :-1].argmax(-1) == batch.ids[:, 1:]
        assert right.tolist() == [hits[batch.answer[:, 1:]].tolist()]
    assert len(depths) > 2


def test_with_hints_loops_are_asked_for_the_way(tokenizer: PreTrainedTokenizerFast, batch: Batch) -> None:
    model = build_raven(TINY, RECURRENCE, tokenizer)
    loss, _, read = recurrent_loss(model, batch, TINY, RECURRENCE, 3)
    assert TINY.train_loops(3) == 4 and read[0] == 1 and read[-1] == 4 and len(read) == 3
    depths = [ExitConfig(mode="fixed", depth=loop) for loop in range(1, 5)]
    logits = torch.stack([model(batch.ids, exit_config=depth, use_cache=False).logits for depth in depths])
    said = logits[:, :, :-1].log_softmax(-1)  # [T, B, S - 1, V]
    marks, rest = batch.answer[:, 1:], batch.real[:, 1:] & ~batch.answer[:, 1:]
    total = -said[3][rest].gather(-1, batch.ids[:, 1:][rest][:, None]).sum()
    for loop in read:
        asked = batch.trails[:, min(loop - 1, batch.trails.shape[1] - 1)]
        total = total - 20 * loop / sum(read) * said[loop - 1][marks].gather(-1, asked[:, None]).sum()
    told = batch.subjects[:, :-1] >= 0
    hint = -said[0][told].gather(-1, batch.subjects[:, :-1][told][:, None]).mean()
    expected = total / (20 * marks.sum() + rest.sum()) + TINY.subject_weight * hint
    torch.testing.assert_close(loss, expected)


def test_gradients_go_through_the_last_loops_alone(tokenizer: PreTrainedTokenizerFast, batch: Batch) -> None:
    model = build_raven(TINY, RECURRENCE, tokenizer)
    embedded = torch.zeros(2, batch.ids.shape[1], TINY.width)
    given = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ways = {"num_loops": 3, "use_cache": False, "initial_state": given}
    whole = model.transformer(input_ids=batch.ids, **ways)
    cut = model.transformer(input_ids=batch.ids, loops_without_grad=1, **ways)
    torch.testing.assert_close(cut.last_hidden_state, whole.last_hidden_state)
    assert not cut.loop_states[0].isnan().any()
    (gradient,) = torch.autograd.grad(whole.last_hidden_state.square().sum(), given, allow_unused=True)
    assert gradient is not None and gradient.abs().max() > 0
    (none,) = torch.autograd.grad(cut.last_hidden_state.square().sum(), given, allow_unused=True)
    assert none is None
    # the injection still gets its gradient
    cut = model.transformer(input_ids=batch.ids, loops_without_grad=1, **ways)
    cut.last_hidden_state[..., 0].sum().backward()
    assert model.transformer.prelude[0].attn.Wqkv.weight.grad.abs().max() > 0


def test_a_share_of_the_rows_starts_from_drawn_states(tokenizer: PreTrainedTokenizerFast, batch: Batch) -> None:
    model = build_raven(TINY, RECURRENCE, tokenizer)
    seen: list[torch.Tensor | None] = []

    def note(module: object, args: object, kwargs: dict[str, torch.Tensor | None]) -> None:
        seen.append(kwargs["initial_state"])

    hook = model.transformer.register_forward_pre_hook(note, with_kwargs=True)
    for step in (3, 5, 6, 6):
        recurrent_loss(model, batch, TINY, RECURRENCE, step)
    hook.remove()
    hints, one, other, again = seen
    assert hints is None and one is not None and other is not None and again is not None
    assert not one[0].any() and one[1].std().item() == pytest.approx(model.config.state_std, rel=0.1)
    assert not torch.equal(one, other) and torch.equal(other, again)


@pytest.mark.exhaustive
def test_a_few_steps_lower_the_loss(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    recipe = replace(TINY, width=32, note_steps=60, note_batch=8, lessons=(Lesson("answers", 1, 1, trails=False),))
    train(replace(recipe, peak_rate=1e-2), tokenizer, tmp_path)
    losses = [report.loss for report in read_log(tmp_path / LOG)][:60]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    def kill(report: Report) -> None:
        if report.step == 6:
            raise KilledError

    whole = train(TINY, tokenizer, tmp_path / "whole")
    with pytest.raises(KilledError):
        train(TINY, tokenizer, tmp_path / "killed", save_every=2, on_step=kill)
    resumed = train(TINY, tokenizer, tmp_path / "killed")
    assert whole is not None and resumed is not None
    before = dict(build_model(TINY, tokenizer).named_parameters())
    for (name, expected), (_, found) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(expected, found), name
        assert not torch.equal(expected, before[name]), name
    assert list(read_log(tmp_path / "whole" / LOG)) == list(read_log(tmp_path / "killed" / LOG))


def test_the_folder_loads_and_is_evaluated_as_it_writes(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    recipe = replace(TINY, width=32)
    assert finish(build_model(recipe, tokenizer), tokenizer, recipe, tmp_path) is None
    model, loaded = load(str(tmp_path), device="cpu", dtype="float32")
    assert isinstance(model, RavenForCausalLM) and model.num_loops == 4 and model.config.mean_recurrence == 2
    assert model.resolve_exit_config(None).mode == "full"
    outcomes = evaluate(model, loaded, model.exit_rule(ExitConfig(mode="converge", eps=0.3)), 6)
    for outcome in outcomes:
        encoded = encode(tokenizer, [outcome.item], outcome.chat)
        ids = torch.tensor([encoded.ids])
        marks = torch.tensor(encoded.answer[1:])
        assert 1 <= outcome.exit_depth <= 4
        for loop in range(1, 5):
            logits = model(ids, exit_config=ExitConfig(mode="fixed", depth=loop)).logits[0, :-1]
            assert outcome.right[loop - 1] == bool((logits.argmax(-1) == ids[0, 1:])[marks].all())
    assert draw("test", 0, 0, questions=1).items[0] == outcomes[0].item


def test_the_shipped_recipe_is_a_raven_of_sixteen_loops() -> None:
    recipe = RECIPES["pocket-raven"]
    assert recipe.loops == 16 and recipe.recurrence == Recurrence()
