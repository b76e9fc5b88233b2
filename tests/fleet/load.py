"""Clients without retries, and the results of their requests."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import grpc

from jaxinfer.client import Client, ServerError
from tests.serve.fake_engine import expected_text, fake_tokenizer

PROMPT = "once"
WHOLE = "whole"
"""Result of a request that got the complete text exactly once."""
_SECONDS = 300.0  # limit for operations that take a few seconds on an idle machine
_IDS = itertools.count()
_TOKENS = fake_tokenizer().encode(PROMPT)


@dataclasses.dataclass
class Ask:
    """A request through a balancer.

    Attributes:
        tokens: number of tokens requested.
        seed: determines the text.
        request_id: its id at the replica.
        text: text received.
        ended: `WHOLE`, or the error; "": in progress.
    """

    tokens: int = 8
    seed: int = 7
    request_id: str = dataclasses.field(default_factory=lambda: f"ask-{next(_IDS)}")
    text: str = ""
    ended: str = ""

    @property
    def number(self) -> int:
        """Number of the request, in order of creation."""
        return number_of(self.request_id)

    @property
    def expected(self) -> str:
        return expected_text(_TOKENS, self.seed, 0, self.tokens)

    def finish(self, reason: str | None) -> None:
        """Check the text received. ``reason``: finish reason; None: there is none."""
        if reason != "length":
            self.ended = f"ended with {reason!r}"
        elif self.text != self.expected:
            self.ended = f"another text: {self.text!r}"
        else:
            self.ended = WHOLE

    @property
    def body(self) -> dict[str, object]:
        """Body for /v1/completions."""
        return {"model": "fake", "prompt": PROMPT, "max_tokens": self.tokens, "seed": self.seed}


def number_of(request_id: str) -> int:
    """Return the number of the request with this id."""
    return int(request_id.removeprefix("ask-"))


class Http:
    """A client of /v1/completions with one connection at a time.

    Args:
        port: port of the balancer.
        stream: whether answers are streamed.
    """

    def __init__(self, port: int, *, stream: bool) -> None:
        self._stream = stream
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)

    def ask(self, ask: Ask) -> None:
        """Send the request, and read its answer to the end."""
        try:
            answer = self.begin(ask)
            if answer.status != 200:
                ask.ended = f"http {answer.status}: {answer.read()[:200]!r}"
            else:
                self.read(ask, answer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            ask.ended = f"http: {type(error).__name__}: {error}"

    def begin(self, ask: Ask) -> http.client.HTTPResponse:
        """Send the request; return the response with its head read."""
        body = json.dumps({**ask.body, "stream": self._stream})
        headers = {"content-type": "application/json", "x-request-id": ask.request_id}
        self._connection.request("POST", "/v1/completions", body, headers)
        return self._connection.getresponse()

    def read(self, ask: Ask, answer: http.client.HTTPResponse) -> None:
        """Read the body of a response."""
        if not self._stream:
            (choice,) = json.loads(answer.read())["choices"]
            ask.text = choice["text"]
            ask.finish(choice["finish_reason"])
            return
        reason, done = None, False
        for event in events(answer):
            done = event == "[DONE]"
            if not done:
                (choice,) = json.loads(event)["choices"]
                ask.text += choice["text"]
                reason = choice["finish_reason"] or reason
        ask.finish(reason if done else "no [DONE]")

    def send(self, ask: Ask) -> None:
        """Send the request without waiting for the answer."""
        threading.Thread(target=self.ask, args=(ask,), daemon=True).start()

    def leave(self) -> None:
        """Disconnect, also during a request."""
        if self._connection.sock is not None:
            self._connection.sock.shutdown(2)

    def close(self) -> None:
        self._connection.close()


def events(answer: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the data of server-sent events.

    Raises:
        ValueError: an event is an error.
    """
    for line in answer:
        if line.startswith(b"event: error"):
            raise ValueError(next(answer).decode())
        if line.startswith(b"data: "):
            yield line[len(b"data: ") :].decode().strip()


class Grpc:
    """A client of streamed Generate.

    Args:
        port: port of the balancer.
    """

    def __init__(self, port: int) -> None:
        self._client = Client(f"127.0.0.1:{port}", retry=None, timeout=_SECONDS)

    def ask(self, ask: Ask) -> None:
        """Send the request, and read its answer to the end."""
        try:
            self._call = self._client.stream(PROMPT, max_tokens=ask.tokens, seed=ask.seed, request_id=ask.request_id)
            reason = None
            for delta in self._call:
                ask.text += delta.text
                reason = delta.finish_reason or reason
            ask.finish(reason)
        except (ServerError, grpc.RpcError) as error:
            ask.ended = f"grpc: {type(error).__name__}: {error}"

    def send(self, ask: Ask) -> None:
        """Send the request without waiting for the answer."""
        threading.Thread(target=self.ask, args=(ask,), daemon=True).start()

    def leave(self) -> None:
        """Cancel the request."""
        self._call.cancel()

    def close(self) -> None:
        self._client.close()


type Asker = Http | Grpc


def kinds(http_port: int, grpc_port: int) -> list[Callable[[], Asker]]:
    """Return a factory of clients for each kind of request: unary, streamed, over gRPC."""
    return [
        lambda: Http(http_port, stream=False),
        lambda: Http(http_port, stream=True),
        lambda: Grpc(grpc_port),
    ]


class Load:
    """Clients that send requests one after the other until they are stopped.

    Args:
        clients: number of clients, evenly divided among the kinds.
        tokens: tokens of each answer.
    """

    def __init__(self, http_port: int, grpc_port: int, clients: int = 30, tokens: int = 100) -> None:
        self.ended, self._lock, self._stop = Counter[str](), threading.Lock(), threading.Event()
        made = [make() for _, make in zip(range(clients), itertools.cycle(kinds(http_port, grpc_port)), strict=False)]
        self._threads = [threading.Thread(target=self._run, args=(client, tokens)) for client in made]

    def _run(self, client: Asker, tokens: int) -> None:
        with contextlib.closing(client):
            while not self._stop.is_set():
                ask = Ask(tokens=tokens)
                client.ask(ask)
                with self._lock:
                    self.ended[ask.ended] += 1

    @property
    def total(self) -> int:
        with self._lock:
            return self.ended.total()

    @property
    def lost(self) -> int:
        """Number of requests without a complete answer."""
        with self._lock:
            return self.ended.total() - self.ended[WHOLE]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
