"""The Host header: a server answers for the names that it knows.

A page elsewhere can give its own name this server's address (DNS rebinding); a browser then lets its scripts read what
they ask here for, but says that name in `Host`. Starlette's own check cannot read IPv6 addresses.
"""

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from starlette.types import ASGIApp, Receive, Scope, Send

from sigma0.serve.api.errors import ApiError

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:/@\[\]]+))(?::[0-9]{0,5})?")
_NAME = re.compile(r"(?:\*\.)?[^\s:/@\[\]*]+")
_SHOWN = 80


def check_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """Entries of a list of allowed hosts, as `HostCheck` takes them.

    Args:
        hosts: Names (`*.` ahead stands for all names below), addresses, networks (`10.0.0.0/8`), or `*` for all.

    Raises:
        ValueError: For anything else, such as one with a port or a scheme.
    """
    found = []
    for host in hosts:
        entry = host.strip().lower().removesuffix(".")
        if entry != "*" and _network(entry) is None and not _NAME.fullmatch(entry):
            raise ValueError(
                f"{host!r} is no host: a name (example.com, *.example.com), an address or a network (10.0.0.0/8), "
                "without scheme and port, or * for all"
            )
        found.append(entry)
    return tuple(found)


def hosts_of(address: str) -> tuple[str, ...]:
    """What is allowed where a server listens on an address: it, or every address where it listens on all.

    An address in `Host` is no rebound name: a browser that says it was given it.

    Args:
        address: An address, or a name.
    """
    read = _address(address)
    if not address or (read is not None and read.is_unspecified):
        return ("0.0.0.0/0", "::/0")
    # browsers leave the zone of an address out
    return (address.partition("%")[0],)


class HostCheck:
    """Answers requests whose `Host` is a loopback name or allowed, with any port, and refuses others with 421.

    Args:
        app: What is asked behind it.
        allowed: As `check_hosts` takes them.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        entries = check_hosts(allowed)
        self._all = "*" in entries
        self._networks = [network for entry in entries if (network := _network(entry)) is not None]
        self._names = {"localhost", *(entry for entry in entries if not entry.startswith("*"))}
        self._suffixes = tuple(entry[1:] for entry in entries if entry.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or refuses it."""
        if scope["type"] == "http" and not self._all:
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(hosts) != 1 or not self.allows(hosts[0]):
                shown = ", ".join(hosts)[:_SHOWN]
                error = ApiError(
                    421,
                    f"this server does not answer for the host {shown!r}: start it with --allowed-host NAME for the "
                    "name that clients use",
                    code="host_not_allowed",
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def allows(self, host: str) -> bool:
        """Whether a `Host` header is one to answer for."""
        match = _HOST.fullmatch(host.strip().lower())
        if match is None:
            return False
        name = (match[1] or match[2]).removesuffix(".")
        address = _address(name)
        if address is None:
            return name in self._names or name.endswith(self._suffixes)
        return address.is_loopback or any(address in network for network in self._networks)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(text)
    except ValueError:
        return None
