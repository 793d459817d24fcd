"""The Ray cluster that an application runs on: one of this machine's own, or one that is there."""

import logging
import os
import socket
from ipaddress import ip_address
from typing import Any

_LOG = logging.getLogger(__name__)
# Jobs and tokens are small: Ray would take a third of the memory for objects.
OBJECT_STORE = 2**27
# That a cluster's port may take to answer.
SECONDS = 5.0


def join(address: str | None, **options: Any) -> None:
    """Connects to a cluster, or starts one that no other machine can reach.

    Args:
        address: As `ray.init` takes it; None: a cluster of this machine's own, which ends with this process.
        **options: Of `ray.init`, where a cluster is started.

    Raises:
        ValueError: If there is no such cluster.
        RuntimeError: If one was started that other machines could reach; it is ended.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is not None:
        import ray

        _check_answers(address)
        try:
            ray.init(address=address, logging_level=logging.WARNING)
        except ConnectionError as error:
            raise ValueError(
                f"no Ray cluster at {address!r}, or one that asks for a token (then set RAY_AUTH_MODE=token): {error}"
            ) from error
        return
    # Ray then takes the loopback address for the node's, and binds all that it starts to it
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray
    from ray._private import ray_constants

    # the variable is read when Ray is imported, which may have been earlier
    ray_constants.ENABLE_RAY_CLUSTER = False
    usual = {"include_dashboard": False, "object_store_memory": OBJECT_STORE, "logging_level": logging.WARNING}
    ray.init(address="local", **(usual | options))
    node = ray.util.get_node_ip_address()
    if not ip_address(node).is_loopback:
        ray.shutdown()
        raise RuntimeError(f"this version of Ray listens on {node}: start a cluster yourself, and name it (--address)")


def _check_answers(address: str) -> None:
    """Refuses a port where nobody listens, which Ray would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"no Ray cluster answers at {address!r} ({error}): start one (ray start --head), or leave --address out"
        ) from error


def bind_to_loopback() -> None:
    """Keeps the server that Serve starts in each replica's process on the loopback interface, where its node is.

    That server takes calls of other replicas, and binds to all interfaces whatever the node's address. To be called in
    a replica's constructor.
    """
    import ray
    from ray.serve._private import replica

    if not ip_address(ray.util.get_node_ip_address()).is_loopback:
        return
    bind = getattr(replica, "add_port_to_grpc_server", None)
    if bind is None:
        _LOG.warning("this version of Ray binds a server of each replica to all interfaces")
        return
    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", "127.0.0.1"))
