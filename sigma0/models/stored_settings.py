"""Settings of sigma0 in a checkpoint's `generation_config.json`, and the settings in force for a call."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from sigma0.config import ExitConfig, FateConfig, KVConfig, Stored, switches
from sigma0.decode.exits import ExitRule
from sigma0.models.exit_thresholds import ExitThresholds, fill_in
from sigma0.signals.confidence import ConfidenceModel
from sigma0.signals.verdict import DoorPolicy

# fields of generation_config.json
STORED: dict[str, type[Stored]] = {
    "exit_config": ExitConfig,
    "exit_thresholds": ExitThresholds,
    "fate_config": FateConfig,
    "door_policy": DoorPolicy,
    "confidence_model": ConfidenceModel,
    "kv_config": KVConfig,
}


class StoredSettings:
    """Reads and saves a model's exit settings, thresholds, fates and door policy.

    Attributes:
        name_or_path: Folder or hub id that it was loaded from; "" of a model that was made here.
    """

    name_or_path: str
    config: PreTrainedConfig
    generation_config: GenerationConfig

    @property
    @abstractmethod
    def num_loops(self) -> int:
        """T, loops at full depth."""

    @property
    def has_gate(self) -> bool:
        """Whether the family trains a gate, which `qexit` reads."""
        return False

    def resolve_exit_config(self, exit_config: ExitConfig | Mapping[str, Any] | None) -> ExitConfig:
        """The exit settings in force.

        Args:
            exit_config: Of the caller; None falls back to `generation_config.exit_config`, then to the checkpoint's
                `early_exit_step` or `early_exit_threshold`; a family without a gate runs at full depth.

        Returns:
            The settings with a value for every field that the rule uses: the caller's, else the model's calibrated
            one, else the library's default (logged once).

        Raises:
            ValueError: For unknown keys or bad values, and for `qexit` where there is no gate.
        """
        if exit_config is None:
            exit_config = getattr(self.generation_config, "exit_config", None)
        if exit_config is not None:
            config = ExitConfig.parse(exit_config)
            if config.mode == "qexit" and not self.has_gate:
                raise ValueError(
                    f"exit mode 'qexit' reads a gate, which {self.config.model_type} models do not have: use margin, "
                    "converge or accel"
                )
            if not config.unset():
                return config
            return fill_in(config, self.exit_thresholds, getattr(self.config, "name_or_path", ""))
        if not self.has_gate:
            return ExitConfig(mode="full")
        step = getattr(self.config, "early_exit_step", None)
        if step is not None:
            return ExitConfig(mode="fixed", depth=step + 1)
        return ExitConfig(mode="qexit", q=self.config.early_exit_threshold)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As transformers' own, with our settings in `generation_config` stored as JSON."""
        stored = {
            name: kind for name, kind in STORED.items() if getattr(self.generation_config, name, None) is not None
        }
        for name, kind in stored.items():
            setattr(self.generation_config, name, kind.parse(getattr(self.generation_config, name)).to_dict())
        if stored:
            # while this flag is set, transformers drops unknown fields when it loads the file
            self.generation_config._from_model_config = False
        super().save_pretrained(*args, **kwargs)  # type: ignore[misc]

    def exit_rule(self, exit_config: ExitConfig) -> ExitRule:
        """The rule that `exit_config` names, for this model's loops and fates and under the environment's switches."""
        config = self.resolve_exit_config(exit_config)
        return ExitRule(config, self.num_loops, switches().inner_break, self.fate_config)

    @property
    def exit_thresholds(self) -> ExitThresholds:
        """The calibrated thresholds: `generation_config.exit_thresholds`, or none."""
        stored = getattr(self.generation_config, "exit_thresholds", None)
        return ExitThresholds() if stored is None else ExitThresholds.parse(stored)

    def counterfactual_rule(self, exit_config: ExitConfig) -> ExitRule | None:
        """The checkpoint's exit rule, for reports under `full` and `fixed` of whether it would have been met.

        Its statistics cost nothing there.

        Returns:
            None under an exit rule, for a checkpoint without one, and where the inner break or `verify` of a fixed
            loop decide which loops run.
        """
        stored, rule = self.resolve_exit_config(None), self.exit_rule(exit_config)
        checked = exit_config.mode == "fixed" and exit_config.after_exit == "verify"
        if rule.fixed_depth is None or rule.break_after or checked or stored.mode in ("full", "fixed"):
            return None
        return self.exit_rule(stored)

    @property
    def fate_config(self) -> FateConfig:
        """Thresholds of spiralling and diverging: `generation_config.fate_config`, or the defaults."""
        stored = getattr(self.generation_config, "fate_config", None)
        return FateConfig() if stored is None else FateConfig.parse(stored)

    @property
    def door_policy(self) -> DoorPolicy:
        """Thresholds of the converge door: `generation_config.door_policy`, or the defaults."""
        stored = getattr(self.generation_config, "door_policy", None)
        return DoorPolicy() if stored is None else DoorPolicy.parse(stored)

    @property
    def confidence_model(self) -> ConfidenceModel | None:
        """The calibrated confidence: `generation_config.confidence_model`; None without one."""
        stored = getattr(self.generation_config, "confidence_model", None)
        return None if stored is None else ConfidenceModel.parse(stored)
