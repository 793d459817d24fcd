"""TLS: what the server shows, whom it lets in, and files that it refuses."""

import datetime
import socket
import ssl
from contextlib import closing

import httpx
import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sigma0.serve.api.tls import check_tls
from tests.serve.api.test_chat import ASKED, SAID
from tests.serve.conftest import commanded


def named(name):
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def certificate(folder, name, issuer=None, password=None):
    """A key and a certificate in files; `issuer` is what this gave for an authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.timezone.utc)
    day = datetime.timedelta(days=1)
    made = (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer[0] if issuer else name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(issuer[1] if issuer else key, hashes.SHA256())
    )
    lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    cert_file, key_file = folder / f"{name}.pem", folder / f"{name}.key"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, lock))
    return name, key, cert_file, key_file


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An authority, a server's certificate and a client's, and another authority with a client."""
    folder = tmp_path_factory.mktemp("tls")
    authority, stranger = certificate(folder, "authority"), certificate(folder, "stranger")
    return {
        "folder": folder,
        "authority": authority,
        "server": certificate(folder, "server", authority),
        "client": certificate(folder, "client", authority),
        "strange": certificate(folder, "strange", stranger),
        "locked": certificate(folder, "locked", authority, b"secret"),
    }


def trusting(files, client=None):
    context = ssl.create_default_context(cafile=str(files["authority"][2]))
    if client is not None:
        context.load_cert_chain(*client[2:])
    return context


def test_answers_come_over_tls_and_nothing_without(pocket, files):
    _, _, cert, key = files["server"]
    with commanded(pocket, tls_cert=cert, tls_key=key) as (port, _):
        body = {"model": "pocket", "messages": ASKED, "max_tokens": 20}
        url = f"https://localhost:{port}/v1/chat/completions"
        with httpx.Client(verify=trusting(files), timeout=60) as client:
            assert client.post(url, json=body).json()["choices"][0]["message"]["content"] == SAID
            streamed = client.post(url, json={**body, "stream": True}).text
            assert streamed.endswith("data: [DONE]\n\n") and "bedroom" in streamed
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{port}/health", timeout=60)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"https://localhost:{port}/health", timeout=60)


def test_clients_need_a_certificate_of_the_authority_and_one_file_may_hold_key_and_certificate(pocket, files):
    _, _, cert, key = files["server"]
    both = files["folder"] / "both.pem"
    both.write_bytes(key.read_bytes() + cert.read_bytes())
    with commanded(pocket, tls_cert=both, tls_client_ca=files["authority"][2]) as (port, _):
        url = f"https://localhost:{port}/health"
        assert httpx.get(url, verify=trusting(files, files["client"]), timeout=60).status_code == 200
        for other in (None, files["strange"]):
            with pytest.raises(httpx.HTTPError):
                httpx.get(url, verify=trusting(files, other), timeout=60)


def test_half_a_handshake_does_not_keep_a_socket(pocket, files):
    _, _, cert, key = files["server"]
    with (
        commanded(pocket, tls_cert=cert, tls_key=key, header_timeout=0.2) as (port, _),
        closing(socket.create_connection(("127.0.0.1", port), timeout=30)) as opened,
    ):
        opened.sendall(b"\x16\x03\x01")
        # asyncio and uvloop wait for a minute by default, and this socket for half of that
        assert opened.recv(100) == b""


@pytest.mark.parametrize(
    ("cert", "key", "client_ca", "why"),
    [
        ("server.pem", "client.key", None, "belong together"),
        ("server.pem", None, None, "belong together"),
        ("server.key", "server.key", None, "belong together"),
        ("nowhere.pem", "server.key", None, "cannot read .*nowhere.pem: No such file"),
        ("server.pem", "nowhere.key", None, "cannot read .*nowhere.key: No such file"),
        ("locked.pem", "locked.key", None, "belong together"),
        ("server.pem", "server.key", "server.key", "no certificates of authorities"),
        (None, "server.key", None, "tls_key needs tls_cert"),
        (None, None, "authority.pem", "tls_client_ca needs tls_cert"),
    ],
)
def test_files_that_make_no_server_are_refused(files, cert, key, client_ca, why):
    paths = (None if name is None else files["folder"] / name for name in (cert, key, client_ca))
    with pytest.raises(ValueError, match=why):
        check_tls(*paths)
