"""The calls that each level must make for an item, written out by hand: no prompt comes from the code under test."""

import math
import re
from collections import Counter
from dataclasses import dataclass

from sigma0.bench.strategyqa import EXPERIMENTS, Makings
from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.level import Question
from sigma0.reason.chat import ScriptedChat
from sigma0.reason.messages import Completion
from sigma0.signals.verdict import ReasonVerdict
from tests.bench.strategyqa.scripts import ITEMS, SCRIPTS, TRAIN, TRAIN_KINDS, UNDECIDABLE

FORM = "Answer with Yes or No."
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
RULES = """Answer the question step by step. Reply with two lines:
Thought: what to do next
Action: one of
- decompose[question] splits it into shorter ones
- lookup[question] tells a fact
- evaluate[question] answers yes or no from the facts so far
- finish[yes] or finish[no] answers the question

"""
SIMPLE_RULES = "".join(line for line in RULES.splitlines(True) if not line.startswith(("- decompose", "- evaluate")))
GOOD = ReasonVerdict(converged=True, depth=2.0, proximity=0.1, grounded=None, stable="contract", reason="threshold_met")
# one objection, and two
SPIRAL = GOOD.model_copy(update={"stable": "spiral"})
LOST = ReasonVerdict(converged=False, depth=4.0, proximity=0.9, grounded=None, stable="diverge", reason="divergence")
# thoughts with their actions that there are at most
STEP_LIMIT = 6


@dataclass(frozen=True)
class Call:
    """A call that must come.

    Attributes:
        purpose: The step of the level.
        prompt: The whole of it; where patterns are shown, all that stands behind them.
        reply: What the scripted model says.
        stop: Strings that end it.
        patterns: Kinds of questions and texts that may be shown, of which the three best are; none are.
        kind: Of the question, whose patterns are better than others.
    """

    purpose: str
    prompt: str
    reply: str | Completion
    stop: tuple[str, ...] = ()
    patterns: tuple[tuple[str, str], ...] = ()
    kind: str = ""

    def check(self, prompt):
        """Compares a prompt that was given with the one that must come."""
        assert prompt.endswith(self.prompt)
        shown = prompt.removesuffix(self.prompt).split("\n\n")
        assert shown.pop() == ""
        kinds = {text: kind for kind, text in self.patterns}
        assert len(set(shown)) == len(shown) == min(3, len(kinds)) and set(shown) <= set(kinds)
        # those of the question's own kind are the best, and stand last
        alike = [kinds[text] == self.kind for text in shown]
        own = min(3, list(kinds.values()).count(self.kind))
        assert alike == [False] * (len(shown) - own) + [True] * own


@dataclass(frozen=True)
class Case:
    """An item, and what the scripted model is to answer to it.

    Attributes:
        number: Of the item, from 0.
        truthful: Whether the model answers as the label says; else the opposite.
    """

    number: int
    truthful: bool = True

    @property
    def item(self):
        return ITEMS[self.number]

    @property
    def script(self):
        return SCRIPTS[self.item.qid]

    @property
    def text(self):
        return self.item.question

    @property
    def word(self):
        return "Yes" if self.item.answer == self.truthful else "No"


def listed(lines):
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, start=1))


def direct(case, purpose="answer"):
    return [Call(purpose, f"{case.text}\n{FORM}", f"**{case.word}**, I think")]


def chain_of_thought(case):
    reasoning = f"First {case.item.facts[0]}\nThen {case.item.facts[1]}"
    asked = f"Question: {case.text}\nReasoning: {reasoning}\nSo, going by this reasoning: {FORM}"
    return [
        Call("reason", f"{case.text}\nThink step by step. Do not answer yet.", reasoning),
        Call("answer", asked, f"The answer is {case.word.lower()}."),
    ]


def chain_of_code(case):
    asked = (
        f"{case.text}\nWrite a short Python program that works out the answer in variables with the facts that you "
        "know, then say what it prints, in a last line of the form 'Answer: Yes' or 'Answer: No'."
    )
    return [Call("answer", asked, f'print("Answer: Yes" if known else "Answer: No")\nAnswer: {case.word}')]


def program_trace(case):
    asked = (
        "Complete the last doctest with the trace of the program, to 'Final answer: Yes' or 'Final answer: No'.\n\n"
        f'{DEMONSTRATION}\n>>> strategy_qa("{case.text}")\n'
    )
    return [Call("trace", asked, f"Calling decompose()...\nFinal answer: {case.word}\n", (">>>",))]


def split_prompt(text):
    return (
        f"Question: {text}\nSplit it into at most 5 short questions, numbered, one a line. Write #1 for the answer to "
        "the first. Do not answer them."
    )


