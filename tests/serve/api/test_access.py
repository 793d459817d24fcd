"""Who reaches the server: API keys, the Host header, and how large a body may be."""

import asyncio
import json
import os
from unittest import mock

import httpx
import openai
import pytest
from pydantic import SecretStr, ValidationError

from sigma0.serve.api.access import BODIES_AT_ONCE, BodyLimit, ServerSettings
from sigma0.serve.api.errors import ApiError
from sigma0.serve.api.hosts import HostCheck, check_hosts, hosts_of
from sigma0.serve.api.keys import KeyRing, read_keys
from sigma0.serve.cluster.settings import RaySettings
from tests.marks import slow
from tests.serve.api.test_chat import STORY
from tests.serve.api.test_refusals import error_of
from tests.serve.conftest import served
from tests.test_cli import run


@pytest.fixture
def keys(tmp_path):
    """A file of keys that is written and given a mode."""

    def write(content, mode=0o600):
        path = tmp_path / "keys"
        path.write_bytes(content)
        path.chmod(mode)
        return path

    return write


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640])
def test_one_key_a_line(keys, mode):
    result = read_keys(keys(b"first\n\n# of the other team\n  second  \r\nth#rd", mode))
    assert [key.get_secret_value() for key in result] == ["first", "second", "th#rd"]


@pytest.mark.parametrize(
    "content, mode, why",
    [
        *((b"hidden\n", mode, f"mode {mode:03o}.*chmod 600") for mode in (0o644, 0o604, 0o602, 0o666)),
        (b"", 0o600, "holds no key"),
        (b"\n# nothing\n", 0o600, "holds no key"),
        (b"good\nhid den\n", 0o600, "line 2 of .* is no key"),
        (b"hid\tden\n", 0o600, "line 1 of .* is no key"),
        (b"\xff\xfe", 0o600, "is no text"),
    ],
)
def test_a_file_that_others_may_read_or_that_holds_no_keys_is_refused_without_being_shown(
    keys, content, mode, why, monkeypatch
):
    path = keys(content, mode)
    # the mode that counts is that of the file that was opened
    monkeypatch.setattr(os, "stat", lambda *_, **__: None)
    with pytest.raises(ValueError, match=why) as refused:
        read_keys(path)
    assert "hid" not in str(refused.value)


def test_a_file_of_keys_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the keys in .*nowhere: No such file"):
        read_keys(tmp_path / "nowhere")


def test_a_ring_has_its_keys_and_no_others_and_compares_all_of_them(monkeypatch):
    ring, compared = KeyRing([SecretStr("one"), SecretStr("zwölf")]), []
    assert ring.has(b"one") and ring.has("zwölf".encode())
    assert not any(map(ring.has, (b"on", b"onee", b"", b"One")))
    monkeypatch.setattr("hmac.compare_digest", lambda left, right: compared.append(right) or left == right)
    assert KeyRing([SecretStr(name) for name in ("one", "two", "three")]).has(b"one") and len(compared) == 3


