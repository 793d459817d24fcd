"""The experiments by name; each makes a new level."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sigma0.bench.strategyqa.adaptive import Route, adaptive, pipeline
from sigma0.bench.strategyqa.distillation import load_demonstrations, load_template
from sigma0.bench.strategyqa.items import Item
from sigma0.bench.strategyqa.level import Level
from sigma0.bench.strategyqa.memory import Improving, seeded
from sigma0.bench.strategyqa.prompted import DEMONSTRATION, chain_of_code, chain_of_thought, direct, program_trace
from sigma0.bench.strategyqa.react import STEP_LIMIT, react
from sigma0.bench.strategyqa.workflow import ParagraphIndex, fact_paragraphs, load_paragraphs, workflow

# items of train that a level is seeded from, and whose facts are searched where no paragraphs are given
SEEDS = 200


@dataclass(frozen=True)
class Makings:
    """What levels are made from, beside the questions."""

    train: Sequence[Item] = ()  # Items that levels may be seeded from; none of them is scored
    paragraphs: Path | None = None  # The published paragraph file; without it, facts of `train` are searched
    demonstrations: Path | None = None  # Distilled traces that L1-ptp shows
    template: Path | None = None  # Distilled steps that L2 is held to
    route: Route = "rules"  # Who decides in L4


def _retrieving(makings: Makings) -> Level:
    if makings.paragraphs is not None:
        result = load_paragraphs(makings.paragraphs)
    elif makings.train:
        result = fact_paragraphs(makings.train)
    else:
        raise ValueError("L2-rag searches paragraphs: give the published file, or items of train")
    return Level("L2-rag", partial(workflow, None, ParagraphIndex(result)))


def _seeded(makings: Makings) -> Level:
    if not makings.train:
        raise ValueError("L5-icl is seeded from items of train, and there are none")
    return seeded(makings.train[:SEEDS])


def _traced(makings: Makings) -> Level:
    result = [] if makings.demonstrations is None else load_demonstrations(makings.demonstrations)
    texts = [one.text for one in result] or [DEMONSTRATION]
    return Level("L1-ptp", partial(program_trace, texts), tuple(one.qid for one in result))


def _workflow(makings: Makings) -> Level:
    template = None if makings.template is None else load_template(makings.template)
    return Level("L2", partial(workflow, template, None), () if template is None else template.qids)


def _adaptive(makings: Makings) -> Level:
    levels = [ONCE[name](Makings()) for name in ("L1-cot", "L2", "L3")]
    return Level("L4", partial(adaptive, levels, makings.route))


# one name of each level, for runs of all of them
ONCE: dict[str, Callable[[Makings], Level]] = {
    "L0": lambda makings: Level("L0", direct),
    "L1-cot": lambda makings: Level("L1-cot", chain_of_thought),
    "L1-coc": lambda makings: Level("L1-coc", chain_of_code),
    "L1-ptp": _traced,
    "L2": _workflow,
    "L2-rag": _retrieving,
    "L3": lambda makings: Level("L3", partial(react, False, STEP_LIMIT)),
    "L3-simple": lambda makings: Level("L3-simple", partial(react, True, STEP_LIMIT)),
    "L4": _adaptive,
    "L4-pipeline": lambda makings: Level("L4-pipeline", pipeline),
    "L5": lambda makings: Improving(),
    "L5-icl": _seeded,
}
ALIASES = {"L0-baseline": "L0", "L2-trace": "L2", "L3-react": "L3", "L4-adaptive": "L4", "L5-improving": "L5"}
EXPERIMENTS = {**ONCE, **{alias: ONCE[name] for alias, name in ALIASES.items()}}


def variant(name: str, makings: Makings) -> str:
    """What a level was made with, in words, where that is not always the same."""
    name = ALIASES.get(name, name)
    if name == "L4":
        return f"by {makings.route}"
    if name == "L2-rag":
        return "facts of train" if makings.paragraphs is None else makings.paragraphs.name
    shown = {"L1-ptp": makings.demonstrations, "L2": makings.template}.get(name)
    return "" if shown is None else shown.name
