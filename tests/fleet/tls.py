"""The balancers' TLS variant, with TLS on both sides: the lines of `#tls`, with test certificates."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import ssl

import httpx
import pytest

from jaxinfer.client import TLS, Client
from tests.fleet.balancers import Balancer
from tests.fleet.replicas import free_ports, start_replicas
from tests.serve.test_certificates import Authority

_OWN = (8443, 50443)
"""TLS ports of a configuration that also has cleartext ports."""


class Encrypted:
    """Tests of a balancer in front of two replicas with TLS.

    Attributes:
        balancer: class of the balancer.
    """

    balancer: type[Balancer]

    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
    def test_both_sides_speak_tls(self, tmp_path: pathlib.Path) -> None:
        authority = Authority(tmp_path / "tls")
        cert, key = authority.sign("cert", "/CN=jaxinfer", "IP:127.0.0.1,DNS:jaxinfer.internal")
        (tmp_path / "tls/cert-and-key.pem").write_text(cert.read_text() + key.read_text())
        shutil.copy(key, tmp_path / "tls/key.pem")
        ports = dict(zip(_OWN, free_ports(2), strict=True))

        def rewrite(text: str) -> str:
            text = text.replace("#tls ", "").replace(f"/etc/{self.balancer.config.parent.name}/tls", str(cert.parent))
            for shipped, port in ports.items():
                text = text.replace(f":{shipped} ", f":{port} ")
            return text

        replicas = start_replicas(tmp_path, tls_cert=str(cert), tls_key=str(key))
        try:
            balancer = self.balancer(tmp_path / "balancer", [it.ports for it in replicas], rewrite=rewrite)
            with contextlib.closing(balancer):
                beside = str(_OWN[0]) in self.balancer.config.read_text()
                http, grpc = ports.values() if beside else (balancer.http, balancer.grpc)
                ask_over_tls(http, grpc, authority.file)
        finally:
            for replica in replicas:
                replica.kill()


def ask_over_tls(http: int, grpc: int, ca: pathlib.Path) -> None:
    """Assert that HTTP and gRPC requests succeed."""
    trusted = ssl.create_default_context(cafile=str(ca))
    body = {"model": "fake", "prompt": "once", "max_tokens": 4}
    answer = httpx.post(f"https://127.0.0.1:{http}/v1/completions", json=body, verify=trusted, timeout=120)
    assert answer.status_code == 200, answer.text
    with Client(f"127.0.0.1:{grpc}", tls=TLS(ca=ca), retry=None, timeout=120) as client:
        assert client.generate("once", max_tokens=4).outputs[0].finish_reason == "length"
