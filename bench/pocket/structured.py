"""Answers as JSON, and questions that are answered by calls of tools, as models of the micro-world are taught them.

A JSON answer has the keys that are asked for, or begins as a schema makes it begin, which is then no choice of the
reader's (`Item.given`). The tools are two: what is told of somebody or something, and the sum of two numbers. They are
called along the way of a question whose story the reader does not see. And an agent's actions on toy repositories.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerFast

from sigma0.bench.outer.toy import TOYS, planted
from sigma0.bench.pocket.data import NONE, Encoded
from sigma0.bench.pocket.forms import named, solution
from sigma0.bench.pocket.items import Item, Scene, words_of
from sigma0.bench.pocket.stories import CITIES, PLACES, THINGS, UNSAID
from sigma0.bench.pocket.tokenizer import BOS, EOS
from sigma0.reason.agent.actions import AnyAction, Finish, ReadFile, RunTests, StartOver
from sigma0.reason.agent.choices import ACT, edits_of, question, written
from sigma0.reason.agent.reports import TestReport

IN_JSON, UNKNOWN, SURE = "In JSON:", "unknown", "sure"
# Of a family, the keys that its answers go by; the first is what the examples show.
KEYS: dict[str, tuple[str, ...]] = {
    "where": ("place", "location", "room", "answer"),
    "holder": ("person", "name", "holder", "answer"),
    "origin": ("city", "town", "origin", "answer"),
    "age": ("age", "years", "answer"),
    "inside": ("answer", "is_there"),
    "descent": ("answer", "is_so"),
    "older": ("answer", "is_older"),
}
LISTS = ("places", "locations", "answers")
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key in keys},
                "required": list(keys),
                "additionalProperties": False,
            },
        },
    }
    for name, about, kind, keys in (
        ("look_up", "What is told of somebody or something.", "string", ("name",)),
        ("add", "The sum of two numbers.", "integer", ("a", "b")),
    )
)
# Pieces of these texts that are one token each: a value that is spelled letter by letter is no look-up.
TOKENS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", '{"name": "', '", "arguments": {"'),
    *("look_up", "Tools:", "Nothing is told of", IN_JSON, f'"{SURE}": ', "true", "false"),
)
VALUES = (*PLACES, *THINGS, *CITIES, "yes", "no", UNKNOWN)
QUOTED_TOKENS = (
    *(f'{{"{key}": ' for key in dict.fromkeys(chain(*KEYS.values()))),
    *(f'{{"{key}": [' for key in LISTS),
    *(f'"{word}' for word in VALUES),
)
CODE_TOKENS = (
    *("def ", "return ", "(a, b): ", "(a): ", "(items): ", ".py", "::test_", "Failing:", "Not tested.", "All pass."),
    *("Files:", ACT, '{"action": "edit", "path": "', '", "old": "', '", "new": "', '{"action": "read", "path": "'),
    *('{"action": "run_tests"}', '{"action": "start_over"}', '{"action": "finish"}', "[0]", "[-1]", "//", "=="),
    *(*TOYS, *(toy.name for toys in TOYS.values() for toy in toys)),
)
_WHERE = re.compile(r"Where is (.*)\?")
_ASSISTANT = re.compile(re.escape(f"{BOS}assistant\n") + "(.*?)" + re.escape(EOS), re.DOTALL)


def json_scene(scene: Scene, seed: str, share: float) -> Scene:
    """The same story with `share` of its questions answered in JSON, always the same by a seed."""
    if not share:
        return scene
    rng = Random(f"json/{seed}")
    items = list(scene.items)
    for place, item in enumerate(items):
        if rng.random() >= share:
            continue
        before = items[place - 1] if place else None
        if before is not None and before.story == item.story and before.answer[0] != "{" and rng.random() < 0.3:
            items[place] = list_item(before, item, rng)
        else:
            items[place] = json_item(item, rng)
    return Scene(scene.story, tuple(items))


def json_item(item: Item, rng: Random) -> Item:
    """An item whose answer is an object; as it is where no key can say that the text is silent."""
    unsaid = item.family == "unsaid"
    if unsaid and not item.question.startswith(("Where is", "Who has", "Where does")):
        return item
    family = {"Where is": "where", "Who has ": "holder"}.get(item.question[:8], "origin") if unsaid else item.family
    key, value = rng.choice(KEYS[family]), UNKNOWN if unsaid else item.key
    fields: dict[str, object] = {key: int(value) if value.isdigit() else value}
    asked = rng.random() < 0.5
    if item.binary:
        # a schema says whether it wants a word; who asks for keys alone gets true or false
        fields[key] = value == "Yes" if asked or rng.random() < 0.5 else value.lower()
    if unsaid or rng.random() < 0.6:
        fields[SURE] = not unsaid
    return _in_json(item, item.question, str(fields[key]).lower() if item.binary else value, fields, asked)


def list_item(first: Item, second: Item, rng: Random) -> Item:
    """Where two are, as a list; the second's own question in JSON where the two are not places."""
    asked = [_WHERE.fullmatch(item.question) for item in (first, second)]
    if asked[0] is None or asked[1] is None or "unsaid" in (first.family, second.family):
        return json_item(second, rng)
    question = f"Where are {asked[0][1]} and {asked[1][1]}?"
    fields = {rng.choice(LISTS): [first.key, second.key]}
    return _in_json(replace(second, trail=()), question, second.key, fields, rng.random() < 0.5)


def _in_json(item: Item, question: str, value: str, fields: Mapping[str, object], asked: bool) -> Item:
    reply, given = json.dumps(fields), ""
    if asked:
        question = f"{question} {IN_JSON} {', '.join(fields)}."
    else:
        # as far as a schema says it
        opens = re.match(r'\{"\w+": \[?"?', reply)
        assert opens is not None, reply
        given = opens[0]
    return replace(item, question=question, answer=reply, key=value, given=given)


