"""What stands between an app and replicas, by itself: no cluster is started here."""

import asyncio
import json
import subprocess
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("ray")

import yaml
from fastapi.testclient import TestClient
from pydantic import ValidationError
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

from sigma0.config import ExitConfig
from sigma0.serve.cluster import replica as ray_replica
from sigma0.serve.cluster.app import build, scaling_of
from sigma0.serve.cluster.command import check_room
from sigma0.serve.cluster.front import Front
from sigma0.serve.cluster.policies import EngineLoad, NamedReplica
from sigma0.serve.cluster.replica import Accepted, EngineReplica, Failed, Refused
from sigma0.serve.cluster.router import NOTHING, EngineReport, Fleet
from sigma0.serve.cluster.service import RayService, RemoteEvents
from sigma0.serve.cluster.settings import RaySettings
from sigma0.serve.engine.messages import EngineRequest, RequestOutput, TokenOutput
from sigma0.signals.savings import Savings
from tests.serve.test_parts import Source
from tests.test_cli import run

pytestmark = pytest.mark.slow

JOB = EngineRequest((1, 2, 3), 4, ExitConfig())
WHOLE = EngineRequest((1, 2, 3), 4, ExitConfig(), whole=True)
A, B, C = (TokenOutput(place, text, 1, None, None, 0.0, 1.0, 0.0, None, (), "m") for place, text in enumerate("abc"))
DONE = RequestOutput("abc", (A, B, C), "stop", 3, 0, 6, 0, 0, Savings(None, None, None, None), None, None, None)
DIED = ActorDiedError()
TASK = RayTaskError("run", "a traceback", KeyError("what somebody said"))


class Stream(Source):
    """Of a replica, and whether it was cancelled."""

    def __init__(self, engine, script):
        super().__init__(*script)
        self.engine, self.cancelled = engine, False

    def cancel(self):
        self.cancelled = True


class Cluster:
    """Two engines, a and b, and what each of a job's streams tells, one after the other."""

    def __init__(self, *scripts, engines="ab", running=2):
        self.fleet = Fleet()
        self.fleet.update([EngineReport(name, running, 4, NOTHING) for name in engines])
        self.scripts, self.streams = list(scripts), []

    def begin(self, job, engine):
        self.streams.append(Stream(engine, self.scripts.pop(0)))
        return self.streams[-1]

    def events(self, job=JOB):
        return RemoteEvents(job, self.fleet, self.begin)

    def told(self, job=JOB):
        """Everything that a job tells: the texts of its tokens, a point for its end, and its failure."""

        async def read():
            obtained = ""
            try:
                async for event in self.events(job):
                    obtained += "." if event is DONE else event.text
            except Exception as error:
                obtained += f"{type(error).__name__}: {error}"
            return obtained

        obtained = asyncio.run(asyncio.wait_for(read(), 20))
        assert self.fleet.open == 0, "nothing is left behind"
        assert "somebody" not in obtained
        return obtained


FULL, ALL = Refused("a", "full"), (A, B, C, DONE)
LOST = (DIED, RayServeException("no such replica"), asyncio.CancelledError())


@pytest.mark.parametrize(
    "told, asked, scripts",
    [
        ("abc.", "a", [[Accepted("a"), *ALL]]),
        ("a.", "ab", [[FULL], [Accepted("b"), A, DONE]]),
        ("Busy", "ab", [[FULL], [Refused("b", "full")]]),
        # Serve sent it elsewhere than it was meant to go, where it had been
        ("Busy: still full", "ab", [[FULL], [Refused("a", "still full")]]),
        # it begins anew where nothing of it was told
        *(("abc.", "ab", [[lost], [Accepted("b"), *ALL]]) for lost in LOST),
        *(("abc.", "ab", [[Accepted("a"), lost], [Accepted("b"), *ALL]]) for lost in LOST),
        ("abRequestFailed: its engine was lost", "a", [[Accepted("a"), A, B, DIED]]),
        # what breaks in a replica breaks there alone
        ("aRequestFailed: KeyError inside", "a", [[Accepted("a"), A, Failed("KeyError inside of this")]]),
        ("aRequestFailed: KeyError in a replica", "a", [[Accepted("a"), A, TASK]]),
    ],
)
def test_what_a_job_tells(told, asked, scripts):
    cluster = Cluster(*scripts)
    assert cluster.told().startswith(told) and not any(stream.cancelled for stream in cluster.streams)
    assert "".join(stream.engine for stream in cluster.streams) == asked
    gone = DIED in scripts[0] or (told == "abc." and asked == "ab")
    assert set(cluster.fleet.engines()) == ({"b"} if gone else {"a", "b"})


