"""Tests of the gRPC server: TLS, limits, silent connections and readers that stop reading."""

import asyncio
import collections
import contextlib
import gc
import pathlib
import shutil
import subprocess

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.protos.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.grpc.server import CONCURRENT_STREAMS, GrpcServers
from jaxinfer.serve.settings import ServeConfig, ServeConfigError
from jaxinfer.types import PositionLogprobs
from tests.serve.fake_engine import Mischief, expected_text, fake_tokenizer
from tests.serve.grpc.running import FakeSupervisor, Keys, collected, failure, plain, request, running

PROMPT = fake_tokenizer().encode("Hi")
CHECK = health_pb2.HealthCheckRequest()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a folder with two self-signed certificates: one.crt, one.key, two.crt, two.key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    for name in ("one", "two"):
        files = ["-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.crt", "-subj", f"/CN={name}"]
        names = ["-addext", "subjectAltName=DNS:localhost"]
        subprocess.run(["openssl", "req", *kind, *files, *names], check=True, capture_output=True)
    return folder


def secure(folder: pathlib.Path, port: int, trusts: str, shows: str | None = None) -> aio.Channel:
    own = [(folder / f"{shows}.{end}").read_bytes() for end in ("key", "crt")] if shows else []
    credentials = grpc.ssl_channel_credentials((folder / f"{trusts}.crt").read_bytes(), *own)
    return aio.secure_channel(f"localhost:{port}", credentials, options=[("grpc.use_local_subchannel_pool", 1)])


async def reached(channel: aio.Channel) -> grpc.StatusCode:
    async with channel:
        return (await failure(HealthStub(channel).Check(CHECK, timeout=5))).code


def install(folder: pathlib.Path, name: str, target: pathlib.Path) -> dict[str, str]:
    """Replace the files of the settings by a rename, as certificate managers do."""
    for end in ("crt", "key"):
        shutil.copy(folder / f"{name}.{end}", target / f"new.{end}")
        (target / f"new.{end}").rename(target / f"server.{end}")
    return {"tls_cert": str(target / "server.crt"), "tls_key": str(target / "server.key")}


