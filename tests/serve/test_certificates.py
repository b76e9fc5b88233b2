"""Tests of client certificates: each identifies the same tenant in every API, and no other."""

from __future__ import annotations

import asyncio
import pathlib
import shutil
import ssl
import subprocess

import grpc
import httpx
import pytest
from grpc import aio

from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.protos.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.serve.api.requests import Call
from jaxinfer.serve.api.tenants import cache_scope, engine_id, own_id, tenant_of_certificate
from tests.serve.grpc.running import running
from tests.serve.http.support import run, serving

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


class Authority:
    """A test certificate authority."""

    def __init__(self, folder: pathlib.Path, name: str = "ca") -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.file = folder, folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        _openssl("req", "-x509", *_NEW, "-subj", f"/CN={name}", "-out", self.file, "-keyout", self._key)

    def sign(self, file: str, subject: str, names: str = "IP:127.0.0.1") -> tuple[pathlib.Path, pathlib.Path]:
        """Return a certificate and its key. ``names``: subject alternative names."""
        certificate, key, wanted = (self.folder / f"{file}.{end}" for end in ("pem", "key", "csr"))
        extensions = self.folder / f"{file}.ext"
        extensions.write_text(f"subjectAltName={names}\n" if names else "basicConstraints=CA:FALSE\n")
        _openssl("req", *_NEW, "-subj", subject, "-out", wanted, "-keyout", key)
        signed = ["-CA", self.file, "-CAkey", self._key, "-CAcreateserial", "-extfile", extensions]
        _openssl("x509", "-req", "-in", wanted, "-days", "1", *signed, "-out", certificate)
        return certificate, key


_NEW = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def tenant(certificate: pathlib.Path) -> str:
    return tenant_of_certificate(ssl.PEM_cert_to_DER_cert(certificate.read_text()))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@needs_openssl
def test_a_tenant_is_who_the_certificate_names(authority: Authority) -> None:
    alice, _ = authority.sign("alice", "/CN=alice")
    renewed, _ = authority.sign("renewed", "/CN=alice")
    others = [
        authority.sign("bob", "/CN=bob"),
        authority.sign("unit", "/O=other/CN=alice"),
        authority.sign("spiffe", "/", "URI:spiffe://house/alice"),
        authority.sign("spiffe2", "/", "URI:spiffe://house/bob"),
        authority.sign("bare", "/CN=alice", ""),
        Authority(authority.folder / "second", "second").sign("alice2", "/CN=alice"),
    ]
    assert tenant(alice) == tenant(renewed)
    found = {tenant(alice), *(tenant(certificate) for certificate, _ in others)}
    assert len(found) == 1 + len(others)
    assert all(name.startswith("cert:") and len(name) == 37 for name in found)


@needs_openssl
def test_every_door_finds_the_same_tenant(authority: Authority) -> None:
    server, (certificate, key) = authority.sign("server", "/CN=server"), authority.sign("client", "/CN=client")
    files = {"tls_cert": str(server[0]), "tls_key": str(server[1]), "tls_client_ca": str(authority.file)}
    seen: list[str] = []

    def watch(frontend: object) -> None:
        generate = frontend.generate

        async def watched(call: Call, *rest: object) -> object:
            seen.append(call.tenant)
            return await generate(call, *rest)

        frontend.generate = watched

    async def over_http() -> None:
        async with serving(**files) as door:
            watch(door.frontend)
            context = ssl.create_default_context(cafile=str(authority.file))
            context.load_cert_chain(certificate, key)
            async with httpx.AsyncClient(verify=context) as client:
                answer = await client.post(
                    f"https://127.0.0.1:{door.server.port}/v1/completions", json={"prompt": "a", "max_tokens": 1}
                )
                assert answer.status_code == 200, answer.text

    async def over_grpc() -> None:
        made = grpc.ssl_channel_credentials(authority.file.read_bytes(), key.read_bytes(), certificate.read_bytes())

        def target(port: int) -> aio.Channel:
            return aio.secure_channel(f"127.0.0.1:{port}", made)

        async with running(target=target, **files) as door:
            watch(door.frontend)
            asked = pb.GenerateRequest(prompt="a", sampling={"max_tokens": 1})
            assert [each async for each in InferenceStub(door.channel).Generate(asked)]

    run(over_http)
    asyncio.run(over_grpc())
    assert seen == [tenant(certificate)] * 2


@pytest.mark.parametrize("data", ["", "30", "3000", "3084ffffffff", "3006300430003000"])
def test_what_is_no_certificate_is_refused(data: str) -> None:
    with pytest.raises(ValueError, match=r"no certificate|longer than"):
        tenant_of_certificate(bytes.fromhex(data))


def test_ids_and_scopes_of_tenants_are_never_those_of_others() -> None:
    pairs = [("", "a"), ("a", "a"), ("a", "b"), ("b", "a"), ("ab", "a"), ("a", "ba")]
    assert len({engine_id(*pair) for pair in pairs}) == len(pairs)
    assert [own_id(engine_id(*pair)) for pair in pairs] == [request_id for _, request_id in pairs]
    names = ("", "a", "b", "group:a", "tenant:a")
    scopes = [cache_scope("a", group) for group in (None, *names)] + [cache_scope(name) for name in names]
    assert len(set(scopes)) == len(scopes) - 1  # "a" occurs twice
