"""`sigma0 serve --ray`: starts the application on a cluster, and stops it on a signal."""

import logging
import signal
import threading
from collections.abc import Mapping
from ipaddress import ip_address

from rich.console import Console

from sigma0.checkpoints import resolve_model
from sigma0.errors import needs_extra
from sigma0.serve.cluster.cluster import join
from sigma0.serve.cluster.settings import RaySettings


def serve_on_ray(settings: RaySettings, host: str, port: int, address: str | None) -> None:
    """Serves until a signal; then refuses further requests and finishes those that were taken.

    Args:
        settings: Of the application.
        host: Of the interface to listen on.
        port: To listen on.
        address: Of a running cluster; None: starts one on this machine.

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
        has_key = settings.api_key is not None or settings.api_key_file is not None
        if not has_key and not was_there and not ip_address(host).is_loopback:
            console.print("no API key is set, and whoever reaches this address may use the model: see --api-key")
        console.print(f"{settings.model} {where} - stop with Ctrl+C")
        _wait()
        front.drain.remote().result()
        serve.delete(NAME)
    finally:
        # a cluster that was started here ends with it
        ray.shutdown()


def check_room(settings: RaySettings, resources: Mapping[str, float]) -> None:
    """Refuses more engines than a machine has room for; Serve would wait for them for ever.

    Args:
        settings: Of the application.
        resources: Of the machine, as Ray names them.

    Raises:
        ValueError: Naming the resource that is short.
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
    """Returns on the first signal; a second one ends the process at once."""
    stopping = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: stopping.set())
    stopping.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
