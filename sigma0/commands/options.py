"""The options that commands share, each defined once."""

from typing import Annotated, Literal

import typer

# Rotated telemetry files that are kept by default.
KEPT_FILES = 5
Model = Annotated[str, typer.Option(help="Shipped name, folder, or hub id.")]
ModelArgument = Annotated[str, typer.Argument(help="Shipped name, folder, or hub id.")]
ServedModel = Annotated[str, typer.Option(help="Shipped name, folder, hub id, or a server's name for it.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
# Of what is sized or reported, and so is not left to the checkpoint.
StatedDtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
BackendName = Annotated[
    str, typer.Option("--backend", help="What runs a pass: auto (kernels on CUDA), torch or triton.")
]
Runner = Annotated[
    str,
    typer.Option("--runner", help="What calls the step: auto, eager, compile, or cudagraph (what auto is on CUDA)."),
]
Quantization = Annotated[
    str | None,
    typer.Option(help="Round the weights of the block to int8 or int4; the rest is bfloat16 unless --dtype says more."),
]
Recurrence = Annotated[
    int | None,
    typer.Option(help="Loops at full depth, of a model that takes any number (Raven); by default the checkpoint's."),
]
Stride = Annotated[
    int | None, typer.Option(help="Loops of such a model that a pass runs; depths are then counted in passes.")
]
KV = Annotated[
    str | None,
    typer.Option(help="How K/V are stored: full, bf16, int8, int4 or residual, or a kv_config as JSON."),
]
DoorRuleName = Annotated[
    Literal["confidence", "certificate"] | None,
    typer.Option(
        "--door-rule",
        help="What opens the door: its confidence, or a certificate (converged and contracting). By default as the "
        "checkpoint says.",
    ),
]
Check = Annotated[
    bool, typer.Option("--check/--no-check", help="Refuse weights that are NaN or infinite as they are loaded.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]

ExitRuleName = Annotated[
    str | None, typer.Option("--exit", help="Exit rule: full, fixed, qexit, converge, accel or margin.")
]
Q = Annotated[float | None, typer.Option(help="Threshold of qexit, in (0, 1].")]
Eps = Annotated[float | None, typer.Option(help="Threshold of converge and accel.")]
Patience = Annotated[int | None, typer.Option(help="Loops running on which accel must hold.")]
Theta = Annotated[float | None, typer.Option(help="Threshold of margin, in (0, 1].")]
Delta = Annotated[float | None, typer.Option(help="Threshold of Huginn's criteria.")]
Stable = Annotated[int | None, typer.Option(help="Loops running with one argmax, for argmax-stability.")]
Depth = Annotated[int | None, typer.Option(help="Loop that fixed stops at.")]
MinLoops = Annotated[int | None, typer.Option(help="No token stops before this loop.")]
After = Annotated[str | None, typer.Option(help="Deeper loops after the exit: finish, verify or drop.")]

Schema = Annotated[
    str | None, typer.Option(help="The answer is JSON of this JSON Schema: a file, or the schema itself.")
]
Regex = Annotated[str | None, typer.Option(help="The answer matches this regular expression.")]
AnswerChoice = Annotated[
    list[str] | None, typer.Option("--choice", help="The answer is this text, or another --choice; may be repeated.")
]
GrammarText = Annotated[
    str | None, typer.Option("--grammar", help="The answer follows this grammar, Lark or EBNF: a file, or its text.")
]

MaxNewTokens = Annotated[int, typer.Option(help="New tokens at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; above, sampling.")]
Stop = Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling.")]
CollapseAction = Annotated[
    str,
    typer.Option("--on-collapse", help="A text that repeats itself: stop it, tighten its sampling, or ignore it."),
]
BudgetLimits = Annotated[str, typer.Option(help='With --ladder, hard limits: "large_tokens=200,seconds=10".')]
TriggerJson = Annotated[
    str | None, typer.Option(help='With --ladder, a trigger as JSON: {"kind": "entropy", "above": 0.5}')
]


def check_sampling(temperature: float, seed: int | None) -> None:
    """Refuses a temperature or a seed that no generator takes.

    Raises:
        ValueError: Naming the value.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be a number of at least 0, got {temperature}")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed must lie in [0, 2^63), got {seed}")
