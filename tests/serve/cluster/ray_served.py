"""A cluster of two replicas on this machine, with windows into their engines, and clients' servers over it."""

import logging
import os
from contextlib import contextmanager
from types import SimpleNamespace

import ray
from ray import serve

from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import create_app
from sigma0.serve.cluster.app import NAME, application
from sigma0.serve.cluster.cluster import join
from sigma0.serve.cluster.replica import EngineReplica
from sigma0.serve.cluster.router import Fleet
from sigma0.serve.cluster.service import RayService
from sigma0.serve.cluster.settings import RaySettings
from sigma0.serve.command import open_socket
from sigma0.serve.engine.loop import EngineService
from sigma0.serve.engine.messages import EngineLimits
from tests.serve.api.test_load import until
from tests.serve.conftest import Served, serving
from tests.serve.engine.spied_worker import HeldEngine, Ticket

SETTINGS = RaySettings(replicas=2, device="cpu", dtype="float32", kv_memory="64MiB", report_seconds=0.2)


class HeldReplica(EngineReplica):
    """A replica whose engine can be held, slowed down, made to fail, made anew, and killed."""

    _reports = 0

    def _engine(self):
        made = super()._engine()
        self._loaded = made.model, made.tokenizer
        return self._held(made.limits)

    def _held(self, limits):
        self._engine_held = HeldEngine(*self._loaded, "pocket", limits)
        return self._engine_held

    def report(self, front):
        self._reports += 1
        limits = self._engine_held.limits
        output = super().report(front)
        return type(output)(output.engine, limits.max_running, limits.max_running + limits.max_waiting, output.status)

    def make_anew(self, limit=None):
        """Another engine, which has read nothing yet; with a limit one that runs one job and lets so many wait."""
        before = self._service
        kv = int(self._settings.kv_memory)
        limits = EngineLimits(kv_bytes=kv) if limit is None else EngineLimits(1, limit, kv_bytes=kv)
        # first the new one, lest Serve finds the replica without an engine and replaces it
        self._service = EngineService(self._held(limits))
        before.close()
        self._before = self._service.status()

    def hold(self):
        self._engine_held.gate.clear()

    def go_on(self):
        self._engine_held.gate.set()

    def slow_down(self, seconds):
        self._engine_held.pause = seconds

    def fail_next(self, what):
        self._engine_held.fails = RuntimeError(what)

    def reports(self):
        return self._reports

    def who_stands(self):
        return os.getpid(), self._service.status()


class Replicas:
    """All replicas, asked at once; `url` is where the application's own front listens."""

    def __init__(self, handle, url):
        self.handle, self.url = handle, url

    def __getattr__(self, name):
        return lambda *arguments: self.handle.broadcast(name, *arguments).results(timeout_s=60)

    def pids(self):
        """Of those that live."""
        result = self.handle.broadcast("who_stands").results(timeout_s=60, return_exceptions=True)
        return {item[0] for item in result if not isinstance(item, Exception)}

    def stands(self):
        return [status for _, status in self.who_stands()]


class OneEngine(Fleet):
    """As if the first replica were the only one, for what counts places."""

    def update(self, reports):
        super().update(sorted(reports, key=lambda report: report.engine)[:1])


class SpiedRayService(RayService):
    """Notes what is submitted, as `SpiedService` does of an engine in the same process."""

    def __init__(self, pocket, replicas, limit):
        self.tickets = []
        # of all engines
        self.gate = SimpleNamespace(set=replicas.go_on, clear=replicas.hold)
        super().__init__(replicas.handle, *pocket, SETTINGS)
        if limit is not None:
            self.fleet = OneEngine()
        until(lambda: self.is_up)

    def submit(self, job):
        ticket = Ticket(job, super().submit(job))
        self.tickets.append(ticket)
        return ticket


def _start(folder, attempts=3):
    for attempt in range(attempts):
        try:
            join(None, num_cpus=2, _temp_dir=f"{folder}/{attempt}", log_to_driver=False)
            return
        except Exception as error:
            # a node gives its own processes 15 seconds to start, which a machine that is busy may not keep
            if "timed out during startup" not in str(error) or attempt == attempts - 1:
                raise
            ray.shutdown()


@contextmanager
def cluster(folder):
    """A cluster, and on it the application; yields its replicas."""
    _start(folder)
    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        with open_socket("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"})
        serve.run(application(SETTINGS, HeldReplica), name=NAME)
        yield Replicas(serve.get_deployment_handle("engine", NAME), f"http://127.0.0.1:{port}")
    finally:
        ray.shutdown()


@contextmanager
def served_on_ray(replicas, pocket, settings=None, ladder=None, limit=None):
    """The app in this process over fresh engines of the cluster, in place of `tests.serve.conftest.served`."""
    replicas.make_anew(limit)
    service = SpiedRayService(pocket, replicas, limit)
    app = create_app(service, settings or ServerSettings(), ladder)
    try:
        with serving(app) as url:
            yield Served(service, url, app)
    finally:
        service.close()
        replicas.go_on()
        replicas.make_anew()