def test_tls_and_certificates_that_are_replaced(certificates: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        files = install(certificates, "one", tmp_path)
        async with running(target=lambda port: secure(certificates, port, "one"), **files) as server:
            port = server.servers.port
            assert (await collected(server.inference.Generate(request())))[0] == [expected_text(PROMPT, 1, 0, 4)]
            assert await reached(secure(certificates, port, "two")) is grpc.StatusCode.UNAVAILABLE
            plain = aio.insecure_channel(f"localhost:{port}")
            assert await reached(plain) is grpc.StatusCode.UNAVAILABLE
            install(certificates, "two", tmp_path)
            assert await reached(secure(certificates, port, "two")) is grpc.StatusCode.OK
            assert await reached(secure(certificates, port, "one")) is grpc.StatusCode.UNAVAILABLE
            assert (await failure(server.inference.Generate(request()))).code is grpc.StatusCode.OK
            (tmp_path / "server.crt").unlink()  # an unreadable file changes nothing
            assert await reached(secure(certificates, port, "two")) is grpc.StatusCode.OK

    asyncio.run(story())


def test_mutual_tls(certificates: pathlib.Path) -> None:
    files = {f"tls_{kind}": str(certificates / f"one.{end}") for kind, end in (("cert", "crt"), ("key", "key"))}

    async def story() -> None:
        ca = str(certificates / "two.crt")
        async with running(
            target=lambda port: secure(certificates, port, "one", "two"), tls_client_ca=ca, **files
        ) as server:
            assert (await failure(server.inference.Generate(request()))).code is grpc.StatusCode.OK
            for shows in (None, "one"):
                channel = secure(certificates, server.servers.port, "one", shows)
                assert await reached(channel) is grpc.StatusCode.UNAVAILABLE

    asyncio.run(story())


def servers(**config: object) -> GrpcServers:
    def frontend() -> None:
        raise AssertionError

    return GrpcServers(ServeConfig(model="fake", **config), frontend, FakeSupervisor(), Keys())


def test_what_cannot_be_listened_on_is_one_sentence(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        missing = str(tmp_path / "missing.pem")
        files = servers(grpc_port=0, tls_cert=missing, tls_key=missing)
        with pytest.raises(ServeConfigError, match=r"cannot read .*missing\.pem"):
            await files.start()
        await files.stop(0)
        first = servers(grpc_port=0)
        await first.start()
        second = servers(grpc_port=first.port)
        with pytest.raises(ServeConfigError, match=f"^grpc_port={first.port}: cannot listen on 127.0.0.1"):
            await second.start()
        await second.stop(0)
        await first.stop(0)

    asyncio.run(story())


def test_messages_and_metadata_that_are_too_large() -> None:
    async def story() -> None:
        async with running(limits=ServeLimits(message_bytes=5000)) as server:
            for call in (
                server.inference.Generate(request(prompt="x" * 6000)),
                server.inference.GenerateBatch(iter([request(prompt="x" * 6000)])),
                server.inference.Tokenize(pb.TokenizeRequest(text="x" * 6000)),
                server.inference.Generate(request(), metadata=(("x-filler", "x" * (1 << 20)),)),
            ):
                assert (await failure(call)).code is grpc.StatusCode.RESOURCE_EXHAUSTED
            metadata = (("x-filler", "x" * 14_000),)
            for _ in range(10):
                found = await failure(server.inference.Generate(request(prompt="x" * 1000), metadata=metadata))
                assert found.code is grpc.StatusCode.OK, found
            await server.baseline()

    asyncio.run(story())


def test_a_silent_prefill_is_waited_for() -> None:
    async def story() -> None:
        async with running(Mischief(hang_at=1), keepalive_seconds=0.1) as server:
            call = server.inference.Generate(request())
            await call.read()
            waiting = asyncio.ensure_future(call.read())
            done, _ = await asyncio.wait([waiting], timeout=2.0)
            assert not done
            server.engine.release()
            assert (await waiting).WhichOneof("event") == "delta"
            assert (await failure(call)).code is grpc.StatusCode.OK

    asyncio.run(story())


SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1
MAX_CONCURRENT_STREAMS = 3  # number of the HTTP/2 setting


def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """Return an HTTP/2 frame for stream 0."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + bytes(4) + payload


async def silent_client(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection without a call."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS))
    return reader, writer


async def until(reader: asyncio.StreamReader, kind: int, flags: int = 0) -> bytes:
    """Return the payload of the next frame of this kind."""
    async with asyncio.timeout(10):
        while True:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3]))
            assert head[3] != GOAWAY
            if (head[3], head[4]) == (kind, flags):
                return payload


def test_a_client_that_pings_often_is_not_sent_away() -> None:
    async def story() -> None:
        async with running() as server:
            reader, writer = await silent_client(server.servers.port)
            for number in range(20):
                writer.write(frame(PING, ping := bytes([number] * 8)))
                assert await until(reader, PING, ACK) == ping
            writer.close()

    asyncio.run(story())


def test_a_client_without_a_call_is_pinged() -> None:
    async def story() -> None:
        async with running(keepalive_seconds=0.1) as server:
            reader, writer = await silent_client(server.servers.port)
            for _ in range(4):
                writer.write(frame(PING, await until(reader, PING), ACK))
            writer.close()

    asyncio.run(story())


def test_streams_of_a_connection_are_bounded() -> None:
    async def story() -> None:
        async with running() as server:
            reader, writer = await silent_client(server.servers.port)
            payload = await until(reader, SETTINGS)
            entries = [payload[at : at + 6] for at in range(0, len(payload), 6)]
            settings = {int.from_bytes(entry[:2]): int.from_bytes(entry[2:]) for entry in entries}
            assert settings[MAX_CONCURRENT_STREAMS] == CONCURRENT_STREAMS
            writer.close()

    asyncio.run(story())


def test_a_burst_is_refused_in_our_words() -> None:
    """A burst of calls gets the server's errors; gRPC's limit of pending calls would give no message or retry time."""

    async def story() -> None:
        async with running() as server, contextlib.AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(plain(server.servers.port)) for _ in range(4)]
            await asyncio.gather(*(channel.channel_ready() for channel in channels))
            server.frontend.draining = True
            calls = [InferenceStub(channel).Generate(request()) for _ in range(600) for channel in channels]
            found = await asyncio.gather(*map(failure, calls))
            told = collections.Counter((each.code, "grpc-retry-pushback-ms" in each.trailers) for each in found)
            assert told == {(grpc.StatusCode.UNAVAILABLE, True): len(calls)}

    asyncio.run(story())


# Fixed flow-control windows: the server soon notices that the client does not read.
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024), ("grpc.use_local_subchannel_pool", 1)]
MUCH = {"max_tokens": 1000, "logprobs": 20}


def test_a_reader_that_stops_is_cut_with_a_status_and_disturbs_nobody() -> None:
    def target(port: int) -> aio.Channel:
        return aio.insecure_channel(f"127.0.0.1:{port}", options=NARROW)

    async def story() -> None:
        async with running(Mischief(seconds=0.001), target=target, slow_reader_seconds=0.5) as server:
            stuck = server.inference.Generate(request(sampling=MUCH))
            batch = server.inference.GenerateBatch(iter([request(sampling=MUCH) for _ in range(3)]))
            for call in (stuck, batch):
                assert (await call.read()).WhichOneof("event") == "started"
            others = [server.inference.Generate(request(sampling={"max_tokens": 1000, "seed": k})) for k in range(3)]
            for k, (texts, _, _) in enumerate(await asyncio.gather(*map(collected, others))):
                assert texts == [expected_text(PROMPT, k, 0, 1000)]
            async with asyncio.timeout(20):
                while server.frontend.active:
                    await asyncio.sleep(0.05)
            await server.baseline()
            # The statuses wait for the reader; unsent data is freed.
            gc.collect()
            assert not any(isinstance(each, PositionLogprobs) for each in gc.get_objects())
            for call in (stuck, batch):
                found = await failure(call)
                assert found.code is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "has read nothing for 0.5 s" in found.message

    asyncio.run(story())


def test_a_slow_reader_that_reads_is_not_cut_and_loses_nothing() -> None:
    def target(port: int) -> aio.Channel:
        return aio.insecure_channel(f"127.0.0.1:{port}", options=NARROW)

    async def story() -> None:
        async with running(target=target, slow_reader_seconds=2.0) as server:
            call = server.inference.Generate(request(sampling=MUCH))
            events = []
            while (event := await call.read()) is not aio.EOF:
                events.append(event)
                await asyncio.sleep(0.6 if len(events) < 6 else 0)
            assert sum(len(event.delta.logprobs) for event in events) == MUCH["max_tokens"]
            assert "".join(event.delta.text for event in events) == expected_text(PROMPT, 1, 0, MUCH["max_tokens"])

    asyncio.run(story())
