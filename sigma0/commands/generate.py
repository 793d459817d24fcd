"""`sigma0 generate`: continue a prompt with one model, or with the rungs of a ladder."""

import json
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

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
)

if TYPE_CHECKING:
    from sigma0.config import ExitConfig
    from sigma0.ladder import FidelityLadder


def ladder_exits(exits: ExitOptions, ladder: "FidelityLadder") -> "ExitConfig | None":
    """The options that were given, over the first looped rung's own settings; None where none was given."""
    from sigma0.ladder import LocalRung

    if exits == ExitOptions():
        return None
    looped = [rung for rung in ladder.rungs if isinstance(rung, LocalRung) and rung.is_looped]
    if not looped:
        raise ValueError("no rung of this ladder has loops to exit from: leave the exit options out")
    return exits.over(looped[0].model.resolve_exit_config(looped[0].exit_config))


@grouped
def generate(
    exits: ExitOptions,
    sampling: SamplingOptions,
    grammars: GrammarOptions,
    loaded: LoadOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue as it is; - reads it from standard input; without one, examples."),
    ] = None,
    model: Model = "pocket",
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message.")] = False,
    special_tokens: Annotated[
        bool,
        typer.Option(
            "--special-tokens",
            help="Read special tokens in the prompt as such, not as text.",
            rich_help_panel="Model and device",
        ),
    ] = False,
    tensor_parallel: Annotated[
        bool,
        typer.Option(
            "--tensor-parallel",
            help="Spread the model over the processes that torchrun started.",
            rich_help_panel="Model and device",
        ),
    ] = False,
    verdict: Annotated[bool, typer.Option("--verdict", help="Also print the verdict, one line for each fact.")] = False,
    svg: Annotated[
        str | None, typer.Option(help="Also write the coloured text to this SVG file.", rich_help_panel="Output")
    ] = None,
    ladder: Annotated[
        str | None,
        typer.Option(
            help="Rungs in place of --model, the lowest first: pocket,pocket-large or small,name@http://host/v1"
        ),
    ] = None,
    unit: Annotated[
        str, typer.Option(help="With --ladder, what goes up: token, draft or answer.", rich_help_panel="Ladder")
    ] = "token",
    budget: BudgetLimits = "",
    policy: TriggerJson = None,
    trail_file: Annotated[
        Path | None,
        typer.Option(
            "--trail", help="With --ladder, also write every decision to this file.", rich_help_panel="Ladder"
        ),
    ] = None,
    telemetry: Annotated[
        Path | None,
        typer.Option(
            help="Also append one JSON line to this file: depths, exits, verdict, costs.", rich_help_panel="Output"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt; each token is coloured by the loop that it was read at, or with --ladder by its rung."""
    from sigma0.checkpoints import resolve_model
    from sigma0.checkpoints.about import unseen_note
    from sigma0.commands.examples import NO_PROMPT, about_model, show_examples

    with one_line_errors(), ExitStack() as waiting:
        if prompt is None and not as_json:
            show_examples(model)
            return
        if prompt is None:
            raise ValueError(NO_PROMPT)
        sampling.check()
        if svg is not None and as_json:
            raise ValueError("--svg and --json exclude each other")
        if telemetry is not None and (ladder is not None or tensor_parallel):
            raise ValueError("--telemetry goes with one model in one process; of a ladder see --trail")
        if tensor_parallel and (ladder is not None or prompt == "-"):
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
        if ladder is None:
            # before what takes seconds to import
            resolve_model(model)
        waiting.enter_context(loading(ladder or model, hidden=tensor_parallel))
        from sigma0.api import stream
        from sigma0.config import Messages
        from sigma0.decode.parallel import tensor_parallel_group

        samples = sampling.temperature > 0
        settings: dict[str, Any] = {"temperature": sampling.temperature} if samples else {}
        said: str | Messages = [{"role": "user", "content": text}] if chat else text
        if ladder is None:
            given = {"unit": unit != "token", "budget": budget, "policy": policy, "trail": trail_file}
            if any(given.values()):
                raise ValueError(f"{', '.join(f'--{name}' for name, value in given.items() if value)} need --ladder")
        else:
            if follows:
                raise ValueError(f"--{next(iter(follows))} does not reach the rungs of a --ladder: leave it out")
            if special_tokens:
                raise ValueError("--special-tokens has no meaning with --ladder: its rungs read them as text")
            if model != "pocket":
                raise ValueError(f"--model {model} and --ladder exclude each other: name it as a rung")
            if unreached := loaded.named("runner", "quantization", "recurrence", "stride", "kv"):
                raise ValueError(f"{next(iter(unreached))} does not reach the rungs of a --ladder: leave it out")
            if sampling.on_collapse != "stop":
                raise ValueError("--on-collapse does not reach the rungs of a --ladder: leave it out")
            if svg is not None or verdict:
                raise ValueError("--svg and --verdict have no meaning with --ladder: --json tells the verdict")
            if unit == "token":
                settings |= {"do_sample": samples, "seed": sampling.seed}
            elif samples or sampling.seed is not None:
                raise ValueError(f"--temperature and --seed have no meaning with --unit {unit}: its texts are greedy")
            from sigma0.commands.ladder import open_ladder, run_ladder

            rungs = open_ladder(ladder, budget, policy, loaded)
            settings |= {"exit_config": ladder_exits(exits, rungs), "max_new_tokens": sampling.max_new_tokens}
            waiting.close()
            run_ladder(rungs, said, unit, trail_file, as_json, stop=sampling.stop or (), **settings)
            return
        log = None
        if telemetry is not None:
            from sigma0.commands.telemetry import TelemetryLog, of_generation

            log = TelemetryLog(telemetry)
        with tensor_parallel_group(tensor_parallel) as is_rank0:
            looped, tokenizer = loaded.load(model, tensor_parallel=tensor_parallel)
            waiting.close()
            if is_rank0 and not as_json:
                looped.announce = compiling
            config = looped.resolve_exit_config(exits.over(looped.resolve_exit_config(None)))
            began = monotonic()
            tokens = stream(
                looped,
                tokenizer,
                said,
                exit_config=config,
                verdict=True if verdict else None,
                special_tokens=special_tokens,
                **follows,
                **sampling.stream_settings(),
            )
            note = unseen_note(*about_model(model), text)
            if is_rank0 and note is not None:
                typer.echo(note, err=True)
            if is_rank0 and not as_json:
                print_stream(tokens, looped.num_loops, text, svg, verdict, looped.confidence_model)
            for _ in tokens:
                pass
            if is_rank0 and as_json:
                typer.echo(json.dumps({"model": model, **tokens.generation.to_dict()}, indent=2, ensure_ascii=False))
            if log is not None:
                log.write(partial(of_generation, tokens.generation, model, config, monotonic() - began))
                log.close()
