"""The options that commands share, each defined once."""

import inspect
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from typer import Argument, Option

from sigma0.errors import needs_extra

if TYPE_CHECKING:
    from sigma0.config import ExitConfig

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
Runner = Annotated[str, Option(help="What calls the step: auto, eager, compile, or cudagraph (what auto is on CUDA).")]
Quantization = Annotated[
    str | None,
    Option(help="Round the weights of the block to int8 or int4; the rest is bfloat16 unless --dtype says more."),
]
Recurrence = Annotated[int | None, Option(help="Loops at full depth; by default the checkpoint's.")]
Stride = Annotated[int | None, Option(help="Loops of a Raven that a pass runs; depths are then counted in passes.")]
KV = Annotated[
    str | None, Option(help="How K/V are stored: full, bf16, int8, int4 or residual, or a kv_config as JSON.")
]
DoorRuleName = Annotated[
    Literal["confidence", "certificate"] | None,
    Option(
        help="What opens the door: its confidence, or a certificate (converged and contracting). By default as the "
        "checkpoint says."
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object instead.")]

MaxNewTokens = Annotated[int, Option(help="New tokens at most.")]
CollapseAction = Annotated[str, Option(help="A text that repeats itself: stop it, tighten its sampling, or ignore it.")]
BudgetLimits = Annotated[
    str, Option(help='With --ladder, hard limits: "large_tokens=200,seconds=10".', rich_help_panel="Ladder")
]
TriggerJson = Annotated[
    str | None,
    Option(help='With --ladder, a trigger as JSON: {"kind": "entropy", "above": 0.5}', rich_help_panel="Ladder"),
]


def check_known(what: str, name: str, known: Collection[str]) -> None:
    """Refuses a name that there is not."""
    if name not in known:
        raise ValueError(f"no such {what}: {name!r}; there are {', '.join(known)}")


def option(default: Any, help: str, *names: str, **more: Any) -> Any:
    """A field of a dataclass of options, as `typer.Option` takes it; with `...` as its default it has to be given."""
    metadata = {"option": Option(*names, help=help, **more)}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ExitOptions:
    """Which tokens stop, and what becomes of their deeper loops; None: as the checkpoint says."""

    PANEL: ClassVar[str] = "Exit rule"
    SHOWN: ClassVar[tuple[str, ...]] = ("exit", "after")
    exit: str | None = option(None, "Exit rule: full, fixed, qexit, converge, accel or margin.")
    q: float | None = option(None, "Threshold of qexit, in (0, 1].")
    eps: float | None = option(None, "Threshold of converge and accel.")
    patience: int | None = option(None, "Loops running on which accel must hold.")
    theta: float | None = option(None, "Threshold of margin, in (0, 1].")
    delta: float | None = option(None, "Threshold of Huginn's criteria.")
    stable: int | None = option(None, "Loops running with one argmax, for argmax-stability.")
    depth: int | None = option(None, "Loop that fixed stops at.")
    min_loops: int | None = option(None, "No token stops before this loop.")
    after: str | None = option(None, "Deeper loops after the exit: finish, verify or drop.")

    def over(self, default: "ExitConfig | None" = None) -> "ExitConfig | None":
        """As `exit_settings` has it."""
        names = {"exit": "mode", "after": "after_exit"}
        return exit_settings({names.get(name, name): value for name, value in asdict(self).items()}, default)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How an answer is drawn, and where it ends."""

    PANEL: ClassVar[str] = "Sampling"
    SHOWN: ClassVar[tuple[str, ...]] = ("max_new_tokens", "temperature")
    max_new_tokens: MaxNewTokens = 64
    temperature: float = option(0.0, "0 is greedy; above, sampling.")
    stop: list[str] | None = option(None, "A string that ends the text; may be repeated.")
    seed: int | None = option(None, "Seed of the sampling.")
    on_collapse: CollapseAction = "stop"

    def check(self) -> None:
        """Refuses a temperature or a seed that no generator takes, and an unknown `on_collapse`."""
        from sigma0.config import parse_on_collapse

        parse_on_collapse(self.on_collapse)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a number of at least 0, got {self.temperature}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2^63), got {self.seed}")

    def stream_settings(self) -> dict[str, Any]:
        """As keyword arguments of `sigma0.stream`."""
        samples = self.temperature > 0
        given = {"max_new_tokens": self.max_new_tokens, "stop": self.stop or (), "seed": self.seed}
        return {**given, "on_collapse": self.on_collapse, "do_sample": samples} | (
            {"temperature": self.temperature} if samples else {}
        )


@dataclass(frozen=True, kw_only=True)
class GrammarOptions:
    """What an answer has to be."""

    PANEL: ClassVar[str] = "Grammar"
    SHOWN: ClassVar[tuple[str, ...]] = ("schema",)
    schema: str | None = option(None, "The answer is JSON of this JSON Schema: a file, or the schema itself.")
    regex: str | None = option(None, "The answer matches this regular expression.")
    choice: list[str] | None = option(None, "The answer is this text, or another --choice; may be repeated.")
    grammar: str | None = option(None, "The answer follows this grammar, Lark or EBNF: a file, or its text.")

    def settings(self) -> dict[str, Any]:
        """As keyword arguments of `sigma0.stream`; checked as far as no model is needed."""
        from sigma0.decode.grammar.spec import parse_spec

        given = {name: value for name, value in asdict(self).items() if value not in (None, [])}
        # a grammar has some rule, and a file name has none
        is_file = {
            "schema": not given.get("schema", "{").lstrip().startswith(("{", "true", "false")),
            "grammar": ":" not in given.get("grammar", ":"),
        }
        for name in (name for name, named in is_file.items() if named):
            try:
                given[name] = Path(given[name]).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"--{name} is neither what it names nor a file that can be read: {error}") from error
        parse_spec(**given)
        return given


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is loaded; as `sigma0.load` takes them."""

    PANEL: ClassVar[str] = "Model and device"
    SHOWN: ClassVar[tuple[str, ...]] = ("device",)
    device: Device = "auto"
    dtype: Dtype = "auto"
    backend: str = option("auto", "What runs a pass: auto (kernels on CUDA), torch or triton.")
    runner: Runner = "auto"
    quantization: Quantization = None
    recurrence: Recurrence = None
    stride: Stride = None
    kv: KV = None
    door_rule: DoorRuleName = None
    check: bool = option(True, "Refuse weights that are NaN or infinite as they are loaded.", "--check/--no-check")

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


@dataclass(frozen=True, kw_only=True)
class SolveOptions:
    """How a problem is solved, by which models, within which limits."""

    strategy: str = option("progressive", "progressive, lemma or agent.")
    model: ServedModel = "pocket-solver"
    ladder: str | None = option(None, "Rungs in place of --model, the lowest first: small,name@http://host/v1")
    base_url: str | None = option(None, "A server that speaks OpenAI's protocol; its key is in OPENAI_API_KEY.")
    config: str | None = option(None, "Name of a policy of effort, or a JSON file of the strategy's settings.")
    memory: Path | None = option(None, "Of the run: progressive's state after every iteration, the others' answers.")
    resume: bool = option(False, "Go on from the memory file.", "--resume")
    repo: Path | None = option(None, "agent: folder whose tests are to pass; it is not changed.")
    patch: Path | None = option(None, "agent: where the patch is written, solved or not.")
    graph: Path | None = option(None, "lemma: where the graph is drawn, as .svg or .mmd.")
    trail: Path | None = option(None, "Where every question, run and decision is written.")
    seed: int = option(0, "Of all samples.")
    temperature: float | None = option(None, "Of texts; 0 is greedy.")
    max_tokens: int | None = option(None, "New tokens of each text at most.", min=1)
    max_calls: int | None = option(None, "Questions to models at most.", min=1)
    max_seconds: float | None = option(None, "No question is begun after this time.")
    device: Device = "auto"
    dtype: Dtype = "auto"
    as_json: AsJson = False

    def check(self) -> None:
        """Refuses what makes no sense before a model is loaded."""
        from sigma0.reason.trail import Strategy

        check_known("strategy", self.strategy, get_args(Strategy))
        for name, strategy in (("repo", "agent"), ("patch", "agent"), ("graph", "lemma")):
            if getattr(self, name) is not None and self.strategy != strategy:
                raise ValueError(f"--{name} has no meaning with --strategy {self.strategy}, only with {strategy}")
        if self.graph is not None and self.graph.suffix not in (".svg", ".mmd"):
            raise ValueError(f"--graph {str(self.graph)!r} ends neither in .svg nor in .mmd")
        if self.graph is not None and self.graph.suffix == ".svg":
            with needs_extra("bench"):
                import matplotlib as matplotlib
        if self.resume and self.memory is None:
            raise ValueError("--resume needs --memory FILE")
        if self.memory is not None and self.memory.exists() and not self.resume:
            raise ValueError(
                f"--memory {str(self.memory)!r} exists: add --resume to go on with it, or name another file"
            )
        if self.strategy == "agent" and (self.repo is None or not self.repo.is_dir()):
            named = "none" if self.repo is None else repr(str(self.repo))
            raise ValueError(f"--strategy agent needs --repo FOLDER, got {named}")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a number of at least 0, got {self.temperature}")
        written = [path for path in (self.trail, self.patch, self.graph, self.memory) if path is not None]
        for path in written:
            if not path.absolute().parent.is_dir():
                raise ValueError(f"{str(path)!r}: there is no such folder")
            if path.is_dir():
                raise ValueError(f"{str(path)!r} is a folder: name a file")
        if len({path.resolve() for path in written}) < len(written):
            raise ValueError("--trail, --patch, --graph and --memory have to be different files")


def grouped(command: Callable[..., None], left_out: Collection[str] = ()) -> Callable[..., None]:
    """Makes an option of each field of the dataclasses or pydantic models that a command takes, but those left out."""
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
    current = {field.name: field.metadata["option"] for field in known if "option" in field.metadata}
    defaults = {field.name: inspect.Parameter.empty if field.default is MISSING else field.default for field in known}
    defaults |= {name: field.default for name, field in getattr(group, "model_fields", {}).items()}
    hints = get_type_hints(group, include_extras=True) if defaults else {}
    options = []
    for name in (name for name in defaults if name not in left_out):
        annotation = Annotated[hints[name], current[name]] if name in current else hints[name]
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
    """The fields of `ExitConfig` that were given, over the checkpoint's settings unless they name another rule.

    Before the checkpoint's are known they are checked as far as that goes. `written` is how the caller writes options.
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
    for name, modes in THRESHOLDS.items():
        if options.get(name) is not None and config.mode not in modes:
            effect = f"{written.format(name)} has no effect with exit mode '{config.mode}'"
            raise ValueError(f"{effect}, only with {' or '.join(modes)}")
    return config
