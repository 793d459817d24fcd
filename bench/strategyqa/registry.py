"""The experiments by name, each of which makes a new level; and the levels that are fixed prompts.

L0 asks at once; L1 makes a model reason in words, in code, or in the trace of a program.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sigma0.bench.strategyqa import workflow as traces
from sigma0.bench.strategyqa.adaptive import Route, adaptive, pipeline
from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.distillation import load_demonstrations, load_template
from sigma0.bench.strategyqa.items import Item
from sigma0.bench.strategyqa.level import FORM, Level, Prediction, Question, has_words, read, read_answer, start
from sigma0.bench.strategyqa.memory import Improving, seeded

# belongs to no item of the data
DEMONSTRATION = """>>> strategy_qa("Would a grand piano fit into the boot of a small car?")
Calling decompose("Would a grand piano fit into the boot of a small car?")...
...decompose returned ["How long is a grand piano?", "How long is the boot of a small car?", "Is #1 less than #2?"]
Calling answer_factual("How long is a grand piano?")...
...answer_factual returned "at least 1.5 metres"
Calling answer_factual("How long is the boot of a small car?")...
...answer_factual returned "about 0.7 metres"
Calling evaluate_condition("Is at least 1.5 metres less than about 0.7 metres?")...
...evaluate_condition returned False
Calling combine_facts([False])...
...combine_facts returned False
Final answer: No
"""


# what a program would print stands in it for every case; only what the model says that it prints is an answer
_PRINTING = re.compile(r"\bprint[ \t]*\([^\n]*")


def direct(question: Question, ask: Ask) -> Prediction:
    """L0: asks the question as it is."""
    return read(ask("answer", f"{question.text}\n{FORM}"), "answer", {})


def chain_of_thought(question: Question, ask: Ask) -> Prediction:
    """L1-cot: reasons first, and then answers from the reasoning."""
    reasoning = ask("reason", f"{question.text}\nThink step by step. Do not answer yet.")
    if not has_words(reasoning):
        return Prediction(None, f"reason: no words in {start(reasoning)}", {"reasoning": reasoning})
    asked = f"Question: {question.text}\nReasoning: {reasoning}\nSo, going by this reasoning: {FORM}"
    return read(ask("answer", asked), "answer", {"reasoning": reasoning})


def chain_of_code(question: Question, ask: Ask) -> Prediction:
    """L1-coc: writes a program of thought, and says what it would print; it is not run."""
    asked = (
        f"{question.text}\nWrite a short Python program that works out the answer in variables with the facts that "
        "you know, then say what it prints, in a last line of the form 'Answer: Yes' or 'Answer: No'."
    )
    program = ask("answer", asked)
    answer = read_answer(_PRINTING.sub("", program))
    miss = f"answer: no yes or no outside of print in {start(program)}" if answer is None else None
    return Prediction(answer, miss, {"program": program})


def program_trace(demonstrations: Sequence[str], question: Question, ask: Ask) -> Prediction:
    """L1-ptp: completes a doctest, the trace of a program that works such questions out, after others."""
    shown = "\n".join(demonstrations)
    asked = (
        "Complete the last doctest with the trace of the program, to 'Final answer: Yes' or 'Final answer: No'.\n\n"
        f'{shown}\n>>> strategy_qa("{question.text}")\n'
    )
    # where a server does not stop there, the next doctest's answer is not this one's
    trace = ask("trace", asked, stop=[">>>"]).partition(">>>")[0]
    return read(trace, "trace", {"trace": trace})


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
        result = traces.load_paragraphs(makings.paragraphs)
    elif makings.train:
        result = traces.fact_paragraphs(makings.train)
    else:
        raise ValueError("L2-rag searches paragraphs: give the published file, or items of train")
    return Level("L2-rag", partial(traces.workflow, None, traces.ParagraphIndex(result)))


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
    return Level("L2", partial(traces.workflow, template, None), () if template is None else template.qids)


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
    "L3": lambda makings: Level("L3", partial(traces.react, False, traces.STEP_LIMIT)),
    "L3-simple": lambda makings: Level("L3-simple", partial(traces.react, True, traces.STEP_LIMIT)),
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
