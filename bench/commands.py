"""The benchmarks by name."""

# ruff: noqa: E501  (a bench is a line)

from typing import Any

import typer

from sigma0.commands.lazy_group import Target, lazy_group

# Name, where it is defined, and the first line of its help, so that the list can be printed without importing it.
_BENCHES = """
all | rerun.command:rerun_all | Make every deterministic figure again from the weights that ship; say which differ from what is committed.
fidelity | fidelity.command:fidelity | Compute saved against fidelity, for every exit rule and threshold and the baselines beside them.
report | report:report | Write the whole tables and the pictures of the latest run of each model; print the short tables.
lossless | lossless.command:lossless | Passes of verify over full depth's, with one draft and with redrafts, and that the text is full depth's.
proximity | proximity.command:proximity | Fit the parts of the proximity on one half of texts and loops, and report on the other.
kernels | kernels.command:kernels | Microseconds and bandwidth of every kernel in Ouro-1.4B's shape, beside eager torch and torch.compile.
grounding | grounding.command:grounding | Recall and precision of unanchored claims: a number altered or a name swapped, against untouched facts.
stability | stability.command:stability | The spectrum of a token's loops beside the loop map's own radius, and beside right and wrong answers.
depths | depths.command:depths | The loop at which each word of a model's answers exits: which words need depth.
verdict | verdict.command:verdict | Wrong answers told from right ones, the door, its features, the switches, shifts and strange prompts.
promise | verdict.command:promise | Draw calibrations from a pool of answers, and count how often the chosen door keeps the stated risk.
worlds | verdict.command:worlds | Calibrate a risk in simulated worlds: how often it is kept, and how often a door is found, beside an oracle.
collapse | collapse.command:collapse | What `--on-collapse stop` ends on ordinary texts and on loops, and what it and the verdict cost a token.
speed | speed.command:speed | Decode time of full depth, of adaptive depth and of transformers' own decoding, in turn; greedy, no end.
course | speed.courses:course | Record at which loop each token of a shipped model's answers stops, and from which loop on it is settled.
gpu | gpu.command:gpu | Measure a GPU in one process, the most important first: what fits the time; the next call goes on from there.
device | gpu.device:device | Facts of a device, versions of the libraries, and the bandwidth of a plain copy, measured.
quantization | quantization.command:quantization | Bytes, time, agreement and depths with weights of int8 and int4, beside the same model with floats; greedy.
kv | kv.command:kv | Agreement, depths, bytes and time with K/V in few bits, beside K/V as computed, at several contexts.
overhead | overhead.command:overhead | Host time and dispatched operations of a pass whose block is empty: library, engine, transformers' generate.
ladder | ladder.command:ladder | Accuracy against cost of handing up, beside both models alone, chance, and entropy alone.
signs | ladder.signs:signs | Which sign of a small model's token says that a larger model would write another.
routes | ladder.signs:routes | Which score should send a whole answer up to a larger model, on many questions that both have answered.
distill | outer.command:distill | Make a program without a model of what a lemma graph verified, and measure it on held-out questions.
agent | outer.command:agent | Let the three-tier agent mend small repositories with one fault each.
outer | outer.command:outer | Each outer loop on held-out hard questions, beside the plain answer, votes of equal cost and a larger model.
effort | effort.command:effort | Success, false accepts and cost of five policies of verification effort, beside flat high effort.
strategyqa | strategyqa.command:strategyqa | Levels of control on yes or no questions, and distillation.
serve | serving.command:serve | Throughput and latency of full depth, never exiting, finish, drop and verify, each through the same server.
soak | serving.soak:soak_server | Load a server with clients of all kinds, one in ten of which leave in the middle; then end it under load.
vllm | serving.command:vllm | The same requests to vLLM at full depth, to vLLM with our drafts, and to our own server, in turn.
humaneval | humaneval.command:humaneval | pass@k on HumanEval, and how the failed completions failed; their code is run in the sandbox alone.
passes | simulation.command:passes | Time the engine's passes by what is in them, and keep the exit depths of its answers for `simulate`.
simulate | simulation.command:simulate | SIMULATE fleets: queueing, tail latency and use under each routing; rows in the ledger are not made again.
mutants | mutation.command:mutants | Change the sources in small ways, one at a time, and see whether the fast tests notice.
gate | gate.command:gate | Exit depth beside difficulty and the oracles, and saturation as a sign of a wrong answer.
"""


_LINES = [line.split(" | ", maxsplit=2) for line in _BENCHES.strip().splitlines()]
COMMANDS = {
    name: Target(f"sigma0.bench.{module}", function, output)
    for name, defined, output in _LINES
    for module, function in [defined.split(":")]
}


def with_record(command: Any) -> Any:
    """The command, with `--record` where it writes into a folder of the caller's; the same of a group's."""
    # after the list of commands, which imports none
    from sigma0.bench.core.options import LEDGER, OWN

    for item in getattr(command, "commands", {}).values():
        with_record(item)
    current = next((str(option.default) for option in command.params if option.name == "out"), "")
    if current.startswith(f"{OWN.parent}/"):
        tracked = str(LEDGER.parent / current.removeprefix(f"{OWN.parent}/"))

        def record(ctx: typer.Context, value: bool) -> None:
            if value and not LEDGER.parent.is_dir():
                typer.echo(f"error: --record writes {tracked}: run it at the root of the repository", err=True)
                raise typer.Exit(2)
            if value:
                ctx.default_map = {"out": tracked}

        said = f"Write {tracked}, which is tracked, where --out says nothing else."
        option = typer.Option(False, "--record", is_eager=True, expose_value=False, callback=record, help=said)
        flag = typer.Typer(add_completion=False)

        @flag.command()
        def of_flag(record: bool = option) -> None: ...

        command.params.append(typer.main.get_command(flag).params[0])
    return command


class BenchGroup(lazy_group(COMMANDS, extra="bench")):  # type: ignore[misc]
    """The benches, which record nothing unless they are asked to."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As its base, with `with_record`."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, with_record(command), rest


app = typer.Typer(cls=BenchGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Benchmarks of sigma0."""
