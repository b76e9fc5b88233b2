"""Encrypted connections, with certificates on both sides."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

from jaxinfer import client as c
from tests.client.serving import SEED, expected, served

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


def certify(folder: pathlib.Path, name: str) -> tuple[str, str]:
    """A certificate that signs itself, and its key."""
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
            with c.Client(run.target, tls=stranger, retry=None, timeout=5) as client, pytest.raises(c.Unavailable):
                client.tokenize("Hi")
