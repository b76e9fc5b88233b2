"""Tests of encrypted connections, with certificates on both sides."""

from __future__ import annotations

import asyncio
import pathlib
import shutil
import socket
import subprocess

import pytest

from jaxinfer import client as c
from tests.client.serving import SEED, expected, served
from tests.serve.live import live_fake

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


def certify(folder: pathlib.Path, name: str) -> tuple[str, str]:
    """Return a self-signed certificate and its key."""
    cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-days", "2"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def test_tls_on_both_sides(tmp_path: pathlib.Path) -> None:
    cert, key = certify(tmp_path, "server.test")
    own_cert, own_key = certify(tmp_path, "client.test")
    with served(tls_cert=cert, tls_key=key, tls_client_ca=own_cert) as run:
        tls = c.TLS(ca=cert, cert=own_cert, key=own_key, server_name="server.test")
        with c.Client(run.target, tls=tls, api_key="any", timeout=10) as client:
            assert client.generate("Hi", max_tokens=9, seed=SEED).text == expected("Hi", 9)
        strangers = (
            c.TLS(ca=cert, server_name="server.test"),
            c.TLS(ca=own_cert, server_name="server.test"),
            True,
            False,
        )
        for stranger in strangers:
            with c.Client(run.target, tls=stranger, retry=None, timeout=5) as client, pytest.raises(c.Incompatible):
                client.tokenize("Hi")


def sentences(target: str, tls: bool | c.TLS) -> str:
    """Return the error message of all kinds of calls, which must be the same."""
    said = set()
    with c.Client(target, tls=tls, timeout=20, retry=None) as client:
        for ask in (lambda: client.generate("Hi"), lambda: client.tokenize("Hi"), client.wait_ready):
            with pytest.raises(c.Incompatible) as refusal:
                ask()
            said.add(str(refusal.value))

    async def asynchronously() -> None:
        async with c.AsyncClient(target, tls=tls, timeout=20, retry=None) as client:
            for ask in (client.generate("Hi"), client.tokenize("Hi"), client.wait_ready()):
                with pytest.raises(c.Incompatible) as refusal:
                    await ask
                said.add(str(refusal.value))

    asyncio.run(asynchronously())
    (one,) = said
    return one


def test_certificates_that_do_not_fit_are_told_in_a_sentence(tmp_path: pathlib.Path) -> None:
    """Certificate errors fail at once, also in `wait_ready`."""
    cert, key = certify(tmp_path, "server.test")
    other, other_key = certify(tmp_path, "other.test")
    with served(tls_cert=cert, tls_key=key) as run:
        said = sentences(run.target, c.TLS(ca=other, server_name="server.test"))
        assert f"{run.target}: the server's certificate is not signed by the file ca='{other}'" in said
        said = sentences(run.target, c.TLS(ca=cert))
        assert "the server's certificate is not for '127.0.0.1': give TLS(server_name=...)" in said
        assert "is not signed by the system's authorities: give TLS(ca=...)" in sentences(run.target, True)
        assert "the server wants TLS: give tls=True, or tls=TLS(ca=...)" in sentences(run.target, False)
    with served(tls_cert=cert, tls_key=key, tls_client_ca=cert) as run:
        said = sentences(run.target, c.TLS(ca=cert, server_name="server.test"))
        assert "the server wants a certificate of the client's: give TLS(cert=..., key=...)" in said
        said = sentences(run.target, c.TLS(ca=cert, cert=other, key=other_key, server_name="server.test"))
        assert f"the server does not accept the client's certificate '{other}'" in said


def test_a_server_without_tls_is_told_in_a_sentence(tmp_path: pathlib.Path) -> None:
    cert, _ = certify(tmp_path, "server.test")
    with served() as run:
        assert "the server speaks no TLS on this port: leave tls out" in sentences(run.target, c.TLS(ca=cert))


def test_the_port_of_the_openai_api_is_told_in_a_sentence(tmp_path: pathlib.Path) -> None:
    with live_fake(tmp_path) as run:
        said = sentences(f"127.0.0.1:{run.server.http_port}", False)
        assert "this port speaks HTTP/1, not gRPC: the server's grpc_port is another one" in said


def test_a_server_that_is_not_there_may_come(tmp_path: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for tls in (False, True):
        with c.Client(f"127.0.0.1:{port}", tls=tls, retry=None) as client, pytest.raises(c.Unavailable):
            client.tokenize("Hi")
