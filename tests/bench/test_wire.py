"""Tests of jaxinfer/bench: the HTTP and gRPC clients on arbitrarily split bytes, and on real server behaviour."""

import asyncio
import itertools
import json
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.bench.grpc_target import GrpcTarget
from jaxinfer.bench.http1 import MAX_HEAD, HttpError, ResponseParser
from jaxinfer.bench.http_target import HttpTarget
from jaxinfer.bench.null_server import Script, serve_grpc, serve_http
from jaxinfer.bench.sse import EventParser
from jaxinfer.bench.target import Access, Ending, Item, Sampling, SendFailed, Served, TargetError
from jaxinfer.protos.v1 import inference_pb2 as pb
from tests.client.serving import scripted

ITEM = Item([5, 6, 7], 3, 4)


def pieces(whole: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
    return [whole[a:b] for a, b in itertools.pairwise(places)]


CUTS = st.lists(st.integers(0, 2000), max_size=40)
LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), max_size=12)


@given(events=st.lists(st.lists(LINE, min_size=1, max_size=3), max_size=6), cuts=CUTS, data=st.data())
def test_events_in_any_pieces(events: list[list[str]], cuts: list[int], data: st.DataObject) -> None:
    ends = st.sampled_from(["\n", "\r\n", "\r"])
    text = "\ufeff" if data.draw(st.booleans()) else ""
    for lines in events:
        end = data.draw(ends)
        text += f": a comment{end}event: delta{end}" + "".join(f"data: {line}{end}" for line in lines) + end
    parser = EventParser()
    found = [event for piece in pieces(text.encode(), cuts) for event in parser.feed(piece)]
    assert [event.decode() for event in found] == ["\n".join(lines) for lines in events]


def test_an_event_is_there_with_its_last_byte_and_not_before() -> None:
    parser = EventParser()
    assert parser.feed(b"data:x\ndata\n") == []
    assert parser.feed(b"\n") == [b"x\n"]


def test_a_line_end_that_is_cut_in_two_is_one() -> None:
    parser = EventParser()
    whole = b"data: a\r\ndata: b\r\n\r\ndata: c\r\r"
    found = [parser.feed(whole[place : place + 1]) for place in range(len(whole))]
    assert [event for each in found for event in each] == [b"a\nb", b"c"]


def chunked(parts: list[bytes]) -> bytes:
    return b"".join(b"%X;ext=1\r\n%s\r\n" % (len(part), part) for part in parts if part) + b"0\r\nTrailer: x\r\n\r\n"


@given(parts=st.lists(st.binary(min_size=1, max_size=40), max_size=8), cuts=CUTS, framing=st.sampled_from("clx"))
def test_responses_in_any_pieces(parts: list[bytes], cuts: list[int], framing: str) -> None:
    body = b"".join(parts)
    header = {"c": b"Transfer-Encoding: chunked", "l": b"content-length: %d" % len(body), "x": b"Connection: close"}
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n%s\r\n\r\n" % header[framing]
    parser, found = ResponseParser(), b""
    for piece in pieces(head + (chunked(parts) if framing == "c" else body), cuts):
        found += parser.feed(piece)
    assert parser.done is (framing != "x")
    parser.end()
    assert (parser.status, found, parser.keeps_alive) == (200, body, framing != "x")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not how an HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "no length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n", "no length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n", "longer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "no length"),
        (b"x" * (MAX_HEAD + 1), "no end"),
    ],
)
def test_what_is_no_http(data: bytes, words: str) -> None:
    with pytest.raises(HttpError, match=words):
        ResponseParser().feed(data)


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab"])
def test_a_response_that_ends_early(data: bytes) -> None:
    parser = ResponseParser()
    parser.feed(data)
    with pytest.raises(HttpError, match="before the response"):
        parser.end()


def http(port: int, endpoint: str = "completions", **access: Any) -> HttpTarget:
    return HttpTarget(Access(f"http://127.0.0.1:{port}", **access), Sampling(seed=3), endpoint, 100)


def answered(answer: bytes, use: Callable[[int], Awaitable[Any]]) -> tuple[Any, list[bytes]]:
    """Use a server that sends ``answer`` to any request and disconnects; return the result and the requests."""
    asked: list[bytes] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        asked.append(head + await reader.readexactly(length))
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def main() -> Any:
        async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
            return await use(server.sockets[0].getsockname()[1])

    return asyncio.run(asyncio.wait_for(main(), 20)), asked


