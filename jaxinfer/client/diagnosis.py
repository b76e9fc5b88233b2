"""Diagnosis of failed connections: gRPC reports only the error of its last address, and retries hopeless cases."""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
from collections.abc import Callable

from jaxinfer.client.connect import TLS
from jaxinfer.client.errors import Incompatible, ServerError, Unavailable

Explain = Callable[[ServerError], ServerError]

_SECONDS = 5.0
_NO_CONNECTION = "failed to connect to all addresses"
_SETTINGS, _ALERT = 4, 0x15  # frame type of HTTP/2, record type of TLS
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
_WRONG_NAMES = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH, and that of an IP address


def explainer(target: str, tls: bool | TLS) -> Explain:
    """Return `explained` for a client's target."""
    settings = TLS() if tls is True else tls or None
    return functools.partial(explained, target=target, tls=settings)


def explained(error: ServerError, target: str, tls: TLS | None) -> ServerError:
    """Return an `Incompatible` instead of ``error`` if certainly no retry can succeed.

    It makes a new connection, which may take seconds.

    Args:
        tls: None: a connection without TLS.
    """
    if not isinstance(error, Unavailable) or _NO_CONNECTION not in error.message:
        return error
    with contextlib.suppress(OSError, ValueError):  # no server listens, or the target is not a host and port
        host, port = _host_and_port(target)
        why = _why_not_plain(host, port) if tls is None else _why_not_tls(host, port, tls)
        return error if why is None else Incompatible(f"{target}: {why}", error.code)
    return error


def _host_and_port(target: str) -> tuple[str, int]:
    """Split HOST:PORT. Raises ValueError: the target has another form."""
    host, _, port = target.removeprefix("dns:///").rpartition(":")
    return host.strip("[]"), int(port)


def _why_not_plain(host: str, port: int) -> str | None:
    with socket.create_connection((host, port), _SECONDS) as line:
        line.sendall(_HELLO)
        with contextlib.suppress(ConnectionError):
            answer = line.recv(9)
            if answer[:5] == b"HTTP/":
                return "this port speaks HTTP/1, not gRPC: the server's grpc_port is another one"
            if answer[3:4] == bytes([_SETTINGS]) and answer[0] != _ALERT:
                return None
    with contextlib.suppress(OSError):
        _handshake(host, port, _context(TLS(), verify=False), host)
        return "the server wants TLS: give tls=True, or tls=TLS(ca=...) for a certificate of your own"
    return None


def _why_not_tls(host: str, port: int, tls: TLS) -> str | None:
    name = tls.server_name or host
    try:
        answered = _handshake(host, port, _context(tls, verify=True), name)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _WRONG_NAMES:
            return f"the server's certificate is not for {name!r}: give TLS(server_name=...) the name that it bears"
        signed = f"the file ca={str(tls.ca)!r}" if tls.ca is not None else "the system's authorities: give TLS(ca=...)"
        return f"the server's certificate is not signed by {signed} ({error.verify_message})"
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
            return "the server speaks no TLS on this port: leave tls out"
        answered = "CERTIFICATE" not in (error.reason or "") and "UNKNOWN_CA" not in (error.reason or "")
    if answered:
        return None
    if tls.cert is None:
        return "the server wants a certificate of the client's: give TLS(cert=..., key=...)"
    return f"the server does not accept the client's certificate {str(tls.cert)!r}"


def _handshake(host: str, port: int, context: ssl.SSLContext, name: str) -> bool:
    """Make a TLS handshake; return whether the server responds after it. A server that rejects the client's
    certificate, or requires one, ends the connection instead, with or without an alert.

    Raises:
        OSError: the connection or (`ssl.SSLError`) the handshake failed.
    """
    with (
        socket.create_connection((host, port), _SECONDS) as line,
        context.wrap_socket(line, server_hostname=name) as wrapped,
    ):
        try:
            wrapped.sendall(_HELLO)
            return bool(wrapped.recv(1))
        except (ConnectionError, ssl.SSLEOFError):
            return False


def _context(tls: TLS, *, verify: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.check_hostname = verify
    context.verify_mode = ssl.CERT_REQUIRED if verify else ssl.CERT_NONE
    if verify and tls.ca is not None:
        context.load_verify_locations(tls.ca)
    elif verify:
        context.load_default_certs()
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context
