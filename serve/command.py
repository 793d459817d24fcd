"""`sigma0 serve`: a model over the OpenAI protocol, and a page that shows its depths."""

import logging
import os
import socket
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from sigma0.checkpoints import resolve_model
from sigma0.commands.console import loading, log_to_stderr, one_line_errors
from sigma0.commands.options import (
    KEPT_FILES,
    BudgetLimits,
    CollapseAction,
    LoadOptions,
    ModelArgument,
    TriggerJson,
    check_known,
    grouped,
    option,
)
from sigma0.errors import needs_extra

if TYPE_CHECKING:
    from sigma0.commands.telemetry import TelemetryLog
    from sigma0.ladder import FidelityLadder
    from sigma0.serve.api.access import ServerSettings
    from sigma0.serve.engine.client import EngineClient


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What is served where, and its limits."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port; 0 takes a free one.", min=0, max=65535)
    api_key: str | None = option(None, "Key that clients must send; better as the variable SIGMA0_API_KEY.")
    api_key_file: Path | None = option(
        None, "File of keys, one a line, of which clients must send one; others may not read it."
    )
    tls_cert: Path | None = option(None, "File of a certificate chain (PEM): the server speaks https.")
    tls_key: Path | None = option(None, "File of its private key (PEM).")
    tls_client_ca: Path | None = option(None, "File of authorities (PEM), of one of which clients need a certificate.")
    allowed_host: list[str] | None = option(
        None, "Name that clients may use for this server beside localhost; may be repeated, * for all."
    )
    ladder: str | None = option(None, "Rungs, the lowest first: pocket,pocket-large")
    budget: BudgetLimits = ""
    policy: TriggerJson = None
    max_running: int = option(16, "Requests that run at most.", min=1)
    max_waiting: int = option(64, "Requests in the queue at most.", min=1)
    pass_rows: int = option(256, "Rows up to which prefill may fill a pass.", min=1)
    page_size: int = option(16, "Tokens of a block of K/V.", min=1)
    kv_memory: str = option("256MiB", "Memory for K/V: 512MiB, 8GiB.")
    max_new_tokens: int = option(4096, "New tokens of one answer at most.", min=1)
    request_timeout: float = option(600.0, "Seconds for one request at most.", min=0.1)
    drain_timeout: float | None = option(None, "Seconds to finish requests when the server stops. [30]", min=0.1)
    on_collapse: CollapseAction = "stop"
    tool_parser: str | None = option(
        None, "How calls of tools are written: hermes, nanbeige. By default as the model says."
    )
    telemetry: Path | None = option(None, "File for one JSON line a request: depths, exits, verdict, route, costs.")
    telemetry_max_bytes: str = option("64MiB", "Size at which that file is rotated: 64MiB.")
    telemetry_keep: int = option(KEPT_FILES, "Rotated files that are kept.", min=1)
    otlp_endpoint: str | None = option(
        None, "Address of an OpenTelemetry collector (OTLP over HTTP) for one span a request."
    )
    threads: int | None = option(None, "CPU threads of a pass; by default torch's choice.", min=1)
    ray: bool = option(False, "Several engines on a Ray cluster, at one address.", "--ray")
    replicas: int | None = option(None, "With --ray, engines.", min=1)
    least: int | None = option(None, "With --ray, engines at least.", "--min", min=1)
    most: int | None = option(None, "With --ray, engines at most.", "--max", min=1)
    gpus: float | None = option(None, "With --ray, GPUs of an engine; 1 with CUDA.", min=0)
    address: str | None = option(None, "With --ray, a cluster that is there (auto, HOST:PORT); else one is started.")

    def refuse(self, loaded: LoadOptions) -> None:
        """Refuses options that do not go together."""
        if self.ladder is None and (self.budget or self.policy is not None):
            raise ValueError("--budget and --policy need --ladder")
        if not self.ray:
            of_ray = {"replicas": "replicas", "least": "min", "most": "max", "gpus": "gpus", "address": "address"}
            if given := [f"--{name}" for field, name in of_ray.items() if getattr(self, field) is not None]:
                raise ValueError(f"{', '.join(given)} {'need' if len(given) > 1 else 'needs'} --ray")
            return
        if self.telemetry is not None:
            raise ValueError("--telemetry goes with one engine: leave it out with --ray, whose front is elsewhere")
        if given := list(loaded.named("runner", "quantization", "recurrence", "stride", "kv", "door_rule")):
            raise ValueError(f"{given[0]} goes with one engine: leave it out with --ray")
        if not loaded.check:
            raise ValueError("--no-check does not go with --ray, whose replicas look at their weights")
        if any((self.tls_cert, self.tls_key, self.tls_client_ca)):
            raise ValueError("--tls-cert, --tls-key and --tls-client-ca go with one engine: Ray's proxy listens")
        if self.drain_timeout is not None:
            raise ValueError("--drain-timeout does not go with --ray, where what was begun has --request-timeout")

    def settings(self) -> dict[str, Any]:
        """The options that were given, as fields of the settings of a server, an engine and a cluster."""
        from pydantic import SecretStr

        from sigma0.config import parse_on_collapse
        from sigma0.decode.grammar.spec import parse_call_style
        from sigma0.serve.api.access import Environment
        from sigma0.serve.api.hosts import check_hosts, hosts_of

        try:
            allowed = check_hosts((*hosts_of(self.host), *(self.allowed_host or ())))
        except ValueError as error:
            raise ValueError(f"--allowed-host: {error}") from error
        memory = parse_bytes(self.kv_memory)
        return {name: value for name, value in asdict(self).items() if value is not None} | {
            "api_key": SecretStr(self.api_key) if self.api_key else Environment().api_key,
            "allowed_hosts": allowed,
            "on_collapse": parse_on_collapse(self.on_collapse),
            "tool_parser": parse_call_style(self.tool_parser),
            "kv_memory": memory,
            "kv_bytes": memory,
            "min_replicas": self.least,
            "max_replicas": self.most,
        }