def stream(target: HttpTarget, item: Item = ITEM) -> Coroutine[Any, Any, tuple[Ending, list[int]]]:
    async def main() -> tuple[Ending, list[int]]:
        notes: list[int] = []
        return await target.stream(target.prepare(item), notes.append), notes

    return main()


def events(*content: dict[str, Any] | str) -> bytes:
    body = b"".join(f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n".encode() for each in content)
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + body


def choice(text: str | None, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def test_a_completion_over_http() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}
    answer = events(choice("a"), choice(""), choice("b", "length"), {"choices": [], "usage": usage}, "[DONE]")
    (ending, notes), (asked,) = answered(answer, lambda port: stream(http(port, api_key="k1")))
    assert ending == Ending("length", 3, 5, 2)
    assert sum(notes) == 2
    head, _, body = asked.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer k1" in head
    content = json.loads(body)
    assert content["prompt"] == [5, 6, 7]
    assert (content["max_tokens"], content["ignore_eos"], content["stream"]) == (4, True, True)


def test_a_chat_over_http() -> None:
    deltas = [{"choices": [{"delta": delta}]} for delta in ({"role": "assistant", "content": ""}, {"content": "hi"})]
    (ending, notes), (asked,) = answered(
        events(*deltas, "[DONE]"), lambda port: stream(http(port, "chat"), ITEM._replace(prompt="hello"))
    )
    assert (ending.output_tokens, notes) == (None, [1])
    assert json.loads(asked.partition(b"\r\n\r\n")[2])["messages"] == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b'HTTP/1.1 429 X\r\nContent-Length: 28\r\n\r\n{"error":{"message":"full"}}', "HTTP 429", "full"),
        (b"HTTP/1.1 500 X\r\nContent-Length: 4\r\n\r\noops", "HTTP 500", "oops"),
        (events(choice("a")), "truncated", "DONE"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\ndata: \r\n", "truncated", "ended"),
        (events(choice("a"), {"error": {"message": "engine died"}}), "error in stream", "engine died"),
        (events("not json"), "error in stream", "not json"),
        (b"", "bad HTTP", "ended"),
        (b"220 smtp.example\r\n\r\n", "bad HTTP", "smtp"),
    ],
)
def test_what_fails_over_http(answer: bytes, kind: str, words: str) -> None:
    async def use(port: int) -> SendFailed:
        with pytest.raises(SendFailed, match=words) as found:
            await stream(http(port))
        return found.value

    assert answered(answer, use)[0].kind == kind


def test_connections_are_used_again_but_not_by_two_at_once() -> None:
    async def main() -> int:
        opened = 0
        server, port = await serve_http(Script(ttft=0.01))
        target = http(port)
        connect = target._pool._connect

        async def counted() -> Any:
            nonlocal opened
            opened += 1
            return await connect()

        target._pool._connect = counted  # type: ignore[method-assign]
        for _ in range(3):
            await asyncio.gather(stream(target), stream(target))
        await target.close()
        server.close()
        return opened

    assert asyncio.run(asyncio.wait_for(main(), 20)) == 2


async def null_target(protocol: str) -> tuple[Any, HttpTarget | GrpcTarget]:
    if protocol == "http":
        server, port = await serve_http(Script(0.02, 0.01))
        return server.close, http(port)
    grpc_server, port = await serve_grpc(Script(0.02, 0.01))
    return lambda: grpc_server.stop(None), GrpcTarget(Access(f"grpc://127.0.0.1:{port}", connections=2), Sampling())


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_null_server(protocol: str) -> None:
    async def main() -> None:
        stop, target = await null_target(protocol)
        served = await target.open()
        assert (served.model, served.vocab_size) == ("null", 32_000 if protocol == "grpc" else 100)
        assert await target.count_tokens("one two three") == 3
        loop, times = asyncio.get_running_loop(), []
        start = loop.time()

        def note(tokens: int) -> None:
            times.extend([loop.time() - start] * tokens)

        ending = await target.stream(target.prepare(ITEM), note)
        assert (ending.prompt_tokens, ending.output_tokens, len(times)) == (3, 4, 4)
        assert all(time >= 0.02 + 0.01 * number for number, time in enumerate(times))
        await target.close()
        stopped = stop()
        if stopped is not None:
            await stopped

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_request_over_grpc() -> None:
    async def main() -> pb.GenerateRequest:
        stop, target = await null_target("grpc")
        await target.open()
        message = target.prepare(ITEM)
        await target.close()
        await stop()
        return pb.GenerateRequest.FromString(message)

    request = asyncio.run(asyncio.wait_for(main(), 30))
    assert (request.model, list(request.token_ids.ids)) == ("null", [5, 6, 7])
    assert (request.sampling.max_tokens, request.sampling.ignore_eos) == (4, True)
    assert request.sampling.HasField("temperature")


