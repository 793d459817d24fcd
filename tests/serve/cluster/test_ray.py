"""The clients' suite against a cluster of two replicas on this machine, and what only several engines can get wrong.

Most tests speak to the application as `serve run` deploys it, through Serve's own proxy. Those that look into the
server speak to the same app in this process over the same replicas.
"""

import inspect
import json
import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType

import httpx
import psutil
import pytest

pytest.importorskip("ray")

from sigma0.ladder import Always, FidelityLadder
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import create_app
from tests.serve.api import (
    test_chat,
    test_completions,
    test_description,
    test_fields,
    test_ladder,
    test_load,
    test_refusals,
)
from tests.serve.api import test_info as test_information
from tests.serve.api.test_chat import ASKED, LOST, SAID, leaving, lines, post
from tests.serve.api.test_connections import ENDLESS
from tests.serve.api.test_description import untooled  # noqa: F401
from tests.serve.api.test_info import scraped
from tests.serve.api.test_load import held, until  # noqa: F401
from tests.serve.api.test_refusals import error_of
from tests.serve.cluster.ray_served import SpiedRayService, cluster, served_on_ray
from tests.serve.conftest import Served, two_rungs

# whether a request goes through Ray at all, one case tells
pytestmark = [pytest.mark.slow, pytest.mark.grid(fast=0, slow=1)]

SUITE = (
    test_chat,
    test_completions,
    test_information,
    test_refusals,
    test_description,
    test_fields,
    test_ladder,
    test_load,
)
# What cannot run here, and why. Nor do tests of the page, which watch an engine token by token, and of parts that no
# client sees.
LEFT_OUT = {
    "test_refusals_a_failure_fails_one_request_alone": "reads in this process's log what the replica logs; see below",
    "test_ladder_routing_reads_and_writes_nothing_twice": "counts the passes of a model of this process",
    "test_info_metrics": "reads figures at once, which replicas report every second; see below",
}
# What looks into the server, and so needs it in this process.
SPYING = {
    "test_chat_n_choices_have_seeds_of_their_own",
    "test_chat_what_is_asked_for_reaches_the_service",
    "test_chat_effort_sets_the_exit",
    "test_chat_roles_and_parts",
    "test_refusals_what_nobody_foresaw",
    "test_fields_logits_are_biased",
}
# One of each kind of request; the others are the service's own, whichever engines are after it.
IN_CI = {
    "test_chat_a_stream_tells_the_role_each_token_and_the_end",
    "test_chat_openais_client_reads_both",
    "test_chat_n_choices_have_seeds_of_their_own",
    "test_completions_texts_and_ids_alone_and_in_lists",
    "test_info_health_and_the_page",
    "test_refusals_limits_of_a_prompt",
    "test_fields_cached_tokens_tell_of_ones_own_salt_alone",
    "test_ladder_routing_hands_up_what_the_verdict_does_not_let_pass",
    "test_load_a_full_queue_asks_to_come_back",
    "test_load_who_leaves_a_stream_frees_the_service",
}
CLIENTS = {"plain", "held", "climbing", "description"}


def _suite():
    for module in SUITE:
        short = module.__name__.rpartition(".")[2]
        for name, test in vars(module).items():
            asks = name.startswith("test_") and inspect.isfunction(test) and test.__module__ == module.__name__
            # the others ask no server
            if asks and (CLIENTS & set(inspect.signature(test).parameters) or "served(" in inspect.getsource(test)):
                yield f"{short}_{name.removeprefix('test_')}", test


def _order(obtained):
    """Those that make engines anew come last: what the others compare, engines have read by then."""
    name, test = obtained
    return name in SPYING, "plain" not in inspect.signature(test).parameters


def _marked(name, test):
    """A test of its own, whose marks the suite's does not get."""
    current = FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    vars(current).update(vars(test))
    return current if name in IN_CI else pytest.mark.exhaustive(current)


FOUND = dict(sorted(_suite(), key=_order))
globals().update({name: _marked(name, test) for name, test in FOUND.items() if name not in LEFT_OUT})


@pytest.fixture(scope="module")
def replicas():
    # a folder of few letters: names of sockets may not be long
    with tempfile.TemporaryDirectory(prefix="s0", dir="/tmp") as folder, cluster(folder) as obtained:
        yield obtained


