"""What goes between a service and the loop of its engine: in one process as it is, between two pickled."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from sigma0.decode.grammar.compiled import CompiledGrammar
from sigma0.models.stored_settings import StoredSettings
from sigma0.serve.engine.messages import (
    EngineLimits,
    EngineRequest,
    Event,
    ModelSettings,
    RequestOutput,
    ServiceStatus,
    SlotView,
)

if TYPE_CHECKING:
    from sigma0.serve.engine.engine import Engine


@dataclass(frozen=True)
class Submit:
    """A request.

    Attributes:
        key: Its number, chosen by the service.
        request: The request.
    """

    key: int
    request: EngineRequest


@dataclass(frozen=True)
class Cancel:
    """The end of a request that nobody waits for any more.

    Attributes:
        key: Its number; of a request that is over it means nothing.
    """

    key: int


@dataclass(frozen=True)
class Compiled:
    """The grammar of a request is compiled; from a thread of the engine's own.

    Attributes:
        key: Number of the request.
        grammar: What came of it; an exception where it cannot be compiled.
    """

    key: int
    grammar: CompiledGrammar | Exception | None


@dataclass(frozen=True)
class Judged:
    """The output of a request has its verdict; from a thread of the engine's own.

    Attributes:
        key: Number of the request.
        output: Of the request; an exception where it cannot be judged.
    """

    key: int
    output: RequestOutput | Exception


@dataclass(frozen=True)
class Drain:
    """The engine's loop ends once all requests are finished; none comes after this."""


@dataclass(frozen=True)
class Close:
    """The engine's loop ends at once; unfinished requests fail."""


@dataclass(frozen=True)
class Look:
    """The next report shows the requests."""


Command = Submit | Cancel | Compiled | Judged | Drain | Close | Look


@dataclass(frozen=True)
class PassReport:
    """What came of some commands and of a pass.

    Attributes:
        events: Of requests, by number.
        status: The engine's, after the pass.
        taken: Requests that have reached the engine so far.
        slots: The requests, where that was asked for.
    """

    events: tuple[tuple[int, Event], ...]
    status: ServiceStatus
    taken: int
    slots: tuple[SlotView, ...] | None = None


@dataclass(frozen=True)
class DescribedModel(StoredSettings):
    """The settings of a model whose weights are elsewhere.

    Attributes:
        name_or_path: Folder or hub id that it was loaded from.
        config: Of the architecture.
        generation_config: Default sampling, end ids, and the settings of ours.
        total_loops: T.
        gated: Whether the family trains a gate.
    """

    name_or_path: str
    config: PreTrainedConfig
    generation_config: GenerationConfig
    total_loops: int
    gated: bool

    @property
    def num_loops(self) -> int:
        """T, loops at full depth."""
        return self.total_loops

    @property
    def has_gate(self) -> bool:
        """Whether the family trains a gate, which `qexit` reads."""
        return self.gated


@dataclass(frozen=True)
class EngineFacts:
    """What a service knows of its engine.

    Attributes:
        name: Of the model.
        model: Its settings.
        tokenizer: Its tokenizer.
        context: Most tokens of prompt and answer together.
        limits: Of the engine.
        status: Of the engine before its first pass.
    """

    name: str
    model: ModelSettings
    tokenizer: PreTrainedTokenizerFast
    context: int
    limits: EngineLimits
    status: ServiceStatus

    @staticmethod
    def of(engine: "Engine", name: str) -> "EngineFacts":
        """Those of an engine in the same process."""
        return EngineFacts(name, engine.model, engine.tokenizer, engine.context, engine.limits, engine.status())

    @staticmethod
    def apart_from(engine: "Engine", name: str) -> "EngineFacts":
        """Those of an engine, without its weights."""
        model = engine.model
        told = DescribedModel(
            model.name_or_path, model.config, model.generation_config, model.num_loops, model.has_gate
        )
        return EngineFacts(name, told, engine.tokenizer, engine.context, engine.limits, engine.status())


@dataclass(frozen=True)
class StartFailed:
    """Why there is no engine.

    Attributes:
        kind: What is to be raised.
        message: With that.
    """

    kind: type[Exception]
    message: str
