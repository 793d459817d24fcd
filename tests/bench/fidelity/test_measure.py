"""Every figure of a row against brute force on a small random model."""

from collections import Counter
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from sigma0.bench.core.conditions import Conditions
from sigma0.bench.fidelity.grid import plan
from sigma0.bench.fidelity.measure import open_bench
from sigma0.bench.fidelity.runs import run_free
from sigma0.bench.pocket.tokenizer import build_tokenizer
from sigma0.config import ExitConfig
from tests.bench.core.test_ledger import CONDITIONS
from tests.marks import fast_if
from tests.reference import DroppingReference, finish_rows, run_all_loops, tiny_model

pytestmark = pytest.mark.slow
NEW = 5
TOTAL = 4
GRID = {"qexit": (0.3, 0.8), "margin": (0.15,), "converge": (0.8,), "accel": (0.9,), "accel-steps": (0.6,)}
MODES = ("full", "qexit", "margin", "converge", "accel", "accel-steps", "fixed", "random", "oracle", "settled")
SETTINGS = plan(MODES, ("finish", "drop"), TOTAL, GRID)


@pytest.fixture(scope="module")
def model():
    return tiny_model(seed=2, total_ut_steps=TOTAL, num_hidden_layers=1)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(8, 61, (2 + k,), generator=generator).tolist()) for k in range(6)]


@pytest.fixture(scope="module")
def bench(model, prompts):
    tokenizer = build_tokenizer()
    full = [list(run_free(model, prompt, ExitConfig(mode="full"), NEW).ids) for prompt in prompts]
    texts = tokenizer.batch_decode(full, skip_special_tokens=True)
    # Half of the "known answers" are full depth's own.
    answers = [text.strip() if number % 2 else "?" for number, text in enumerate(texts)]
    conditions = Conditions(**{**CONDITIONS, "total_loops": TOTAL, "n": len(prompts), "max_new_tokens": NEW})
    return open_bench(model, tokenizer, conditions, prompts, answers, SETTINGS)


@pytest.fixture(scope="module")
def exact(model):
    return deepcopy(model).double()


def forced_reference(exact, ids, first, config):
    """(same argmax, KL from full depth) of each token of a text, from the `first` on, fed back under the rule."""
    with torch.no_grad():
        output = exact.model(input_ids=torch.tensor([ids]), use_cache=False)
        loops = exact.lm_head(output.loop_states[:, 0]).log_softmax(-1)  # [T, S, V]
    result, dropping = [], DroppingReference(exact, config)
    for place in range(len(ids) - 1):
        full = loops[-1, place]
        if config.after_exit == "drop":
            dropping.read(ids[place], prompt=place < first)
            here = dropping.logits.log_softmax(-1)
        else:
            here = loops[run_all_loops(exact, list(ids[: place + 1]), config, 1)[0].depth - 1, place]
        result.append((bool(full.argmax() == here.argmax()), float((full.exp() * (full - here)).sum())))
    return result[first - 1 :]


def setting_of(mode):
    return next(item for item in SETTINGS if item.mode == mode)


RULES = [setting for setting in SETTINGS if setting.mode not in ("random", "oracle", "settled")]
# one rule of every kind of reading among the fast ones
FAST = ("full", "fixed", "qexit")


