"""Actions as a choice: what is shown, what may be said, and a repair by a model that chooses."""

import json

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from sigma0.bench.pocket.structured import CODE_TOKENS
from sigma0.checkpoints import CHECKPOINTS
from sigma0.decode.grammar.spec import parse_spec
from sigma0.decode.grammar.vocabulary import Vocabulary
from sigma0.reason.agent import choices
from sigma0.reason.agent.actions import EditFile, parse_action
from sigma0.reason.agent.agent import AgentSettings, RepoAgent
from sigma0.reason.agent.escalation import ThreeTierEscalation
from sigma0.reason.chat import ScriptedChat
from sigma0.reason.desk import Desk
from sigma0.reason.trail import Trail
from tests.reason.agent.repositories import PlainRunner

SUMS = "def add(a, b): return a - b\n\n\ndef last(items): return items[-1]\n"
TEST = "from sums import add\n\n\ndef test_add():\n    assert add(3, 2) == 5\n"


def _edit(sign):
    line = "def add(a, b): return a {} b"
    return EditFile(action="edit", path="sums.py", old=line.format("-"), new=line.format(sign))


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "sums.py").write_text(SUMS)
    (folder / "test_sums.py").write_text(TEST)
    return folder


@pytest.mark.parametrize(
    ("line", "others"),
    [
        ("    return a + b", ["    return a - b", "    return a * b", "    return a // b"]),
        ("def f(a): return a[-1] - 10", ["return a[0] - 10", "a[-1] + 10", "a[-1] * 10", "a[-1] // 10"]),
        ("def odd(a): return a % 2 == 1", ["a % 2 != 1", "a % 2 == 0"]),
        ("def f(a): return max(a) >= 0", ["min(a) >= 0", "max(a) < 0", "max(a) > 0", "max(a) <= 0", "max(a) >= 1"]),
        ("x = a + b", []),
    ],
)
def test_an_edit_changes_one_operator_of_what_is_returned(line, others):
    edits = list(choices.edits_of("a.py", f"{line}\n\nrest = 1\n"))
    assert len(edits) == len(others) and all(edit.old == line and edit.path == "a.py" for edit in edits)
    assert all(edit.new.endswith(other) for edit, other in zip(edits, others, strict=True))
    # what stands twice cannot be named
    assert not list(choices.edits_of("a.py", f"{line}\n{line}\n"))


def test_the_grammar_holds_the_listed_actions_and_no_other():
    allowed = choices.actions(["sums.py", 'a "b".py'], ("sums.py", SUMS), warned=False)
    texts = [choices.written(action) for action in allowed]
    assert [parse_action(text) for text in texts] == allowed and len(set(texts)) == len(texts) == 2 + 4 + 3
    grammar = choices.choice_grammar(allowed)
    assert parse_spec(grammar=grammar) is not None and all(json.dumps(text) in grammar for text in texts)
    (barred, *_) = (action for action in allowed if isinstance(action, EditFile))
    assert barred not in choices.actions([], ("sums.py", SUMS), {barred}, warned=True)
    assert [action.action for action in choices.actions(["a.py"], None, warned=True)] == [
        "run_tests", "start_over", "finish",
    ]  # fmt: skip


def test_an_action_may_be_written_in_tokens_that_hold_more_than_what_all_begin_with():
    pytest.importorskip("llguidance")
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "pocket")
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in CODE_TOKENS])
    vocabulary = Vocabulary(tokenizer, len(tokenizer), {tokenizer.eos_token_id})
    allowed = choices.actions(["sums.py"], ("sums.py", SUMS))
    grammar = vocabulary.compile(parse_spec(grammar=choices.choice_grammar(allowed)))
    for action in allowed:
        matcher = grammar.matcher()
        for token_id in (*tokenizer.encode(choices.written(action), add_special_tokens=False), tokenizer.eos_token_id):
            assert matcher.mask()[token_id >> 5] >> (token_id & 31) & 1, (action, tokenizer.decode([token_id]))
            matcher.take(token_id)


@pytest.mark.cpu(6)
def test_a_model_that_chooses_repairs_and_is_shown_what_it_was_taught(source):
    replies = iter(
        [
            '{"action": "read", "path": "sums.py"}',
            choices.written(_edit("+")),
            '{"action": "run_tests"}',
            '{"action": "finish"}',
        ]
    )
    chat = ScriptedChat(lambda **_: next(replies))
    desk = Desk(Trail())
    result = RepoAgent([chat], PlainRunner(), desk, AgentSettings(choices=True)).solve("Mend it.", source)
    assert result.solved and result.steps == 4
    shown = "def add(a, b): return a {} b. def last(items): return items[-1]"
    assert [call["messages"][-1]["content"] for call in chat.calls] == [
        "Failing: test_sums.py::test_add. Files: sums.py. Act?",
        f"Failing: test_sums.py::test_add. sums.py: {shown.format('-')}. Act?",
        f"Not tested. sums.py: {shown.format('+')}. Act?",
        f"All pass. sums.py: {shown.format('+')}. Act?",
    ]
    assert all('"finish' in call["grammar"].replace("\\", "") for call in chat.calls)


@pytest.mark.slow
def test_a_new_strategy_bars_the_edits_before_it(source):
    wrong = EditFile(
        action="edit", path="sums.py", old="def add(a, b): return a - b", new="def add(a, b): return a * b"
    )
    asked = []

    def reply(grammar, messages, **_):
        asked.append(grammar)
        edit = json.dumps(choices.written(wrong))
        if "Files:" in messages[-1]["content"]:
            return '{"action": "read", "path": "sums.py"}'
        if edit in grammar:
            return choices.written(wrong)
        return '{"action": "run_tests"}' if "Not tested" in messages[-1]["content"] else '{"action": "start_over"}'

    tiers = ThreeTierEscalation(4, 8, 12, check_interval=1, max_steps=12, patience=1)
    desk = Desk(Trail())
    settings = AgentSettings(choices=True, escalation=tiers)
    result = RepoAgent([ScriptedChat(reply)], PlainRunner(), desk, settings).solve("Mend it.", source)
    whats = [decision.what for decision in desk.trail.decisions]
    planned = whats.index("replan")
    assert (
        not result.solved and "edit" in whats[:planned] and "edit" not in whats[planned:] and "read" in whats[planned:]
    )
    assert "a * b" in asked[1] and "a * b" not in asked[-1]
