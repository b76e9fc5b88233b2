"""Production traces as requests: arrival times, lengths, and shared prefixes."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import math
import pathlib
from collections.abc import Sequence

MOONCAKE_BLOCK = 512  # tokens per hash id of the Mooncake trace


class TraceError(ValueError):
    """A trace that cannot be replayed with these options. The message gives the reason."""


@dataclasses.dataclass(frozen=True)
class TraceRequest:
    """A request of a trace.

    Attributes:
        arrival: seconds since the trace began.
        prompt_len, output_len: tokens.
        blocks: blocks of the prompt: equal numbers are equal runs of tokens; the last one may be partial.
    """

    arrival: float
    prompt_len: int
    output_len: int
    blocks: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.prompt_len + self.output_len


@dataclasses.dataclass(frozen=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        block_tokens: tokens of a block; None: a request is one block.
        scale: tokens here per token of the file.
        dropped: number of requests of the file that were too long and skipped.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int | None
    scale: float
    dropped: int

    @property
    def longest(self) -> int:
        return max(request.total for request in self.requests)


def read_azure(path: pathlib.Path) -> list[TraceRequest]:
    """Read Azure's LLM inference trace of 2023: TIMESTAMP, ContextTokens, GeneratedTokens. Prompts share no prefixes.

    Raises:
        TraceError: the file is not such a trace.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        times = [_azure_time(row["TIMESTAMP"]) for row in rows]
        if not rows:
            raise ValueError("it is empty")
        return [
            TraceRequest(time - times[0], int(row["ContextTokens"]), int(row["GeneratedTokens"]), (number,))
            for number, (time, row) in enumerate(zip(times, rows, strict=True))
        ]
    except (OSError, KeyError, ValueError) as cause:
        raise TraceError(f"{path} is not an Azure trace: {cause}") from cause


def _azure_time(text: str) -> float:
    whole, _, fraction = text.partition(".")
    moment = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC)
    return moment.timestamp() + float(f"0.{fraction or 0}")


def read_mooncake(path: pathlib.Path) -> list[TraceRequest]:
    """Read a Mooncake trace: JSON lines with ``timestamp`` in milliseconds, ``hash_ids`` of blocks of 512 tokens.

    Raises:
        TraceError: the file is not such a trace.
    """
    try:
        with path.open(encoding="utf-8") as file:
            requests = [_mooncake_request(json.loads(line)) for line in file]
        if not requests:
            raise ValueError("it is empty")
        return requests
    except (OSError, KeyError, TypeError, ValueError) as cause:
        raise TraceError(f"{path} is not a Mooncake trace: {cause}") from cause


def _mooncake_request(row: dict) -> TraceRequest:
    length, blocks = row["input_length"], tuple(row["hash_ids"])
    if math.ceil(length / MOONCAKE_BLOCK) != len(blocks):
        raise ValueError(f"{length} tokens are not {len(blocks)} blocks")
    return TraceRequest(row["timestamp"] / 1000, length, row["output_length"], blocks)


def scale_azure(requests: Sequence[TraceRequest], max_len: int, scale: float | None = None) -> Trace:
    """Scale all lengths; requests that are then longer than ``max_len`` are skipped.

    Args:
        scale: None: the largest at which the longest request fits, and at most 1.
    """
    scale = min(1.0, max_len / max(request.total for request in requests)) if scale is None else scale
    scaled = [
        dataclasses.replace(
            request, prompt_len=_scaled(request.prompt_len, scale), output_len=_scaled(request.output_len, scale)
        )
        for request in requests
    ]
    return _fitting("azure", scaled, None, scale, max_len)


def scale_mooncake(requests: Sequence[TraceRequest], max_len: int, block_tokens: int) -> Trace:
    """Use blocks of ``block_tokens`` instead of 512 tokens, outputs in proportion; skip requests that are too long."""
    scale = block_tokens / MOONCAKE_BLOCK
    scaled = []
    for request in requests:
        cut = request.prompt_len - (len(request.blocks) - 1) * MOONCAKE_BLOCK
        length = (len(request.blocks) - 1) * block_tokens + _scaled(cut, scale)
        output = _scaled(request.output_len, scale)
        scaled.append(dataclasses.replace(request, prompt_len=length, output_len=output))
    return _fitting("mooncake", scaled, block_tokens, scale, max_len)


def _scaled(tokens: int, scale: float) -> int:
    """Round down, so that no sum grows; the small term compensates rounding errors of products that are integers."""
    return max(1, int(tokens * scale + 1e-9))


def _fitting(name: str, requests: list[TraceRequest], block: int | None, scale: float, max_len: int) -> Trace:
    fitting = tuple(request for request in requests if request.total <= max_len)
    if not fitting:
        raise TraceError(f"no request of the {name} trace fits into {max_len} tokens: a smaller scale, please")
    return Trace(name, fitting, block, scale, len(requests) - len(fitting))
