from dataclasses import replace
from unittest.mock import Mock

import pytest

from sigma0.reason.chat import ChatFailed, Completion, ScriptedChat
from sigma0.reason.desk import Desk, LimitReached, Limits, as_label
from sigma0.reason.messages import ChatSettings, Usage
from sigma0.reason.record import Record
from sigma0.reason.trail import Call, Decision, Heading, Outcome, Run, Trail, read_lines

ASKED = [{"role": "user", "content": "Well?"}]


def test_a_purpose_has_its_seed():
    first, second, other = ScriptedChat(["a", "b"]), ScriptedChat(["b", "a"]), ScriptedChat(["a"])
    for chat, purposes, seed in ((first, "xy", 0), (second, "yx", 0), (other, "x", 1)):
        desk = Desk(Trail(), seed=seed)
        for purpose in purposes:
            desk.ask(chat, purpose, ASKED)
    seeds = [[asked["seed"] for asked in chat.calls] for chat in (first, second, other)]
    assert seeds[0] == seeds[1][::-1] and seeds[0][0] != seeds[0][1] and seeds[2][0] != seeds[0][0]
    assert all(0 <= seed < 2**31 for seed in seeds[0])


def test_a_limit_forbids_the_next_question_before_it_is_asked():
    for limits, limit in ((Limits(calls=2), "calls"), (Limits(tokens=20), "tokens"), (Limits(seconds=1e-9), "seconds")):
        chat = ScriptedChat(lambda **_: Completion("x", Usage(1, 5, 10)))
        desk = Desk(Trail(), limits)
        for number in range(0 if limit == "seconds" else 2):
            desk.ask(chat, f"question {number}", ASKED)
        before = list(chat.calls)
        with pytest.raises(LimitReached, match=limit) as caught:
            desk.ask(chat, "one more", ASKED)
        assert caught.value.limit == limit and chat.calls == before
    for name, value in (("calls", 0), ("tokens", -1), ("seconds", 0.0)):
        with pytest.raises(ValueError, match=f"limit {name} must be above 0, got {value}"):
            Limits(**{name: value})


def test_usage_is_added_up_and_a_failed_question_counts():
    desk = Desk(Trail())
    chat = ScriptedChat([Completion("x", Usage(1, 5, 7, 9, 11, 0.5)), Completion("y", Usage(1, 1, 1, 1, 1, 0.25))])
    for number in range(2):
        desk.ask(chat, str(number), ASKED)
    assert desk.usage == Usage(2, 6, 8, 10, 12, 0.75)
    with pytest.raises(ChatFailed):
        desk.ask(chat, "3", ASKED)
    assert desk.usage.calls == 3
    failed = desk.trail.lines[-1]
    assert isinstance(failed, Call) and failed.answer is None and "no reply" in failed.failed


class Held(ScriptedChat):
    """A model that can be held to labels."""

    def choose(self, messages, labels, *, effort="low", seed=None):
        return labels[1], Completion(f" {labels[1]}")


def test_labels_are_whole_answers_held_to_or_asked_for_twice():
    desk = Desk(Trail())
    chat = Held([])
    assert desk.choose(chat, "judge", ASKED, ("YES", "NO")) == "NO" and not chat.calls
    assert desk.trail.lines[0].answer["text"] == "NO" and desk.usage.calls == 1
    chat = ScriptedChat(["well, YES", "no."])
    assert Desk(Trail()).choose(chat, "judge", ASKED, ("YES", "NO")) == "NO"
    assert chat.calls[1]["messages"][-1]["content"] == "Answer with one word alone: YES or NO."
    chat = ScriptedChat(["YES and NO", "YESNO"])
    assert Desk(Trail()).choose(chat, "judge", ASKED, ("YES", "NO")) is None
    assert as_label(" yes. ", ("YES", "NO")) == "YES" and as_label("yes..", ("YES", "NO")) is None
    assert as_label("not NO", ("YES", "NO")) is None
    assert as_label("**Yes**.", ("YES", "NO")) == as_label("`yes.`", ("YES", "NO")) == "YES"