@pytest.mark.parametrize(
    "told, engines, scripts",
    [
        # it tells nothing twice
        ("abc.", "ab", [[Accepted("a"), A, B, DIED], [Accepted("b"), *ALL]]),
        # one that ends every replica that it comes to ends two at most
        ("RequestFailed", "abc", [[Accepted("a"), DIED], [Accepted("b"), DIED]]),
        ("Unavailable", "a", [[Accepted("a"), DIED]]),
    ],
)
def test_a_whole_job_begins_anew(told, engines, scripts):
    cluster = Cluster(*scripts, engines=engines)
    assert cluster.told(WHOLE).startswith(told) and cluster.fleet.is_up == (engines != "a")


async def test_a_job_that_came_elsewhere_counts_there():
    cluster = Cluster([Accepted("b"), A, ...])
    events = cluster.events()
    await anext(events)
    assert cluster.fleet.take((1, 2, 3, 4)) == "b", "there the chat goes on"
    await events.aclose()
    assert cluster.streams[0].cancelled and cluster.fleet.open == 1


async def test_closing_cancels_the_replica_and_an_end_does_not():
    cluster = Cluster([...], [Accepted("a"), DONE])
    unread, ended = cluster.events(), cluster.events()
    await unread.aclose()
    await unread.aclose()
    assert [event async for event in ended] == [DONE]
    await ended.aclose()
    assert [item.cancelled for item in cluster.streams] == [True, False] and cluster.fleet.open == 0


async def test_a_reader_that_is_cancelled_is_cancelled():
    cluster = Cluster([Accepted("a"), ...])
    events = cluster.events()
    reading = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.wait({reading})
    assert reading.cancelled()
    await events.aclose()
    assert [stream.cancelled for stream in cluster.streams] == [True]


def test_a_job_that_cannot_be_sent_leaves_nothing_behind():
    cluster = Cluster()
    with pytest.raises(RayServeException):
        RemoteEvents(JOB, cluster.fleet, mock.Mock(side_effect=RayServeException("Serve is gone")))
    assert cluster.fleet.open == 0


async def test_a_job_ends_with_its_front(pocket, monkeypatch):
    """Ray lets it run on: a replica tells by not being asked for reports any more."""
    monkeypatch.setattr(ray_replica.serve, "get_replica_context", lambda: SimpleNamespace(replica_id=NAMED))
    now = [0.0]
    monkeypatch.setattr(ray_replica, "time", SimpleNamespace(monotonic=lambda: now[0]))
    replica = EngineReplica(RaySettings(device="cpu", kv_memory="64MiB"))
    job = EngineRequest(tuple(pocket[1]("Once upon")["input_ids"]), 500, ExitConfig(mode="full"))
    here, gone = replica.run(job, "here"), replica.run(job, "gone")
    told = [await anext(item) for item in (here, gone, here, gone)]
    now[0] = 50.0
    report = replica.report("here")
    now[0] = 100.0
    rest = [event async for event in gone]
    told.append(await anext(here))
    await here.aclose()
    replica.__del__()
    assert told[:2] == [Accepted("r1")] * 2 and all(isinstance(item, TokenOutput) for item in told[2:])
    assert rest == [], "not even its end"
    assert (report.engine, report.max_running, report.capacity) == ("r1", 16, 80)


NAMED = SimpleNamespace(unique_id="r1")
# a handle of which no replica answers
DEAF = SimpleNamespace(broadcast=mock.Mock(side_effect=RayServeException("no replica")))


