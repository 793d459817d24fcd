"""A reply is one action or a fault that names what is wrong; nothing else ever comes of it."""

import json
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sigma0.reason.agent.actions import (
    MAX_REPLY_CHARS,
    ActionFault,
    EditFile,
    Finish,
    ListFolder,
    ReadFile,
    RunTests,
    StartOver,
    action_grammar,
    parse_action,
)

READ, EDIT = {"action": "read", "path": "a.py"}, {"action": "edit", "path": "a", "old": "", "new": "```\n"}
ACTIONS = [
    ({"action": "list"}, ListFolder(action="list", path=".")),
    ({"action": "list", "path": "a"}, ListFolder(action="list", path="a")),
    (READ, ReadFile(action="read", path="a.py", start=1, lines=200)),
    ({**READ, "start": 3, "lines": 9}, ReadFile(action="read", path="a.py", start=3, lines=9)),
    (EDIT, EditFile(**EDIT)),
    ({"action": "run_tests"}, RunTests(action="run_tests")),
    ({"action": "start_over"}, StartOver(action="start_over")),
    ({"action": "finish"}, Finish(action="finish")),
]
FORMS = [
    "{}",
    "  {}\n",
    "```json\n{}\n```",
    "```\n{}\n```",
    "I think that\n\n```json\n{}\n```\nis right.",
    "```json {} ```",
]


@pytest.mark.parametrize("value, action", ACTIONS)
def test_an_action_is_read_bare_or_from_one_fence(value, action):
    for form in FORMS:
        for indent in (None, 2):
            assert parse_action(form.replace("{}", json.dumps(value, indent=indent))) == action


@pytest.mark.parametrize(
    "reply, fault",
    [
        ("", "not one JSON object"),
        ("I would read the file.", "not one JSON object"),
        ('{"action": "list"} {"action": "finish"}', "not one JSON object"),
        ('I do {"action": "list"}', "not one JSON object"),
        ('```json\n{"action": "list"}\n```\n```json\n{"action": "finish"}\n```', "2 fenced blocks"),
        ('[{"action": "list"}]', "not an object"),
        ("{}", "no action"),
        ('{"action": "delete", "path": "a"}', "'delete'"),
        ('{"action": "list", "path": "a", "deep": true}', "deep"),
        ('{"action": "read"}', "path"),
        ('{"action": "read", "path": "a", "start": "1"}', "start"),
        ('{"action": "read", "path": "a", "start": 0}', "start"),
        ('{"action": "read", "path": "a", "lines": 100000}', "lines"),
        ('{"action": "read", "path": "a", "lines": true}', "lines"),
        ('{"action": "edit", "path": "a", "old": "x"}', "new"),
        ('{"action": "edit", "path": "a", "old": "x", "new": "\\ud800"}', "surrogate"),
        ('{"action": "list", "action": "finish"}', "twice"),
        ('{"action": NaN}', "NaN"),
        ('{"action": ' + "9" * 5000 + "}", "no valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("x" * (MAX_REPLY_CHARS + 1), "characters"),
        (json.dumps({"action": "list", "path": "x" * 1001}), "path"),
    ],
)
def test_a_fault_is_named(reply, fault):
    with pytest.raises(ActionFault, match=fault) as caught:
        parse_action(reply)
    assert len(str(caught.value)) < 700


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["action", "path", "old", "new"]) | st.text(), inner)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.text() | ANY_JSON.map(json.dumps))
@example('{"action": ["list"]}')
@example('{"action": {"a": 1}}')
def test_no_reply_does_anything_but_parse_or_fault(reply):
    with suppress(ActionFault):
        parse_action(reply)


@pytest.mark.slow
def test_a_grammar_allows_the_actions_and_nothing_else(allows):
    edit = '{"action": "edit", "path": "a.py", "old": "x\\n\\"", "new": ""}'
    for reply in ('{"action": "list", "path": "."}', edit, '{"action": "run_tests"}', '{"action": "finish"}'):
        assert allows(action_grammar(), reply) and parse_action(reply)
    few = action_grammar((RunTests, Finish))
    assert allows(few, '{"action": "run_tests"}') and not allows(few, edit)
    for reply in ("run_tests", '{"action": "delete"}', '{"action": "run_tests", "path": "."}', '{"action": "edit"}'):
        assert not allows(action_grammar(), reply)
