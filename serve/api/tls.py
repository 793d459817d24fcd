"""TLS: files that uvicorn could not use are refused before anything is loaded."""

import ssl
from pathlib import Path


def check_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> None:
    """Refuses files that do not make a TLS server.

    Args:
        cert: Certificate chain in PEM; None: no TLS.
        key: Its private key in PEM; None: in `cert`.
        client_ca: Authorities of clients' certificates in PEM; None: clients need none.

    Raises:
        ValueError: If `cert` is missing beside the others, or a file cannot be read, is no PEM, is encrypted, or does
            not belong to the others.
    """
    if cert is None:
        for name, value in (("tls_key", key), ("tls_client_ca", client_ca)):
            if value is not None:
                raise ValueError(f"{name} needs tls_cert")
        return
    for path in (cert, key, client_ca):
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    current = str(cert) if key is None else f"{cert} and {key}"
    try:
        # an empty password: else OpenSSL would ask the terminal for one
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        raise ValueError(f"{current}: no certificate and private key in PEM that belong together ({error})") from error
    if client_ca is None:
        return
    try:
        context.load_verify_locations(client_ca)
    except ssl.SSLError as error:
        raise ValueError(f"{client_ca}: no certificates of authorities in PEM ({error})") from error
