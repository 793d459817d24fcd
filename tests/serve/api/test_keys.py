"""API keys from an option, from the environment and from a file."""

import os

import httpx
import pytest

pytest.importorskip("fastapi")

from pydantic import SecretStr, ValidationError
from typer.testing import CliRunner

from sigma0.cli import app
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.keys import KeyRing, read_keys
from tests.marks import slow
from tests.serve.conftest import served


@pytest.fixture
def keys(tmp_path):
    """A file of keys that is written and given a mode."""
    path = tmp_path / "keys"

    def write(content, mode=0o600):
        path.write_bytes(content)
        path.chmod(mode)
        return path

    return write


def secrets(path):
    return [key.get_secret_value() for key in read_keys(path)]


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640])
def test_one_key_a_line(keys, mode):
    assert secrets(keys(b"first\n\n# of the other team\n  second  \r\nth#rd", mode)) == ["first", "second", "th#rd"]


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o666])
def test_a_file_that_everybody_may_read_or_write_is_refused(keys, mode):
    with pytest.raises(ValueError, match=f"mode {mode:03o}.*chmod 600") as refused:
        read_keys(keys(b"hidden\n", mode))
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "holds no key"),
        (b"\n# nothing\n", "holds no key"),
        (b"good\nhid den\n", "line 2 of .* is no key"),
        (b"hid\tden\n", "line 1 of .* is no key"),
        (b"\xff\xfe", "is no text"),
    ],
)
def test_what_is_no_key_is_refused_without_being_shown(keys, content, why):
    with pytest.raises(ValueError, match=why) as refused:
        read_keys(keys(content))
    assert "hid" not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the keys in .*nowhere: No such file"):
        read_keys(tmp_path / "nowhere")


def test_a_ring_has_its_keys_and_no_others():
    ring = KeyRing([SecretStr("one"), SecretStr("zwölf")])
    assert [ring.has(key) for key in (b"one", "zwölf".encode(), b"on", b"onee", b"", b"One")] == [True] * 2 + [
        False
    ] * 4


def test_a_ring_compares_all_of_its_keys(monkeypatch):
    compared = []

    def equal(left, right):
        compared.append(right)
        return left == right

    monkeypatch.setattr("hmac.compare_digest", equal)
    ring = KeyRing([SecretStr(name) for name in ("one", "two", "three")])
    assert ring.has(b"one") and len(compared) == 3


def test_every_key_opens_the_server(pocket, keys):
    settings = ServerSettings(api_key=SecretStr("option"), api_key_file=keys(b"first\nsecond\n"))
    with served(pocket, settings) as server:
        statuses = {
            given: httpx.get(f"{server.url}/v1/models", headers={"authorization": given} if given else {}).status_code
            for given in ("Bearer option", "bearer first", "Bearer second", "Bearer third", "Basic first", "first", "")
        }
    assert list(statuses.values()) == [200, 200, 200, 401, 401, 401, 401]


def test_a_file_alone_closes_the_server(pocket, keys):
    with served(pocket, ServerSettings(api_key_file=keys(b"first\n"))) as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer first"}).status_code == 200


@pytest.mark.parametrize("ray", [False, slow(True)])
def test_the_command_refuses_a_bad_file_before_it_loads_a_model(keys, ray):
    if ray:
        pytest.importorskip("ray")
    arguments = ["--api-key-file", str(keys(b"hidden\n", 0o644)), *(["--ray"] if ray else [])]
    told = CliRunner().invoke(app, ["serve", "pocket", *arguments])
    assert told.exit_code == 2 and "chmod 600" in told.output and "hidden" not in told.output


def test_settings_do_not_show_keys(keys):
    settings = ServerSettings(api_key=SecretStr("hidden"), api_key_file=keys(b"hidden\n"))
    assert "hidden" not in repr(settings) and len(settings.keys) == 2
    with pytest.raises(ValidationError) as refused:
        ServerSettings(api_key=SecretStr("hid den"))
    assert "hid den" not in str(refused.value)


def test_the_file_that_was_opened_is_the_one_whose_mode_counts(keys, monkeypatch):
    path = keys(b"first\n", 0o644)
    monkeypatch.setattr(os, "stat", lambda *_, **__: None)
    with pytest.raises(ValueError, match="mode 644"):
        read_keys(path)
