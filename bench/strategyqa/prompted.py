"""L0 and L1: fixed prompts that ask at once, or make a model reason in words, in code, or in the trace of a program."""

import re
from collections.abc import Sequence

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.level import FORM, Prediction, Question, has_words, read, read_answer, start

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
