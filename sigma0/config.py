"""What a user may ask of the decoder, and the switches of the environment: frozen, validated messages."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic.dataclasses import dataclass
from pydantic_settings import BaseSettings, SettingsConfigDict

from sigma0.errors import LONGEST, one_line_constructor

# A chat: each message with `role` and `content`.
Messages = Sequence[Mapping[str, Any]]
ExitMode = Literal["full", "fixed", "qexit", "converge", "accel", "margin"]
AfterExit = Literal["finish", "verify", "drop"]
# What becomes of a text that runs in circles: it is ended, loosened by a higher penalty and temperature, or left alone.
OnCollapse = Literal["stop", "tighten", "ignore"]
AccelScale = Literal["states", "steps"]
Effort = Literal["minimal", "low", "medium", "high"]
S = TypeVar("S", bound="Stored")
# Which exit modes read which threshold.
THRESHOLDS = {
    "q": ("qexit",),
    "eps": ("converge", "accel"),
    "patience": ("accel",),
    "theta": ("margin",),
    "accel_scale": ("accel",),
}


def parse_on_collapse(value: Any) -> OnCollapse:
    """What is to become of a text that runs in circles.

    Raises:
        ValueError: For anything else than `stop`, `tighten` or `ignore`.
    """
    if value not in get_args(OnCollapse):
        raise ValueError(f"on_collapse is stop, tighten or ignore, got {str(value)[:LONGEST]!r}")
    return cast(OnCollapse, value)


# The fields that each adaptive rule reads, its threshold first, and the library's values for them.
RULE_DEFAULTS: dict[str, dict[str, Any]] = {
    "qexit": {"q": 0.5},
    "margin": {"theta": 0.9},
    "converge": {"eps": 0.05},
    "accel": {"eps": 0.05, "patience": 2, "accel_scale": "states"},
}


class Stored:
    """Settings that a checkpoint's `generation_config.json` holds: a base of frozen, validated dataclasses.

    Attributes:
        stored_as: Their name there.
    """

    stored_as: ClassVar[str]

    @classmethod
    def parse(cls: type[S], value: "S | Mapping[str, Any]") -> S:
        """Takes such settings, or a mapping of their fields as stored in `generation_config.json`.

        Args:
            value: An instance, or a mapping with the field names as keys.

        Returns:
            The validated settings.

        Raises:
            ValueError: For an unknown key or a bad value, naming each.
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


