"""The options that commands share, each defined once."""

import inspect
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_type_hints

import typer

if TYPE_CHECKING:
    from sigma0.config import ExitConfig, OnCollapse

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
    typer.Option(help="Loops at full depth; by default the checkpoint's."),
]
Stride = Annotated[
    int | None, typer.Option(help="Loops of a Raven that a pass runs; depths are then counted in passes.")
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
BudgetLimits = Annotated[
    str, typer.Option(help='With --ladder, hard limits: "large_tokens=200,seconds=10".', rich_help_panel="Ladder")
]
TriggerJson = Annotated[
    str | None,
    typer.Option(help='With --ladder, a trigger as JSON: {"kind": "entropy", "above": 0.5}', rich_help_panel="Ladder"),
]


@dataclass(frozen=True, kw_only=True)
class ExitOptions:
    """Which tokens stop, and what becomes of their deeper loops; None: as the checkpoint says."""

    PANEL: ClassVar[str] = "Exit rule"
    SHOWN: ClassVar[tuple[str, ...]] = ("exit", "after")
    exit: ExitRuleName = None
    q: Q = None
    eps: Eps = None
    patience: Patience = None
    theta: Theta = None
    delta: Delta = None
    stable: Stable = None
    depth: Depth = None
    min_loops: MinLoops = None
    after: After = None

    def given(self) -> dict[str, Any]:
        """As fields of `ExitConfig`, None where not given."""
        names = {"exit": "mode", "after": "after_exit"}
        return {names.get(name, name): value for name, value in asdict(self).items()}

    def over(self, default: "ExitConfig | None" = None) -> "ExitConfig | None":
        """As `exit_settings` has it.

        Raises:
            ValueError: For bad values.
        """
        from sigma0.commands.exit_options import exit_settings

        return exit_settings(self.given(), default)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How an answer is drawn, and where it ends."""

    PANEL: ClassVar[str] = "Sampling"
    SHOWN: ClassVar[tuple[str, ...]] = ("max_new_tokens", "temperature")
    max_new_tokens: MaxNewTokens = 64
    temperature: Temperature = 0.0
    stop: Stop = None
    seed: Seed = None
    on_collapse: CollapseAction = "stop"

    @property
    def collapse(self) -> "OnCollapse":
        """What becomes of a text that repeats itself.

        Raises:
            ValueError: For what it is not.
        """
        from sigma0.config import parse_on_collapse

        return parse_on_collapse(self.on_collapse)

    def check(self) -> None:
        """Refuses a temperature or a seed that no generator takes, and an unknown `on_collapse`.

        Raises:
            ValueError: Naming the value.
        """
        _ = self.collapse
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a number of at least 0, got {self.temperature}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2^63), got {self.seed}")

    def stream_settings(self) -> dict[str, Any]:
        """As keyword arguments of `sigma0.stream`."""
        samples = self.temperature > 0
        given = {"max_new_tokens": self.max_new_tokens, "stop": self.stop or (), "seed": self.seed}
        return {**given, "on_collapse": self.collapse, "do_sample": samples} | (
            {"temperature": self.temperature} if samples else {}
        )


@dataclass(frozen=True, kw_only=True)
class GrammarOptions:
    """What an answer has to be."""

    PANEL: ClassVar[str] = "Grammar"
    SHOWN: ClassVar[tuple[str, ...]] = ("schema",)
    schema: Schema = None
    regex: Regex = None
    choice: AnswerChoice = None
    grammar: GrammarText = None


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is loaded; as `sigma0.load` takes them."""

    PANEL: ClassVar[str] = "Model and device"
    SHOWN: ClassVar[tuple[str, ...]] = ("device",)
    device: Device = "auto"
    dtype: Dtype = "auto"
    backend: BackendName = "auto"
    runner: Runner = "auto"
    quantization: Quantization = None
    recurrence: Recurrence = None
    stride: Stride = None
    kv: KV = None
    door_rule: DoorRuleName = None
    check: Check = True

    def named(self, *names: str) -> dict[str, Any]:
        """Which of some options are not as by default, by their names on the command line."""
        default = type(self)()
        return {
            f"--{name.replace('_', '-')}": getattr(self, name)
            for name in names
            if getattr(self, name) != getattr(default, name)
        }

    def load(self, model: str, **more: Any) -> Any:
        """The model and its tokenizer."""
        from sigma0.models.load import load

        return load(model, **asdict(self), **more)


def grouped(command: Callable[..., None], left_out: Collection[str] = ()) -> Callable[..., None]:
    """Makes an option of each field of the dataclasses or pydantic models that a command takes.

    Args:
        command: What runs.
        left_out: Fields that keep their defaults.
    """
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    groups = {name: found for name in signature.parameters if (found := _fields(hints[name], left_out))}
    parameters, kind = [], inspect.Parameter.KEYWORD_ONLY
    for name, parameter in signature.parameters.items():
        for field, default in groups.get(name, {}).items():
            annotation = get_type_hints(hints[name], include_extras=True)[field]
            if (panel := getattr(hints[name], "PANEL", None)) and field not in hints[name].SHOWN:
                annotation = _under(panel, annotation)
            parameters.append(inspect.Parameter(field, kind, default=default, annotation=annotation))
        if name not in groups:
            parameters.append(parameter.replace(kind=kind, annotation=hints[name]))

    @wraps(command)
    def run(**given: Any) -> None:
        for name, found in groups.items():
            given[name] = hints[name](**{field: given.pop(field) for field in found})
        command(**given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _fields(group: Any, left_out: Collection[str]) -> dict[str, Any]:
    """Fields of a dataclass or a pydantic model with their defaults; none of anything else."""
    if is_dataclass(group):
        found = {field.name: field.default for field in fields(group)}
    else:
        found = {name: field.default for name, field in getattr(group, "model_fields", {}).items()}
    return {name: default for name, default in found.items() if name not in left_out}


def _under(panel: str, annotation: Any) -> Any:
    """An option's annotation under a heading of the help."""
    kind, option = get_args(annotation)
    option = copy(option)
    option.rich_help_panel = panel
    return Annotated[kind, option]
