"""`outer`: outer loops beside votes that cost the same; `distill`: a program; `agent`: a repository with faults."""

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from sigma0.bench.core.conditions import describe, utc_now
from sigma0.bench.core.ledger import append_row, check_ledger
from sigma0.bench.core.options import OWN, AsJsonLines, FormsModel, HardStories, LedgerFile, ShownExamples
from sigma0.bench.core.output import measuring, step_bar, tell_rows
from sigma0.bench.core.rows import OuterRow
from sigma0.bench.outer import measure as study
from sigma0.bench.outer.measure import run
from sigma0.bench.outer.program import Trace, induce
from sigma0.bench.outer.toy import FAULTS, planted, write
from sigma0.bench.pocket.items import Item
from sigma0.checkpoints.about import read_about
from sigma0.commands.options import Threads
from sigma0.config import Messages
from sigma0.decode.grammar.bounds import OWN_TOKENS
from sigma0.models.load import load_causal
from sigma0.models.prompts import encode
from sigma0.reason.agent.agent import AgentSettings, RepoAgent
from sigma0.reason.agent.agent_settings import TEST_COMMAND
from sigma0.reason.agent.escalation import ThreeTierEscalation
from sigma0.reason.chat import ChatModel, LocalChat, ScriptedChat
from sigma0.reason.desk import Desk
from sigma0.reason.lemma.form_solver import FormSolver
from sigma0.reason.lemma.settings import LemmaSettings
from sigma0.reason.progressive.policies import ProgressiveConfig, Stage
from sigma0.reason.sandbox.sandbox import Sandbox
from sigma0.reason.shown_forms import ShownForms
from sigma0.reason.trail import Trail

FLAT_LOW = ProgressiveConfig("flat low", (Stage("low", 2),))
RISING = ProgressiveConfig("low to high", (Stage("low", 1), Stage("medium", 1), Stage("high", 1)))
FLAT_HIGH = ProgressiveConfig("flat high", (Stage("high", 2),))
BY_RULE = "yes or no by rule"
PLAIN, PLAIN_HIGH = "plain answer", "plain answer, high effort"
CHANCE = "chance"
TASK = "The tests of this repository fail. Mend the code, so that they pass."


def loops() -> dict[str, study.Way]:
    """The outer loops by name, made anew: one of them learns."""
    return {
        "plan, unchecked": study.planned,
        "check, once": study.reasoned,
        "effort: flat low": study.verified(FLAT_LOW),
        "effort: low to high": study.verified(RISING),
        "effort: flat high": study.verified(FLAT_HIGH),
        "lemma graph": study.lemmas,
        "walk": study.walked,
        "walk where the verdict doubts": study.routed(study.walked),
        "walk where plain answers were wrong": study.Learned(study.walked),
    }


