"""What Prometheus reads: how the service stands, what ladders did, and how long clients waited."""

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sigma0.serve.engine.messages import RequestOutput, Service, ServiceStatus, TokenOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class ServiceCollector(Collector):
    """The service's own figures, read when Prometheus asks.

    Args:
        service: The engine.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """Today's figures: of all engines together, and where there are several of each."""
        total_loops = int(self._service.model.num_loops)
        for name, (told, value) in _gauges(self._service.status(), total_loops).items():
            yield GaugeMetricFamily(f"sigma0_{name}", told, value=value)
        for name, (told, value) in _counters(self._service.status()).items():
            yield CounterMetricFamily(f"sigma0_{name}", told, value=value)
        # under names of their own, so that a sum over a name counts nothing twice
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for engine, status in sorted(self._service.engines().items()):
            for name, (told, value) in _gauges(status, total_loops).items():
                gauge = GaugeMetricFamily(f"sigma0_replica_{name}", told, labels=["replica"])
                families.setdefault(name, gauge).add_metric([engine], value)
            for name, (told, value) in _counters(status).items():
                counter = CounterMetricFamily(f"sigma0_replica_{name}", told, labels=["replica"])
                families.setdefault(name, counter).add_metric([engine], value)
        yield from families.values()


def _gauges(status: ServiceStatus, total_loops: int) -> dict[str, tuple[str, float]]:
    mean = status.exit_loops / status.tokens if status.tokens else 0.0
    return {
        "queue": ("Jobs in the queue.", status.waiting),
        "running": ("Jobs on their way.", status.running),
        "mean_depth": ("Mean exit depth of all new tokens, in loops.", mean),
        "depth_saved": ("Share of loops saved, over all new tokens.", 1 - mean / total_loops if mean else 0.0),
        "pages": ("Pages of K/V.", status.blocks_total),
        "pages_used": ("Pages held by jobs.", status.blocks_used),
        "pages_cached": ("Pages kept for prompts that begin alike.", status.blocks_cached),
    }


def _counters(status: ServiceStatus) -> dict[str, tuple[str, float]]:
    return {
        "passes": ("Calls of the shared block.", status.passes),
        "rows": ("Rows in those calls.", status.rows),
        "tokens": ("New tokens.", status.tokens),
        "preemptions": ("Jobs that were put back.", status.preemptions),
    }


class Metrics:
    """The figures of one app.

    Args:
        service: The engine.
    """

    def __init__(self, service: Service) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(ServiceCollector(service))
        self.requests = Counter(
            "sigma0_requests",
            "Requests for text that could be read, by kind and status.",
            ["kind", "status"],
            registry=registry,
        )
        self.handed_up = Counter("sigma0_hand_ups", "Tokens, drafts and answers that went up.", registry=registry)
        self.aborts = Counter("sigma0_aborts", "Ladder answers that the budget cut short.", registry=registry)
        self.cancelled = Counter("sigma0_cancelled", "Requests whose client left.", registry=registry)
        self.latency = Histogram("sigma0_request_seconds", "From request to end.", buckets=SECONDS, registry=registry)
        self.first = Histogram(
            "sigma0_first_token_seconds", "From request to first token.", buckets=SECONDS, registry=registry
        )
        self.between = Histogram(
            "sigma0_between_tokens_seconds", "From token to token.", buckets=BETWEEN, registry=registry
        )

    def watch(self) -> Callable[[int, TokenOutput | RequestOutput], None]:
        """What is to be told the events of one request."""
        began = time.monotonic()
        last: dict[int, float] = {}

        def observe(index: int, event: TokenOutput | RequestOutput) -> None:
            now = time.monotonic()
            if isinstance(event, TokenOutput):
                (self.between if index in last else self.first).observe(now - last.get(index, began))
                last[index] = now
                return
            if not event.costs:
                return
            # tokens tell it themselves; of what goes up whole, it shows in who wrote
            ups = sum(token.handed_up is not None for token in event.tokens)
            self.handed_up.inc(ups if event.tokens else sum(cost["tokens"] > 0 for cost in event.costs[1:]))
            self.aborts.inc(event.door == "abort")

        return observe

    def text(self) -> bytes:
        """What Prometheus reads."""
        return generate_latest(self._registry)
