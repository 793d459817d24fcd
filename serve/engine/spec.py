"""What an engine is made of, by names and numbers: it can be made in another process."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sigma0.commands.console import compiling
from sigma0.config import KVConfig
from sigma0.decode.ops import Backend
from sigma0.decode.runners import RunnerName
from sigma0.serve.engine.messages import EngineLimits
from sigma0.signals.verdict import DoorRule

if TYPE_CHECKING:
    from sigma0.serve.engine.engine import Engine


@dataclass(frozen=True)
class EngineSpec:
    """A model and how it is to be run; the fields are those of `sigma0.load`.

    Attributes:
        model: Shipped name, folder or hub id.
        limits: Of the engine.
        device: Where weights and K/V lie.
        dtype: Of both.
        backend: What runs a pass.
        runner: What calls the step.
        check: Whether weights that are not finite are refused.
        quantization: What the weights of the block are rounded to.
        recurrence: T; None for the checkpoint's own.
        stride: Loops of a Raven that a pass runs.
        kv: How K/V are stored; None for the checkpoint's own way.
        door_rule: What opens the door of a verdict; None for the checkpoint's own rule.
    """

    model: str
    limits: EngineLimits = field(default_factory=EngineLimits)
    device: str = "auto"
    dtype: str = "auto"
    backend: Backend = "auto"
    runner: RunnerName = "auto"
    check: bool = True
    quantization: str | None = None
    recurrence: int | None = None
    stride: int | None = None
    kv: KVConfig | None = None
    door_rule: DoorRule | None = None

    @property
    def name(self) -> str:
        """Of the model, for clients."""
        return Path(self.model).name if Path(self.model).is_dir() else self.model

    def build(self) -> "Engine":
        """Loads the model and makes an engine of it, which shows on stderr what it compiles.

        Raises:
            ValueError: If the model cannot be loaded, or there is no memory for K/V.
        """
        # imported in the process that runs the model
        from sigma0.models.load import load
        from sigma0.serve.engine.engine import Engine

        model, tokenizer = load(
            self.model,
            device=self.device,
            dtype=self.dtype,
            backend=self.backend,
            runner=self.runner,
            quantization=self.quantization,
            recurrence=self.recurrence,
            stride=self.stride,
            kv=self.kv,
            door_rule=self.door_rule,
            check=self.check,
        )
        model.announce = compiling
        return Engine(model, tokenizer, self.name, self.limits)