@pytest.mark.grid(fast=0, slow=2)
@pytest.mark.parametrize(
    "setting",
    [fast_if(rule.mode in FAST, rule) for rule in RULES],
    ids=lambda setting: f"{setting.mode}-{setting.config.after_exit}",
)
def test_a_row_equals_brute_force(bench, exact, prompts, setting):
    row = bench.measure(setting)
    config = setting.config
    full = [run_all_loops(exact, list(prompt), ExitConfig(mode="full"), NEW) for prompt in prompts]
    if config.after_exit == "drop":
        runs = [DroppingReference(exact, config).generate(list(prompt), NEW) for prompt in prompts]
    else:
        runs = [run_all_loops(exact, list(prompt), config, NEW) for prompt in prompts]
    margins = [step.margin for run in (*full, *runs) for step in run]
    assert min(margins) > 1e-5, "a near tie: choose another seed"
    ids = [[step.token for step in run] for run in runs]
    wanted = [[step.token for step in run] for run in full]
    equal = [mine == theirs for mine, theirs in zip(ids, wanted, strict=True)]
    assert row.exact_match.value == pytest.approx(np.mean(equal))
    pairs = [(mine, theirs) for mine, theirs in zip(ids, wanted, strict=True) if mine != theirs]
    parted = [np.equal(mine, theirs).tolist().index(False) for mine, theirs in pairs]
    assert (row.first_divergence is None) == (not parted)
    assert row.first_divergence is None or row.first_divergence.value == pytest.approx(np.mean(parted))
    texts = bench.tokenizer.batch_decode(ids, skip_special_tokens=True)
    right = [text.strip() == answer for text, answer in zip(texts, bench.answers, strict=True)]
    assert row.accuracy.value == pytest.approx(np.mean(right))
    depths = [[step.depth for step in run] for run in runs]
    spent, most = sum(sum(item[1:]) for item in depths), TOTAL * (NEW - 1) * len(prompts)
    assert row.mean_depth.value == pytest.approx(spent / (most / TOTAL))
    assert row.depth_saved.value == pytest.approx(1 - spent / most)
    assert row.passes_saved.value == pytest.approx(1 - spent / most)
    total = config.depth or TOTAL
    rows = spent if config.after_exit == "drop" else sum(finish_rows(item, total) for item in depths)
    assert row.rows_saved.value == pytest.approx(1 - rows / most)
    assert row.new_tokens == NEW * len(prompts) == sum(row.reasons.values())
    assert row.prompt_rows == total * sum(map(len, prompts))
    if config.mode not in ("full", "fixed"):
        met = sum(step.met for run in runs for step in run)
        assert row.reasons.get("max_depth", 0) == row.new_tokens - met
    heads = spent if config.mode == "margin" else (NEW - 1) * len(prompts)
    assert row.head_rows == heads
    texts = [(prompt, [*prompt, *new]) for prompt, new in zip(prompts, wanted, strict=True)]
    forced = [item for prompt, ids in texts for item in forced_reference(exact, ids, len(prompt), config)]
    same, kl = np.mean(forced, 0)
    assert row.agreement_on_answers.value == pytest.approx(same)
    assert row.kl_on_answers.value == pytest.approx(kl, abs=1e-5)


def test_agreement_counts_the_prompts_too(bench, exact, prompts):
    setting = setting_of("qexit")
    row = bench.measure(setting)
    assert [len(text.ids) for text in bench.texts] == [len(prompt) + NEW for prompt in prompts]
    forced = [item for text in bench.texts for item in forced_reference(exact, text.ids, 1, setting.config)]
    same, kl = np.mean(forced, 0)
    assert row.agreement.value == pytest.approx(same) and row.kl.value == pytest.approx(kl, abs=1e-5)


@pytest.mark.parametrize("mode", ["oracle", "settled"])
def test_the_oracles_change_nothing_and_their_passes_are_run(bench, mode):
    row = bench.measure(setting_of(mode))
    assert row.exact_match.value == row.agreement.value == row.agreement_on_answers.value == 1.0
    assert row.first_divergence is None and row.reasons == {}
    chosen = bench.readings.oracle if mode == "oracle" else bench.readings.settled
    new, text = bench.readings.is_new, bench.readings.text
    later = [depth for number in range(len(bench.texts)) for depth in chosen[new & (text == number)][1:]]
    assert row.passes_saved.value == pytest.approx(1 - sum(later) / (TOTAL * len(later)))
    assert row.passes_saved.value > 0