def test_a_trail_is_read_back_as_it_was(path):
    trail = Trail(path)
    trail.add(Heading("lemma", "2 + 2?\n", ("pocket",), {"a": 1}, {"sigma0-lm": "0"}))
    trail.add(Call("prove", "pocket", "low", 3, Completion("é").to_dict()))
    trail.add(Run("check", "assert f()", {"ok": True}))
    trail.decide("verified", "it held", lemma="L1")
    trail.add(Outcome(True, "4", "all hold", {}))
    assert list(read_lines(path)) == trail.lines
    # a writer that was killed in the middle of a line
    path.write_bytes(path.read_bytes()[:-10])
    assert list(read_lines(path)) == trail.lines[:-1]
    text = path.read_text()
    for change, named in (
        (text.replace('"seed": 3', '"seed": "x"'), "line 2 .* seed"),
        (text.replace('"kind": "run"', '"kind": "walk"'), "line 3"),
        (text.replace('"why": "it held"', '"why": "it held", "more": 1'), "line 4"),
        ("", "heading"),
    ):
        path.write_text(change)
        with pytest.raises(ValueError, match=named):
            read_lines(path)


HEADING = Heading("lemma", "p", ("m",), {}, {})


def test_a_run_goes_on_behind_a_line_that_a_crash_cut_off(path):
    first = Trail(path)
    first.add(HEADING)
    first.decide("pass", "one")
    with path.open("a") as file:
        file.write('{"what": "fail", "wh')
    second = Trail(path)
    second.decide("pass", "two")
    assert list(read_lines(path)) == [HEADING, Decision("pass", "one", {}), Decision("pass", "two", {})]


@pytest.mark.parametrize("text", ["my notes", "my notes\nof years\n", '{"unit": "token"}\n', "[" * 50_000])
def test_a_file_that_is_no_trail_is_left_as_it_is(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match="no trail of an outer loop"):
        Trail(path)
    assert path.read_text() == text


def test_half_a_surrogate_pair_ends_no_run(path):
    trail = Trail(path)
    trail.add(HEADING)
    trail.decide("pass", "a\ud800b\u2028c")
    assert read_lines(path)[1] == Decision("pass", "a?b\u2028c", {})


@pytest.mark.parametrize("line", ['{"kind": ["x"]}', "[" * 50_000, "7", '{"kind": "call", "n": ' + "9" * 5000 + "}"])
def test_a_line_of_nonsense_is_named(path, line):
    Trail(path).add(HEADING)
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ValueError, match="line 2 of"):
        read_lines(path)


# a run repeated from its answers asks for nothing twice
OF_RUN = Heading("lemma", "What?", ("scripted",), {"repairs": (1, 2)}, {"torch": "2"})


def desk(path, resume=False, heading=OF_RUN):
    made = Desk(Trail())
    made.record = Record(path, heading, resume)
    return made


def test_what_was_answered_is_given_again_in_order_and_the_rest_is_asked(path):
    first = desk(path)
    replies = [Completion("a", Usage(1, 2, 3)), Completion("b"), Completion("c", notes={"costs": [1]})]
    for purpose, chat in zip(("one", "two", "two"), [ScriptedChat([reply]) for reply in replies], strict=True):
        first.ask(chat, purpose, ASKED)
    second = desk(path, resume=True, heading=replace(OF_RUN, resumed=True))
    chat = ScriptedChat(["d"])
    given = [second.ask(chat, purpose, ASKED) for purpose in ("one", "two", "two", "two")]
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
    desk(path).ask(ScriptedChat(["long"]), "one", ASKED)
    short = ChatSettings(max_tokens=4)
    assert desk(path, resume=True).ask(ScriptedChat(["short"]), "one", ASKED, short).text == "short"
    assert desk(path, resume=True).ask(ScriptedChat([]), "one", ASKED).text == "long"
    with pytest.raises(ChatFailed):
        desk(path).ask(ScriptedChat([]), "one", ASKED)
    assert desk(path, resume=True).ask(ScriptedChat(["now"]), "one", ASKED).text == "now"


def test_labels_are_given_again(path):
    chooser = Held([])
    assert desk(path).choose(chooser, "label", ASKED, ("no", "yes")) == "yes"
    chooser.choose = Mock(side_effect=AssertionError("asked again"))
    assert desk(path, resume=True).choose(chooser, "label", ASKED, ("no", "yes")) == "yes"
    with pytest.raises(AssertionError, match="asked again"):
        desk(path, resume=True).choose(chooser, "label", ASKED, ("yes", "no"))


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
        desk(path, resume=True, heading=replace(OF_RUN, **changed))
    desk(path, resume=True, heading=replace(OF_RUN, versions={"torch": "3"}))


def test_files_that_are_no_memory_are_refused_and_left_as_they_are(path):
    with pytest.raises(ValueError, match="no such file"):
        desk(path, resume=True)
    path.write_text("my notes")
    with pytest.raises(ValueError, match="is no memory of a run"):
        desk(path, resume=True)
    assert path.read_text() == "my notes"