@pytest.fixture(scope="module", autouse=True)
def on_ray(replicas, pocket):
    """What the suite's tests start for themselves stands before the cluster too."""

    def served(_, *arguments, **settings):
        return served_on_ray(replicas, pocket, *arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        for module in (test_chat, test_load, test_refusals, test_ladder):
            patch.setattr(module, "served", served)
        yield


@pytest.fixture(scope="module")
def proxied(replicas):
    server = Served(None, replicas.url, None)
    server.client.chat.completions.create(model="pocket", messages=ASKED, max_tokens=20)
    return server


@pytest.fixture(scope="module")
def spied(replicas, pocket):
    with served_on_ray(replicas, pocket) as server:
        yield server


@pytest.fixture
def plain(request):
    return request.getfixturevalue("spied" if request.node.originalname in SPYING else "proxied")


@pytest.fixture(scope="module")
def climbing(replicas, pocket):
    with served_on_ray(replicas, pocket, ladder=FidelityLadder(two_rungs(pocket), policy=Always())) as server:
        yield server


@pytest.fixture(scope="module")
def description(request, replicas):
    service = SpiedRayService(request.getfixturevalue("untooled"), replicas, None)
    app = create_app(service, ServerSettings(max_new_tokens=3, max_n=2, allowed_hosts=("testserver",)))
    yield test_description.described(app)
    service.close()


def by_replica(server, name):
    figures = scraped(server)[1].items()
    return {labels[0]: value for (known, *labels), value in figures if known == f"sigma0_replica_{name}"}


def test_nothing_is_left_out_that_is_not_there():
    assert set(LEFT_OUT) | SPYING | IN_CI <= set(FOUND) and len(FOUND) > 50


def test_it_listens_on_the_loopback_interface_alone(replicas, proxied):
    processes = psutil.Process().children(recursive=True)
    assert sum("EngineReplica" in item.name() or "ServeRepl" in item.name() for item in processes) >= 2
    sockets = [item for process in processes for item in process.net_connections("inet")]
    heard = [item.laddr.ip for item in sockets if item.status == psutil.CONN_LISTEN]
    assert len(heard) > 5 and {address.removeprefix("::ffff:") for address in heard} == {"127.0.0.1"}


def test_a_chat_comes_back_to_the_replica_that_read_it(proxied, replicas):
    replicas.make_anew()
    names = ("Sara", "John", "Mary", "Daniel", "Sandra", "Julie")
    said = "{0} went to the park. Then {0} went to the kitchen. Where is {0}?"
    chats = {name: [{"role": "user", "content": said.format(name)}] for name in names}

    def turn(name):
        output = post(proxied, messages=chats[name], cache_salt=name).json()
        said = output["choices"][0]["message"]["content"]
        chats[name] += [{"role": "assistant", "content": said}, {"role": "user", "content": f"Where is {name} now?"}]
        return output["usage"]["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(len(names)) as pool:
        first = list(pool.map(turn, names))
        # in another order, so that taking turns would not do
        second = list(pool.map(turn, reversed(names)))
        third = list(pool.map(turn, names))
    assert first == [0] * 6 and all(second), (first, second)
    assert all(later > before for later, before in zip(third, reversed(second), strict=True))
    until(lambda: sum(by_replica(proxied, "tokens_total").values()) > 0)
    assert all(status.tokens > 0 for status in replicas.stands()), "both have work"


def test_figures_are_told_of_each_replica_and_together(proxied, replicas):
    replicas.make_anew()
    post(proxied)
    post(proxied, messages=LOST, max_tokens=9)
    until(lambda: sum(by_replica(proxied, "tokens_total").values()) == 7 + 9)
    _, obtained = scraped(proxied)
    item = by_replica(proxied, "pages")
    assert len(item) == 2 and obtained["sigma0_pages",] == sum(item.values()) > 200
    assert by_replica(proxied, "rows_total").keys() == item.keys()
    assert obtained["sigma0_requests_total", "chat", "200"] >= 2 and 0 < obtained["sigma0_mean_depth",] < 6


def test_who_leaves_a_stream_ends_its_job_in_the_replica(proxied, replicas):
    replicas.make_anew()
    replicas.slow_down(0.02)
    with leaving(proxied, messages=LOST, **ENDLESS) as answer:
        output = (line for line in answer.iter_lines() if '"tokens": [{' in line)
        next(output)
        assert sum(status.running for status in replicas.stands()) == 1
    until(lambda: sum(status.running + status.waiting for status in replicas.stands()) == 0)
    assert sum(status.tokens for status in replicas.stands()) < 500
    more = {"model": "pocket", "messages": LOST, "n": 2, **ENDLESS}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{proxied.url}/v1/chat/completions", json=more, timeout=httpx.Timeout(5, read=0.5))
    until(lambda: sum(status.running + status.waiting for status in replicas.stands()) == 0)
    replicas.make_anew()


def test_a_failure_in_a_replica_fails_one_request_alone(proxied, replicas, tmp_path):
    replicas.make_anew()
    replicas.fail_next("broke on what somebody said")
    answer = post(proxied)
    error = error_of(answer, 500)
    assert error["type"] == "server_error" and answer.headers["x-request-id"] in error["message"]
    replicas.fail_next("broke")
    output = post(proxied, stream=True)
    assert output.status_code == 200 and json.loads(lines(output.text)[-1])["error"]["type"] == "server_error"
    replicas.make_anew()
    assert post(proxied).status_code == 200


def hear_of(replicas):
    """Lets the front hear of what engines have become: it asks them in periods, as the other apps of this file do."""
    asked = replicas.reports()
    until(lambda: all(now >= before + 8 for now, before in zip(replicas.reports(), asked, strict=True)))


def test_full_engines_ask_to_come_back(replicas, proxied):
    """One job runs and one waits in each of two replicas."""
    replicas.make_anew(1)
    replicas.hold()
    try:
        with ThreadPoolExecutor(12) as pool:
            hear_of(replicas)
            asked = [pool.submit(post, proxied, stream=bool(place % 2)) for place in range(12)]
            until(lambda: sum(item.done() for item in asked) == 8)
            refused = [item.result() for item in asked if item.done()]
            assert all(item.status_code == 429 and item.headers["retry-after"] == "1" for item in refused)
            until(lambda: {status.running + status.waiting for status in replicas.stands()} == {2})
            replicas.go_on()
            assert sorted(item.result().status_code for item in asked) == [200] * 4 + [429] * 8
    finally:
        replicas.go_on()
        replicas.make_anew()
        hear_of(replicas)


@pytest.mark.exhaustive
def test_a_replica_that_is_killed_under_load(proxied, replicas):
    """Whole answers come from the other one, streams break off in an error or are whole, and the replica comes back."""
    replicas.make_anew()
    chats = [[{"role": "user", "content": f"Once upon {place}"}] for place in range(24)]
    asked = [{"messages": chat, "max_tokens": 12, "sigma0": {"exit": {"mode": "full"}}} for chat in chats]
    # one after the other, so that each replica has read half of them
    wanted = [said(post(proxied, **item)) for item in asked]
    before = dict(replicas.who_stands())
    replicas.slow_down(0.03)
    with ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(post, proxied, stream=bool(place % 4), **item) for place, item in enumerate(asked)]
        until(lambda: all(now.tokens > before[pid].tokens + 40 for pid, now in replicas.who_stands()))
        victim, status = replicas.who_stands()[0]
        os.kill(victim, signal.SIGKILL)
        obtained = [answer.result() for answer in answers]
    assert [said(item) for item in obtained[::4]] == wanted[::4]
    broken = 0
    for place, answer in enumerate(obtained):
        if place % 4:
            output, end = streamed(answer)
            if end == "[DONE]":
                assert output == wanted[place]
            else:
                broken += 1
                assert json.loads(end)["error"]["type"] == "server_error"
                assert wanted[place].startswith(output) and len(output) < len(wanted[place])
    assert 0 < broken <= status.running + status.waiting < 24, "none at the other replica broke"
    assert [said(post(proxied, **item)) for item in asked[:4]] == wanted[:4]
    # a new process loads all that an engine needs
    until(lambda: len(replicas.pids() - {victim}) == 2, tries=40_000)
    until(lambda: len(by_replica(proxied, "pages")) == 2)
    assert httpx.get(f"{proxied.url}/health").status_code == 200
    assert said(post(proxied)) == SAID


def said(answer):
    return answer.json()["choices"][0]["message"]["content"]


def streamed(answer):
    """What a stream told of its text, and how it ended."""
    *output, end = lines(answer.text)
    values = [json.loads(line) for line in output]
    return "".join(value["choices"][0]["delta"].get("content", "") for value in values), end


def test_the_requests_of_all_engines_are_listed(replicas, proxied):
    def listed():
        return httpx.get(f"{proxied.url}/slots", timeout=60).json()

    replicas.hold()
    try:
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(post, proxied, max_tokens=4) for _ in range(2)]
            until(lambda: len(listed()) == 2)
            output = listed()
            replicas.go_on()
            answers = [item.result() for item in asked]
    finally:
        replicas.go_on()
    names = {report.engine for report in replicas.report("test")}
    # a chat returns to the engine that read it
    assert {item["engine"] for item in output} <= names and len(names) == 2
    assert {item["state"] for item in output} == {"prefill"}
    ids = {answer.headers["x-request-id"][:8] for answer in answers}
    assert {item["id"].rpartition("-")[0] for item in output} == ids
    until(lambda: listed() == [])