@grouped
def serve(loaded: LoadOptions, asked: ServeOptions, model: ModelArgument = "pocket") -> None:
    """Serve a model to OpenAI clients, and a page on which to watch it."""
    with one_line_errors(), needs_extra("serve"), ExitStack() as stack, ExitStack() as waiting:
        resolve_model(model)
        waiting.enter_context(loading(model))
        from sigma0.serve.engine.child import EngineProcess
        from sigma0.serve.engine.process import ProcessService
        from sigma0.serve.engine.wire import EngineSpec

        # it imports what an engine needs while this process imports what a server does
        process = None if asked.ray or asked.ladder is not None else stack.enter_context(closing(EngineProcess()))

        from sigma0.commands.telemetry import TelemetryLog
        from sigma0.config import KVConfig
        from sigma0.serve.api.access import ServerSettings
        from sigma0.serve.engine.messages import EngineLimits

        asked.refuse(loaded)
        given = asked.settings()
        rotated_at = parse_bytes(asked.telemetry_max_bytes, "--telemetry-max-bytes")
        # of a cluster too: what does not fit is refused before one is started
        settings = ServerSettings(**_those_of(ServerSettings, given))
        if asked.ray:
            from sigma0.serve.cluster.command import serve_on_ray
            from sigma0.serve.cluster.settings import RaySettings

            given |= {"model": model} | {name: getattr(loaded, name) for name in ("device", "dtype", "backend")}
            cluster = RaySettings(**{name: given[name] for name in RaySettings.model_fields if name in given})
            waiting.close()
            with open_socket(asked.host, asked.port) as listener:
                # a server that takes no socket gets a free port
                port = int(listener.getsockname()[1])
            serve_on_ray(cluster, asked.host, port, asked.address)
            return
        limits = EngineLimits(**_those_of(EngineLimits, given))
        log = None if asked.telemetry is None else TelemetryLog(asked.telemetry, rotated_at, asked.telemetry_keep)
        listener = open_socket(asked.host, asked.port)
        log_to_stderr()
        waiting.close()
        console = Console(stderr=True, highlight=False)
        console.print(f"loading {model}")
        check_known("backend", loaded.backend, ("auto", "torch", "triton"))
        kv = None if loaded.kv is None else KVConfig.parse(loaded.kv)
        spec = EngineSpec(model, limits, **{**asdict(loaded), "kv": kv})
        climbing = None
        service: EngineClient
        if asked.ladder is None:
            service = ProcessService(spec, asked.threads, process)
        else:
            from sigma0.commands.ladder import open_ladder
            from sigma0.serve.engine.loop import EngineService

            # in one process, since a rung that is the served model shares its weights
            engine = spec.build()
            console.print(f"loading the ladder {asked.ladder}")
            known = {model: (engine.model, engine.tokenizer)}
            climbing = open_ladder(asked.ladder, asked.budget, asked.policy, loaded, known)
            service = EngineService(engine, asked.threads)
        address, bound = listener.getsockname()[:2]
        if not settings.keys and not ip_address(address).is_loopback:
            console.print("no API key is set, and whoever reaches this address may use the model: see --api-key")
        place = f"[{address}]" if ":" in address else address
        scheme = "https" if asked.tls_cert else "http"
        console.print(f"{spec.name} on {scheme}://{place}:{bound} - stop with Ctrl+C")
        run(service, settings, climbing, listener, log)


def _those_of(settings: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Of what was given the fields of a dataclass."""
    return {field.name: given[field.name] for field in fields(settings) if field.name in given}


def run(
    service: "EngineClient",
    settings: "ServerSettings",
    ladder: "FidelityLadder | None",
    listener: socket.socket,
    telemetry: "TelemetryLog | None" = None,
) -> None:
    """Serves until a signal; then refuses further requests, and finishes those taken within `settings.drain_timeout`.

    Where requests had to be cut off, the process exits with status 1.
    """
    from sigma0.serve.api.app import create_app
    from sigma0.serve.api.connections import Server
    from sigma0.serve.engine.child import frozen_heap

    server = Server(create_app(service, settings, ladder, telemetry), service, settings)
    server.ended_by_signals()
    try:
        with frozen_heap():
            server.run(sockets=[listener])
    finally:
        service.close()
        if telemetry is not None:
            telemetry.close()
    if server.cut_off:
        typer.echo(
            f"{server.cut_off} request(s) cut off after {settings.drain_timeout:g} s: see --drain-timeout", err=True
        )
        logging.shutdown()
        # without joining threads, which may still generate an answer of a request that was cut off
        os._exit(1)


def open_socket(host: str, port: int) -> socket.socket:
    """A bound socket, so that a bad address is refused before anything is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; see --host and --port (0 takes a free one)"
        ) from error
    return listener


def parse_bytes(text: str, option: str = "--kv-memory") -> int:
    """A number of bytes, written as 512MiB or 8GB; of an option, for the message."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise ValueError(f"{option} {text!r} is no amount of memory such as 512MiB or 8GiB") from error
