"""The figures of tasks and policies that stand in sentences, each with the row that it comes from."""

# ruff: noqa: E501  (sentences are easier to find in their text where they are not broken up)

from sigma0.bench.core.ledger import FidelityRow, HumanEvalRow, StrategyQARow, VllmRow
from sigma0.bench.effort.simulation import Rates
from sigma0.bench.fidelity.pages import latest_runs
from sigma0.bench.figures.check import computed as c
from sigma0.bench.figures.forms import only
from sigma0.bench.figures.forms import percent as p
from sigma0.bench.figures.results import Results
from sigma0.bench.outer.table import latest_outer
from sigma0.bench.strategyqa.table import latest_levels
from sigma0.calibrate.bootstrap import share


def effort_sentence(results: Results) -> str:
    """What the outer loops say of the measured policies."""
    effort = results.effort("pocket")
    first = effort.first_right
    assert first is not None
    return (
        f"{c(effort.policies[0].runs)} held-out questions of the hard half, temperature "
        f"{c(str(effort.settings['temperature']))}; first answers were right in {p(first.value)} %"
    )


def task_sentences(results: Results) -> list[str]:
    """What the list of benches says of tasks."""
    solved = {row.n for row in results.rows if isinstance(row, HumanEvalRow)}
    direct = _direct(results)
    return [
        f"none of HumanEval's first {only(solved)} problems",
        f"On StrategyQA's {c(direct.n)} dev items SmolLM2 is right on {p(direct.accuracy.value)} % "
        f"({p(direct.accuracy.low)} to {p(direct.accuracy.high)}) asked directly",
    ]


def outer_sentences(results: Results) -> list[str]:
    """What the outer loops' bench says of the model that knows the forms."""
    runs = {run[0].way.split()[0]: run for run in latest_outer(results.rows) if run[0].model == "pocket-solver"}
    rows = {row.way: row for row in runs["plain"]}
    lemma, plain, large = (rows[name] for name in ("lemma graph", "plain answer", "pocket-large: plain answer"))
    vote = next(name for name in lemma.beats if name.startswith("vote") and "rule" not in name)
    over_plain, over_vote = lemma.beats["plain answer"], lemma.beats[vote]
    high, doubts = rows["effort: flat high"], rows["walk where the verdict doubts"]
    program = runs["program"][0]
    return [
        f"The lemma graph is right on {p(lemma.right.value)} % of {c(lemma.n)} questions, the plain answer on {p(plain.right.value)} %: "
        f"{p(over_plain.value)} points more ({p(over_plain.low)} to {p(over_plain.high)}), and {p(over_vote.value)} more "
        f"({p(over_vote.low)} to {p(over_vote.high)}) than the {vote.replace(vote.split()[-1], c(vote.split()[-1]))} that costs as much. It stands behind "
        f"{p(lemma.accepted.value)} % of its answers, and {p(lemma.accepted_wrong.value)} % of all are wrong ones among them.",
        f"flat high effort is as good ({p(high.right.value)} %), with {p(high.accepted_wrong.value)} % accepted wrong",
        f"a walk where the verdict doubts is right on {p(doubts.right.value)} % at a cost of {c(round(doubts.cost))}, where the plain answer costs {c(round(plain.cost))}",
        f"`pocket-large` alone is right on {p(large.right.value)} % at a cost of {c(round(large.cost))}",
        f"the program is right on {p(program.right.value)} % ({p(program.right.low)} to {p(program.right.high)}), wrong on {p(program.accepted_wrong.value)} %",
    ]


def vllm_sentences(results: Results) -> list[str]:
    """What the plugin's text says of drafts, as the last run of its bench has it."""
    rows = [row for row in results.rows if isinstance(row, VllmRow)]
    last = {(row.way, row.clients): row for row in rows if row.time == max(each.time for each in rows)}
    drafts, verify = ([last[way, clients] for clients in (1, 8, 32)] for way in ("vllm-drafts", "verify"))
    assert all(row.same_text == 1 for row in last.values())
    times = [
        f"{c(ratio.value, '.2f')} ({c(ratio.low, '.2f')} to {c(ratio.high, '.2f')})"
        for ratio in (row.speed_ratio for row in (*drafts, *verify))
    ]
    return [
        f"`{drafts[0].model}`, {drafts[0].dtype}, {c(drafts[0].drafts or 0)} drafts of {c(drafts[0].draft_loops or 0)} loops, {c(drafts[0].rounds)} rounds: "
        f"{times[0]} times vLLM's own tokens a second at {c(1)} client, {times[1]} at {c(8)} and {times[2]} at {c(32)}; "
        f"`sigma0 serve` with `verify`, which is as lossless, {times[3]}, {times[4]} and {times[5]}.",
    ]