def part_prompt(text, part):
    return f"Question: {text}\nAnswer only this part of it, in a few words: {part}"


def workflow(case, passages=lambda query: ""):
    calls = [Call("decompose", split_prompt(case.text), f"Here you are:\n{listed(case.item.decomposition)}\n")]
    for step in case.script.steps:
        if step.is_condition:
            calls.append(Call("evaluate_condition", f"{step.asks}\n{FORM}", f"{step.says}, it is so."))
        else:
            asked = passages(step.asks) + part_prompt(case.text, step.asks)
            calls.append(Call("answer_factual", asked, f"\n {step.says}.\nThat is all."))
    facts = "".join(f"- {step.asks} {step.says}\n" for step in case.script.steps)
    asked = f"Facts:\n{facts}Question: {case.text}\nGoing by these facts: {FORM}"
    return [*calls, Call("combine_facts", asked, f"So the answer is {case.word.lower()}.")]


def retrieval_workflow(case):
    return workflow(case, passages_for)


def passages_for(query):
    """The three facts of train with the highest cosine of TF-IDF, worked out anew from its definition."""
    texts = [(item.term, fact) for item in TRAIN for fact in item.facts]
    documents = [Counter(re.findall(r"\b\w\w+\b", f"{term}\n{fact}".lower())) for term, fact in texts]
    weights = {
        word: 1 + math.log((1 + len(texts)) / (1 + sum(word in each for each in documents)))
        for each in documents
        for word in each
    }

    def vector(counts):
        raw = {word: (1 + math.log(count)) * weights[word] for word, count in counts.items() if word in weights}
        length = math.sqrt(sum(value**2 for value in raw.values())) or 1.0
        return {word: value / length for word, value in raw.items()}

    asked = vector(Counter(re.findall(r"\b\w\w+\b", query.lower())))
    scores = [sum(asked.get(word, 0.0) * value for word, value in vector(each).items()) for each in documents]
    best = sorted(range(len(texts)), key=lambda place: -scores[place])[:3]
    lines = "".join(f"- {texts[place][0]}: {texts[place][1]}\n" for place in best if scores[place] > 0)
    return f"Passages:\n{lines}" if lines else ""


def act(action, argument):
    return f"Thought: I should {action} now.\nAction: {action}[{argument}]"


def react(case):
    history, facts, calls = "", "", []

    def acts(action, argument):
        known = f"Facts so far:\n{facts}" if facts else ""
        asked = f"{RULES}Question: {case.text}\n{history}{known}"
        calls.append(Call("act", asked, act(action, argument), ("Observation:",)))
        return f"{act(action, argument)}\nObservation: "

    # a decomposition takes one of the thoughts, and the end another
    if len(case.script.steps) + 2 <= STEP_LIMIT:
        told = acts("decompose", case.text)
        calls.append(Call("decompose", split_prompt(case.text), listed(case.item.decomposition)))
        parts = "; ".join(f"{number}. {part}" for number, part in enumerate(case.item.decomposition, start=1))
        history += f"{told}{parts}\n"
    for number, (part, step) in enumerate(zip(case.item.decomposition, case.script.steps, strict=True), start=1):
        if step.is_condition:
            told = acts("evaluate", part)
            calls.append(Call("evaluate", f"Facts:\n{facts}Question: {step.asks}\n{FORM}", f"{step.says}!"))
        else:
            told = acts("lookup", part)
            calls.append(Call("lookup", part_prompt(case.text, step.asks), f"{step.says}.\n"))
        history += f"{told}{step.says}\n"
        facts += f"#{number} {step.asks} {step.says}\n"
    acts("finish", case.word)
    return calls


def simple_react(case):
    history, calls = "", []
    for step in case.script.steps:
        asked = f"{SIMPLE_RULES}Question: {case.text}\n{history}"
        calls.append(Call("act", asked, act("lookup", step.asks), ("Observation:",)))
        calls.append(Call("lookup", part_prompt(case.text, step.asks), step.says))
        history += f"{act('lookup', step.asks)}\nObservation: {step.says}\n"
    asked = f"{SIMPLE_RULES}Question: {case.text}\n{history}"
    return [*calls, Call("act", asked, act("finish", case.word.lower()), ("Observation:",))]


BY_DIFFICULTY = {"simple": chain_of_thought, "medium": workflow, "hard": react}


def routed_by_rules(case):
    return BY_DIFFICULTY[case.script.difficulty](case)


def routed_by_model(case):
    difficulty = ("simple", "medium", "hard")[case.number % 3]
    asked = f"Question: {case.text}\nHow hard is it to answer? Reply with one word: simple, medium or hard."
    return [Call("route", asked, f" {difficulty.capitalize()}.\n"), *BY_DIFFICULTY[difficulty](case)]


