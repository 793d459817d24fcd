"""Ways to compare with write full depth's text, in the passes that they should take."""

import pytest
import torch
from torch._dynamo.utils import counters

from sigma0 import ExitConfig
from sigma0.bench.core.replay import Trace
from sigma0.bench.lossless.measure import full_texts, record, simulate
from sigma0.bench.speed import self_speculation
from sigma0.bench.speed.branches import Branches, most_nodes
from sigma0.bench.speed.decoders import Ours, PromptedCache
from sigma0.bench.speed.peer import Stock
from sigma0.bench.speed.self_speculation import Drafting, SelfSpeculation, fit_drafting, passes_along
from tests.marks import exhaustive, needs_compiler
from tests.reference import settled_model, tiny_model

NEW = 16


def prompt(seed, batch=1, length=7):
    return torch.randint(8, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.grid(fast=0, slow=1)
@needs_compiler
@pytest.mark.parametrize("backend", ["eager", exhaustive("inductor")])
def test_a_static_cache_writes_what_transformers_own_decoding_writes(backend):
    torch._dynamo.reset()
    model, ids = tiny_model(seed=1, total_ut_steps=4), prompt(0, batch=2)
    counters.clear()
    static = Stock(model, ids, NEW, backend)
    first, again, stock = static.decode(), static.decode(), Stock(model, ids, NEW).decode()
    assert first.tokens.tolist() == again.tokens.tolist() == stock.tokens.tolist()
    # one graph for all tokens and runs, and none is broken
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert (first.passes, first.rows, first.head_rows) == (stock.passes, stock.rows, stock.head_rows)
    assert first.kv_in_use == stock.kv_in_use < first.kv_allocated and static.prompt() > 0


@pytest.mark.parametrize("depth, length", [(1, 1), (1, 4), (3, 2), (5, 3)])
@pytest.mark.parametrize("make", [tiny_model, settled_model])
def test_self_speculation_writes_what_full_depth_writes(make, depth, length):
    model, ids = make(seed=2, total_ut_steps=6), prompt(1)
    decoder, full = SelfSpeculation(model, ids, NEW, Drafting(depth, length)), Stock(model, ids, NEW).decode()
    result = decoder.decode()
    assert result.tokens.tolist() == decoder.decode().tokens.tolist() == full.tokens.tolist()
    # what each round gives follows from the argmax at loop d and at loop T of every token
    text = full_texts(model, [tuple(ids[0].tolist())], NEW + length)
    (trace,), _ = record(model, [tuple(ids[0].tolist())], text, ExitConfig(mode="full"))
    fed = rounds = 0
    while fed < NEW - 1:
        right = [trace[depth - 1, fed + place] == trace[-1, fed + place] for place in range(length)] + [False]
        fed, rounds = fed + right.index(False) + 1, rounds + 1
    assert (result.passes, result.timed) == (rounds * (length * depth + 6), fed)
    assert (result.rows, result.head_rows) == (rounds * 6 * (length + 1), rounds * (2 * length + 1))


def test_self_speculation_keeps_the_kv_of_full_depth():
    model, ids = settled_model(seed=2, total_ut_steps=4), prompt(1)
    decoder = SelfSpeculation(model, ids, NEW, Drafting(2, 3))
    text = torch.cat([ids, decoder.decode().tokens], 1)
    alone = SelfSpeculation(model, text, 1, Drafting(2, 3))
    alone.prompt()  # all loops of the whole text at once
    kept = text.shape[1] - 1
    for ours, whole in zip(decoder._planes, alone._planes, strict=True):
        for held, expected in zip(ours, whole, strict=True):
            torch.testing.assert_close(held[:, :, :kept], expected[:, :, :kept], rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@needs_compiler
def test_compiled_self_speculation_writes_the_same():
    model, ids = settled_model(seed=2, total_ut_steps=3, num_hidden_layers=1), prompt(1)
    compiled = SelfSpeculation(model, ids, NEW, Drafting(1, 2), compiled=True).decode()
    plain = SelfSpeculation(model, ids, NEW, Drafting(1, 2)).decode()
    assert compiled.tokens.tolist() == plain.tokens.tolist() and compiled.passes == plain.passes
    assert (compiled.runner, plain.runner) == ("compile", "eager")


def test_a_course_says_which_drafts_stand():
    model, ids = tiny_model(seed=2, total_ut_steps=4), prompt(1)
    result = SelfSpeculation(model, ids, 7, Drafting(2, 2), Trace(4, (1, 1, 1), (1, 2, 3))).decode()
    # two drafts stand and one token comes of loop 4, then the same again
    assert (result.passes, result.timed) == (2 * (2 * 2 + 4), 6)
    with pytest.raises(ValueError, match="nothing of settled loops"):
        SelfSpeculation(model, ids, 7, Drafting(2, 2), Trace(4, (1,)))


def test_along_a_course_the_drafts_of_the_fewest_passes_are_taken():
    model, ids = tiny_model(seed=2, total_ut_steps=4), prompt(1)
    # eight of nine drafts of loop 1 stand: a round of eight drafts takes 12 passes for nine tokens
    easy = Trace(4, (1,) * 9, (1,) * 8 + (4,))
    assert fit_drafting(model, ids, NEW, easy) == Drafting(1, 8) and passes_along(easy, Drafting(1, 8)) == 12 / 9
    assert fit_drafting(model, ids, NEW, Trace(4, (4,) * 5, (2,) * 5)).depth == 2
    assert fit_drafting(model, ids, NEW, Trace(4, (4,) * 5, (4,) * 5)) == Drafting(1, 1)


@pytest.mark.slow
def test_the_fastest_drafts_are_taken(monkeypatch):
    """With a clock that a pass moves by one, the fastest drafts are those of the fewest passes."""
    clock = [0.0]
    run = SelfSpeculation._run

    def counted(self, hidden_states, columns, first, last):
        clock[0] += last - first
        return run(self, hidden_states, columns, first, last)

    monkeypatch.setattr(SelfSpeculation, "_run", counted)
    monkeypatch.setattr(self_speculation, "now", lambda like: clock[0])
    monkeypatch.setattr(self_speculation, "LENGTHS", (1, 3))
    model, ids = settled_model(seed=2, total_ut_steps=6), prompt(1)
    chosen = fit_drafting(model, ids, NEW, None)
    costs = {}
    for depth in (1, 3):
        for length in self_speculation.LENGTHS:
            result = SelfSpeculation(model, ids, NEW, Drafting(depth, length)).decode()
            costs[depth, length] = result.passes / result.timed
    assert costs[chosen.depth, chosen.length] == min(costs.values()) < max(costs.values())


RULES = [
    ExitConfig(mode="margin", theta=0.02),
    ExitConfig(mode="margin", theta=0.1, min_loops=2),
    ExitConfig(mode="qexit", q=0.4),
    ExitConfig(mode="fixed", depth=1),
    ExitConfig(mode="full"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.mode)
@pytest.mark.parametrize("seed", [0, 1])
def test_live_branches_take_the_passes_that_traces_say(rule, seed):
    model, ids = settled_model(seed=seed, total_ut_steps=6), prompt(seed)
    prompts = [tuple(ids[0].tolist())]
    texts = full_texts(model, prompts, NEW)
    counted = simulate(*record(model, prompts, texts, rule))
    one, two = (Branches(model, ids, NEW, rule, second).decode() for second in (False, True))
    assert one.tokens.tolist() == two.tokens.tolist() == texts[0][:, 7:].tolist()
    assert (one.passes, two.passes) == (counted.passes, counted.with_fallback)
    verify = ExitConfig.parse({**rule.to_dict(), "after_exit": "verify", "redraft": False})
    ours = Ours(PromptedCache(model, ids, NEW), verify, None).decode()
    assert (one.passes, one.rows, one.tail_passes) == (ours.passes, ours.rows, ours.tail_passes)
    if rule.mode in ("qexit", "fixed"):
        assert two.passes < one.passes and two.rows > one.rows


def test_branches_hold_no_more_tokens_than_there_is_room_for():
    """Every loop of every token doubts: the most branches that there can be."""
    model, ids = tiny_model(seed=3, total_ut_steps=5), prompt(3)
    decoder = Branches(model, ids, NEW, ExitConfig(mode="fixed", depth=1), True)
    least = [decoder._slots]
    fed = decoder._fed
    decoder._fed = lambda token, after: (least.append(len(decoder._free)), fed(token, after))[1]
    assert decoder.decode().tokens.tolist() == Stock(model, ids, NEW).decode().tokens.tolist()
    assert min(least) > 0 and most_nodes(5) == 33


def test_other_rules_have_no_branches():
    model, ids = tiny_model(seed=1), prompt(1)
    with pytest.raises(ValueError, match="not under converge"):
        Branches(model, ids, NEW, ExitConfig(mode="converge", eps=0.1), True)
    with pytest.raises(ValueError, match="batch of 2"):
        Branches(model, ids.expand(2, -1), NEW, ExitConfig(), True)
    with pytest.raises(ValueError, match="batch of 2"):
        SelfSpeculation(model, ids.expand(2, -1), NEW, Drafting(1, 1))