@pytest.fixture
def front(pocket):
    front = Front(DEAF, RaySettings(api_key="sk-secret", kv_memory="1MiB", max_new_tokens=5))
    yield front
    front._service.close()


def test_a_front_without_replicas_says_so(front):
    client = TestClient(front.__serve_build_asgi_app__(), base_url="http://localhost")
    assert client.get("/v1/models").status_code == 401
    health = client.get("/health")
    assert health.status_code == 503 and health.headers["retry-after"] == "1"
    key = {"Authorization": "Bearer sk-secret"}
    body = {"model": "pocket", "prompt": "Once upon", "max_tokens": 4}
    for stream in (False, True):
        answer = client.post("/v1/completions", json={**body, "stream": stream}, headers=key)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "unavailable"
        assert answer.headers["retry-after"] == "1"
    assert client.post("/v1/completions", json={**body, "max_tokens": 6}, headers=key).status_code == 400
    assert "sigma0_pages 0.0" in client.get("/metrics", headers=key).text


def test_a_ladder_stands_in_the_front():
    front = Front(DEAF, RaySettings(ladder="pocket,pocket-large", device="cpu"))
    client = TestClient(front.__serve_build_asgi_app__(), base_url="http://localhost")
    with closing(front._service):
        assert client.get("/v1/sigma0").json()["ladder"] == ["pocket", "pocket-large"]
        body = {"model": "pocket", "prompt": "Once upon", "max_tokens": 4, "sigma0": {"ladder": "token"}}
        assert client.post("/v1/completions", json=body).status_code == 200, "it asks no replica"


def test_a_front_knows_the_context_without_weights(front, pocket):
    # a mebibyte holds few pages of this model's K/V, in the dtype that it is stored in
    page = 2 * pocket[0].num_block_layers * 6 * pocket[0].config.num_key_value_heads * 16 * 4
    head_dim = pocket[0].config.hidden_size // pocket[0].config.num_attention_heads
    assert front._service.context == 2**20 // (page * head_dim) * 16 < 2048
    assert all(item.is_meta for item in front._service.model.parameters())
    with pytest.raises(ValueError, match="hold no block"):
        RayService(DEAF, front._service.model, pocket[1], RaySettings(kv_memory=10))


def test_a_request_has_the_name_that_serves_proxy_gave_it(front):
    client = TestClient(front.__serve_build_asgi_app__(), base_url="http://localhost")
    named = client.get("/v1/nothing", headers={"x-request-id": "0f0f-4a4a_named"})
    assert "x-request-id" not in named.headers, "the proxy adds it"
    for odd in ("short", "with spaces in it", "x" * 65):
        assert len(client.get("/health", headers={"x-request-id": odd}).headers["x-request-id"]) == 16


def test_the_router_takes_the_replica_that_is_named_and_then_any():
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc"]
    router = NamedReplica.__new__(NamedReplica)

    def chosen(name):
        context = SimpleNamespace(should_backoff=False)
        pending = SimpleNamespace(metadata=SimpleNamespace(session_id=name), routing_context=context)
        obtained = asyncio.run(router.choose_replicas(replicas, pending))
        assert context.should_backoff
        return [[item.replica_id.unique_id for item in rank] for rank in obtained]

    assert chosen("b") == [["b"], ["a", "c"]]
    assert chosen("gone") == [["a", "b", "c"]] == chosen("")
    assert asyncio.run(router.choose_replicas(replicas)) == [replicas]


@pytest.mark.parametrize(
    "requests, rows, wanted", [(0, {}, 0), (12, {}, 1), (30, {"a": 4, "b": 4}, 2.5), (6, {"a": 256, "b": 512}, 3)]
)
def test_replicas_follow_jobs_and_rows(requests, rows, wanted):
    metrics = {"rows": rows} if rows else None
    load = EngineLoad(12, 256)
    assert load(SimpleNamespace(total_num_requests=requests, aggregated_metrics=metrics)) == (wanted, {})


