"""What a checkpoint's `generation_config.json` holds of sigma0's, and the settings in force for a call."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from sigma0.config import ExitConfig, FateConfig, switches
from sigma0.decode.exits import ExitRule
from sigma0.models.exit_thresholds import ExitThresholds, fill_in
from sigma0.signals.verdict import DoorPolicy

# what sigma0 keeps in a checkpoint's generation_config.json
STORED: dict[str, type[ExitConfig] | type[ExitThresholds] | type[FateConfig] | type[DoorPolicy]] = {
    "exit_config": ExitConfig,
    "exit_thresholds": ExitThresholds,
    "fate_config": FateConfig,
    "door_policy": DoorPolicy,
}


class StoredSettings:
    """Reads and saves a model's exit settings, thresholds, fates and door policy."""

    config: PreTrainedConfig
    generation_config: GenerationConfig

    @property
    @abstractmethod
    def num_loops(self) -> int:
        """T, loops at full depth."""

    def resolve_exit_config(self, exit_config: ExitConfig | Mapping[str, Any] | None) -> ExitConfig:
        """The exit settings in force.

        Args:
            exit_config: What the caller asked for; None falls back to `generation_config.exit_config`, then to the
                checkpoint's own `early_exit_step` or `early_exit_threshold`.

        Returns:
            The settings with a value for everything that the rule reads: the caller's, else those that the model was
            calibrated with, else the library's (which is said once).

        Raises:
            ValueError: For unknown keys or bad values.
        """
        if exit_config is None:
            exit_config = getattr(self.generation_config, "exit_config", None)
        if exit_config is not None:
            config = ExitConfig.parse(exit_config)
            if not config.unset():
                return config
            return fill_in(config, self.exit_thresholds, getattr(self.config, "name_or_path", ""))
        step = getattr(self.config, "early_exit_step", None)
        if step is not None:
            return ExitConfig(mode="fixed", depth=step + 1)
        return ExitConfig(mode="qexit", q=self.config.early_exit_threshold)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As transformers' own; our settings in `generation_config` are stored as JSON and survive the next load."""
        stored = {
            name: kind for name, kind in STORED.items() if getattr(self.generation_config, name, None) is not None
        }
        for name, kind in stored.items():
            setattr(self.generation_config, name, kind.parse(getattr(self.generation_config, name)).to_dict())
        if stored:
            # while this flag is set, transformers drops what it does not know when it loads the file
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

    def unasked_rule(self, exit_config: ExitConfig) -> ExitRule | None:
        """The checkpoint's own rule, where `exit_config` stops every token without asking any.

        All that it looks at is known there for free, so that it can be said whether it would have been met.

        Returns:
            None under a rule, where the checkpoint has none, and where the inner break or `verify` of a fixed loop
            decide what is run.
        """
        own, asked = self.resolve_exit_config(None), self.exit_rule(exit_config)
        checked = exit_config.mode == "fixed" and exit_config.after_exit == "verify"
        if asked.fixed_depth is None or asked.break_after or checked or own.mode in ("full", "fixed"):
            return None
        return self.exit_rule(own)

    @property
    def fate_config(self) -> FateConfig:
        """What counts as spiralling or diverging: `generation_config.fate_config`, or the defaults."""
        stored = getattr(self.generation_config, "fate_config", None)
        return FateConfig() if stored is None else FateConfig.parse(stored)

    @property
    def door_policy(self) -> DoorPolicy:
        """What opens the converge door: `generation_config.door_policy`, or the defaults."""
        stored = getattr(self.generation_config, "door_policy", None)
        return DoorPolicy() if stored is None else DoorPolicy.parse(stored)
