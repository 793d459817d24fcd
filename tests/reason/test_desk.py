import pytest

from sigma0.reason.chat import ChatFailed, Completion, ScriptedChat
from sigma0.reason.desk import Desk, LimitReached, Limits, as_label
from sigma0.reason.messages import Usage
from sigma0.reason.trail import Call, Heading, Outcome, Run, Trail, read_lines

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