def outer(
    model: FormsModel = "pocket-solver",
    larger: Annotated[str, typer.Option(help="A larger one, asked alone.")] = "pocket-large",
    n: HardStories = 500,
    seed: Annotated[int, typer.Option(help="Of the stories and the samples.")] = 0,
    shown: ShownExamples = 3,
    ways: Annotated[str, typer.Option(help="Some of the loops, separated by semicolons; all by default.")] = "",
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "float32",
    most_votes: Annotated[int, typer.Option(min=1, help="Answers of a vote at most.")] = 32,
    threads: Threads = 1,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Each outer loop on held-out hard questions, beside the plain answer, votes of equal cost and a larger model."""
    started = utc_now()
    with measuring(threads):
        check_ledger(out)
        items = study.hard_questions(n, seed)
        where = study.where_from(seed)
        chosen = choose(ways)
        small, block = open_asked(model, items, where, shown, dtype=dtype)
        large, _ = open_asked(larger, items, where, shown, block)
        if model != larger and small.conditions.model == large.conditions.model:
            raise ValueError(f"{model!r} and {larger!r} have one name, so that their rows could not be told apart")
        with step_bar("questions", n * (len(chosen) + 3 + 2 * most_votes), as_json) as advance:
            output = _measure(_Run(items, seed, started, most_votes, out, advance), chosen, small, large)
    tell_rows(output, as_json, lambda: _print(output), f"{len(output)} rows in {out}")


def _print(output: Sequence[OuterRow]) -> None:
    for table in (study.table(output), study.levels_table(output)):
        if table.rows:
            table.show()


def choose(names: str) -> dict[str, study.Way]:
    """Some of the loops, by names separated by semicolons, since some hold commas; all for none."""
    known = loops()
    wanted = [name.strip() for name in names.split(";") if name.strip()] or list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no such loop: {unknown[0]!r}; there are {'; '.join(known)}")
    return {name: known[name] for name in wanted}


def open_asked(
    name: str,
    items: Sequence[Item],
    where: str,
    shown: int | None,
    first_block: int | None = None,
    dtype: str = "float32",
) -> tuple[study.MeasuredModel, int]:
    """A model, and the numbers of its block; one that was not taught the forms is shown them, but where it is None.

    Of a folder its rows have the name alone: where it lies on this machine tells nobody anything.
    """
    model, tokenizer = load_causal(name, device="cpu", dtype=dtype)
    short = Path(name).absolute().name if Path(name).is_dir() else name
    block = sum(weight.numel() for layer in model.base_model.layers for weight in layer.parameters())
    ids = [tuple(encode(tokenizer, [{"role": "user", "content": item.prompt}])[0].tolist()) for item in items]
    chat: ChatModel = LocalChat(model, tokenizer, short)
    about = read_about(model.name_or_path)
    if about is None and shown is not None:
        chat, where = (
            ShownForms(chat, study.examples(shown)),
            f"{where}; {shown} examples of each form, held to its grammar",
        )
    conditions = describe(model, name, where, ids, [item.answer for item in items], study.MAX_TOKENS)
    return study.MeasuredModel(
        chat, conditions.model_copy(update={"model": short}), block / (first_block or block)
    ), block


@dataclass
class _Run:
    """The rows of a run, in the ledger as they come: a run that breaks off leaves those that it has."""

    items: Sequence[Item]
    seed: int
    time: str
    most_votes: int
    out: Path
    advance: Callable[[], None]
    rows: list[OuterRow] = field(default_factory=list)
    results: dict[str, list[study.Answered]] = field(default_factory=dict)
    drawn: dict[str, list[list[study.Answered]]] = field(default_factory=dict)

    def run(self, name: str, way: study.Way, asked: study.MeasuredModel) -> float:
        """Asks every question in a way; what one cost."""
        self.results[name] = run(way, asked.chat, self.items, self.seed, self.advance)
        return asked.cost(self.results[name])

    def keep(self, name: str, asked: study.MeasuredModel, *beside: str) -> None:
        """Adds the row of a way that was run, with how it stands to others."""
        others = {other: self.results[other] for other in beside}
        self.rows.append(study.to_row(name, asked, self.results[name], others, self.seed, self.time))
        append_row(self.out, self.rows[-1])

    def vote(self, asked: study.MeasuredModel, one: float, cost: float) -> str:
        """Runs the smallest vote that costs no less than `cost`, where one answer costs `one`; its name."""
        wanted = max(1, ceil(cost / one))
        votes = min(self.most_votes, wanted)
        drawn = self.drawn.setdefault(asked.conditions.model, [])
        while len(drawn) < votes:
            drawn.append(run(study.sampled(len(drawn)), asked.chat, self.items, self.seed, self.advance))
        name = f"vote of {votes}{', which costs less' if wanted > votes else ''}"
        if asked.conditions.model != self.rows[0].model:
            name = f"{asked.conditions.model}: {name}"
        for entry, by_rule in ((name, False), (f"{name}, {BY_RULE}", True)):
            if entry not in self.results:
                self.results[entry] = study.run_vote(self.items, drawn[:votes], by_rule)
                self.keep(entry, asked, PLAIN)
        return name


def _measure(
    measured: _Run, chosen: Mapping[str, study.Way], small: study.MeasuredModel, large: study.MeasuredModel
) -> list[OuterRow]:
    """All ways: each loop beside the plain answer and the vote that costs as much, and the larger model alone."""
    one = measured.run(PLAIN, study.plain(), small)
    measured.keep(PLAIN, small)
    measured.run(PLAIN_HIGH, study.plain("high"), small)
    measured.keep(PLAIN_HIGH, small, PLAIN)
    dearest = 0.0
    for name, way in chosen.items():
        cost = measured.run(name, way, small)
        vote = measured.vote(small, one, cost)
        measured.keep(name, small, PLAIN, vote, f"{vote}, {BY_RULE}")
        dearest = max(dearest, cost)
    alone = f"{large.conditions.model}: {PLAIN}"
    cost = measured.run(alone, study.plain(), large)
    measured.keep(alone, large, PLAIN)
    measured.vote(large, cost, dearest)
    return measured.rows


def distill(
    model: FormsModel = "pocket-solver",
    seen: Annotated[int, typer.Option(min=1, help="Stories of the training split, one question each.")] = 400,
    n: HardStories = 500,
    seed: Annotated[int, typer.Option(help="Of the stories.")] = 0,
    shown: ShownExamples = 3,
    program: Annotated[Path, typer.Option(help="Where the program is written, as JSON.")] = Path("program.json"),
    threads: Threads = 1,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Make a program without a model of what a lemma graph verified, and measure it on held-out questions."""
    started = utc_now()
    with measuring(threads):
        check_ledger(out)
        items = study.hard_questions(n, seed)
        asked, _ = open_asked(model, items, study.where_from(seed), shown)
        traces = []
        with step_bar("questions", seen, as_json) as advance:
            for place, item in enumerate(islice(study.questions("train", seed), seen)):
                desk = Desk(Trail(), seed=place)
                solution = FormSolver(asked.chat, desk, LemmaSettings(max_tokens=study.MAX_TOKENS)).solve(item.prompt)
                # the known answer is not looked at: what the graph verified is taken for right
                if solution.graph is not None:
                    traces.append(Trace(item.prompt, solution.graph.lemmas))
                advance()
        made = induce(traces)
        program.write_text(json.dumps(asdict(made), indent=1) + "\n")
        answers = [made.answer(item.prompt) for item in items]
        results = [
            study.Answered(answer or "", answer is not None, right=answer == item.answer)
            for answer, item in zip(answers, items, strict=True)
        ]
        row = study.to_row(f"program of {len(traces)} traces", asked, results, {}, seed, started)
        append_row(out, row)
    closing = (
        f"{len(traces)} of {seen} questions verified; {program}: {len(made.pointers)} pointers, {len(made.kinds)} kinds"
        f"; 1 row in {out}"
    )

    right = f"right {row.right.value:.1%} ({row.right.low:.1%} to {row.right.high:.1%})"
    line = f"{right}, wrong {row.accepted_wrong.value:.1%}, without an answer {1 - row.accepted.value:.1%} of {n}"
    tell_rows([row], as_json, lambda: typer.echo(line), closing)


def agent(
    model: FormsModel = "pocket-solver",
    held: Annotated[bool, typer.Option(help="Hold replies to one action by a grammar.")] = True,
    steps: Annotated[int, typer.Option(min=4, help="Steps on each fault at most; a tier every quarter.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each reply at most.")] = 128,
    seed: Annotated[int, typer.Option(help="Of the questions.")] = 0,
    toys: Annotated[int, typer.Option(min=0, help="So many drawn repositories, with choices; 0: the five faults.")] = 0,
    tiers: Annotated[str, typer.Option(help="Tiers that act, 0 to 3, or chance: choose by lot. 0,1 runs both.")] = "3",
    threads: Threads = 1,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Let the three-tier agent mend small repositories with one fault each."""
    started = utc_now()
    with measuring(threads):
        check_ledger(out)
        arms = tiers.split(",")
        for arm in arms:
            if arm not in ("0", "1", "2", "3", CHANCE) or arms.count(arm) > 1:
                raise ValueError(f"--tiers takes numbers from 0 to 3 and {CHANCE}, each once, got {tiers!r}")
        if CHANCE in arms and not toys:
            raise ValueError(f"--tiers {CHANCE} chooses among listed actions: give --toys")
        sandbox = Sandbox()
        if sandbox.unavailable is not None:
            raise ValueError(f"the agent runs tests in a sandbox alone, and there is none: {sandbox.unavailable}")
        faults: list[Callable[[Path], None]] = [partial(write, fault=fault) for fault in FAULTS]
        if toys:
            faults = [planted(seed, index, held_out=True).write for index in range(toys)]
        # conditions of the row: the faults are the questions
        where = f"a repository of the micro-world's rules with one of {len(FAULTS)} faults"
        where = f"{toys} repositories of toy functions with a held-out fault, seed {seed}" if toys else where
        asked, _ = open_asked(model, study.hard_questions(2, seed), where, None)
        asked = replace(
            asked,
            conditions=asked.conditions.model_copy(update={"n": len(faults), "max_new_tokens": max_tokens}),
        )
        listed = "choices" if toys else "held to actions" if held else "free"
        results: dict[str, list[study.Answered]] = {}
        rows, lines = [], []
        with step_bar("faults", len(arms) * len(faults), as_json) as advance:
            for arm in arms:
                acting = 3 if arm == CHANCE else int(arm)
                settings = AgentSettings(
                    escalation=_tiers(steps, acting),
                    max_tokens=max_tokens,
                    context_chars=8_000,
                    held=held,
                    choices=toys > 0,
                    test_command=(*TEST_COMMAND, "--disable-plugin-autoload"),
                )
                way = f"agent, {CHANCE if arm == CHANCE else listed}, {steps} steps"
                way = way if acting == 3 else f"{way}, {acting} tiers"
                mended, taken, refused = [], 0, 0
                for place, plant in enumerate(faults):
                    desk = Desk(Trail(), seed=seed + place)
                    with tempfile.TemporaryDirectory() as folder:
                        plant(Path(folder))
                        lot = ScriptedChat(_by_lot(Random(seed + place)), CHANCE)
                        chooser = lot if arm == CHANCE else asked.chat
                        result = RepoAgent([chooser], sandbox, desk, settings).solve(TASK, Path(folder))
                    taken += result.steps
                    refused += sum(decision.what == "refused" for decision in desk.trail.decisions)
                    mended.append(study.Answered(result.patch, result.solved, right=result.solved, usage=desk.usage))
                    advance()
                row = study.to_row(way, asked, mended, results, seed, started)
                results[way] = mended
                append_row(out, row)
                rows.append(row)
                interval = f"({row.right.low:.1%} to {row.right.high:.1%})"
                lines.append(
                    f"{way}: {sum(one.right for one in mended)} of {len(faults)} faults mended {interval}; "
                    f"{refused} of {taken} replies were no action that could be taken"
                )
    tell_rows(rows, as_json, lambda: typer.echo("\n".join(lines)), f"{len(rows)} rows in {out}")


def _tiers(steps: int, acting: int) -> ThreeTierEscalation:
    """A tier every quarter of the steps; those above `acting` after the last step, which is never."""
    starts = [steps * (tier + 1) // 4 if tier < acting else steps + tier for tier in range(3)]
    first, second, third = starts
    return ThreeTierEscalation(first, second, third, check_interval=max(1, steps // 8), max_steps=steps)


def _by_lot(rng: Random) -> Callable[..., str]:
    """Replies with one of the texts that a grammar of choices lists."""

    def reply(messages: Messages, grammar: str, **_: object) -> str:
        return str(json.loads(rng.choice(re.findall(r'"(?:[^"\\]|\\.)*"', grammar.removeprefix(OWN_TOKENS)))))

    return reply
