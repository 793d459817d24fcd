"""L1: fixed prompts that make a model reason in words, in code, or in the trace of a program."""

from collections.abc import Sequence

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.direct import FORM
from sigma0.bench.strategyqa.items import Item
from sigma0.bench.strategyqa.level import Prediction, Question, read

DEMONSTRATION = """>>> strategy_qa("Could a llama give birth during the War in Vietnam?")
Calling decompose("Could a llama give birth during the War in Vietnam?")...
...decompose returned ["How long did the Vietnam war last?", "How long is a llama's gestation period?"]
Calling answer_factual("How long did the Vietnam war last?")...
...answer_factual returned "About 20 years"
Calling answer_factual("How long is a llama's gestation period?")...
...answer_factual returned "11 months"
Calling combine_facts(["About 20 years", "11 months"])...
...combine_facts returned True
Final answer: Yes
"""


class _Fixed:
    """A level that is a prompt: it learns nothing, and knows no items."""

    learns = False

    def learn(self, item: Item, prediction: Prediction) -> None:
        """Learns nothing."""

    def seeds(self) -> Sequence[str]:
        """Knows no items."""
        return ()


class ChainOfThought(_Fixed):
    """Reasons first, and then answers from the reasoning.

    Calls: reason, answer.
    """

    name = "L1-cot"

    def predict(self, question: Question, ask: Ask) -> Prediction:
        """See `Level`."""
        reasoning = ask("reason", f"{question.text}\nThink step by step. Do not answer yet.")
        asked = f"Question: {question.text}\nReasoning: {reasoning}\nSo, going by this reasoning: {FORM}"
        return read(ask("answer", asked), "answer", {"reasoning": reasoning})


class ChainOfCode(_Fixed):
    """Writes a program of thought, and says what it would print: it is not run.

    Calls: answer.
    """

    name = "L1-coc"

    def predict(self, question: Question, ask: Ask) -> Prediction:
        """See `Level`."""
        asked = (
            f"{question.text}\nWrite a short Python program that works out the answer in variables with the facts that "
            "you know, then say what it prints, in a last line of the form 'Answer: Yes' or 'Answer: No'."
        )
        program = ask("answer", asked)
        return read(program, "answer", {"program": program})


class ProgramTrace(_Fixed):
    """Completes a doctest: the trace of a program that works such questions out.

    Calls: trace.

    Args:
        demonstrations: Traces shown before it; by default one that belongs to no item of the data.
    """

    name = "L1-ptp"

    def __init__(self, demonstrations: Sequence[str] = (DEMONSTRATION,)) -> None:
        self.demonstrations = tuple(demonstrations)

    def predict(self, question: Question, ask: Ask) -> Prediction:
        """See `Level`."""
        shown = "\n".join(self.demonstrations)
        asked = (
            f"Complete the last doctest with the trace of the program, to its 'Final answer: Yes' or 'Final answer: No'."
            f'\n\n{shown}\n>>> strategy_qa("{question.text}")\n'
        )
        trace = ask("trace", asked, stop=[">>>"])
        return read(trace, "trace", {"trace": trace})