def tool_messages(item: Item) -> list[dict[str, Any]]:
    """A question without its story, the calls along its way with their results, and the answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": item.question}]
    for name, arguments, result in _calls(item):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": result})
    return [*messages, {"role": "assistant", "content": item.answer}]


def _calls(item: Item) -> list[tuple[str, dict[str, Any], str]]:
    proof = item.derivation[:-1]
    if item.family == "unsaid":
        looks = [("look_up", {"name": named(sentence).removeprefix("the ")}, sentence) for sentence in proof]
        end = words_of(proof[-1])[-1] if proof else item.subject
        return [*looks, ("look_up", {"name": end}, f"Nothing is told of {end}.")]
    calls: list[tuple[str, dict[str, Any], str]] = []
    for step in solution(item):
        if step.name:
            calls.append(("look_up", {"name": step.name.removeprefix("the ")}, step.statement))
        elif step.total:
            left, sign, right = step.total.split()
            numbers = int(left), int(right) * (1 if sign == "+" else -1)
            calls.append(("add", {"a": numbers[0], "b": numbers[1]}, str(sum(numbers))))
    return calls


def tool_row(tokenizer: PreTrainedTokenizerFast, scene: Scene, seed: str, length: int) -> Encoded | None:
    """A chat about a scene with tools at hand, as many of its questions as fit into `length` tokens; None if none does.

    Mostly the story is not shown and the tools are. Where both are, the answer needs no call, and a call that is made
    all the same begins as it has to. Where neither is, the text says nothing.
    """
    rng = Random(f"tools/{seed}")
    way = rng.choices(("calls", "both", "forced", "neither"), (6, 1.5, 1, 1.5))[0]
    items = [item for item in scene.items if item.story == scene.story]
    rng.shuffle(items)
    tools = None if way == "neither" else list(TOOLS)
    result: Encoded | None = None
    messages: list[dict[str, Any]] = []
    for item in items:
        turn = tool_messages(item)
        if way in ("both", "forced") and not messages:
            turn[0] = {"role": "user", "content": item.prompt}
        if way == "both":
            turn = [turn[0], turn[-1]]
        elif way == "neither":
            turn = [turn[0], {"role": "assistant", "content": UNSAID}]
        messages += turn
        row = encode_messages(tokenizer, messages, tools, '<tool_call>\n{"name": "' if way == "forced" else "")
        if len(row.ids) > length:
            if result is not None:
                break
            messages = []
            continue
        result = row
        if way == "forced":
            break
    return result


def repairs(seed: int, index: int) -> list[tuple[str, str]]:
    """Moments of a repair of a toy repository, in their order: what an agent is shown, and the action that helps."""
    rng = Random(f"repairs/{seed}/{index}")
    toys = planted(seed, index, held_out=False)
    mend, path = toys.mend, toys.mend.path
    paths = sorted(name for name in toys.files if not name.startswith("test_"))
    failing, passing = _report(f"test_{path}::test_{toys.toy.name}"), _report()
    shown, mended = (path, toys.files[path]), (path, toys.mended)
    read, tests = ReadFile(action="read", path=path), RunTests(action="run_tests")
    other = rng.choice([name for name in paths if name != path])
    worse = rng.choice([edit for edit in edits_of(*shown) if edit.old != mend.old])
    named = re.search(r"def (\w+)", worse.old)
    assert named is not None
    twice = _report(f"test_{path}::test_{toys.toy.name}", f"test_{path}::test_{named[1]}")
    moments: list[tuple[TestReport | None, tuple[str, str] | None, AnyAction]] = [
        (failing, None, read),
        (failing, (other, toys.files[other]), read),
        (failing, shown, mend),
        (twice, (path, shown[1].replace(worse.old, worse.new)), StartOver(action="start_over")),
        (None, shown, tests),
        (None, mended, tests),
        (passing, mended, Finish(action="finish")),
    ]
    return [(question(report, paths, file), written(action)) for report, file, action in moments]


def _report(*failing: str) -> TestReport:
    return TestReport(frozenset(), frozenset(failing), frozenset(), not failing, "", "")


def repair_row(tokenizer: PreTrainedTokenizerFast, seed: int, index: int, length: int) -> Encoded:
    """One moment of a repair as a chat, or two; most often the one at which an edit is to be chosen."""
    rng = Random(f"moments/{seed}/{index}")
    moments = rng.choices(repairs(seed, index), (1, 1, 6, 1, 0.5, 0.5, 1), k=rng.choice((1, 2)))
    messages: list[dict[str, Any]] = []
    for asked, reply in moments:
        messages += {"role": "user", "content": asked}, {"role": "assistant", "content": reply}
    row = encode_messages(tokenizer, messages)
    return row if len(row.ids) <= length else encode_messages(tokenizer, messages[:2])


def encode_messages(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    given: str = "",
) -> Encoded:
    """A chat as ids; what an assistant says is marked, but for the beginning of the first such turn that is given."""
    text = str(tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False))
    spans = [output.span(1) for output in _ASSISTANT.finditer(text)]
    spans = [(start + len(given) * (place == 0), end + len(EOS)) for place, (start, end) in enumerate(spans)]
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    marks = [any(end > begin and start < stop for begin, stop in spans) for start, end in encoding.offsets]
    own: list[tuple[int, ...]] = [(token,) for token, mark in zip(encoding.ids, marks, strict=True) if mark]
    return Encoded(encoding.ids, marks, own, [NONE] * len(encoding.ids))
