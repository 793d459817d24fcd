"""`sigma0 serve --ray`: starts the application on a cluster, and ends it when a signal comes."""

import logging
import signal
import threading
from collections.abc import Mapping
from ipaddress import ip_address

from rich.console import Console

from sigma0.extras import needs_extra
from sigma0.models.load import resolve_model
from sigma0.serve.cluster.cluster import join
from sigma0.serve.cluster.settings import RaySettings


def serve_on_ray(settings: RaySettings, host: str, port: int, address: str | None) -> None:
    """Serves until a signal comes; then takes no more and finishes what was begun.

    Args:
        settings: Of the application.
        host: Of the interface to listen on.
        port: To listen on.
        address: Of a cluster that is there; None: one of this machine's own.

    Raises:
        ValueError: If there is no such model or cluster, Ray is not installed, the machine has no room for so many
            engines, or the application does not come up.
    """
    resolve_model(settings.model)
    console = Console(stderr=True, highlight=False)
    with needs_extra("ray"):
        join(address)
        import ray
        from ray import serve

        from sigma0.serve.cluster.app import NAME, build
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        if address is None:
            check_room(settings, ray.cluster_resources())
        was_there = bool(serve.status().proxies)
        serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"})
        console.print(f"starting {settings.bounds[0]} engine(s) with {settings.model}")
        try:
            front = serve.run(build(settings), name=NAME)
        except RuntimeError as error:
            raise ValueError(f"the application did not come up: {error}") from error
        where = "where this cluster's Serve listens" if was_there else f"on http://{host}:{port}"
        if settings.api_key is None and not was_there and not ip_address(host).is_loopback:
            console.print("no API key is set, and whoever reaches this address may use the model: see --api-key")
        console.print(f"{settings.model} {where} - stop with Ctrl+C")
        _wait()
        front.drain.remote().result()
        serve.delete(NAME)
    finally:
        # a cluster of our own ends with it
        ray.shutdown()


def check_room(settings: RaySettings, resources: Mapping[str, float]) -> None:
    """Refuses more engines than a machine has room for, which Serve would wait for without an end.

    Args:
        settings: Of the application.
        resources: Of the machine, as Ray names them.

    Raises:
        ValueError: Naming what is short.
    """
    least = settings.bounds[0]
    for name, option in (("CPU", "--threads"), ("GPU", "--gpus")):
        claimed, there = least * settings.claims[f"num_{name.lower()}s"], resources.get(name, 0.0)
        if claimed > there:
            raise ValueError(
                f"{least} engines claim {claimed:g} {name}s, and this machine has {there:g}: see --replicas, --min and "
                f"{option}"
            )


def _wait() -> None:
    """Returns once a signal asks for the end; a second one ends the process at once."""
    asked = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: asked.set())
    asked.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