def policy_sentences(results: Results) -> list[str]:
    """What the simulated policies do."""
    simulated, odds = results.effort("simulation"), Rates()
    passed, failed, cut = (
        [p(each[level], 0) for level in ("low", "medium", "high")]
        for each in (odds.false_pass, odds.false_fail, odds.cut_off)
    )
    costly = [c(each, "g") for each in (*odds.tokens.values(), odds.generation)]
    rising = {each.policy: each for each in simulated.policies}
    flat = rising.pop("flat high")
    asked = [each.verifications.value / flat.verifications.value - 1 for each in rising.values()]
    costs = [each.cost.value / flat.cost.value - 1 for each in rising.values()]
    return [
        f"{c(flat.runs, ',')} runs of each policy with the default odds: {p(odds.first_right, 0)} % of first solutions are "
        f"right, {p(odds.repaired, 0)} % of corrections mend, {p(odds.spoiled, 0)} % of needless ones spoil",
        f"lets a wrong solution pass in {passed[0]}, {passed[1]} and {passed[2]} %, fails a right one in {failed[0]}, "
        f"{failed[1]} and {failed[2]} %, is cut off in {cut[0]}, {cut[1]} and {cut[2]} %, and costs {costly[0]}, "
        f"{costly[1]} and {costly[2]}, a solution {costly[3]};",
        f"and asks for {c(round(100 * min(asked), -1), '.0f')} to {c(round(100 * max(asked), -1), '.0f')} % more "
        f"verifications, at a cost that is {p(min(costs), 0)} to {p(max(costs), 0)} % higher",
    ]


def accel_sentences(results: Results) -> list[str]:
    """What the two forms of `accel` save."""
    runs = latest_runs(results.rows)
    rows = [row for run in runs.values() for row in run if isinstance(row, FidelityRow) and row.after_exit == "finish"]

    def saved(model: str, mode: str) -> str:
        (row,) = (row for row in rows if (row.model, row.mode) == (model, mode) and row.promise is not None)
        assert row.passes_saved is not None
        return p(row.passes_saved.value)

    ours, older = ([saved(model, mode) for model in ("pocket", "pocket-large")] for mode in ("accel", "accel-steps"))
    return [
        f"at thresholds of one promise ours saves {ours[0]} % and {ours[1]} % of the passes, the older form {older[0]} % "
        f"and {older[1]} %",
    ]


def humaneval_sentences(results: Results) -> list[str]:
    """How many problems of HumanEval were solved."""
    rows = [row for row in results.rows if isinstance(row, HumanEvalRow)]
    n = max(row.n for row in rows)
    return [
        f"{c(0)} of {c(n)} is {c(0)} to {p(share(0, n).interval[1])} %",
        f"The first {c(n)} problems, greedy, at most {only({row.max_new_tokens for row in rows})} new tokens",
    ]


def distillation_sentences(results: Results) -> list[str]:
    """What distilling a level gained."""
    found = [row for row in results.rows if isinstance(row, StrategyQARow) and row.against != "L0"]
    before, after = ([p(each) for each in (row.accuracy.value, row.accuracy.low, row.accuracy.high)] for row in found)
    misses = [c(sum(row.misses.values())) for row in reversed(found)]
    return [
        f"{after[0]} % ({after[1]} to {after[2]}) right on the items of dev, {before[0]} % ({before[1]} to {before[2]}) "
        f"without (p {c(found[1].p_value or 0.0, '.2f')}). {misses[0]} and {misses[1]} of {c(found[0].n)} are misses of form"
    ]


def _direct(results: Results) -> StrategyQARow:
    return max((row for run in latest_levels(results.rows) for row in run if row.level == "L0"), key=lambda row: row.n)