@pytest.mark.parametrize("option", [{}, {"api_key": SecretStr("option")}])
def test_every_key_opens_the_server_and_no_other(pocket, keys, option, caplog):
    caplog.set_level("DEBUG")
    settings = ServerSettings(**option, api_key_file=keys(b"first\nsecond\n"))
    assert "first" not in repr(settings) and "option" not in repr(settings)
    with served(pocket, settings) as server:
        statuses = {
            given: httpx.get(f"{server.url}/v1/models", headers={"authorization": given} if given else {}).status_code
            for given in ("bearer first", "Bearer second", "Bearer option", "Bearer third", "Basic first", "first", "")
        }
        for path in ("v1/models", "v1/sigma0", "metrics", "slots", "openapi.json", "v1/nothing", "/health"):
            for headers in ({}, {"Authorization": "Bearer third"}):
                answer = httpx.get(f"{server.url}/{path}", headers=headers)
                assert error_of(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert httpx.get(f"{server.url}/health").status_code == httpx.get(server.url).status_code == 200
        client = server.client.with_options(api_key="first")
        assert client.models.list().data[0].id == "pocket"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()
    assert "first" not in caplog.text
    assert list(statuses.values()) == [200, 200, 200 if option else 401, 401, 401, 401, 401]


@pytest.mark.parametrize(
    "arguments, reported",
    [
        (["--api-key-file", "{keys}"], "chmod 600"),
        slow(["--api-key-file", "{keys}", "--ray"], "chmod 600"),
        (["--tls-cert", "nowhere.pem"], "nowhere.pem: No such file"),
        slow(["--tls-cert", "nowhere.pem", "--ray"], "go with one engine: Ray's proxy listens"),
        (["--allowed-host", "http://models.example"], "--allowed-host: 'http://models.example' is no host"),
    ],
)
def test_the_command_refuses_them_before_it_loads_a_model(keys, arguments, reported):
    if "--ray" in arguments:
        pytest.importorskip("ray")
    path = keys(b"hidden\n", 0o644)
    result = run("serve", "pocket", *(item.format(keys=path) for item in arguments))
    assert result.exit_code == 2 and reported in " ".join(result.output.split())
    assert "hidden" not in result.output and "loading" not in result.output


def test_a_key_that_is_none_is_not_shown():
    with pytest.raises(ValidationError) as refused:
        ServerSettings(api_key=SecretStr("hid den"))
    assert "hid den" not in str(refused.value)


LOOPBACK = ("localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.9.9.9:80", "[::1]", "[::1]:8000")
ELSEWHERE = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[::2]")
BROKEN = ("", ":", "[::1", "::1", "localhost:x", "a b", "localhost,evil.example", "user@localhost", "localhost/x")


@pytest.mark.parametrize(
    "allowed, taken, refused",
    [
        ((), [], ["10.0.0.5", *ELSEWHERE, *BROKEN]),
        (["Models.example"], ["MODELS.example:80", "models.example."], ["a.models.example", "example"]),
        (["*.example"], ["a.example", "b.a.example:80"], ["example", "aexample"]),
        (["10.0.0.5"], ["10.0.0.5", "10.0.0.5:80"], ["10.0.0.6"]),
        (["10.0.0.0/8"], ["10.9.9.9"], ["11.0.0.1", "10.evil.example"]),
        (["fe80::1"], ["[fe80::1]", "[FE80:0::1]:80"], ["[fe80::2]"]),
        # of the addresses that a server listens on: of all of them no name is let in
        *((hosts_of(all_), ["192.168.1.7:8000", "[fd00::7]:8000"], ELSEWHERE[:4]) for all_ in ("0.0.0.0", "::", "")),
        (hosts_of("192.168.1.7"), ["192.168.1.7"], ["192.168.1.8"]),
        (hosts_of("fe80::7%eth0"), ["[fe80::7]"], ["[fe80::8]"]),
        (hosts_of("models.lan"), ["models.lan:8000"], ["lan"]),
    ],
)
def test_loopback_names_and_what_is_allowed_are_answered_for(allowed, taken, refused):
    check = HostCheck(None, allowed)
    assert all(map(check.allows, [*taken, *LOOPBACK])) and not any(map(check.allows, refused))


@pytest.mark.parametrize("entry", ["http://a", "a:80", "", "a b", "10.0.0.0/99", "a/b", "**", "a.*"])
def test_what_is_no_host(entry):
    with pytest.raises(ValueError, match="is no host: a name"):
        check_hosts([entry])
    for settings in (ServerSettings, RaySettings):
        with pytest.raises(ValidationError, match="is no host"):
            settings(allowed_hosts=(entry,))


@pytest.mark.parametrize("path", ["", "health", "metrics", "v1/models", "page/main.js", "openapi.json", "v1/nothing"])
def test_a_rebound_name_reaches_nothing(plain, path):
    error = error_of(httpx.get(f"{plain.url}/{path}", headers={"Host": "evil.example"}), 421)
    assert error["code"] == "host_not_allowed" and "'evil.example'" in error["message"]
    assert "--allowed-host" in error["message"]
    error_of(httpx.post(f"{plain.url}/{path}", json={}, headers={"Host": "evil.example"}), 421)


def test_an_allowed_name_reaches_all(pocket):
    for allowed, statuses in ((("models.example",), [200, 200, 421]), (("*",), [200, 200, 200])):
        with served(pocket, ServerSettings(allowed_hosts=allowed)) as server:
            hosts = (server.url.replace("http://127.0.0.1", "localhost"), "models.example", "evil.example")
            result = [httpx.get(f"{server.url}/v1/models", headers={"Host": host}).status_code for host in hosts]
        assert result == statuses


@pytest.mark.parametrize("hosts", [[], [b"localhost", b"localhost"], [b"localhost", b"evil.example"]])
def test_there_is_one_host_and_no_other(hosts):
    send = mock.AsyncMock()
    scope = {"type": "http", "headers": [(b"host", host) for host in hosts], "method": "GET", "path": "/"}
    asyncio.run(HostCheck(None, ("localhost",))(scope, None, send))
    assert send.call_args_list[0].args[0]["status"] == 421


def test_the_size_of_a_body(pocket):
    with served(pocket, ServerSettings(max_body_bytes=1000)) as server:
        address, headers = f"{server.url}/v1/completions", {"Content-Type": "application/json"}
        body = json.dumps({"model": "pocket", "prompt": "a" * 2000}).encode()
        error_of(httpx.post(address, content=body, headers=headers), 413)
        # without a length beforehand
        error_of(httpx.post(address, content=iter([body[:600], body[600:]]), headers=headers), 413)
        small = json.dumps({"model": "pocket", "prompt": STORY}).encode()
        assert httpx.post(address, content=iter([small]), headers=headers).status_code == 200


async def test_bodies_that_are_never_finished_do_not_pile_up():
    """As many as fit wait; one more is asked to come back, and has a place once the others have left."""
    release, refused, held = asyncio.Event(), [], []
    part = {"type": "http.request", "body": b"x" * 10, "more_body": True}

    async def app(scope, receive, send):
        try:
            await receive()
        except ApiError as error:
            refused.append(error)
            return
        held.append(limit._held)
        await release.wait()

    receive, whole = mock.AsyncMock(return_value=part), mock.AsyncMock(return_value={**part, "more_body": False})
    limit = BodyLimit(app, 10)
    scope = {"type": "http", "headers": [], "path": "/", "method": "POST"}
    tasks = [asyncio.create_task(limit(scope, receive, None)) for _ in range(BODIES_AT_ONCE)]
    await asyncio.sleep(0)
    assert not refused
    await limit(scope, receive, None)
    assert [error.status_code for error in refused] == [429] and "Retry-After" in refused[0].headers
    release.set()
    await asyncio.gather(*tasks)
    await limit(scope, receive, None)
    assert len(refused) == 1 and limit._held == 0
    await limit(scope, whole, None)
    assert held[-1] == 0, "a whole body is not held any more"
