"""Settings of a Ray Serve application: the arguments of `serve.yaml`, and of `sigma0 serve --ray`."""

from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ByteSize, ConfigDict, Field, SecretStr, field_validator, model_validator

from sigma0.config import OnCollapse
from sigma0.decode.grammar.spec import CallStyle
from sigma0.serve.api.hosts import check_hosts
from sigma0.serve.engine.messages import EngineLimits
from sigma0.serve.engine.wire import EngineSpec

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RaySettings(BaseModel):
    """Settings of one application.

    Attributes:
        model: Shipped name, folder, or hub id; to be found on every node.
        device: Of a replica: auto, cpu, cuda, ...
        dtype: auto, float32, bfloat16 or float16.
        backend: What runs a pass.
        threads: CPU threads of a pass, and so the CPUs that a replica claims; None: one.
        gpus: That a replica claims; None: one where `device` is CUDA, or `auto` and there is CUDA here.
        replicas: Engines; None: from `min_replicas` to `max_replicas`, or one.
        min_replicas: Engines at least.
        max_replicas: Engines at most.
        target_jobs: Requests of one engine, running and waiting, that autoscaling aims at; None: three quarters of
            `max_running`.
        target_rows: Rows in a pass of one engine that autoscaling aims at; None: `pass_rows`.
        upscale_delay_s: Seconds of a higher load before engines are added.
        downscale_delay_s: Seconds of a lower load before engines are removed.
        report_seconds: Seconds between two reports of an engine to the front.
        max_running: Requests that share passes at most.
        max_waiting: Requests in the queue of one engine at most.
        pass_rows: Rows up to which prefill may fill a pass.
        page_size: Tokens of a block of K/V.
        kv_memory: Bytes for K/V of one engine.
        api_key: Key that clients must send; None: SIGMA0_API_KEY of the front, or none.
        api_key_file: File of further keys, one a line, where the front runs; None: no file.
        max_new_tokens: New tokens of one answer at most.
        request_timeout: Seconds for one request at most.
        allowed_hosts: Hosts beside loopback names that requests may name, as `sigma0.serve.api.hosts` reads them.
        otlp_endpoint: Address of a collector that gets a span for each request (OTLP over HTTP); None: no spans.
        on_collapse: What is done with a text that repeats itself, where a request does not say.
        tool_parser: How the model writes calls of tools; None: as its chat template says.
        ladder: Rungs, the lowest first; they run in the front.
        budget: Hard limits of the ladder.
        policy: Trigger of the ladder, as JSON.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "pocket"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    backend: Literal["auto", "torch", "triton"] = "auto"
    threads: Count | None = None
    gpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    replicas: Count | None = None
    min_replicas: Count | None = None
    max_replicas: Count | None = None
    target_jobs: Amount | None = None
    target_rows: Amount | None = None
    upscale_delay_s: Annotated[float, Field(ge=0)] = 10.0
    downscale_delay_s: Annotated[float, Field(ge=0)] = 300.0
    report_seconds: Amount = 1.0
    max_running: Count = 16
    max_waiting: Count = 64
    pass_rows: Count = 256
    page_size: Count = 16
    kv_memory: ByteSize = ByteSize(2**28)
    api_key: SecretStr | None = None
    api_key_file: Path | None = None
    max_new_tokens: Count = 4096
    request_timeout: Amount = 600.0
    allowed_hosts: tuple[str, ...] = ()
    otlp_endpoint: str | None = None
    on_collapse: OnCollapse = "stop"
    tool_parser: CallStyle | None = None
    ladder: str | None = None
    budget: str = ""
    policy: str | None = None

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_hosts(value)

    @model_validator(mode="after")
    def _fits_together(self) -> "RaySettings":
        if self.replicas is not None and (self.min_replicas is not None or self.max_replicas is not None):
            raise ValueError("replicas is a fixed number: leave it out, or leave min_replicas and max_replicas out")
        if (self.min_replicas or 1) > (self.max_replicas or self.min_replicas or 1):
            raise ValueError(f"min_replicas={self.min_replicas} is over max_replicas={self.max_replicas}")
        if self.ladder is None and (self.budget or self.policy is not None):
            raise ValueError("budget and policy need ladder")
        return self

    @property
    def limits(self) -> EngineLimits:
        """Limits of one engine."""
        return EngineLimits(self.max_running, self.max_waiting, self.pass_rows, self.page_size, int(self.kv_memory))

    @property
    def engine(self) -> EngineSpec:
        """What each engine is made of."""
        return EngineSpec(self.model, self.limits, self.device, self.dtype, self.backend)

    @property
    def bounds(self) -> tuple[int, int]:
        """Engines at least and at most."""
        if self.replicas is not None:
            return self.replicas, self.replicas
        least = self.min_replicas or 1
        return least, self.max_replicas or least

    @property
    def claims(self) -> dict[str, float]:
        """Resources that a replica claims of a node, as Ray names them."""
        gpus = self.gpus
        if gpus is None:
            gpus = float(self.device.startswith("cuda") or (self.device == "auto" and torch.cuda.is_available()))
        return {"num_cpus": float(self.threads or 1), "num_gpus": gpus}
