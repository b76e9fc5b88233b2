"""Parsing of long JSON bodies and tokenization of long texts, in helper processes. No jax.

Inputs that take a few milliseconds are processed in the event loop or a thread. Inputs that may take seconds, and many
times their size in memory, go to `jaxinfer.serve.workers.text_helper`: killable processes, started on first use.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxinfer.helper_process import GOOD
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.workers import packing
from jaxinfer.serve.workers.templates import Pool, Sizes
from jaxinfer.serve.workers.text_helper import BODY, TEXT, TEXT_ALONE

LONG_CHARACTERS = 64 << 10
"""Characters above which a text is tokenized in a helper. Up to here a thread takes 0.1 s and some megabytes."""

_MODULE = "jaxinfer.serve.workers.text_helper"
_SIZES = Sizes(helpers=3, share=2, waiting=256)  # each waiting request may hold the bytes of a whole message
_SECONDS = 30.0


class BodyReader:
    """A parser of long JSON bodies, in helper processes without a model.

    Args:
        limits: ``values`` bounds the values of a body.
    """

    def __init__(self, limits: ServeLimits) -> None:
        self._pool = _pool(None, limits.values)

    async def read(self, body: bytes, tenant: str) -> Any:
        """Parse a body as `jaxinfer.serve.api.json_bodies.parse` does, except that lists of token ids become arrays.

        Raises:
            ServeError: INVALID: the body is invalid.
            QueueFullError: too many requests wait.
        """
        answer = await self._pool.ask(tenant, BODY + body)
        if answer is None:
            raise ServeError(Kind.INVALID, _stopped("the body"))
        if answer[:1] != GOOD:
            raise ServeError(Kind.INVALID, *json.loads(answer[1:]))
        return await asyncio.to_thread(packing.unpack, memoryview(answer)[1:])

    def close(self) -> None:
        """Kill the processes."""
        self._pool.close()


class LongTexts:
    """A tokenizer of long texts, in helper processes.

    Args:
        folder: folder of the tokenizer, see `jaxinfer.text.load.load_tokenizer`.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._pool = _pool(folder, 0)

    async def encode(self, field: str, text: str, add_special_tokens: bool, tenant: str) -> Sequence[int]:
        """Return the token ids of a text.

        Raises:
            RequestError: the text cannot be tokenized, or takes too long.
            QueueFullError: too many requests wait.
        """
        question = (TEXT if add_special_tokens else TEXT_ALONE) + _encoded(field, text)
        answer = await self._pool.ask(tenant, question)
        if answer is None:
            raise RequestError(field, f": {_stopped('the tokenizer')}")
        if answer[:1] != GOOD:
            raise RequestError(field, f": {json.loads(answer[1:])[0]}")
        found = await asyncio.to_thread(packing.unpack, memoryview(answer)[1:])
        ids: Sequence[int] = found["ids"]
        return ids

    def close(self) -> None:
        """Kill the processes."""
        self._pool.close()


def _pool(folder: pathlib.Path | None, values: int) -> Pool:
    setup = {"folder": None if folder is None else str(folder), "values": values, "seconds": _SECONDS}
    return Pool(_MODULE, _SIZES, json.dumps(setup).encode(), _SECONDS, "long bodies or texts")


def _encoded(field: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as cause:
        raise RequestError(field, f": the text has a lone surrogate at character {cause.start}: not Unicode") from cause


def _stopped(what: str) -> str:
    return f"{what} was stopped: it ran for {_SECONDS:g} s, or wanted too much memory"
