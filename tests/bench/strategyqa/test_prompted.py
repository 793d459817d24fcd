"""L1: what becomes of reasoning without words, of programs that only print, and of words behind the answer."""

import pytest

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.level import Question
from sigma0.bench.strategyqa.prompted import ChainOfCode, ChainOfThought, ProgramTrace
from sigma0.reason.chat import ScriptedChat

GULLS = Question("gulls", "Do gulls swim?")


def asked(level, *replies):
    ask = Ask(ScriptedChat(replies))
    return level.predict(GULLS, ask), ask


@pytest.mark.parametrize("said", ["", " \n\t", "...", "\x00\x07", "🙃", "____"])
def test_reasoning_without_words_is_a_miss_that_says_why(said):
    found, ask = asked(ChainOfThought(), said, "No")
    assert (found.answer, found.miss) == (None, f"reason: no words in {' '.join(said.split())!r}")
    assert [each.purpose for each in ask.asked] == ["reason"] and found.trace == {"reasoning": said}


def test_a_trace_ends_where_another_doctest_begins():
    said = 'Final answer: Yes\n>>> strategy_qa("Do hens swim?")\nFinal answer: No'
    assert asked(ProgramTrace(), said)[0].answer is True
    assert asked(ProgramTrace(), f">>>{said}")[0].miss == "trace: no yes or no in ''"


@pytest.mark.parametrize(
    "said, answer",
    [
        ('if gulls == "birds":\n    print("Answer: Yes")\nelse:\n    print("Answer: No")', None),
        ('print ("Answer: No")\nAnswer: Yes', True),
        ("print('Answer: Yes')\nIt prints 'Answer: No'.", False),
        ("swims = True\nAnswer: Yes", True),
    ],
)
def test_what_stands_in_a_program_is_not_what_it_prints(said, answer):
    found, ask = asked(ChainOfCode(), said)
    assert (found.answer, found.trace) == (answer, {"program": said})
    assert len(ask.asked) == 1 and (found.miss or "answer: ").startswith("answer: ")