def test_random_depths_are_the_rules_own_shuffled(bench):
    setting = setting_of("random")
    rule = next(item for item in SETTINGS if item.mode == "qexit" and item.config == setting.config)
    mine, theirs = bench._depths(setting), bench._depths(rule)
    new, text = bench.readings.is_new, bench.readings.text
    first = new & (np.arange(len(new)) == np.searchsorted(text + new / 2, text + 0.5))
    assert first.sum() == len(bench.texts)
    for marks in (first, new & ~first, ~new):
        assert Counter(mine[marks]) == Counter(theirs[marks])
    assert (mine != theirs).any()
    row = bench.measure(setting)
    assert row.agreement.value == pytest.approx(bench.readings.same_at(mine).mean())
    assert row.passes_saved.value == pytest.approx(row.depth_saved.value)
    one, again = (bench._replayed(setting, 0) for _ in range(2))
    assert one == again and len(one.exits) == NEW and set(one.exits[:-1]) <= set(theirs[new & ~first].tolist())


def test_intervals_hold_their_figures_and_full_depth_is_whole(bench):
    for setting in SETTINGS[:4]:
        row = bench.measure(setting)
        for name in ("agreement", "kl", "exact_match", "accuracy", "passes_saved", "rows_saved"):
            figure = getattr(row, name)
            assert figure.low <= figure.value <= figure.high, name
    full = bench.measure(SETTINGS[0])
    assert SETTINGS[0].mode == "full" and full.exact_match.value == full.agreement.value == 1.0
    assert full.kl.value == full.passes_saved.value == full.rows_saved.value == 0.0
    assert full.accuracy.value == 0.5 and full.speed_ratio is None


def test_speed_is_tokens_a_second_over_those_of_full_depth(bench, monkeypatch):
    """With times given, so that numerator, denominator, median and turns can be told apart."""
    asked = []
    stall = iter([True] + [False] * 1000)

    def timed(model, prompt, config, new):
        asked.append(config.mode)
        seconds = 4.0 if config.mode == "full" else 1.0
        tokens = NEW if config.mode == "full" else 3
        return replace(run, ids=run.ids[:tokens], seconds=1000.0 if next(stall) else seconds * len(prompt))

    run = run_free(bench.model, bench.prompts[0], ExitConfig(mode="full"), NEW)
    monkeypatch.setattr("sigma0.bench.fidelity.runs.run_free", timed)
    setting = setting_of("qexit")
    speed, figure = bench._speed(setting)
    lengths = sum(len(prompt) for prompt in bench.prompts)
    assert speed == pytest.approx(3 * len(bench.prompts) / lengths)
    assert figure.value == pytest.approx(speed / (NEW * len(bench.prompts) / (4.0 * lengths)))
    assert figure.low <= figure.value <= figure.high
    assert asked[:6] == ["full", "qexit", "qexit", "full", "full", "qexit"]
    assert bench._speed(SETTINGS[0]) == (pytest.approx(NEW * len(bench.prompts) / (4.0 * lengths)), None)


@pytest.mark.parametrize("mode", ["qexit", "margin"])
def test_verify_writes_full_depth_and_counts_its_tail(bench, prompts, mode):
    setting = next(item for item in plan((mode,), ("verify",), TOTAL, {mode: GRID[mode]}) if item.mode == mode)
    row = bench.measure(setting)
    assert row.after_exit == "verify"
    assert row.exact_match.value == row.agreement.value == 1.0 and row.kl.value == 0.0
    runs = [run_free(bench.model, prompt, setting.config, NEW) for prompt in prompts]
    passes = sum(run.passes for run in runs)
    assert row.passes_saved.value == pytest.approx(1 - passes / (TOTAL * (NEW - 1) * len(runs)))
    assert row.rows_saved.value <= 0


def test_samples_show_the_tokens_of_the_first_prompts(bench, prompts):
    row = bench.sample(ExitConfig(q=0.8))
    assert len(row.samples) == len(prompts) and row.settings == {"q": 0.8}
    run = run_free(bench.model, prompts[0], ExitConfig(q=0.8), NEW)
    assert [depth for _, depth in row.samples[0].tokens] == list(run.depths)
    assert [text for text, _ in row.samples[0].tokens] == [bench.tokenizer.decode([token]) for token in run.ids]
