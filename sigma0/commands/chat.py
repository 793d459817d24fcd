"""`sigma0 chat`: a conversation in the terminal."""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sigma0.commands.options import ExitOptions, LoadOptions, MaxNewTokens, ModelArgument, SamplingOptions, grouped


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(SamplingOptions):
    """Of an answer, which is longer than a text that goes on."""

    max_new_tokens: MaxNewTokens = 256


@grouped
def chat(
    exits: ExitOptions,
    sampling: AnswerOptions,
    loaded: LoadOptions,
    model: ModelArgument = "pocket",
    history: Annotated[
        Path | None, typer.Option(help="Keep the lines that were typed in this file; by default they are forgotten.")
    ] = None,
) -> None:
    """Talk with a model; each token is coloured by the loop that it was read at. /help lists the commands.

    Where standard input or output is no terminal, each line is a message, and answers are printed as they are.
    """
    from rich.console import Console

    from sigma0.checkpoints import resolve_model
    from sigma0.commands.console import loading, one_line_errors
    from sigma0.commands.examples import about_model

    with one_line_errors(), ExitStack() as waiting:
        sampling.check()
        exits.over()
        resolve_model(model)
        waiting.enter_context(loading(model))
        from sigma0.commands.chat_terminal import ChatLoop, piped_lines, terminal_lines
        from sigma0.commands.conversation import Conversation

        out, err = (Console(highlight=False, soft_wrap=True, stderr=stderr) for stderr in (False, True))
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        read_line = terminal_lines(history, out) if interactive else piped_lines
        looped, tokenizer = loaded.load(model)
        config = looped.resolve_exit_config(exits.over(looped.resolve_exit_config(None)))
        config.stops_at(looped.num_loops)
        waiting.close()
        conversation = Conversation(looped, tokenizer, config, sampling)
        ChatLoop(conversation, *about_model(model), out, err, interactive).run(read_line)