# a dataclass with `to_dict`: the one form of foreign object that transformers prints, compares and stores
@one_line_constructor
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ExitConfig(Stored):
    """When a token may stop looping, and what becomes of its deeper loops afterwards.

    A field of the rule that is None takes the value that the model was calibrated with (`models.exit_thresholds`), else
    that of `RULE_DEFAULTS`; the model's `resolve_exit_config` fills it in.

    Attributes:
        mode: The exit rule; formulas stand in `sigma0.decode.exits`.
        q: `qexit` stops at the first loop whose cumulative exit probability is at least `q`, in (0, 1].
        eps: Threshold of `converge` and `accel`, relative to the norm of the state, > 0.
        patience: Loops in a row on which `accel` must hold, >= 1.
        theta: `margin` stops when the top-1 probability leads the top-2 one by at least `theta`, in (0, 1].
        depth: The loop that `fixed` stops at, >= 1; not used by other modes.
        min_loops: No token stops before this loop, >= 1; a value above T means T.
        after_exit: `finish` runs the deeper loops in later passes (exact for this rule), `verify` also checks each
            token at loop T (equal to full depth), `drop` never runs them (approximate).
        redraft: Under `verify`, read a proposed token again at every loop and propose anew as soon as one thinks
            otherwise; else it is read again at T alone. Not used elsewhere.
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

    @model_validator(mode="before")
    @classmethod
    def _is_read(cls, given: Any) -> Any:
        """Refuses a threshold that the mode does not read, unless all fields are given, as when settings are copied."""
        values = getattr(given, "kwargs", given)
        if not isinstance(values, Mapping) or set(cls.__dataclass_fields__) - {"stored_as"} <= set(values):
            return given
        _refuse_unread(values)
        return given

    @field_validator("q", "theta")
    @classmethod
    def _is_probability(cls, value: float | None) -> float | None:
        if value is not None and not 0.0 < value <= 1.0:
            raise ValueError(f"must lie in (0, 1], got {value}")
        return value

    @field_validator("eps")
    @classmethod
    def _is_positive(cls, value: float | None) -> float | None:
        if value is not None and not 0.0 < value < float("inf"):
            raise ValueError(f"must be a finite number above 0, got {value}")
        return value

    @field_validator("patience", "min_loops", "depth")
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
        """The q, theta or eps of the rule; None where it is not set, or for `full` and `fixed`."""
        fields = RULE_DEFAULTS.get(self.mode)
        return None if fields is None else getattr(self, next(iter(fields)))

    def unset(self) -> list[str]:
        """The fields that the rule reads and that are not set."""
        return [name for name in RULE_DEFAULTS.get(self.mode, ()) if getattr(self, name) is None]

    def filled(self, values: Mapping[str, Any] | None = None) -> "ExitConfig":
        """These settings with a value for each field that the rule reads; what is set stays.

        Args:
            values: Of those that are not set; by default the library's.
        """
        known = RULE_DEFAULTS.get(self.mode, {}) if values is None else values
        missing = {name: known[name] for name in self.unset()}
        return replace(self, **missing) if missing else self

    def stops_at(self, total_loops: int) -> int | None:
        """The loop at which every token stops, if that is known beforehand.

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
    """Where a loop counts as spiralling or diverging: a property of a model, found by `sigma0 calibrate`.

    Attributes:
        growth: m: a step 1 + m times as long as the longest of the three before it, or a spectrum of that radius,
            diverges; >= 0.
        spiral: theta_s: steps that turn by this much spiral; degrees in (0, 180].
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


class Switches(BaseSettings):
    """The steps that act on verdicts, each by itself; read from `SIGMA0_VERDICT` and so on, 1 or 0.

    Attributes:
        verdict: Statistics of every token and a verdict for every generation, in `sigma0.generate` and `stream`.
        inner_break: A token whose loop diverges on `BREAK_AFTER` loops running stops, with the reason `divergence`.
        ladder: Units whose verdict says escalate are handed up, where a ladder is configured.
        routing: The server routes by verdicts.
    """

    model_config = SettingsConfigDict(env_prefix="SIGMA0_", frozen=True, extra="ignore", env_ignore_empty=True)

    verdict: bool = Field(default=True)
    inner_break: bool = Field(default=False)
    ladder: bool = Field(default=False)
    routing: bool = Field(default=False)


BREAK_AFTER = 2


def switches() -> Switches:
    """The switches as the environment has them now."""
    return _switches(
        tuple((name, os.environ[name]) for name in sorted(os.environ) if name.upper().startswith("SIGMA0_"))
    )


@lru_cache(maxsize=32)
def _switches(values: tuple[tuple[str, str], ...]) -> Switches:
    """Parsed once for each environment: a forward asks."""
    return Switches()


SHARES: dict[Effort, float] = {"minimal": 0.5, "low": 0.75, "medium": 1.0, "high": 1.0}


def exit_for(effort: Effort, own: ExitConfig, total_loops: int) -> ExitConfig:
    """`reasoning_effort` as an exit setting: how deep a model thinks, as changes over the checkpoint's own setting.

    | effort | `q`, `theta`, fixed `depth` | `eps` | `min_loops` | `after_exit` |
    |---|---|---|---|---|
    | `minimal` | times 1/2 | times 2 | own | own |
    | `low` | times 3/4 | times 4/3 | own | own |
    | `medium` | own | own | own | own |
    | `high` | own | own | at least T/2, rounded up | `verify`: full depth's own text, and still a verdict |

    A checkpoint whose own setting is full depth, or a fixed one, has no rule to make more eager or check: there `low`
    and `minimal` stop at a fixed share of its loops, and `high` is full depth. What an effort saves, and what it costs
    in accuracy, is a matter of the model: measure it.

    Args:
        effort: How long tokens should loop.
        own: The model's setting, as `resolve_exit_config` has it.
        total_loops: T.
    """
    fixed = own.mode in ("full", "fixed")
    if effort == "high":
        if fixed:
            return replace(own, mode="full", depth=None)
        return replace(own, min_loops=max(own.min_loops, math.ceil(total_loops / 2)), after_exit="verify")
    share = SHARES[effort]
    if share == 1.0:
        return own
    if fixed:
        return replace(own, mode="fixed", depth=math.ceil(share * (own.stops_at(total_loops) or total_loops)))
    own = own.filled()
    eager: dict[str, float | None] = {"q": own.q, "theta": own.theta, "eps": own.eps}
    factors = {"q": share, "theta": share, "eps": 1 / share}
    # as decimals: 0.6 * 0.75 is to be told as 0.45
    changed = {name: round(value * factors[name], 6) for name, value in eager.items() if value is not None}
    return replace(own, **changed)  # type: ignore[arg-type]
