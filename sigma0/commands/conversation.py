"""A conversation with a looped model: its turns, its settings, and the slash commands that show and change them."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, NamedTuple, cast, get_args

from rich.text import Text
from transformers import PreTrainedTokenizerFast

from sigma0.api import stream
from sigma0.commands.console import legend, savings_lines, summary
from sigma0.commands.options import SamplingOptions, exit_settings
from sigma0.config import RULE_DEFAULTS, AfterExit, ExitConfig, ExitMode, Messages
from sigma0.models.hf_generate import DepthGenerationMixin
from sigma0.models.prompts import encode
from sigma0.signals.generation import Generation
from sigma0.signals.tokens import Token

# between the turns of a model without a chat template
SEPARATOR = "\n"


class Turn(NamedTuple):
    """A message and its answer."""

    message: str  # The user's text
    tokens: tuple[Token, ...]  # Of the answer, at least one
    generation: Generation | None  # Sums the answer up; None where it was stopped before its end

    @property
    def answer(self) -> str:
        """The text of the answer, as far as it was written."""
        return "".join(token.text for token in self.tokens)


class Reply(NamedTuple):
    """What a slash command prints, and whether it ends the conversation."""

    lines: tuple[Text, ...] = ()
    ends: bool = False


class SlashCommand(NamedTuple):
    """A slash command."""

    usage: str  # How it is written
    help: str  # What it does
    most: int  # Values that it takes at most
    run: Callable[..., Reply]


@dataclass(eq=False)
class Conversation:
    """The turns so far; every answer is written from all of them."""

    model: DepthGenerationMixin
    tokenizer: PreTrainedTokenizerFast
    exit_config: ExitConfig  # Of the next answer, every field that the rule reads set
    sampling: SamplingOptions  # How answers are written
    turns: list[Turn] = field(default_factory=list)  # The oldest first

    @property
    def total_loops(self) -> int:
        """T."""
        return int(self.model.num_loops)

    @property
    def _context(self) -> int | None:
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def has_template(self) -> bool:
        """Whether turns go through a chat template; else they are joined by line breaks, as one plain text."""
        return self.tokenizer.chat_template is not None

    def prompt(self, message: str) -> str | Messages:
        """What the model is to continue: all turns, and a new message."""
        texts = [text for turn in self.turns for text in (turn.message, turn.answer)] + [message]
        if not self.has_template:
            return SEPARATOR.join(texts) + SEPARATOR
        return [{"role": role, "content": text} for role, text in zip(cycle(_ROLES), texts, strict=False)]

    def ask(self, message: str) -> Generator[Token, None, None]:
        """Writes an answer, a token at a time.

        Closed or interrupted before its end, the turn holds what was written; without a token there is no turn.
        """
        prompt = self.prompt(message)
        limit, new = self._context, self.sampling.max_new_tokens
        count = encode(self.tokenizer, prompt).shape[1]
        if limit is not None and count + new > limit:
            what = f"take {count} tokens, which with {new} new ones exceed the model's context of {limit}"
            if self.turns:
                raise ValueError(f"the conversation and this message {what}: /reset begins a new conversation")
            raise ValueError(f"the tokens of this message {what}: shorten it, or lower --max-new-tokens")
        generation = None
        tokens: list[Token] = []
        try:
            settings = {"exit_config": self.exit_config, "verdict": False, **self.sampling.stream_settings()}
            answer = stream(self.model, self.tokenizer, prompt, **settings)
            for token in answer:
                tokens.append(token)
                yield token
            generation = answer.generation
        finally:
            if tokens:
                self.turns.append(Turn(message, tuple(tokens), generation))

    def command(self, line: str) -> Reply:
        """Runs a slash command, which begins with a slash.

        Raises:
            ValueError: For an unknown command or a bad value; nothing has changed then.
        """
        name, *values = line.split()
        known = COMMANDS.get(name)
        if known is None:
            raise ValueError(f"no such command: {name[:_LONGEST]}; /help lists them")
        if len(values) > known.most:
            raise ValueError(f"too many values for {name}: write {known.usage}")
        return known.run(self, *values)

    def exit(self, rule: str | None = None, threshold: str | None = None) -> Reply:
        """Shows or sets the exit rule; a rule without a threshold takes the one that the model was calibrated with."""
        if rule is None:
            return self._show_exit(" (to leave: /quit)")
        if rule not in get_args(ExitMode):
            raise ValueError(f"no such exit rule: {rule[:_LONGEST]!r}; there are {_MODES}")
        kept = self.exit_config
        options: dict[str, Any] = {"mode": rule, "min_loops": kept.min_loops, "after_exit": kept.after_exit}
        name = threshold_name(cast(ExitMode, rule))
        if threshold is not None:
            if name is None:
                raise ValueError(f"/exit {rule} takes no value")
            try:
                options[name] = int(threshold) if name == "depth" else float(threshold)
            except ValueError:
                what = "a whole number" if name == "depth" else "a number"
                raise ValueError(f"/exit {rule} takes {what}, its {name}, got {threshold[:_LONGEST]!r}") from None
        return self._use(cast(ExitConfig, exit_settings(options)))

    def after(self, setting: str | None = None) -> Reply:
        """Shows or sets what becomes of the loops after the exit."""
        if setting is None:
            return self._show_exit()
        if setting not in get_args(AfterExit):
            raise ValueError(f"/after takes {_AFTERS}, got {setting[:_LONGEST]!r}")
        return self._use(replace(self.exit_config, after_exit=cast(AfterExit, setting)))

    def _use(self, config: ExitConfig) -> Reply:
        resolved: ExitConfig = self.model.resolve_exit_config(config)
        resolved.stops_at(self.total_loops)
        self.exit_config = resolved
        return self._show_exit()

    def _show_exit(self, more: str = "") -> Reply:
        return Reply((Text(f"exit            {exit_in_words(self.exit_config)}{more}"),))

    def quit(self) -> Reply:
        """Ends the conversation."""
        return Reply(ends=True)

    def reset(self) -> Reply:
        """Forgets all turns."""
        self.turns.clear()
        return Reply((Text("a new conversation: all turns are forgotten"),))

    def help(self) -> Reply:
        """Lists the commands."""
        rows = [f"{command.usage:26}{command.help}" for command in COMMANDS.values()]
        return Reply((*map(Text, rows), Text("Ctrl-C stops an answer; a line without a slash is a message.")))

    def stats(self) -> Reply:
        """Loops and savings of the last answer, and of all."""
        if not self.turns:
            return Reply((Text("no answer yet"),))
        _, tokens, generation = self.turns[-1]
        lines = [Text("last answer"), legend([token.depth for token in tokens], self.total_loops)]
        if generation is not None:
            lines += map(Text, summary(generation))
        else:
            lines.append(Text(f"new tokens      {len(tokens)} (stopped by you: its savings are not counted)"))
        if len(self.turns) > 1:
            lines += self._sums()
        if generation is not None and self._context is not None:
            used = generation.prompt_tokens + len(generation.tokens)
            lines.append(Text(f"context         {used} of {self._context} tokens"))
        return Reply(tuple(lines))

    def _sums(self) -> Iterator[Text]:
        """Of all answers; the savings, as ratios of sums, of those that came to their end."""
        tokens = [token for turn in self.turns for token in turn.tokens]
        yield Text("")
        yield Text(f"all {len(self.turns)} answers")
        yield legend([token.depth for token in tokens], self.total_loops)
        yield Text(f"new tokens      {len(tokens)}")
        ended = [turn.generation for turn in self.turns if turn.generation is not None]
        if full := self.total_loops * sum(len(generation.tokens) - 1 for generation in ended):
            depths = sum(token.depth for generation in ended for token in generation.tokens[1:])
            passes, rows = sum(it.loop_passes for it in ended), sum(it.loop_rows for it in ended)
            saved = (1 - depths / full, 1 - passes / full, 1 - rows / full)
            yield from map(Text, savings_lines(saved, passes, rows))


_MODES, _AFTERS = (", ".join(get_args(kind)) for kind in (ExitMode, AfterExit))
_COMMANDS = (
    SlashCommand("/exit [RULE [THRESHOLD]]", f"when tokens stop: {_MODES}", 2, Conversation.exit),
    SlashCommand("/after [SETTING]", f"deeper loops after the exit: {_AFTERS}", 1, Conversation.after),
    SlashCommand("/stats", "loops and savings, of the last answer and of all", 0, Conversation.stats),
    SlashCommand("/reset", "forget all turns; the settings stay", 0, Conversation.reset),
    SlashCommand("/help", "this list", 0, Conversation.help),
    SlashCommand("/quit", "leave, as Ctrl-D does", 0, Conversation.quit),
)
COMMANDS = {command.usage.split()[0]: command for command in _COMMANDS}
_ROLES = ("user", "assistant")
_LONGEST = 40


def threshold_name(mode: ExitMode) -> str | None:
    """The field of `ExitConfig` that a rule's threshold, or its loop, is; None for `full`."""
    return "depth" if mode == "fixed" else next(iter(RULE_DEFAULTS.get(mode, ())), None)


def exit_in_words(config: ExitConfig) -> str:
    """A rule with its threshold, and what becomes of the deeper loops: `qexit, q = 0.3, after exit: finish`."""
    field = threshold_name(config.mode)
    value = "" if field is None else f", {field} = {getattr(config, field):g}"
    least = f", not before loop {config.min_loops}" if config.min_loops > 1 else ""
    return f"{config.mode}{value}{least}, after exit: {config.after_exit}"
