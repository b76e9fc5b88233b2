"""Tests of TLS, client certificates, and certificate files that change."""

import shutil
import ssl
import subprocess

import httpx
import pytest

from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.server import HttpServer, ReloadingContext
from jaxinfer.serve.settings import ServeConfig, ServeConfigError
from tests.serve.http.support import run, serving

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


def certify(folder, name):
    """Return a self-signed certificate for 127.0.0.1 and its key."""
    files = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files


def trusting(certificate, own=None):
    context = ssl.create_default_context(cafile=str(certificate))
    if own is not None:
        context.load_cert_chain(*own)
    return context


def test_files_are_read_again_when_they_change(tmp_path):
    first, second = certify(tmp_path, "first"), certify(tmp_path, "second")
    cert, key = tmp_path / "cert.pem", tmp_path / "cert.key"

    def use(files):
        shutil.copy(files[0], cert)
        shutil.copy(files[1], key)

    use(first)

    async def test():
        async with serving(tls_cert=str(cert), tls_key=str(key)) as running:
            running.scheme = "https"
            async with running.http(verify=trusting(first[0])) as client:
                assert (await client.get("/health")).status_code == 200
                use(second)
                running.server._tls.reload()
                assert (await client.get("/health")).status_code == 200  # an open connection stays
            async with running.http(verify=trusting(second[0])) as client:
                assert (await client.get("/health")).status_code == 200
                cert.write_text("broken")
                assert not running.server._tls.reload()
            async with running.http(verify=trusting(second[0])) as client:
                assert (await client.get("/health")).status_code == 200
            async with running.http(verify=trusting(first[0])) as client:
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await client.get("/health")

    run(test)


def test_clients_must_show_a_certificate_where_an_authority_is_named(tmp_path):
    server, client_files, stranger = (certify(tmp_path, name) for name in ("server", "client", "stranger"))

    async def test():
        settings = {"tls_cert": str(server[0]), "tls_key": str(server[1]), "tls_client_ca": str(client_files[0])}
        async with serving(**settings) as running:
            running.scheme = "https"
            for own, welcome in ((client_files, True), (None, False), (stranger, False)):
                async with running.http(verify=trusting(server[0], own)) as client:
                    if welcome:
                        assert (await client.get("/v1/models")).status_code == 200
                        continue
                    with pytest.raises(httpx.TransportError):
                        await client.get("/v1/models")

    run(test)


def test_files_that_cannot_be_used(tmp_path):
    config = ServeConfig(model="fake", http_port=0, tls_cert=str(tmp_path / "no.pem"), tls_key=str(tmp_path / "no.key"))
    with pytest.raises(ServeConfigError, match=r"no\.pem"):
        HttpServer(config, AppState("1"))
    good = certify(tmp_path, "good")
    config = ServeConfig(model="fake", http_port=0, tls_cert=str(good[0]), tls_key=str(good[1]))
    assert ReloadingContext(config).reload() is False
