"""Address of an OpenTelemetry collector."""

from importlib import import_module
from urllib.parse import urlsplit

from sigma0.errors import needs_extra


def traces_url(endpoint: str) -> str:
    """Where spans are sent.

    Args:
        endpoint: Of a collector: its base, or the whole address of its traces.

    Raises:
        ValueError: If it is no address of HTTP.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{endpoint!r} is no address of an OTLP collector, such as http://127.0.0.1:4318")
    return endpoint.rstrip("/") + "/v1/traces" if parts.path in ("", "/") else endpoint


def check_collector(endpoint: str) -> None:
    """Refuses an address that is none, and one where nothing is installed that could send there.

    Raises:
        ValueError: For either.
    """
    traces_url(endpoint)
    with needs_extra("otel"):
        import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
