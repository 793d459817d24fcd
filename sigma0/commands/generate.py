"""`sigma0 generate`: continue a prompt with one model, or with the rungs of a ladder."""

import json
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from sigma0.commands.console import compiling, loading, one_line_errors, print_stream
from sigma0.commands.options import (
    AsJson,
    BudgetLimits,
    ExitOptions,
    GrammarOptions,
    LoadOptions,
    Model,
    SamplingOptions,
    TriggerJson,
    grouped,
    option,
)

_LADDER, _OUTPUT, _MODEL = ({"rich_help_panel": panel} for panel in ("Ladder", "Output", LoadOptions.PANEL))


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What continues the prompt, and what is printed and written of it."""

    model: Model = "pocket"
    chat: bool = option(False, "Send the prompt as a user's message.", "--chat")
    special_tokens: bool = option(
        False, "Read special tokens in the prompt as such, not as text.", "--special-tokens", **_MODEL
    )
    tensor_parallel: bool = option(
        False, "Spread the model over the processes that torchrun started.", "--tensor-parallel", **_MODEL
    )
    verdict: bool = option(False, "Also print the verdict, one line for each fact.", "--verdict")
    svg: str | None = option(None, "Also write the coloured text to this SVG file.", **_OUTPUT)
    ladder: str | None = option(
        None, "Rungs in place of --model, the lowest first: pocket,pocket-large or small,name@http://host/v1"
    )
    unit: str = option("token", "With --ladder, what goes up: token, draft or answer.", **_LADDER)
    budget: BudgetLimits = ""
    policy: TriggerJson = None
    trail_file: Path | None = option(
        None, "With --ladder, also write every decision to this file.", "--trail", **_LADDER
    )
    telemetry: Path | None = option(
        None, "Also append one JSON line to this file: depths, exits, verdict, costs.", **_OUTPUT
    )
    as_json: AsJson = False

    def check(self, grammar: Iterable[str], sampling: SamplingOptions, loaded: LoadOptions) -> None:
        """Refuses options that do not go with or without a ladder."""
        if self.ladder is None:
            given = {"unit": self.unit != "token", "budget": self.budget, "policy": self.policy}
            given["trail"] = self.trail_file
            if any(given.values()):
                raise ValueError(f"{', '.join(f'--{name}' for name, value in given.items() if value)} need --ladder")
            return
        unread = [*(f"--{name}" for name in grammar)]
        unread += loaded.named("runner", "quantization", "recurrence", "stride", "kv")
        unread += ["--on-collapse"] if sampling.on_collapse != "stop" else []
        if unread:
            raise ValueError(f"{unread[0]} does not reach the rungs of a --ladder: leave it out")
        if self.special_tokens:
            raise ValueError("--special-tokens has no meaning with --ladder: its rungs read them as text")
        if self.model != "pocket":
            raise ValueError(f"--model {self.model} and --ladder exclude each other: name it as a rung")
        if self.svg is not None or self.verdict:
            raise ValueError("--svg and --verdict have no meaning with --ladder: --json tells the verdict")
        if self.unit != "token" and (sampling.temperature > 0 or sampling.seed is not None):
            raise ValueError(f"--temperature and --seed have no meaning with --unit {self.unit}: its texts are greedy")


@grouped
def generate(
    exits: ExitOptions,
    sampling: SamplingOptions,
    grammars: GrammarOptions,
    loaded: LoadOptions,
    asked: GenerateOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue as it is; - reads it from standard input; without one, examples."),
    ] = None,
) -> None:
    """Continue a prompt; each token is coloured by the loop that it was read at, or with --ladder by its rung."""
    from sigma0.checkpoints import resolve_model
    from sigma0.checkpoints.about import unseen_note
    from sigma0.commands.examples import NO_PROMPT, about_model, show_examples

    with one_line_errors(), ExitStack() as waiting:
        if prompt is None and not asked.as_json:
            show_examples(asked.model)
            return
        if prompt is None:
            raise ValueError(NO_PROMPT)
        sampling.check()
        if asked.svg is not None and asked.as_json:
            raise ValueError("--svg and --json exclude each other")
        if asked.telemetry is not None and (asked.ladder is not None or asked.tensor_parallel):
            raise ValueError("--telemetry goes with one model in one process; of a ladder see --trail")
        if asked.tensor_parallel and (asked.ladder is not None or prompt == "-"):
            raise ValueError(
                "--tensor-parallel goes with one model and a prompt that is an argument: its processes share their "
                "standard input, and do not agree on what a ladder hands up"
            )
        exits.over()
        follows = grammars.settings()
        # the newline that echo and editors add is no part of the text
        text = sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r") if prompt == "-" else prompt
        if not text:
            raise ValueError("the prompt is empty")
        if asked.ladder is None:
            # before what takes seconds to import
            resolve_model(asked.model)
        waiting.enter_context(loading(asked.ladder or asked.model, hidden=asked.tensor_parallel))
        from sigma0.api import stream
        from sigma0.config import Messages
        from sigma0.decode.parallel import tensor_parallel_group

        said: str | Messages = [{"role": "user", "content": text}] if asked.chat else text
        asked.check(follows, sampling, loaded)
        if asked.ladder is not None:
            from sigma0.commands.ladder import ladder_exits, open_ladder, run_ladder

            ladder = open_ladder(asked.ladder, asked.budget, asked.policy, loaded)
            settings = sampling.stream_settings()
            # of a ladder the unit token alone samples
            for name in ("on_collapse", *(("do_sample", "seed") if asked.unit != "token" else ())):
                del settings[name]
            settings["exit_config"] = ladder_exits(exits, ladder)
            waiting.close()
            run_ladder(ladder, said, asked.unit, asked.trail_file, asked.as_json, **settings)
            return
        log = None
        if asked.telemetry is not None:
            from sigma0.commands.telemetry import TelemetryLog, of_generation

            log = TelemetryLog(asked.telemetry)
        with tensor_parallel_group(asked.tensor_parallel) as is_rank0:
            looped, tokenizer = loaded.load(asked.model, tensor_parallel=asked.tensor_parallel)
            waiting.close()
            if is_rank0 and not asked.as_json:
                looped.progress = compiling
            config = looped.resolve_exit_config(exits.over(looped.resolve_exit_config(None)))
            began = monotonic()
            settings = sampling.stream_settings() | follows
            settings |= {"exit_config": config, "special_tokens": asked.special_tokens}
            tokens = stream(looped, tokenizer, said, verdict=True if asked.verdict else None, **settings)
            if is_rank0 and (note := unseen_note(*about_model(asked.model), text)) is not None:
                typer.echo(note, err=True)
            if is_rank0 and not asked.as_json:
                print_stream(tokens, looped, text, asked.svg, asked.verdict)
            for _ in tokens:
                pass
            if is_rank0 and asked.as_json:
                report = {"model": asked.model, **tokens.generation.to_dict()}
                typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
            if log is not None:
                log.write(partial(of_generation, tokens.generation, asked.model, config, monotonic() - began))
                log.close()
