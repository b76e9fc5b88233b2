"""A server without a model and with known latencies, to measure the overhead of the load generator.

    python -m jaxinfer.bench.null_server http --ttft 0.05 --itl 0.01

prints its port and serves on loopback until its standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from rich.console import Console

from jaxinfer.bench.http1 import MAX_HEAD
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.protos.v1 import inference_pb2_grpc as pb_grpc

MODEL, VOCAB, MAX_LEN, MAX_BODY = "null", 32_000, 1 << 20, 64 << 20
HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Script:
    """Scripted latencies: seconds from a request to its first token, and from each token to the next."""

    ttft: float = 0.0
    itl: float = 0.0

    async def tokens(self, count: int) -> AsyncIterator[int]:
        """Yield each token at its scheduled time since the request: a late token does not delay the next one."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        for number in range(count):
            wait = start + self.ttft + number * self.itl - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            yield number


class Inference(pb_grpc.InferenceServicer):
    """RPCs used by the load generator."""

    def __init__(self, script: Script) -> None:
        self._script = script

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.ModelInfo:  # noqa: N802 - gRPC's
        if request.HasField("model") and request.model != MODEL:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no model {request.model!r}")
        return pb.ModelInfo(name=MODEL, vocab_size=VOCAB, max_model_len=MAX_LEN)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802 - gRPC's
        return pb.TokenizeResponse(token_ids=range(len(request.text.split())))

    async def Generate(  # noqa: N802 - gRPC's
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        prompt = len(request.token_ids.ids) or len(request.prompt.split())
        yield pb.GenerateResponse(started=pb.Started(prompt_tokens=prompt))
        count = request.sampling.max_tokens
        async for number in self._script.tokens(count):
            delta = pb.Delta(text=" the", token_ids=[number % VOCAB])
            if number == count - 1:
                delta.finish_reason = pb.FINISH_REASON_LENGTH
            yield pb.GenerateResponse(delta=delta)
        usage = pb.Usage(prompt_tokens=prompt, completion_tokens=count)
        yield pb.GenerateResponse(finished=pb.Finished(usage=usage))


async def serve_grpc(script: Script) -> tuple[grpc.aio.Server, int]:
    """Start the gRPC server; return it and its port."""
    server = grpc.aio.server()
    pb_grpc.add_InferenceServicer_to_server(Inference(script), server)
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    return server, port


async def serve_http(script: Script) -> tuple[asyncio.Server, int]:
    """Start the HTTP server; return it and its port."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await _one(script, reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client disconnected
        finally:
            writer.close()

    server = await asyncio.start_server(connected, HOST, 0, limit=MAX_HEAD)
    return server, server.sockets[0].getsockname()[1]


async def _one(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Serve one request; return False if the connection ends with it."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
    if length > MAX_BODY:
        return False
    request = json.loads(await reader.readexactly(length) or b"{}")
    if request.get("stream"):
        await _stream(script, request, writer)
    else:
        choices = {"data": [{"id": MODEL, "max_model_len": MAX_LEN}], "choices": [], "usage": _usage(request)}
        body = json.dumps(choices).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    return True


async def _stream(script: Script, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    choice = {"index": 0, "text": " the", "delta": {"content": " the"}, "finish_reason": None}
    event = _chunk({"id": "cmpl-0", "model": MODEL, "choices": [choice]})
    async for _ in script.tokens(request["max_tokens"]):
        writer.write(event)
        await writer.drain()
    writer.write(_chunk({"choices": [], "usage": _usage(request)}) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    await writer.drain()


def _usage(request: dict[str, Any]) -> dict[str, int]:
    prompt = request.get("prompt") or " ".join(message["content"] for message in request.get("messages", []))
    length = len(prompt.split() if isinstance(prompt, str) else prompt)
    return {"prompt_tokens": length, "completion_tokens": request.get("max_tokens", 0)}


def _chunk(content: dict[str, Any]) -> bytes:
    data = b"data: %s\n\n" % json.dumps(content, separators=(",", ":")).encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _serve(protocol: str, script: Script) -> None:
    _server, port = await (serve_grpc if protocol == "grpc" else serve_http)(script)
    Console().print(port)
    await asyncio.to_thread(sys.stdin.read)  # until the parent closes it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m jaxinfer.bench.null_server")
    parser.add_argument("protocol", choices=("grpc", "http"))
    parser.add_argument("--ttft", type=float, default=0.0, help="time to first token in seconds")
    parser.add_argument("--itl", type=float, default=0.0, help="inter-token latency in seconds")
    options = parser.parse_args(arguments)
    asyncio.run(_serve(options.protocol, Script(options.ttft, options.itl)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