def test_the_policy_needs_no_sigma0():
    """Serve's controller unpickles it; to load torch there would take its time and memory."""
    scaling = scaling_of(RaySettings(max_replicas=3))["autoscaling_config"]
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())(1, 2); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], input=scaling.policy.get_serialized_policy_def(), check=True)
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 3, 12)
    assert scaling_of(RaySettings(replicas=3)) == {"num_replicas": 3}


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"replicas": 0}, "greater than or equal to 1"),
        ({"budget": "seconds=1"}, "need ladder"),
        ({"nonsense": 1}, "not permitted"),
        ({"kv_memory": "much"}, "byte string"),
    ],
)
def test_settings_are_checked(wrong, told):
    with pytest.raises(ValidationError, match=told):
        RaySettings(**wrong)


def test_settings_come_to_bounds_and_claims():
    assert RaySettings().bounds == (1, 1) and RaySettings(replicas=3).bounds == (3, 3)
    assert RaySettings(min_replicas=2).bounds == (2, 2) and RaySettings(max_replicas=4).bounds == (1, 4)
    assert RaySettings(device="cpu", threads=4).claims == {"num_cpus": 4.0, "num_gpus": 0.0}
    assert RaySettings(device="cuda").claims == {"num_cpus": 1.0, "num_gpus": 1.0}
    assert RaySettings(device="cuda", gpus=0.5).claims["num_gpus"] == 0.5
    assert "sk-secret" not in repr(RaySettings(api_key="sk-secret"))
    assert RaySettings(**json.loads('{"kv_memory": "1GiB", "threads": 2}')).limits.kv_bytes == 2**30


def test_the_file_that_serve_run_takes():
    text = (Path(import_module("sigma0.serve.cluster.app").__file__).parents[1] / "serve.yaml").read_text()
    described = ServeDeploySchema.model_validate(yaml.safe_load(text))
    (application,) = described.applications
    assert described.http_options.host == "127.0.0.1" and application.route_prefix == "/"
    module, _, name = application.import_path.partition(":")
    assert getattr(import_module(module), name) is build
    assert isinstance(build(RaySettings(**application.args)), Application)


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--replicas", "2", "--gpus", "1"], "--replicas, --gpus need --ray"),
        (["--min", "1", "--max", "2"], "--min, --max need --ray"),
        (["--address", "auto"], "--address needs --ray"),
        (["--ray", "--replicas", "2", "--max", "3"], "leave it out"),
        (["--ray", "--min", "3", "--max", "2"], "is over max_replicas=2"),
        (["--ray", "--dtype", "int8"], "'float32'"),
        (["nowhere", "--ray"], "no such model"),
        (["--ray", "--address", "127.0.0.1:1"], "no Ray cluster answers at '127.0.0.1:1'"),
        (["--ray", "--host", "203.0.113.1"], "cannot listen on 203.0.113.1"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, told):
    result = run("serve", "--port", "0", *arguments)
    assert result.exit_code == 2 and told in " ".join(result.stderr.split())


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = run("serve", "--ray", "--port", "0")
    assert result.exit_code == 2 and "pip install 'sigma0-lm[ray]'" in " ".join(result.stderr.split())


def test_the_server_needs_no_ray():
    """Who does not ask for a cluster loads nothing of Ray."""
    names = "api.app api.ladder api.tracing engine.process command cluster.cluster cluster.command cluster.settings"
    loads = "".join(f"import sigma0.serve.{name}\n" for name in names.split())
    subprocess.run([sys.executable, "-c", f"import sys\nsys.modules['ray'] = None\n{loads}"], check=True)


def test_no_more_engines_than_a_machine_has_room_for():
    check_room(RaySettings(replicas=2, device="cpu"), {"CPU": 2.0})
    for settings, told in (
        (RaySettings(replicas=3, device="cpu"), "3 engines claim 3 CPUs, and this machine has 2"),
        (RaySettings(replicas=1, device="cuda"), "1 engines claim 1 GPUs, and this machine has 0"),
    ):
        with pytest.raises(ValueError, match=told):
            check_room(settings, {"CPU": 2.0})
