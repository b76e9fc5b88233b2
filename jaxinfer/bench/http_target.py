"""Target for servers with OpenAI's HTTP API: completions or chat, streamed as server-sent events."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.parse
from collections.abc import Callable
from typing import Any

from jaxinfer.bench.http1 import HttpError, Pool, ResponseParser
from jaxinfer.bench.sse import EventParser
from jaxinfer.bench.target import Access, Ending, Item, Sampling, SendFailed, Served, TargetError

PATHS = {"completions": "/completions", "chat": "/chat/completions"}
MAX_ERROR = 4096  # maximum bytes kept of an error body


class HttpTarget:
    """HTTP implementation of `Target`. ``endpoint``: completions or chat."""

    def __init__(self, access: Access, sampling: Sampling, endpoint: str, vocab_size: int | None = None) -> None:
        url = urllib.parse.urlsplit(access.url)
        tls = ssl.create_default_context(cadata=_text(access.ca)) if url.scheme == "https" else None
        self._host = url.hostname or "localhost"
        self._port = url.port or (443 if tls else 80)
        self._base = url.path.rstrip("/") or "/v1"
        self._pool = Pool(self._host, self._port, tls, access.connect_timeout)
        self._access, self._sampling, self._endpoint, self._vocab = access, sampling, endpoint, vocab_size
        self._model = access.model or ""

    async def open(self) -> Served:
        response, body = await self._ask("GET", "/models", None, self._access.connect_timeout)
        models = self._models(body)
        if not models:
            raise TargetError(f"{self._access.url} serves no model")
        names = [str(model.get("id")) for model in models]
        self._model = self._access.model or names[0]
        if self._model not in names:
            raise TargetError(f"{self._access.url} serves no model {self._model!r}, but {', '.join(names[:10])}")
        longest = models[names.index(self._model)].get("max_model_len")
        ids = self._endpoint == "completions"
        return Served(self._model, response.headers.get("server"), self._vocab, longest, accepts_ids=ids)

    async def count_tokens(self, text: str) -> int:
        content = self._content(text) | {"model": self._model, "max_tokens": 1}
        _, body = await self._ask("POST", PATHS[self._endpoint], content)
        try:
            return int(json.loads(body)["usage"]["prompt_tokens"])
        except (ValueError, KeyError, TypeError) as cause:
            raise TargetError(f"{self._access.url} does not tell how many tokens a prompt has") from cause

    def _models(self, body: bytes) -> list[dict[str, Any]]:
        try:
            found = json.loads(body)["data"]
            return [dict(model) for model in found]
        except (ValueError, KeyError, TypeError) as cause:
            why = f"{self._base}/models answers {body[:80]!r}"
            raise TargetError(f"{self._access.url} has not OpenAI's API: {why}") from cause

    async def _ask(
        self, method: str, path: str, content: dict[str, Any] | None, seconds: float | None = None
    ) -> tuple[ResponseParser, bytes]:
        """Make one small request before the load, within ``seconds``."""
        chunks: list[bytes] = []
        message = self._message(method, path, b"" if content is None else json.dumps(content).encode())
        try:
            async with asyncio.timeout(seconds):
                response = await self._pool.exchange(message, lambda status, chunk: chunks.append(chunk))
        except (OSError, TimeoutError, HttpError) as cause:
            raise TargetError(f"no answer from {self._access.url}: {_reason(cause)}") from cause
        body = b"".join(chunks)
        if response.status != 200:
            raise TargetError(f"{self._access.url} answers {response.status}: {_error_text(body)}")
        return response, body

    def prepare(self, item: Item) -> bytes:
        content = {
            "model": self._model,
            **self._content(item.prompt),
            "max_tokens": item.output_len,
            "temperature": self._sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._sampling.temperature > 0:
            content["seed"] = self._sampling.seed
        if self._sampling.ignore_eos:
            content["ignore_eos"] = True
        return self._message("POST", PATHS[self._endpoint], json.dumps(content, separators=(",", ":")).encode())

    def _content(self, prompt: str | list[int]) -> dict[str, Any]:
        if self._endpoint == "chat":
            return {"messages": [{"role": "user", "content": prompt}]}
        return {"prompt": prompt}

    def _message(self, method: str, path: str, body: bytes) -> bytes:
        lines = [
            f"{method} {self._base}{path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Accept: text/event-stream, application/json",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self._access.api_key is not None:
            lines.append(f"Authorization: Bearer {self._access.api_key}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    async def stream(self, message: bytes, note: Callable[[int], None]) -> Ending:
        answer = _Answer(note)
        try:
            response = await self._pool.exchange(message, answer.on_body)
        except ConnectionRefusedError as cause:
            raise SendFailed("connection refused", str(cause)) from cause
        except TimeoutError as cause:
            raise SendFailed("connect timeout", "no connection in time") from cause
        except OSError as cause:
            raise SendFailed("connection lost", str(cause)) from cause
        except HttpError as cause:
            raise SendFailed("truncated" if answer.chunks or answer.began else "bad HTTP", str(cause)) from cause
        return answer.ending(response.status or 0)

    async def close(self) -> None:
        self._pool.close()


class _Answer:
    """A streamed response while it is received."""

    def __init__(self, note: Callable[[int], None]) -> None:
        self.began = False
        self.chunks: list[bytes] = []  # of a body that is not an event stream
        self._note, self._events = note, EventParser()
        self._finish: str | None = None
        self._usage: dict[str, Any] = {}
        self._error: str | None = None
        self._done = False

    def on_body(self, status: int, chunk: bytes) -> None:
        if status != 200:
            if sum(map(len, self.chunks)) < MAX_ERROR:
                self.chunks.append(chunk)
            return
        self.began = True
        tokens = sum(map(self._event, self._events.feed(chunk)))
        if tokens:
            self._note(tokens)

    def _event(self, data: bytes) -> int:
        """Return 1 for an event with text, counted as one token: the API does not report the number of tokens."""
        if data == b"[DONE]":
            self._done = True
            return 0
        try:
            event = json.loads(data)
            if "error" in event:
                self._error = _error_text(data)
                return 0
            self._usage = event.get("usage") or self._usage
            return sum(map(self._choice, event.get("choices", ())))
        except (ValueError, TypeError, AttributeError):
            self._error = f"an event that is no completion: {data[:80]!r}"
            return 0

    def _choice(self, choice: dict[str, Any]) -> int:
        self._finish = choice.get("finish_reason") or self._finish
        delta = choice.get("delta") or choice
        said = delta.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls")
        return 1 if said else 0

    def ending(self, status: int) -> Ending:
        """Return the end of the stream.

        Raises:
            SendFailed: the request was rejected, or its stream did not end properly.
        """
        if status != 200:
            raise SendFailed(f"HTTP {status}", _error_text(b"".join(self.chunks)))
        if self._error is not None:
            raise SendFailed("error in stream", self._error)
        if not self._done:
            raise SendFailed("truncated", "the stream ended without [DONE]")
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return Ending(self._finish, self._usage.get("prompt_tokens"), self._usage.get("completion_tokens"), cached)


def _error_text(body: bytes) -> str:
    """Return the message in an error body, or the body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace").strip() or "no reason given"


def _reason(cause: Exception) -> str:
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused"
    return "timeout" if isinstance(cause, TimeoutError) else str(cause) or type(cause).__name__


def _text(pem: bytes | None) -> str | None:
    return None if pem is None else pem.decode("ascii")
