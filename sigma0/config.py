"""Settings of the decoder and switches of the environment: frozen, validated dataclasses."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.dataclasses import dataclass
from pydantic_settings import BaseSettings, SettingsConfigDict

from sigma0.errors import LONGEST, one_line_constructor

# A chat: each message with `role` and `content`.
Messages = Sequence[Mapping[str, Any]]
ExitMode = Literal[
    "full",
    "fixed",
    "qexit",
    "converge",
    "accel",
    "margin",
    "entropy-diff",
    "latent-diff",
    "cosine",
    "kl",
    "minp-kl",
    "argmax-stability",
]
AfterExit = Literal["finish", "verify", "drop"]
# When a text repeats itself: end it, raise repetition penalty and temperature, or let it run.
OnCollapse = Literal["stop", "tighten", "ignore"]
AccelScale = Literal["states", "steps"]
Effort = Literal["minimal", "low", "medium", "high"]
S = TypeVar("S", bound="Stored")
# Planes of a layer of a coda: of what was read at the exit, and of what was read at loop T.
CODA_PLANES = 2
# Rows that the head reads at once of tokens that run no further, and up to which their states wait for it.
DEEPEST_ROWS = 64
# Exit modes that use a threshold.
THRESHOLDS = {
    "q": ("qexit",),
    "eps": ("converge", "accel"),
    "patience": ("accel",),
    "theta": ("margin",),
    "accel_scale": ("accel",),
    "delta": ("entropy-diff", "latent-diff", "cosine", "kl", "minp-kl"),
    "stable": ("argmax-stability",),
}

# Numbers and whole numbers among the fields of an `ExitConfig`.
NUMBERS = ("q", "eps", "theta", "delta")
COUNTS = ("patience", "min_loops", "depth", "stable")


def parse_on_collapse(value: Any) -> OnCollapse:
    """A validated `on_collapse`.

    Raises:
        ValueError: For anything else than `stop`, `tighten` or `ignore`.
    """
    if value not in get_args(OnCollapse):
        raise ValueError(f"on_collapse is stop, tighten or ignore, got {str(value)[:LONGEST]!r}")
    return cast(OnCollapse, value)


# The fields of each adaptive rule, its threshold first, and their defaults.
RULE_DEFAULTS: dict[str, dict[str, Any]] = {
    "qexit": {"q": 0.5},
    "margin": {"theta": 0.9},
    "converge": {"eps": 0.05},
    "accel": {"eps": 0.05, "patience": 2, "accel_scale": "states"},
    "entropy-diff": {"delta": 0.01},
    "latent-diff": {"delta": 0.05},
    "cosine": {"delta": 0.001},
    "kl": {"delta": 0.001},
    "minp-kl": {"delta": 0.001},
    "argmax-stability": {"stable": 2},
}


class Stored:
    """Settings in a checkpoint's `generation_config.json`: a base of frozen, validated dataclasses.

    Attributes:
        stored_as: Name of the field there.
    """

    stored_as: ClassVar[str]

    @classmethod
    def parse(cls: type[S], value: "S | Mapping[str, Any]") -> S:
        """Settings out of an instance, or out of a mapping as stored in `generation_config.json`.

        Args:
            value: An instance, or a mapping with the field names as keys.

        Returns:
            The validated settings.

        Raises:
            ValueError: Naming every unknown key and bad value.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            kind = f"{'an' if cls.__name__[0] in 'AEIOU' else 'a'} {cls.__name__}"
            raise ValueError(f"{cls.stored_as} must be {kind} or a mapping, got {type(value).__name__}")
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values; transformers calls this when it prints or saves a generation config."""
        instance: Any = self
        return asdict(instance)


def _refuse_unread(values: Mapping[str, Any]) -> None:
    mode = values.get("mode", "qexit")
    for name, modes in THRESHOLDS.items():
        if values.get(name) is not None and mode in get_args(ExitMode) and mode not in modes:
            raise ValueError(f"{name} has no effect with exit mode '{mode}', only with {' or '.join(modes)}")


# a dataclass with `to_dict`: the one kind of foreign object that transformers prints, compares and stores
@one_line_constructor
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ExitConfig(Stored):
    """When a token may stop looping, and what happens to its deeper loops afterwards.

    A field of the rule that is None takes the model's calibrated value (`models.exit_thresholds`), else that of
    `RULE_DEFAULTS`; the model's `resolve_exit_config` fills it in.

    Attributes:
        mode: The exit rule; its formula is in `sigma0.decode.exits`.
        q: `qexit` stops at the first loop whose cumulative exit probability is at least `q`, in (0, 1].
        eps: Threshold of `converge` and `accel`, relative to the norm of the state, > 0.
        patience: Loops in a row on which `accel` must hold, >= 1.
        theta: `margin` stops when the top-1 probability leads the top-2 one by at least `theta`, in (0, 1].
        depth: The loop that `fixed` stops at, >= 1; not used by other modes.
        min_loops: No token stops before this loop, >= 1; a value above T means T.
        after_exit: `finish` runs the deeper loops in later passes (exact for this rule), `verify` also checks each
            token at loop T (equal to full depth), `drop` never runs them (approximate).
        redraft: Under `verify`, check a draft token at every loop and re-draft as soon as a loop disagrees; else check
            it at T alone. Not used elsewhere.
        delta: The criteria of Huginn (`sigma0.decode.exits`) stop where a loop has changed less than it, > 0.
        stable: `argmax-stability` stops where the argmax has stayed the same so often running, >= 1.
        accel_scale: `states` divides the second difference by the norm of the state; `steps` is the older form that
            divides by the norms of the steps, kept for comparison.
    """

    stored_as: ClassVar[str] = "exit_config"

    mode: ExitMode = "qexit"
    q: float | None = None
    eps: float | None = None
    patience: int | None = None
    theta: float | None = None
    depth: int | None = None
    min_loops: int = 1
    after_exit: AfterExit = "finish"
    redraft: bool = True
    accel_scale: AccelScale | None = None
    delta: float | None = None
    stable: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_read(cls, given: Any) -> Any:
        """Refuses a threshold that the mode does not use, unless all fields are given, as when settings are copied."""
        values = getattr(given, "kwargs", given)
        # settings that were copied before there were criteria have no fields for them
        copied = set(cls.__dataclass_fields__) - {"stored_as", "delta", "stable"}
        if not isinstance(values, Mapping) or copied <= set(values):
            return given
        _refuse_unread(values)
        return given

    @field_validator(*NUMBERS, *COUNTS, mode="before")
    @classmethod
    def _is_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Neither True nor "3" is a number; pydantic would take both."""
        whole = info.field_name in COUNTS
        if isinstance(value, bool | str) or (whole and isinstance(value, float) and not value.is_integer()):
            raise ValueError(f"must be a {'whole ' if whole else ''}number")
        return value

    @field_validator("q", "theta")
    @classmethod
    def _is_probability(cls, value: float | None) -> float | None:
        if value is not None and not 0.0 < value <= 1.0:
            raise ValueError(f"must lie in (0, 1], got {value}")
        return value

    @field_validator("eps", "delta")
    @classmethod
    def _is_positive(cls, value: float | None) -> float | None:
        if value is not None and not 0.0 < value < float("inf"):
            raise ValueError(f"must be a finite number above 0, got {value}")
        return value

    @field_validator(*COUNTS)
    @classmethod
    def _is_count(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError(f"must be at least 1, got {value}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> "ExitConfig":
        if self.mode == "fixed" and self.depth is None:
            raise ValueError("mode 'fixed' needs depth=k, the loop to stop at")
        if self.mode != "fixed" and self.depth is not None:
            raise ValueError(f"depth={self.depth} has no meaning for mode '{self.mode}'; use mode='fixed'")
        return self

    def check_read(self) -> None:
        """Refuses a threshold that the mode does not read also where all fields are given.

        Raises:
            ValueError: Naming it, and the modes that read it.
        """
        _refuse_unread(vars(self))

    @property
    def threshold(self) -> float | None:
        """The q, theta, eps, delta or stable of the rule; None where it is not set, or for `full` and `fixed`."""
        fields = RULE_DEFAULTS.get(self.mode)
        return None if fields is None else getattr(self, next(iter(fields)))

    def unset(self) -> list[str]:
        """The fields of the rule that are not set."""
        return [name for name in RULE_DEFAULTS.get(self.mode, ()) if getattr(self, name) is None]

    def filled(self, values: Mapping[str, Any] | None = None) -> "ExitConfig":
        """A copy with a value for every field of the rule; fields that are set stay.

        Args:
            values: For the fields that are not set; by default the library's.
        """
        known = RULE_DEFAULTS.get(self.mode, {}) if values is None else values
        missing = {name: known[name] for name in self.unset()}
        return replace(self, **missing) if missing else self

    def stops_at(self, total_loops: int) -> int | None:
        """The loop at which every token stops, if the rule fixes it.

        Args:
            total_loops: T, the loops at full depth.

        Returns:
            T for `full`, k for `fixed`, None for the adaptive rules.

        Raises:
            ValueError: If `depth` exceeds T.
        """
        if self.mode == "full":
            return total_loops
        if self.mode != "fixed":
            return None
        assert self.depth is not None
        if self.depth > total_loops:
            raise ValueError(f"depth={self.depth} exceeds the model's {total_loops} loops")
        return self.depth


@one_line_constructor
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FateConfig(Stored):
    """Thresholds of spiralling and diverging: a property of a model, set by `sigma0 calibrate`.

    Attributes:
        growth: m: a step 1 + m times as long as the longest of the three before it, or a spectrum of that radius,
            diverges; >= 0.
        spiral: theta_s: steps that turn by this angle spiral; degrees in (0, 180].
    """

    stored_as: ClassVar[str] = "fate_config"

    growth: float = 0.1
    spiral: float = 60.0

    @field_validator("growth")
    @classmethod
    def _is_margin(cls, value: float) -> float:
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"must be a finite number of at least 0, got {value}")
        return value

    @field_validator("spiral")
    @classmethod
    def _is_angle(cls, value: float) -> float:
        if not 0.0 < value <= 180.0:
            raise ValueError(f"must lie in (0, 180] degrees, got {value}")
        return value


KVCodecName = Literal["full", "bf16", "int8", "int4", "residual"]


@one_line_constructor
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class KVConfig(Stored):
    """How K/V planes are stored once all loops of their tokens have run.

    Attributes:
        codec: `full` keeps them as the model computes them, and so does `bf16` of a model in bfloat16; `int8` and
            `int4` round every plane; `residual` rounds the last loop's plane, and what the others differ from it.
        bits: Of `residual`, for each loop: 1, 2, 4 or 8; None: 2 for all but the last, which has 4.
        group: Numbers of a head that share a scale, a multiple of 8.
        segment: Cache positions that are encoded together, a multiple of 16. A token reads its own segment as computed.
    """

    stored_as: ClassVar[str] = "kv_config"

    codec: KVCodecName = "full"
    bits: tuple[int, ...] | None = None
    group: int = 16
    segment: int = 64

    @classmethod
    def parse(cls, value: "KVConfig | Mapping[str, Any] | str") -> "KVConfig":
        """As `Stored.parse`; the name of a codec stands for its defaults, and a text may be JSON.

        Raises:
            ValueError: Naming every unknown key and bad value.
        """
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f"kv is no JSON: {error}, got {str(value)[:LONGEST]!r}") from error
        if isinstance(value, str):
            return cls(codec=cast(KVCodecName, value))
        return super().parse(value)

    @field_validator("bits")
    @classmethod
    def _are_widths(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and (not value or set(value) - {1, 2, 4, 8}):
            raise ValueError(f"must be 1, 2, 4 or 8 for each loop, got {list(value)}")
        return value

    @field_validator("group")
    @classmethod
    def _fills_bytes(cls, value: int) -> int:
        if value < 8 or value % 8:
            raise ValueError(f"must be a multiple of 8, got {value}")
        return value

    @field_validator("segment")
    @classmethod
    def _holds_blocks(cls, value: int) -> int:
        if value < 16 or value % 16:
            raise ValueError(f"must be a multiple of 16, got {value}")
        return value

    @model_validator(mode="after")
    def _reads_bits(self) -> "KVConfig":
        if self.bits is not None and self.codec != "residual":
            raise ValueError(f"bits are of the codec 'residual', and {self.codec!r} has its own")
        return self

    @property
    def is_coded(self) -> bool:
        """Whether planes are stored in few bits."""
        return self.codec not in ("full", "bf16")

    def bits_of(self, planes: int) -> tuple[int, ...]:
        """Bits of each of the last `planes` loops.

        Raises:
            ValueError: If `bits` are of fewer loops.
        """
        if self.codec != "residual":
            return (8 if self.codec == "int8" else 4,) * planes
        if self.bits is None:
            return (2,) * (planes - 1) + (4,)
        if len(self.bits) < planes:
            raise ValueError(f"kv_config has bits for {len(self.bits)} loops, and the model runs {planes}")
        return self.bits[-planes:]


FULL_KV = KVConfig()


class Switches(BaseSettings):
    """Switches of the features that act on verdicts, from `SIGMA0_VERDICT` and so on, 1 or 0.

    Attributes:
        verdict: Statistics of every token and a verdict for every generation, in `sigma0.generate` and `stream`.
        inner_break: A token that diverges in `BREAK_AFTER` consecutive loops stops, with the reason `divergence`.
        ladder: Units with the verdict escalate are handed up, where a ladder is configured.
        routing: The server routes by verdicts.
    """

    model_config = SettingsConfigDict(env_prefix="SIGMA0_", frozen=True, extra="ignore", env_ignore_empty=True)

    verdict: bool = Field(default=True)
    inner_break: bool = Field(default=False)
    ladder: bool = Field(default=False)
    routing: bool = Field(default=False)


BREAK_AFTER = 2


def switches() -> Switches:
    """The switches in the environment now."""
    return _switches(
        tuple((name, os.environ[name]) for name in sorted(os.environ) if name.upper().startswith("SIGMA0_"))
    )


@lru_cache(maxsize=32)
def _switches(values: tuple[tuple[str, str], ...]) -> Switches:
    """Parsed once for each environment: every forward needs them."""
    return Switches()


SHARES: dict[Effort, float] = {"minimal": 0.5, "low": 0.75, "medium": 1.0, "high": 1.0}


def exit_for(effort: Effort, config: ExitConfig, total_loops: int) -> ExitConfig:
    """`reasoning_effort` as an exit setting, as changes to the model's setting ("kept" where there is none).

    | effort | `q`, `theta`, fixed `depth` | `eps`, `delta` | `min_loops` | `after_exit` |
    |---|---|---|---|---|
    | `minimal` | times 1/2 | times 2 | kept | kept |
    | `low` | times 3/4 | times 4/3 | kept | kept |
    | `medium` | kept | kept | kept | kept |
    | `high` | kept | kept | at least T/2, rounded up | `verify`: full depth's own text, and still a verdict |

    `stable` of `argmax-stability` is kept. Under `full` and `fixed` there is no rule to make more eager or to check:
    there `low` and `minimal` stop at a fixed share of the loops, and `high` is full depth. What an effort saves, and
    what it costs in accuracy, depends on the model: measure it.

    Args:
        effort: `reasoning_effort` of the OpenAI protocol.
        config: The model's setting, as `resolve_exit_config` returns it.
        total_loops: T.
    """
    fixed = config.mode in ("full", "fixed")
    if effort == "high":
        if fixed:
            return replace(config, mode="full", depth=None)
        return replace(config, min_loops=max(config.min_loops, math.ceil(total_loops / 2)), after_exit="verify")
    share = SHARES[effort]
    if share == 1.0:
        return config
    if fixed:
        return replace(config, mode="fixed", depth=math.ceil(share * (config.stops_at(total_loops) or total_loops)))
    config = config.filled()
    eager: dict[str, float | None] = {"q": config.q, "theta": config.theta, "eps": config.eps, "delta": config.delta}
    factors = {"q": share, "theta": share, "eps": 1 / share, "delta": 1 / share}
    # rounded, so that 0.6 * 0.75 is reported as 0.45
    changed = {name: round(value * factors[name], 6) for name, value in eager.items() if value is not None}
    return replace(config, **changed)  # type: ignore[arg-type]
