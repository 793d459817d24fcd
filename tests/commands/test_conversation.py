"""A conversation and its slash commands, without a terminal."""

import copy
from dataclasses import replace

import pytest

import sigma0
from sigma0.commands.conversation import COMMANDS, Conversation, exit_in_words
from sigma0.commands.options import SamplingOptions

STORY = "Mary went to the park. The hat is with Mary. John went to the barn. Ida went to the attic."
FIRST, SECOND = f"{STORY} Where is the hat?", "Where is Ida?"


@pytest.fixture
def conversation(pocket):
    model, tokenizer = pocket
    return Conversation(model, tokenizer, model.resolve_exit_config(None), SamplingOptions(max_new_tokens=32))


def said(conversation, message):
    return "".join(token.text for token in conversation.ask(message)).strip()


def lines(conversation, command):
    return "\n".join(text.plain for text in conversation.command(command).lines)


def test_answers_are_those_of_generate_on_all_turns(conversation, pocket):
    assert said(conversation, FIRST) == "The hat is in the park."
    first = conversation.turns[0]
    messages = [
        {"role": "user", "content": FIRST},
        {"role": "assistant", "content": first.answer},
        {"role": "user", "content": SECOND},
    ]
    expected = sigma0.generate(*pocket, messages, max_new_tokens=32, verdict=False)
    assert said(conversation, SECOND) == expected.text.strip() == "Ida is in the attic."
    assert conversation.turns[1].generation == expected


def test_an_answer_that_is_stopped_keeps_what_was_written(conversation):
    tokens = conversation.ask(FIRST)
    written = [next(tokens), next(tokens)]
    tokens.close()
    (turn,) = conversation.turns
    assert turn.tokens == tuple(written) and turn.generation is None
    assert conversation.prompt(SECOND)[1] == {"role": "assistant", "content": turn.answer}
    assert "stopped by you" in lines(conversation, "/stats")
    assert said(conversation, SECOND) and len(conversation.turns) == 2
    conversation.ask(FIRST).close()
    assert len(conversation.turns) == 2, "without a token there is no turn"


def test_without_a_chat_template_turns_are_one_plain_text(pocket):
    model, tokenizer = pocket[0], copy.deepcopy(pocket[1])
    tokenizer.chat_template = None
    talk = Conversation(model, tokenizer, model.resolve_exit_config(None), SamplingOptions(max_new_tokens=4))
    assert not talk.has_template
    assert talk.prompt("Hello.") == "Hello.\n"
    turn = "".join(token.text for token in talk.ask("Hello."))
    assert talk.prompt("More?") == f"Hello.\n{turn}\nMore?\n"


def test_exit_sets_rule_and_threshold_and_keeps_the_rest(conversation):
    conversation.exit_config = replace(conversation.exit_config, min_loops=2, after_exit="drop")
    assert lines(conversation, "/exit qexit 0.3").endswith("qexit, q = 0.3, not before loop 2, after exit: drop")
    config = conversation.exit_config
    assert (config.mode, config.q, config.min_loops, config.after_exit) == ("qexit", 0.3, 2, "drop")
    lines(conversation, "/after verify")
    assert conversation.exit_config == replace(config, after_exit="verify")
    shown = lines(conversation, "/exit")
    assert exit_in_words(conversation.exit_config) in shown and "/quit" in shown
    assert exit_in_words(conversation.exit_config) in lines(conversation, "/after")
    assert conversation.exit_config == replace(config, after_exit="verify")
    assert said(conversation, FIRST) == "The hat is in the park."


def test_a_rule_without_a_threshold_takes_the_calibrated_one(conversation, pocket):
    for mode in ("margin", "converge", "accel", "qexit"):
        conversation.command(f"/exit {mode}")
        assert conversation.exit_config == pocket[0].resolve_exit_config({"mode": mode})
    assert lines(conversation, "/exit fixed 2").endswith("fixed, depth = 2, after exit: finish")
    assert lines(conversation, "/exit full").endswith("full, after exit: finish")


@pytest.mark.parametrize(
    "command, message",
    [
        ("/", "no such command: /; /help lists them"),
        ("/sing loud", "no such command: /sing; "),
        ("/" + "x" * 500, "no such command: /xxxx"),
        ("/exit sometimes", "no such exit rule: 'sometimes'; there are full, fixed, qexit"),
        ("/exit qexit x", "/exit qexit takes a number, its q, got 'x'"),
        ("/exit qexit 7", r"q: must lie in \(0, 1\], got 7"),
        ("/exit converge nan", "eps: must be a finite number"),
        ("/exit full 3", "/exit full takes no value"),
        ("/exit fixed", "needs depth=k"),
        ("/exit fixed 1.5", "/exit fixed takes a whole number, its depth, got '1.5'"),
        ("/exit fixed 99", "depth=99 exceeds the model's 6 loops"),
        ("/exit qexit 0.3 0.4", r"too many values for /exit: write /exit \[RULE"),
        ("/after later", "/after takes finish, verify, drop, got 'later'"),
        ("/quit now", "too many values for /quit"),
    ],
)
def test_a_bad_command_is_one_line_and_changes_nothing(conversation, command, message):
    before = conversation.exit_config
    with pytest.raises(ValueError, match=message) as raised:
        conversation.command(command)
    assert len(str(raised.value)) < 200 and "\n" not in str(raised.value)
    assert conversation.exit_config == before


def test_stats_are_ratios_of_sums(conversation):
    assert lines(conversation, "/stats") == "no answer yet"
    said(conversation, FIRST)
    assert "all" not in lines(conversation, "/stats")
    said(conversation, SECOND)
    generations = [turn.generation for turn in conversation.turns]
    full = 6 * sum(len(generation.tokens) - 1 for generation in generations)
    passes = sum(generation.loop_passes for generation in generations)
    last, _, whole = lines(conversation, "/stats").partition("all 2 answers")
    assert f"passes_saved    {generations[1].passes_saved:.1%}" in last
    assert f"passes_saved    {1 - passes / full:.1%}  {passes} passes run" in whole
    used = generations[1].prompt_tokens + len(generations[1].tokens)
    assert f"context         {used} of 2048 tokens" in whole


def test_a_conversation_over_the_context_says_how_to_go_on(conversation):
    said(conversation, FIRST)
    with pytest.raises(ValueError, match=r"exceed the model's context of 2048: /reset begins a new conversation"):
        next(conversation.ask("park " * 2000))
    assert len(conversation.turns) == 1
    conversation.command("/reset")
    assert conversation.turns == []
    with pytest.raises(ValueError, match=r"this message take .* shorten it, or lower --max-new-tokens"):
        next(conversation.ask("park " * 2030))
    assert said(conversation, FIRST) == "The hat is in the park."


def test_help_lists_every_command_and_quit_ends(conversation):
    shown = lines(conversation, "/help")
    assert all(command.usage in shown for command in COMMANDS.values())
    assert conversation.command("/quit").ends and not conversation.command("/help").ends
