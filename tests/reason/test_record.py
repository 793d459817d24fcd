"""A run repeated from its answers asks for nothing twice, and a file of another run is refused."""

from dataclasses import replace

import pytest

from sigma0.reason.chat import Completion, ScriptedChat
from sigma0.reason.desk import Desk
from sigma0.reason.messages import ChatFailed, ChatSettings, Usage
from sigma0.reason.record import Record
from sigma0.reason.trail import Call, Heading, Trail, read_lines

HEADING = Heading("lemma", "What?", ("scripted",), {"repairs": (1, 2)}, {"torch": "2"})
USER = [{"role": "user", "content": "x"}]


def desk(path, resume=False, heading=HEADING):
    made = Desk(Trail())
    made.record = Record(path, heading, resume)
    return made


def test_what_was_answered_is_given_again_in_order_and_the_rest_is_asked(path):
    first = desk(path)
    replies = [Completion("a", Usage(1, 2, 3)), Completion("b"), Completion("c", notes={"costs": [1]})]
    for purpose, chat in zip(("one", "two", "two"), [ScriptedChat([reply]) for reply in replies], strict=True):
        first.ask(chat, purpose, USER)
    second = desk(path, resume=True, heading=replace(HEADING, resumed=True))
    chat = ScriptedChat(["d"])
    given = [second.ask(chat, purpose, USER) for purpose in ("one", "two", "two", "two")]
    assert [one.text for one in given] == ["a", "b", "c", "d"] and given[:3] == replies
    assert len(chat.calls) == 1 and second.usage.calls == 4 and second.usage.completion_tokens == 3
    # the trail of the second run is whole, and the file holds each answer once
    texts = [line.answer["text"] for line in read_lines(path) if isinstance(line, Call)]
    assert texts == [line.answer["text"] for line in second.trail.lines] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("before", "after", "is_asked"),
    [
        ("Is 7 prime?", "Is 9 prime?", True),
        ("in <f at 0x7f01> after 0.25s", "in <f at 0x7e02> after 11.50s", False),
        ("0.25 of them", "0.75 of them", True),
    ],
)
def test_a_question_of_another_text_is_asked_though_its_purpose_was_answered(path, before, after, is_asked):
    desk(path).ask(ScriptedChat(["old"]), "one", [{"role": "user", "content": before}])
    given = desk(path, resume=True).ask(ScriptedChat(["new"]), "one", [{"role": "user", "content": after}])
    assert given.text == ("new" if is_asked else "old")


def test_questions_that_failed_or_had_other_settings_are_asked_again(path):
    desk(path).ask(ScriptedChat(["long"]), "one", USER)
    short = ChatSettings(max_tokens=4)
    assert desk(path, resume=True).ask(ScriptedChat(["short"]), "one", USER, short).text == "short"
    assert desk(path, resume=True).ask(ScriptedChat([]), "one", USER).text == "long"
    with pytest.raises(ChatFailed):
        desk(path).ask(ScriptedChat([]), "one", USER)
    assert desk(path, resume=True).ask(ScriptedChat(["now"]), "one", USER).text == "now"


def test_labels_are_given_again(path):
    class Chooser(ScriptedChat):
        def choose(self, messages, labels, *, effort="low", seed=None):
            return labels[1], Completion(f"*{labels[1]}*")

    assert desk(path).choose(Chooser([]), "label", USER, ("no", "yes")) == "yes"

    class Never(Chooser):
        def choose(self, *arguments, **settings):
            raise AssertionError("asked again")

    assert desk(path, resume=True).choose(Never([]), "label", USER, ("no", "yes")) == "yes"
    with pytest.raises(AssertionError, match="asked again"):
        desk(path, resume=True).choose(Never([]), "label", USER, ("yes", "no"))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"problem": "Who?"}, "problem"),
        ({"settings": {"repairs": (1, 3)}}, r"settings: repairs \[1, 2\], not \[1, 3\]"),
        ({"settings": {"repairs": (1, 2), "sources": ["a"]}}, r"settings: sources None, not \[\"a\"\]"),
        ({"strategy": "agent"}, "strategy"),
    ],
)
def test_a_file_of_another_run_is_refused(path, changed, named):
    desk(path)
    with pytest.raises(ValueError, match=f"of another run: {named}"):
        desk(path, resume=True, heading=replace(HEADING, **changed))
    desk(path, resume=True, heading=replace(HEADING, versions={"torch": "3"}))


def test_files_that_are_no_memory_are_refused_and_left_as_they_are(path):
    with pytest.raises(ValueError, match="no such file"):
        desk(path, resume=True)
    path.write_text("my notes")
    with pytest.raises(ValueError, match="is no memory of a run"):
        desk(path, resume=True)
    assert path.read_text() == "my notes"
