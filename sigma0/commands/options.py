"""The options that commands share, each defined once."""

import inspect
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from typer import Argument, Option

if TYPE_CHECKING:
    from sigma0.config import ExitConfig, OnCollapse

# Rotated telemetry files that are kept by default.
KEPT_FILES = 5
Model = Annotated[str, Option(help="Shipped name, folder, or hub id.")]
ModelArgument = Annotated[str, Argument(help="Shipped name, folder, or hub id.")]
ServedModel = Annotated[str, Option(help="Shipped name, folder, hub id, or a server's name for it.")]
Device = Annotated[str, Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, Option(help="auto, float32, bfloat16 or float16.")]
# Of what is sized or reported, and so is not left to the checkpoint.
StatedDtype = Annotated[str, Option(help="float32, bfloat16 or float16.")]
Threads = Annotated[int, Option(min=1, help="CPU threads.")]
Runner = Annotated[
    str,
    Option("--runner", help="What calls the step: auto, eager, compile, or cudagraph (what auto is on CUDA)."),
]
Quantization = Annotated[
    str | None,
    Option(help="Round the weights of the block to int8 or int4; the rest is bfloat16 unless --dtype says more."),
]
Recurrence = Annotated[
    int | None,
    Option(help="Loops at full depth; by default the checkpoint's."),
]
Stride = Annotated[int | None, Option(help="Loops of a Raven that a pass runs; depths are then counted in passes.")]
KV = Annotated[
    str | None,
    Option(help="How K/V are stored: full, bf16, int8, int4 or residual, or a kv_config as JSON."),
]
DoorRuleName = Annotated[
    Literal["confidence", "certificate"] | None,
    Option(
        "--door-rule",
        help="What opens the door: its confidence, or a certificate (converged and contracting). By default as the "
        "checkpoint says.",
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object instead.")]

MaxNewTokens = Annotated[int, Option(help="New tokens at most.")]
CollapseAction = Annotated[
    str,
    Option("--on-collapse", help="A text that repeats itself: stop it, tighten its sampling, or ignore it."),
]
BudgetLimits = Annotated[
    str, Option(help='With --ladder, hard limits: "large_tokens=200,seconds=10".', rich_help_panel="Ladder")
]
TriggerJson = Annotated[
    str | None,
    Option(help='With --ladder, a trigger as JSON: {"kind": "entropy", "above": 0.5}', rich_help_panel="Ladder"),
]


@dataclass(frozen=True, kw_only=True)
class ExitOptions:
    """Which tokens stop, and what becomes of their deeper loops; None: as the checkpoint says."""

    PANEL: ClassVar[str] = "Exit rule"
    SHOWN: ClassVar[tuple[str, ...]] = ("exit", "after")
    exit: Annotated[str | None, Option(help="Exit rule: full, fixed, qexit, converge, accel or margin.")] = None
    q: Annotated[float | None, Option(help="Threshold of qexit, in (0, 1].")] = None
    eps: Annotated[float | None, Option(help="Threshold of converge and accel.")] = None
    patience: Annotated[int | None, Option(help="Loops running on which accel must hold.")] = None
    theta: Annotated[float | None, Option(help="Threshold of margin, in (0, 1].")] = None
    delta: Annotated[float | None, Option(help="Threshold of Huginn's criteria.")] = None
    stable: Annotated[int | None, Option(help="Loops running with one argmax, for argmax-stability.")] = None
    depth: Annotated[int | None, Option(help="Loop that fixed stops at.")] = None
    min_loops: Annotated[int | None, Option(help="No token stops before this loop.")] = None
    after: Annotated[str | None, Option(help="Deeper loops after the exit: finish, verify or drop.")] = None

    def over(self, default: "ExitConfig | None" = None) -> "ExitConfig | None":
        """As `exit_settings` has it.

        Raises:
            ValueError: For bad values.
        """
        names = {"exit": "mode", "after": "after_exit"}
        return exit_settings({names.get(name, name): value for name, value in asdict(self).items()}, default)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How an answer is drawn, and where it ends."""

    PANEL: ClassVar[str] = "Sampling"
    SHOWN: ClassVar[tuple[str, ...]] = ("max_new_tokens", "temperature")
    max_new_tokens: MaxNewTokens = 64
    temperature: Annotated[float, Option(help="0 is greedy; above, sampling.")] = 0.0
    stop: Annotated[list[str] | None, Option(help="A string that ends the text; may be repeated.")] = None
    seed: Annotated[int | None, Option(help="Seed of the sampling.")] = None
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
    schema: Annotated[
        str | None, Option(help="The answer is JSON of this JSON Schema: a file, or the schema itself.")
    ] = None
    regex: Annotated[str | None, Option(help="The answer matches this regular expression.")] = None
    choice: Annotated[
        list[str] | None, Option(help="The answer is this text, or another --choice; may be repeated.")
    ] = None
    grammar: Annotated[
        str | None, Option(help="The answer follows this grammar, Lark or EBNF: a file, or its text.")
    ] = None

    def settings(self) -> dict[str, Any]:
        """As keyword arguments of `sigma0.stream`; checked as far as no model is needed.

        Raises:
            ValueError: For two of them, a file that cannot be read, or a text that is no JSON.
        """
        from sigma0.decode.grammar.spec import parse_spec

        given = {name: value for name, value in asdict(self).items() if value not in (None, [])}
        # a grammar has some rule, and a file name has none
        is_file = {
            "schema": not given.get("schema", "{").lstrip().startswith(("{", "true", "false")),
            "grammar": ":" not in given.get("grammar", ":"),
        }
        for option in (name for name, named in is_file.items() if named):
            try:
                given[option] = Path(given[option]).read_text()
            except (OSError, UnicodeDecodeError) as error:
                why = f"--{option} is neither what it names nor a file that can be read: {error}"
                raise ValueError(why) from error
        parse_spec(**given)
        return given


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is loaded; as `sigma0.load` takes them."""

    PANEL: ClassVar[str] = "Model and device"
    SHOWN: ClassVar[tuple[str, ...]] = ("device",)
    device: Device = "auto"
    dtype: Dtype = "auto"
    backend: Annotated[str, Option(help="What runs a pass: auto (kernels on CUDA), torch or triton.")] = "auto"
    runner: Runner = "auto"
    quantization: Quantization = None
    recurrence: Recurrence = None
    stride: Stride = None
    kv: KV = None
    door_rule: DoorRuleName = None
    check: Annotated[
        bool, Option("--check/--no-check", help="Refuse weights that are NaN or infinite as they are loaded.")
    ] = True

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
    groups: dict[str, list[inspect.Parameter]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if options := _options(hints[name], left_out):
            groups[name] = options
        parameters += options or [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, options in groups.items():
            given[name] = hints[name](**{option.name: given.pop(option.name) for option in options})
        command(**given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options(group: Any, left_out: Collection[str]) -> list[inspect.Parameter]:
    """Of a dataclass or a pydantic model, under the heading that it names; none of anything else."""
    known = fields(group) if is_dataclass(group) else ()
    defaults = {field.name: inspect.Parameter.empty if field.default is MISSING else field.default for field in known}
    defaults |= {name: field.default for name, field in getattr(group, "model_fields", {}).items()}
    hints = get_type_hints(group, include_extras=True) if defaults else {}
    options = []
    for name in (name for name in defaults if name not in left_out):
        annotation = hints[name]
        if (panel := getattr(group, "PANEL", None)) and name not in group.SHOWN:
            kind, option = get_args(annotation)
            option = copy(option)
            option.rich_help_panel = panel
            annotation = Annotated[kind, option]
        kind_of = inspect.Parameter.KEYWORD_ONLY
        options.append(inspect.Parameter(name, kind_of, default=defaults[name], annotation=annotation))
    return options


def exit_settings(
    options: Mapping[str, Any], default: "ExitConfig | None" = None, written: str = "--{}"
) -> "ExitConfig | None":
    """The options that were given, over the checkpoint's settings unless they name another rule.

    Args:
        options: Fields of `ExitConfig`, None where not given.
        default: The checkpoint's settings, once they are known.
        written: How the caller writes an option's name.

    Raises:
        ValueError: For bad values.
    """
    from sigma0.config import THRESHOLDS, ExitConfig

    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return default
    if "mode" not in given and default is not None:
        # a threshold that only one rule reads selects that rule, unless the checkpoint's rule reads it too
        named = [modes for name in given if len(modes := THRESHOLDS.get(name, ())) == 1 and default.mode not in modes]
        if named:
            given["mode"] = named[0][0]
    if "mode" not in given:
        if default is None:
            # the mode, which decides which of them are read, is not known yet
            replace(ExitConfig(), **{name: value for name, value in given.items() if name != "depth"})
            return None
        given = {**default.to_dict(), **given}
    config = replace(ExitConfig(), **given)
    for name, option in THRESHOLDS.items():
        if options.get(name) is not None and config.mode not in option:
            option_name = written.format(name)
            raise ValueError(
                f"{option_name} has no effect with exit mode '{config.mode}', only with {' or '.join(option)}"
            )
    return config
