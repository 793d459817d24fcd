"""What all rows of the ledger are made of: figures, and the conditions of a measurement."""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from sigma0.bench.core.digests import stale_mark
from sigma0.calibrate.bootstrap import Estimate


class Figure(BaseModel):
    """A measured figure and its 95 % interval over prompts."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, estimate: Estimate | None) -> "Figure | None":
        """The figure of an estimate."""
        if estimate is None:
            return None
        return cls(value=estimate.value, low=estimate.interval[0], high=estimate.interval[1])

    @model_validator(mode="after")
    def _in_order(self) -> "Figure":
        if not self.low <= self.high:
            raise ValueError(f"the interval from {self.low} to {self.high} is upside down")
        return self


class Conditions(BaseModel):
    """Under which a row was measured; two rows of one run share all of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str  # Name of the model, as it was loaded
    model_sha256: str  # Of its weights: of the one safetensors file, or of "sha256  name" lines where there are several
    settings_sha256: str  # Of the "sha256  name" lines of its other files (configs, tokenizer)
    total_loops: int  # T; 1 of a model without loops
    parameters: int  # How many
    device: str  # Device type, and the processor's name and caches
    dtype: str  # Of the weights
    threads: int  # CPU threads
    prompts: str  # Where they come from: a file's name, or a task and its split and seed
    prompts_sha256: str  # Of the prompts' ids and their known answers
    n: int  # Prompts
    batch_size: int  # Prompts in a batch
    max_new_tokens: int  # New tokens of each prompt at most
    # Git commit of the code, "+" and a digest of the differences behind it where there are some; None outside a
    # repository
    commit: str | None
    versions: dict[str, str]  # Of Python and of the libraries that compute
    # To what the weights of the block were rounded as the model was loaded; None where they were not
    quantization: str | None = None
    stride: int = 1  # Loops that a pass runs; `total_loops` counts passes
    kv: dict[str, Any] | None = None  # How K/V were stored; None as the model computes them
    # Of a fixed product on the device (`sigma0.bench.core.conditions.product_ms`), which tells machines of one
    # name apart; None of rows from before it was taken. No condition: two starts of a run differ in it
    product_ms: float | None = None

    @property
    def named(self) -> str:
        """Its model's name, marked where other weights ship under it now."""
        return f"{self.model}{stale_mark({self.model: self.model_sha256})}"

    @property
    def unnamed(self) -> set[str]:
        """Fields that the name of a run leaves out, since they say what held before there was a choice."""
        since = {"quantization": self.quantization is None, "stride": self.stride == 1, "kv": self.kv is None}
        return {"product_ms", *(name for name, usual in since.items() if usual)}

    @property
    def run(self) -> str:
        """A short name for these conditions, the same for all rows of a run."""
        shared = {name: getattr(self, name) for name in Conditions.model_fields if name not in self.unnamed}
        return sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]


class Measured(Conditions):
    """A row: what was measured, under which conditions.

    Attributes:
        keyed: Names of the fields that make two rows of a run measurements of the same thing.
    """

    keyed: ClassVar[tuple[str, ...]]

    time: str  # when its run began or ended, ISO 8601, UTC; the same for all rows of a run that times ways in turn

    @property
    def key(self) -> str:
        """What makes two rows of a run measurements of the same thing."""
        return json.dumps([getattr(self, name) for name in ("benchmark", *self.keyed)], sort_keys=True)


def short_commit(commit: str | None) -> str:
    """A commit in 12 digits, with what follows it where sources differed from it."""
    return "unknown" if commit is None else commit[:12] + commit[40:]


def row_key(benchmark: str, mode: str, after_exit: str, settings: Mapping[str, float | int | str]) -> str:
    """What makes two rows of a run measurements of the same thing."""
    return json.dumps([benchmark, mode, after_exit, dict(settings)], sort_keys=True)
