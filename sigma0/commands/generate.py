"""`sigma0 generate`: continue a prompt with one model, or with the rungs of a ladder."""

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated, ClassVar

import typer
from typer import Option

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


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """How a prompt is read, and by how many processes."""

    PANEL: ClassVar[str] = LoadOptions.PANEL
    SHOWN: ClassVar[tuple[str, ...]] = ()
    special_tokens: bool = option(False, "Read special tokens in the prompt as such, not as text.", "--special-tokens")
    tensor_parallel: bool = option(
        False, "Spread the model over the processes that torchrun started.", "--tensor-parallel"
    )


@dataclass(frozen=True, kw_only=True)
class RungOptions:
    """What a ladder hands up, within which limits."""

    PANEL: ClassVar[str] = "Ladder"
    SHOWN: ClassVar[tuple[str, ...]] = ("ladder",)
    ladder: str | None = option(
        None, "Rungs in place of --model, the lowest first: pocket,pocket-large or small,name@http://host/v1"
    )
    unit: str = option("token", "With --ladder, what goes up: token, draft or answer.")
    budget: BudgetLimits = ""
    policy: TriggerJson = None
    trail_file: Path | None = option(None, "With --ladder, also write every decision to this file.", "--trail")


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
    chat: Annotated[bool, Option("--chat", help="Send the prompt as a user's message.")] = False,
    places: PlaceOptions = PlaceOptions(),
    verdict: Annotated[bool, Option("--verdict", help="Also print the verdict, one line for each fact.")] = False,
    svg: Annotated[
        str | None, Option(help="Also write the coloured text to this SVG file.", rich_help_panel="Output")
    ] = None,
    rungs: RungOptions = RungOptions(),
    telemetry: Annotated[
        Path | None,
        Option(help="Also append one JSON line to this file: depths, exits, verdict, costs.", rich_help_panel="Output"),
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
        if telemetry is not None and (rungs.ladder is not None or places.tensor_parallel):
            raise ValueError("--telemetry goes with one model in one process; of a ladder see --trail")
        if places.tensor_parallel and (rungs.ladder is not None or prompt == "-"):
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
        if rungs.ladder is None:
            # before what takes seconds to import
            resolve_model(model)
        waiting.enter_context(loading(rungs.ladder or model, hidden=places.tensor_parallel))
        from sigma0.api import stream
        from sigma0.config import Messages
        from sigma0.decode.parallel import tensor_parallel_group

        said: str | Messages = [{"role": "user", "content": text}] if chat else text
        if rungs.ladder is None:
            given = {"unit": rungs.unit != "token", "budget": rungs.budget, "policy": rungs.policy}
            given["trail"] = rungs.trail_file
            if any(given.values()):
                raise ValueError(f"{', '.join(f'--{name}' for name, value in given.items() if value)} need --ladder")
        else:
            unread = {f"--{name}": value for name, value in follows.items()}
            unread |= loaded.named("runner", "quantization", "recurrence", "stride", "kv")
            if sampling.on_collapse != "stop":
                unread["--on-collapse"] = sampling.on_collapse
            if unread:
                raise ValueError(f"{next(iter(unread))} does not reach the rungs of a --ladder: leave it out")
            if places.special_tokens:
                raise ValueError("--special-tokens has no meaning with --ladder: its rungs read them as text")
            if model != "pocket":
                raise ValueError(f"--model {model} and --ladder exclude each other: name it as a rung")
            if svg is not None or verdict:
                raise ValueError("--svg and --verdict have no meaning with --ladder: --json tells the verdict")
            if rungs.unit != "token" and (sampling.temperature > 0 or sampling.seed is not None):
                raise ValueError(
                    f"--temperature and --seed have no meaning with --unit {rungs.unit}: its texts are greedy"
                )
            from sigma0.commands.ladder import ladder_exits, open_ladder, run_ladder

            ladder = open_ladder(rungs.ladder, rungs.budget, rungs.policy, loaded)
            settings = sampling.stream_settings()
            # of a ladder the unit token alone samples
            for name in ("on_collapse", *(("do_sample", "seed") if rungs.unit != "token" else ())):
                del settings[name]
            settings["exit_config"] = ladder_exits(exits, ladder)
            waiting.close()
            run_ladder(ladder, said, rungs.unit, rungs.trail_file, as_json, **settings)
            return
        log = None
        if telemetry is not None:
            from sigma0.commands.telemetry import TelemetryLog, of_generation

            log = TelemetryLog(telemetry)
        with tensor_parallel_group(places.tensor_parallel) as is_rank0:
            looped, tokenizer = loaded.load(model, tensor_parallel=places.tensor_parallel)
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
                special_tokens=places.special_tokens,
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
