"""Prometheus metrics: the state of the service, the work of ladders, and latencies."""

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sigma0.serve.engine.messages import RequestOutput, Service, ServiceStatus, TokenOutput
from sigma0.signals.drift import DriftMonitor

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
CONFIDENCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


class ServiceCollector(Collector):
    """Gauges and counters of the service, collected at each scrape.

    Args:
        service: The engine.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """Current values: of all engines together, and of each where there are several."""
        total_loops = int(self._service.model.num_loops)
        for name, (help_text, value) in _gauges(self._service.status(), total_loops).items():
            yield GaugeMetricFamily(f"sigma0_{name}", help_text, value=value)
        for name, (help_text, value) in _counters(self._service.status()).items():
            yield CounterMetricFamily(f"sigma0_{name}", help_text, value=value)
        # under other names, so that a sum over a name counts nothing twice
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for engine, status in sorted(self._service.engines().items()):
            for name, (help_text, value) in _gauges(status, total_loops).items():
                gauge = GaugeMetricFamily(f"sigma0_replica_{name}", help_text, labels=["replica"])
                families.setdefault(name, gauge).add_metric([engine], value)
            for name, (help_text, value) in _counters(status).items():
                counter = CounterMetricFamily(f"sigma0_replica_{name}", help_text, labels=["replica"])
                families.setdefault(name, counter).add_metric([engine], value)
        yield from families.values()


def _gauges(status: ServiceStatus, total_loops: int) -> dict[str, tuple[str, float]]:
    mean = status.exit_loops / status.tokens if status.tokens else 0.0
    return {
        "queue": ("Requests in the queue.", status.waiting),
        "running": ("Requests that run.", status.running),
        "mean_depth": ("Mean exit depth of all new tokens, in loops.", mean),
        "depth_saved": ("Share of loops saved, over all new tokens.", 1 - mean / total_loops if mean else 0.0),
        "pages": ("Pages of K/V.", status.blocks_total),
        "pages_used": ("Pages held by requests.", status.blocks_used),
        "pages_cached": ("Pages in the prefix cache that no request holds.", status.blocks_cached),
    }


def _counters(status: ServiceStatus) -> dict[str, tuple[str, float]]:
    return {
        "passes": ("Calls of the shared block.", status.passes),
        "rows": ("Rows in those calls.", status.rows),
        "tokens": ("New tokens.", status.tokens),
        "preemptions": ("Requests that were preempted.", status.preemptions),
    }


class DriftCollector(Collector):
    """Gauges of drift, collected at each scrape; one that is not known yet has no sample.

    Args:
        drift: Of the served model's answers.
    """

    def __init__(self, drift: DriftMonitor) -> None:
        self._drift = drift

    def collect(self) -> Iterable[Metric]:
        """Current values."""
        share_help = "Share of the latest answers that were out of calibration."
        psi_help = "How far the latest confidences are from those of the calibration (PSI)."
        yield GaugeMetricFamily("sigma0_out_of_calibration_share", share_help, self._drift.out_of_calibration)
        yield GaugeMetricFamily("sigma0_confidence_psi", psi_help, self._drift.psi)


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
        self.top_rung = Counter(
            "sigma0_top_rung", "Ladder answers that the highest rung was asked for.", registry=registry
        )
        self.cancelled = Counter("sigma0_cancelled", "Requests whose client left.", registry=registry)
        self.latency = Histogram("sigma0_request_seconds", "From request to end.", buckets=SECONDS, registry=registry)
        self.first = Histogram(
            "sigma0_first_token_seconds", "From request to first token.", buckets=SECONDS, registry=registry
        )
        self.between = Histogram(
            "sigma0_between_tokens_seconds", "From token to token.", buckets=BETWEEN, registry=registry
        )
        self.doors = Counter("sigma0_doors", "Answers by door.", ["door"], registry=registry)
        self.confidence = Histogram(
            "sigma0_confidence",
            "Confidence in the served model's own answers.",
            buckets=CONFIDENCES,
            registry=registry,
        )
        confidence_model = service.model.confidence_model
        self._drift = None if confidence_model is None else DriftMonitor(confidence_model)
        if self._drift is not None:
            registry.register(DriftCollector(self._drift))

    def watch(self) -> Callable[[int, TokenOutput | RequestOutput], None]:
        """An observer of the events of one request."""
        began = time.monotonic()
        last: dict[int, float] = {}

        def observe(index: int, event: TokenOutput | RequestOutput) -> None:
            now = time.monotonic()
            if isinstance(event, TokenOutput):
                (self.between if index in last else self.first).observe(now - last.get(index, began))
                last[index] = now
                return
            if event.door is not None:
                self.doors.labels(event.door).inc()
            if not event.costs:
                self.judged(event)
                return
            # token outputs have it; a text that was handed up whole has tokens of a higher rung
            ups = sum(token.handed_up is not None for token in event.tokens)
            self.handed_up.inc(ups if event.tokens else sum(cost["tokens"] > 0 for cost in event.costs[1:]))
            self.aborts.inc(bool(event.not_tried))
            self.top_rung.inc(event.top_rung)

        return observe

    def judged(self, output: RequestOutput) -> None:
        """Takes in the verdict on an answer of the served model itself, also of one that a ladder's replaces."""
        if output.verdict is None:
            return
        if output.verdict.confidence is not None:
            self.confidence.observe(output.verdict.confidence)
        if self._drift is not None:
            self._drift.add(output.verdict)

    def text(self) -> bytes:
        """The metrics in the text format."""
        return generate_latest(self._registry)