def routed_by_verdict(case):
    """The first answer is the opposite of the final one wherever it does not stand."""
    other = "No" if case.word == "Yes" else "Yes"
    said, goes_on = [
        (Completion(case.word, verdict=GOOD, door="converge"), None),
        (Completion(other), workflow),
        (Completion(other, verdict=SPIRAL, door="escalate"), workflow),
        (Completion(other, verdict=LOST, door="abort"), react),
    ][case.number % 4]
    first = Call("first", f"{case.text}\n{FORM}", said)
    return [first] if goes_on is None else [first, *goes_on(case)]


def pipeline(case):
    script = case.script
    needs = listed(f"the answer to: {part}" for part in case.item.decomposition)
    condition = script.condition if case.truthful else script.opposite
    calls = [
        Call(
            "analyse",
            f"Question: {case.text}\nDo not answer it yet. Write a numbered list of 2 to 5 short things that must be "
            "known to answer it. Then write a last line that says when the answer is yes, such as 'Condition: #1 < "
            "#2', 'Condition: #1 = #2' or 'Condition: #1 and not #2', where #1 is the first thing.",
            needs if condition is None else f"{needs}\n\nCondition: {condition}.",
        ),
        Call(
            "decompose",
            f"Question: {case.text}\nTo answer this question of {script.kind}, one must know:\n{needs}\nWrite a "
            "numbered list with one short question for each, in this order. #1 stands for the answer to the first.",
            listed(case.item.decomposition),
        ),
    ]
    for step in script.steps:
        asked = f"{case.text}\nTo work this out, first: {step.asks}\nAnswer in a few words."
        calls.append(Call("answer", asked, f"{step.says}\nThat is all."))
    if condition is None or case.item.qid in UNDECIDABLE:
        known = "\n".join(f"{step.asks} {step.says}" for step in script.steps)
        asked = f"Question: {case.text}\nKnown:\n{known}\nSo, going by what is known: {FORM}"
        calls.append(Call("combine", asked, f"{case.word}."))
    return calls


def answered_with_patterns(case, patterns):
    # of a decomposition at most
    steps = listed(case.item.decomposition[:4])
    asked = (
        f"Question: {case.text}\nDo not answer it yet. Write a numbered list of 2 to 4 short questions that lead to "
        "the answer. #1 stands for the answer to the first."
    )
    answer = f"Question: {case.text}\nSteps:\n{steps}\nAnswer the steps in your mind. {FORM}"
    kind = case.script.kind
    return [
        Call("decompose", asked, listed(case.item.decomposition), patterns=patterns, kind=kind),
        Call("answer", answer, f"Answer: {case.word}", patterns=patterns, kind=kind),
    ]


def improving(case):
    earlier = [Case(number, case.truthful) for number in range(case.number)]
    return answered_with_patterns(case, tuple((each.script.kind, learned(each)) for each in earlier))


def learned(case):
    label = "Yes" if case.item.answer else "No"
    steps = listed(case.item.decomposition[:4])
    if case.truthful:
        return f"A question that was answered well: {case.text}\n{steps}\nThe answer is {label}."
    wrong = f"These steps led to {case.word}, which is wrong; the answer is {label}."
    return f"A question that went wrong: {case.text}\n{steps}\n{wrong}"


def seeded(case):
    patterns = tuple(
        (
            TRAIN_KINDS[item.qid],
            f"A question that was answered well: {item.question}\n{listed(item.decomposition)}\n"
            f"The answer is {'Yes' if item.answer else 'No'}.",
        )
        for item in TRAIN
    )
    return answered_with_patterns(case, patterns)


DEFINITIONS = {
    "L0": direct,
    "L1-cot": chain_of_thought,
    "L1-coc": chain_of_code,
    "L1-ptp": program_trace,
    "L2": workflow,
    "L2-rag": retrieval_workflow,
    "L3": react,
    "L3-simple": simple_react,
    "L4 by rules": routed_by_rules,
    "L4 by model": routed_by_model,
    "L4 by verdict": routed_by_verdict,
    "L4-pipeline": pipeline,
    "L5": improving,
    "L5-icl": seeded,
}


def asked(level, question, *replies):
    """What a level makes of a question or of its text, and the purposes and prompts of its calls."""
    ask = Ask(ScriptedChat(replies))
    question = question if isinstance(question, Question) else Question("new", question)
    return level.predict(question, ask), [(each.purpose, each.prompt) for each in ask.asked]


def made(name, train=TRAIN):
    """A new level by its name in the table."""
    registered, _, route = name.partition(" by ")
    return EXPERIMENTS[registered](Makings(train=train, route=route or "rules"))