def test_a_key_goes_with_a_call_and_every_token_of_a_delivery_counts() -> None:
    seen: list[object] = []

    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        seen.append(dict(context.invocation_metadata())["authorization"])
        yield pb.GenerateResponse(delta=pb.Delta(text="abc", token_ids=[5, 6, 7]))
        if request.sampling.seed != 3:
            yield pb.GenerateResponse(finished=pb.Finished(usage=pb.Usage(prompt_tokens=2, completion_tokens=3)))

    async def main(port: str) -> tuple[Ending, list[int]]:
        target = GrpcTarget(Access(f"grpc://{port}", api_key="k1"), Sampling())
        with pytest.raises(TargetError, match="UNIMPLEMENTED"):  # the server lists no models, but the channels are open
            await target.open()
        notes: list[int] = []
        ending = await target.stream(pb.GenerateRequest().SerializeToString(), notes.append)
        with pytest.raises(SendFailed, match="without its last message"):
            await target.stream(pb.GenerateRequest(sampling={"seed": 3}).SerializeToString(), notes.append)
        await target.close()
        return ending, notes

    with scripted(Generate=generate) as port:
        assert asyncio.run(asyncio.wait_for(main(port), 30)) == (Ending(None, 2, 3, 0), [3, 3])
    assert seen == ["Bearer k1"] * 2


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_the_seed_is_sent_where_it_counts(temperature: float) -> None:
    async def main() -> Any:
        stop, target = await null_target("grpc")
        await target.open()
        target._sampling = Sampling(temperature, seed=3)
        message = target.prepare(ITEM)
        await target.close()
        await stop()
        return pb.GenerateRequest.FromString(message).sampling

    sampling = asyncio.run(asyncio.wait_for(main(), 30))
    assert (sampling.seed, sampling.temperature) == (3, temperature)
    over_http = HttpTarget(Access("http://127.0.0.1:1"), Sampling(temperature, seed=3), "completions", 100)
    body = json.loads(over_http.prepare(ITEM).partition(b"\r\n\r\n")[2])
    assert body.get("seed") == (3 if temperature else None)  # some servers reject a seed with greedy sampling


def opened(target: HttpTarget | GrpcTarget) -> Served:
    return asyncio.run(asyncio.wait_for(target.open(), 30))


@pytest.mark.parametrize("kind", [http, lambda port: GrpcTarget(Access(f"grpc://127.0.0.1:{port}"), Sampling())])
def test_nobody_there_is_one_sentence(kind: Callable[[int], HttpTarget | GrpcTarget]) -> None:
    with pytest.raises(TargetError, match=r"no answer from .*://127.0.0.1:1: .*refused"):
        opened(kind(1))


@pytest.mark.parametrize("answer", [b"<html>hi</html>", b"[1,2]", b'{"data": [1]}', b"\xff"])
def test_another_site_is_named_with_its_answer(answer: bytes) -> None:
    ports: list[int] = []

    def use(port: int) -> Awaitable[Served]:
        ports.append(port)
        return http(port).open()

    with pytest.raises(TargetError) as caught:
        answered(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer), use)
    assert f"http://127.0.0.1:{ports[0]} " in str(caught.value)
    assert f"/v1/models answers {answer!r}" in str(caught.value)


def test_another_protocol_is_named_with_what_it_says() -> None:
    with pytest.raises(TargetError, match=r"http://127.0.0.1:\d+: 'SSH-2.0-x.*' is not how an HTTP"):
        answered(b"SSH-2.0-x\r\n", lambda port: http(port).open())


def test_a_server_that_says_nothing_is_not_waited_for() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with pytest.raises(TargetError, match=f"no answer from http://127.0.0.1:{port}: timeout"):
                await http(port, connect_timeout=0.05).open()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_model_that_is_not_served_is_one_sentence() -> None:
    body = b'{"data":[{"id":"a"},{"id":"b"}]}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with pytest.raises(TargetError, match="serves no model 'c', but a, b"):
        answered(answer, lambda port: http(port, model="c").open())
    body = b'{"error":{"message":"no such key"}}'
    answer = b"HTTP/1.1 401 X\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with pytest.raises(TargetError, match="answers 401: no such key"):
        answered(answer, lambda port: http(port).open())
