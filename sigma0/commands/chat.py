"""`sigma0 chat`: a conversation in the terminal."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from sigma0.commands.options import (
    KV,
    After,
    BackendName,
    Check,
    CollapseAction,
    Delta,
    Depth,
    Device,
    DoorRuleName,
    Dtype,
    Eps,
    ExitRuleName,
    MaxNewTokens,
    MinLoops,
    ModelArgument,
    Patience,
    Q,
    Quantization,
    Recurrence,
    Seed,
    Stable,
    Stop,
    Stride,
    Temperature,
    Theta,
    check_sampling,
)


def chat(
    model: ModelArgument = "pocket",
    exit: ExitRuleName = None,
    q: Q = None,
    eps: Eps = None,
    patience: Patience = None,
    theta: Theta = None,
    delta: Delta = None,
    stable: Stable = None,
    depth: Depth = None,
    min_loops: MinLoops = None,
    after: After = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    stop: Stop = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    backend: BackendName = "auto",
    quantization: Quantization = None,
    recurrence: Recurrence = None,
    stride: Stride = None,
    kv: KV = None,
    door_rule: DoorRuleName = None,
    seed: Seed = None,
    on_collapse: CollapseAction = "stop",
    check: Check = True,
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
    from sigma0.commands.exit_options import exit_settings
    from sigma0.config import parse_on_collapse

    options: dict[str, Any] = {
        "mode": exit,
        "q": q,
        "eps": eps,
        "patience": patience,
        "theta": theta,
        "delta": delta,
        "stable": stable,
        "depth": depth,
        "min_loops": min_loops,
        "after_exit": after,
    }
    with one_line_errors(), ExitStack() as waiting:
        check_sampling(temperature, seed)
        exit_settings(options)
        collapse = parse_on_collapse(on_collapse)
        resolve_model(model)
        waiting.enter_context(loading(model))
        from sigma0.commands.chat_terminal import ChatLoop, piped_lines, terminal_lines
        from sigma0.commands.conversation import Conversation, ConversationSettings
        from sigma0.decode.ops import Backend
        from sigma0.models.load import load

        settings = ConversationSettings(max_new_tokens, temperature, seed, tuple(stop or ()), collapse)
        out, err = (Console(highlight=False, soft_wrap=True, stderr=stderr) for stderr in (False, True))
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        read_line = terminal_lines(history, out) if interactive else piped_lines
        looped, tokenizer = load(
            model,
            device=device,
            dtype=dtype,
            backend=cast(Backend, backend),
            quantization=quantization,
            recurrence=recurrence,
            stride=stride,
            kv=kv,
            door_rule=door_rule,
            check=check,
        )
        config = looped.resolve_exit_config(exit_settings(options, looped.resolve_exit_config(None)))
        config.stops_at(looped.num_loops)
        waiting.close()
        conversation = Conversation(looped, tokenizer, config, settings)
        ChatLoop(conversation, *about_model(model), out, err, interactive).run(read_line)
