"""The calibrated thresholds of a model in its `generation_config.json`, one for each exit rule.

    "exit_thresholds": {"margin": {"theta": 0.9, "agreement": 0.99, "confidence": 0.95, "prompts": 2000, ...}, ...}

`ExitConfig(mode="margin")` on that model stops at 0.9. A record is used as a whole: when the caller sets no threshold
and no other field of the rule to another value than the record's. Else the library's defaults are used.
`accel` has a record for each of its two forms; if the caller names neither, the one that stops earlier is used.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from transformers.utils import logging

from sigma0.config import RULE_DEFAULTS, AccelScale, ExitConfig, ExitMode, Stored
from sigma0.errors import one_line

logger = logging.get_logger(__name__)


_MODES: dict[str, ExitMode] = {
    "qexit": "qexit",
    "margin": "margin",
    "converge": "converge",
    "accel": "accel",
    "accel_steps": "accel",
}
_FIELDS = sorted({field for mode in _MODES.values() for field in RULE_DEFAULTS[mode]})


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CalibratedThreshold:
    """A threshold and its guarantee, see `sigma0.calibrate.agreement`. Fields that the rule does not use are None."""

    agreement: float = Field(gt=0, lt=1)  # Least share of new tokens whose argmax is that of full depth, in (0, 1)
    confidence: float = Field(gt=0, lt=1)  # Of that share, in (0, 1)
    prompts: int = Field(ge=1)  # Number of prompts that it was calibrated on
    mean_depth: float = Field(ge=1)  # Mean exit depth of their new tokens
    q: float | None = Field(None, gt=0, le=1)  # Threshold of `qexit`
    theta: float | None = Field(None, gt=0, le=1)  # Threshold of `margin`
    eps: float | None = Field(None, gt=0, allow_inf_nan=False)  # Threshold of `converge` and `accel`
    patience: int | None = Field(None, ge=1)  # Of `accel`
    accel_scale: AccelScale | None = None  # Of `accel`

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, as plain JSON values."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_") and value is not None}


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ExitThresholds(Stored):
    """Calibrated thresholds by exit rule; None for rules that were not calibrated.

    Raises:
        ValueError: For a record that lacks a field of its rule, or has one that the rule does not use.
    """

    stored_as = "exit_thresholds"

    qexit: CalibratedThreshold | None = None
    margin: CalibratedThreshold | None = None
    converge: CalibratedThreshold | None = None
    accel: CalibratedThreshold | None = None
    accel_steps: CalibratedThreshold | None = None

    @classmethod
    def parse(cls, value: "ExitThresholds | Mapping[str, Any]") -> "ExitThresholds":
        """As for all stored settings; a mistake is one line that names the record and the way out."""
        try:
            return super().parse(value)
        except ValidationError as error:
            raise ValueError(
                f"{cls.stored_as}: {one_line(error)}; take the record out of generation_config.json, and let "
                "`sigma0 calibrate` store it anew"
            ) from error

    @model_validator(mode="after")
    def _fits_the_rules(self) -> "ExitThresholds":
        for name, record in self._records().items():
            fields = RULE_DEFAULTS[_MODES[name]]
            given = {field for field in _FIELDS if getattr(record, field) is not None}
            if given != set(fields):
                raise ValueError(f"{name} needs {', '.join(fields)}, got {', '.join(sorted(given)) or 'none of them'}")
        return self

    def _records(self) -> dict[str, CalibratedThreshold]:
        records = {name: getattr(self, name) for name in _MODES}
        return {name: record for name, record in records.items() if record is not None}

    def configs(self) -> dict[str, ExitConfig]:
        """The calibrated settings, by the rule's name: its mode, or `accel_steps`."""
        configs = {}
        for name, record in self._records().items():
            mode = _MODES[name]
            configs[name] = ExitConfig(mode=mode, **{field: getattr(record, field) for field in RULE_DEFAULTS[mode]})
        return configs

    def matching(self, config: ExitConfig) -> ExitConfig | None:
        """The calibrated setting that agrees with the fields that `config` sets; None without one.

        Args:
            config: A setting without a threshold.
        """
        fields = list(RULE_DEFAULTS[config.mode])
        fits = [
            (self._records()[name].mean_depth, name)
            for name, known in self.configs().items()
            if known.mode == config.mode
            and all(getattr(config, field) in (None, getattr(known, field)) for field in fields)
        ]
        return self.configs()[min(fits)[1]] if fits else None

    def to_dict(self) -> dict[str, Any]:
        """The records as plain JSON values; rules without one are left out."""
        return {name: record.to_dict() for name, record in self._records().items()}

    def updated(self, records: Mapping[str, CalibratedThreshold]) -> "ExitThresholds":
        """A copy with some records replaced, by name."""
        return ExitThresholds(**{**self._records(), **records})


def fill_in(config: ExitConfig, thresholds: ExitThresholds, model_name: str) -> ExitConfig:
    """Fills the unset fields of a rule from the model's calibration, else from the library's defaults.

    The use of defaults is logged once for each model and setting.

    Args:
        config: Of the caller.
        thresholds: Of the model.
        model_name: For the log message.
    """
    unset = config.unset()
    fields = list(RULE_DEFAULTS[config.mode])
    calibrated = None if config.threshold is not None else thresholds.matching(config)
    if calibrated is not None:
        return config.filled({name: getattr(calibrated, name) for name in fields})
    filled = config.filled()
    if config.threshold is None:
        _warn_once(model_name, config, unset)
    return filled


def _warn_once(model_name: str, config: ExitConfig, unset: list[str]) -> None:
    """Logs that a default is used; without the caller's numbers, since `warning_once` remembers every text."""
    defaults = RULE_DEFAULTS[config.mode]
    given = [name for name in defaults if name not in unset]
    used = ", ".join(f"{name} {defaults[name]}" for name in unset)
    way_out = f"set {', '.join(unset)}"
    if config.mode in _MODES.values():
        way_out = f"`sigma0 calibrate {model_name or 'MODEL'} --exit {config.mode} --prompts FILE` finds and stores one"
    logger.warning_once(
        f"{model_name or 'this model'} stores no calibrated threshold for {config.mode}"
        f"{' with its ' + ', '.join(given) + ' set' if given else ''}: the library's default is used ({used}), which "
        f"may save nothing or change the text; {way_out}"
    )
