"""The Host header: loopback names and what is allowed are answered for, and a rebound name is not."""

import asyncio

import httpx
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

pytest.importorskip("fastapi")

from sigma0.cli import app
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.hosts import HostCheck, check_hosts, hosts_of
from sigma0.serve.cluster.settings import RaySettings
from tests.serve.api.test_refusals import error_of
from tests.serve.conftest import served

LOOPBACK = (
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:80",
    "127.9.9.9",
    "[::1]",
    "[::1]:8000",
)
ELSEWHERE = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.5",
    "[::2]",
)
BROKEN = ("", ":", "[::1", "::1", "localhost:x", "a b", "localhost,evil.example", "user@localhost", "localhost/x")


@pytest.mark.parametrize("host", [*LOOPBACK, *ELSEWHERE, *BROKEN])
def test_loopback_names_alone_are_answered_for(host):
    assert HostCheck(None, ()).allows(host) == (host in LOOPBACK)


@pytest.mark.parametrize(
    "entry, taken, refused",
    [
        ("Models.example", ["models.example", "MODELS.example:80", "models.example."], ["a.models.example", "example"]),
        ("*.example", ["a.example", "b.a.example:80"], ["example", "aexample"]),
        ("10.0.0.5", ["10.0.0.5", "10.0.0.5:80"], ["10.0.0.6"]),
        ("10.0.0.0/8", ["10.9.9.9"], ["11.0.0.1", "10.evil.example"]),
        ("fe80::1", ["[fe80::1]", "[FE80:0::1]:80"], ["[fe80::2]"]),
        ("*", ["evil.example"], []),
    ],
)
def test_what_is_allowed_is_answered_for_too(entry, taken, refused):
    check = HostCheck(None, (entry,))
    assert entry == "*" or all(map(check.allows, [*taken, *LOOPBACK]))
    assert not any(map(check.allows, refused))


def test_where_a_server_listens_on_all_addresses_no_name_is_let_in():
    for address in ("0.0.0.0", "::", ""):
        check = HostCheck(None, hosts_of(address))
        assert check.allows("192.168.1.7:8000") and check.allows("[fd00::7]:8000")
        assert not check.allows("evil.example") and not check.allows("1.evil.example")
    assert HostCheck(None, hosts_of("192.168.1.7")).allows("192.168.1.7")
    assert HostCheck(None, hosts_of("fe80::7%eth0")).allows("[fe80::7]")
    assert HostCheck(None, hosts_of("models.lan")).allows("models.lan:8000")


@pytest.mark.parametrize("entry", ["http://a", "a:80", "", "a b", "10.0.0.0/99", "a/b", "**", "a.*"])
def test_what_is_no_host(entry):
    with pytest.raises(ValueError, match="is no host: a name"):
        check_hosts([entry])
    for settings in (ServerSettings, RaySettings):
        with pytest.raises(ValidationError, match="is no host"):
            settings(allowed_hosts=(entry,))


PATHS = ("/", "/health", "/metrics", "/v1/models", "/page/main.js", "/openapi.json", "/v1/nothing")


def test_a_rebound_name_reaches_nothing(plain):
    for path in PATHS:
        error = error_of(httpx.get(f"{plain.url}{path}", headers={"Host": "evil.example"}), 421)
        assert error["code"] == "host_not_allowed" and "'evil.example'" in error["message"]
        assert "--allowed-host" in error["message"]
    body = {"model": "pocket", "prompt": "Hi", "max_tokens": 1}
    error_of(httpx.post(f"{plain.url}/v1/completions", json=body, headers={"Host": "evil.example"}), 421)
    port = plain.url.rpartition(":")[2]
    for host in (f"localhost:{port}", f"[::1]:{port}"):
        assert httpx.get(f"{plain.url}/health", headers={"Host": host}).status_code == 200


def test_an_allowed_name_reaches_all(pocket):
    with served(pocket, ServerSettings(allowed_hosts=("models.example",))) as server:
        for host, status in (("models.example", 200), ("evil.example", 421)):
            assert httpx.get(f"{server.url}/v1/models", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("hosts", [[], [b"localhost", b"localhost"], [b"localhost", b"evil.example"]])
def test_there_is_one_host_and_no_other(hosts):
    sent = []

    async def send(message):
        sent.append(message)

    async def inside(*_):
        raise AssertionError("it was let in")

    scope = {"type": "http", "headers": [(b"host", host) for host in hosts], "method": "GET", "path": "/"}
    asyncio.run(HostCheck(inside, ("localhost",))(scope, None, send))
    assert sent[0]["status"] == 421


def test_the_option_is_checked_before_anything_is_loaded():
    told = CliRunner().invoke(app, ["serve", "--allowed-host", "http://models.example"])
    assert told.exit_code == 2 and "--allowed-host: 'http://models.example' is no host" in told.stderr
    assert "loading" not in told.stderr
