"""What goes between a service and the loop of its engine: in one process as it is, between two pickled."""

from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from sigma0.commands.console import compiling
from sigma0.config import KVConfig
from sigma0.decode.ops import Backend
from sigma0.decode.runners import RunnerName
from sigma0.models.stored_settings import StoredSettings
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, Event, ServiceStatus, SlotView
from sigma0.signals.verdict import DoorRule

if TYPE_CHECKING:
    from sigma0.serve.engine.engine import Engine

T = TypeVar("T")


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made of, by names and numbers: it can be made in another process."""

    model: str  # Shipped name, folder or hub id; this and all but the limits as `sigma0.load` takes them
    limits: EngineLimits = field(default_factory=EngineLimits)  # Of the engine
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

        settings = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "limits"}
        model, tokenizer = load(settings.pop("model"), **settings)
        model.progress = compiling
        return Engine(model, tokenizer, self.name, self.limits)


@dataclass(frozen=True)
class DescribedModel(StoredSettings):
    """The settings of a model whose weights are elsewhere."""

    name_or_path: str
    config: PreTrainedConfig
    generation_config: GenerationConfig
    num_loops: int = 1
    has_gate: bool = False


@dataclass(frozen=True)
class EngineFacts:
    """What a service knows of its engine: its status is that before the first pass."""

    name: str
    model: StoredSettings
    tokenizer: PreTrainedTokenizerFast
    context: int
    limits: EngineLimits
    status: ServiceStatus

    @classmethod
    def of(cls, engine: "Engine", with_weights: bool = True) -> "EngineFacts":
        """Those of an engine, with its model or the settings of that alone."""
        model: StoredSettings = engine.model
        if not with_weights:
            model = DescribedModel(
                model.name_or_path, model.config, model.generation_config, model.num_loops, model.has_gate
            )
        return cls(engine.name, model, engine.tokenizer, engine.context, engine.limits, engine.status())


class Submit(NamedTuple):
    """A request, and the number that the service has given it."""

    key: int
    request: EngineRequest


class Cancel(NamedTuple):
    """The end of a request that nobody waits for any more; of one that is over it means nothing."""

    key: int


class Done(NamedTuple):
    """What the loop itself has put off for a request has come to an end, in a thread of its own."""

    key: int


class Tell(Enum):
    """What an engine's loop is told: to end once all requests are finished, or at once, and to report the requests."""

    DRAIN = "drain"
    CLOSE = "close"
    LOOK = "look"


Command = Submit | Cancel | Done | Tell


def take_all(queue: "SimpleQueue[T]", wait: bool = True) -> list[T]:
    """All items of a queue that only the caller takes from, and at least one, for which it waits, if it is to."""
    first = [queue.get()] if wait else []
    return first + [queue.get() for _ in range(queue.qsize())]


@dataclass(frozen=True)
class PassReport:
    """What came of some commands and of a pass."""

    events: tuple[tuple[int, Event], ...]  # Of requests, by number
    status: ServiceStatus  # The engine's, after the pass
    taken: int  # Requests that have reached the engine so far
    slots: tuple[SlotView, ...] | None = None  # The requests, where that was asked for
