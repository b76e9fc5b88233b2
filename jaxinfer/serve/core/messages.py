"""Messages between the front end and the engine core: the declarations are the codec (msgpack). No jax.

Both sides are of one version, and the socket between them is accessible to their user only. Decoding checks all types
against the declarations; the fields of `SamplingParams` are checked by its constructor.
"""

from __future__ import annotations

import dataclasses
import itertools
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.lora.store import LoadedLoRA
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.serve.api.requests import ModelCard
from jaxinfer.serve.api.tenants import own_id
from jaxinfer.serve.core.operations import AnyOperation, WeightState
from jaxinfer.types import (
    ImageInput,
    LoRARef,
    PlacedImage,
    PositionLogprobs,
    Request,
    SequenceDelta,
    WeightVersions,
)

METHOD = "/jaxinfer.internal.Core/Serve"
"""gRPC method of a core: its only call, one stream of encoded messages in each direction, lasts as long as the core."""
MOST_CANDIDATES = 4096
"""Candidates of prompt log probabilities in one message, which bounds its size and the time to decode it."""

_LARGEST_INTEGER = 2**64 - 1


class MessageError(ValueError):
    """Error for bytes that are no message; the text is one sentence."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """A message, encoded as the array of its class name and its fields."""


# ---- to the core


class Submit(Message):
    """A request (`encode_request`). Answered by `Accepted` or `Refused` with the same number, which also numbers its
    stream of deltas; deltas may arrive before `Accepted`."""

    number: int
    request: bytes


class Abort(Message):
    """Ends a request or one of its outputs: its stream gets a last delta. Unknown ids are ignored."""

    request_id: str
    index: int | None = None


class Leave(Message):
    """The reader of this stream is gone: no answer, and no more deltas."""

    number: int


class Ask(Message):
    """A question, answered by `Answer` or `Refused` with the same number."""

    number: int
    question: Literal["stats", "reset_prefix_cache", "stop_profile", "wait_profile", "check"]


class StartProfile(Message):
    """Starts a profile of so many steps. Answered like `Ask`; "wait_profile" is answered when it has ended."""

    number: int
    steps: int


class LoadLora(Message):
    """Loads an adapter, for requests until it is released. Answered like `Ask`."""

    number: int
    name: str
    path: str


class UnloadLora(Message):
    """Drops a name of an adapter. No answer."""

    name: str


class ReleaseLora(Message):
    """Releases one load of an adapter, which no further request will use. No answer."""

    lora: LoRARef


class Operate(Message):
    """Changes the engine. Answered by `Operated` or `Refused` with the same number."""

    number: int
    operation: AnyOperation


class Stop(Message):
    """Aborts the running requests and ends the core."""


# ---- from the core


class StartupEvent(Message):
    """Progress of a start. The phases "ready" and "failed", with an error ``message``, are added by the supervisor."""

    phase: Literal["starting", "loading_weights", "compiling", "checking", "ready", "failed"] = "starting"
    bytes_done: int = 0
    bytes_total: int = 0
    compilations_done: int = 0
    compilations_total: int = 0
    message: str = ""


class Ready(Message):
    """The engine runs. ``folder``: folder of the tokenizer and the chat template."""

    card: ModelCard
    folder: str


class Failed(Message):
    """A permanent failure of the start; ``reason`` is one sentence."""

    reason: str


class Fault(Message):
    """The engine ended by a fault; it is the last message."""

    reason: str


class Pulse(Message):
    """Liveness of the engine thread: ``steps`` completed; ``busy``: seconds since the last progress while there is
    work, else 0; ``p99``: 99th percentile of the step durations in seconds."""

    steps: int = 0
    busy: float = 0.0
    p99: float = 0.0


class Accepted(Message):
    """A request is accepted, with its seed, which the engine draws for a request without one."""

    number: int
    seed: int | None


class Refused(Message):
    """A request or a question is rejected. ``place``: see `RequestError`."""

    number: int
    kind: Literal["request", "queue_full", "engine", "question"]
    reason: str
    place: str | None = None


class Answer(Message):
    """The answer to a question; None: it is done."""

    number: int
    value: EngineStats | LoadedLoRA | int | str | None = None


class Operated(Message):
    """The state of the engine after an operation."""

    number: int
    state: WeightState


class Deltas(Message):
    """Deltas of one step, or of an abort, each with the number of its stream.

    Most deltas have one token and nothing else; these are stored in columns: numbers, sample indices and tokens.
    ``version``: weight version of those tokens.
    """

    streams: Sequence[int]
    indexes: Sequence[int]
    tokens: Sequence[int]
    others: Sequence[tuple[int, SequenceDelta]]
    version: int = 0


class Part(Message):
    """A part of the prompt log probabilities of a large delta, which follows in a later `Deltas`."""

    stream: int
    index: int
    prompt_logprobs: list[PositionLogprobs | None]


class KvStored(msgspec.Struct, array_like=True):
    """Pages that were stored on a medium, each the parent of the next one.

    Attributes:
        parent: hash of the page before the first one.
        tokens: token ids of all pages, int32 in this machine's byte order.
        lora: adapter that computed the pages.
        extra: opaque key of cache scope and salt, "" if there is neither.
        images: opaque key of the images in the pages, "" if there are none.
    """

    medium: str
    parent: bytes | None
    hashes: Sequence[bytes]
    tokens: bytes
    lora: LoRARef | None = None
    extra: str = ""
    images: str = ""

    @property
    def extra_keys(self) -> tuple[str, ...]:
        """All keys of the pages besides their tokens and adapter."""
        return tuple(key for key in (self.extra, self.images) if key)


class KvRemoved(msgspec.Struct, array_like=True):
    """Pages that were removed from a medium."""

    medium: str
    hashes: Sequence[bytes]


class KvEvents(Message):
    """Changes of the cached pages of replica ``rank``, in order: all were removed (``cleared``), some were stored,
    others removed."""

    rank: int = 0
    cleared: bool = False
    stored: Sequence[KvStored] = ()
    removed: Sequence[KvRemoved] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens and hashes."""
        hashes = itertools.chain(*(run.hashes for run in self.stored), *(gone.hashes for gone in self.removed))
        return sum(len(run.tokens) for run in self.stored) + sum(map(len, hashes))


ToCore = Submit | Abort | Leave | Ask | StartProfile | LoadLora | UnloadLora | ReleaseLora | Operate | Stop
Numbered = Submit | Ask | StartProfile | LoadLora | Operate
"""Messages with an answer."""
Lifecycle = StartupEvent | Ready | Failed | Fault | Pulse | KvEvents
"""Messages that concern no single request or question."""
FromCore = Accepted | Refused | Answer | Operated | Deltas | Part | Lifecycle

# ---- codec


def _plain(value: object) -> Any:
    """Convert a value that msgspec does not encode: an array or a number of numpy, or a mapping that is no dict."""
    match value:
        case np.ndarray():
            return str(value.dtype), value.shape, memoryview(np.ascontiguousarray(value)).cast("B")
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value)
        case Mapping():
            return dict(value)
    raise TypeError(f"a message cannot contain {type(value).__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_TO_CORE = msgspec.msgpack.Decoder[ToCore](ToCore)
_FROM_CORE = msgspec.msgpack.Decoder[FromCore](FromCore)

encode = _ENCODER.encode


def decode_to_core(data: bytes) -> ToCore:
    """Decode a message to the core. Raises `MessageError` if it is none."""
    return _decoded(_TO_CORE, data)


def decode_from_core(data: bytes) -> FromCore:
    """Decode a message from the core. Raises `MessageError` if it is none."""
    return _decoded(_FROM_CORE, data)


def _decoded[M](decoder: msgspec.msgpack.Decoder[M], data: bytes) -> M:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MessageError(f"{len(data)} bytes are no message: {error}") from error


# ---- requests


@dataclasses.dataclass(frozen=True, eq=False)
class _SentImage(ImageInput):
    """An image as it arrives: dtype, shape and bytes of its patches."""

    patches: tuple[Literal["uint8"], tuple[int, int], bytes]

    def image(self) -> ImageInput:
        """Return the image, whose patches are read-only."""
        dtype, shape, data = self.patches
        try:
            return ImageInput(**{**vars(self), "patches": np.frombuffer(data, dtype).reshape(shape)})
        except ValueError as error:
            raise MessageError(f"{len(data)} bytes are no patches of {shape}") from error


@dataclasses.dataclass(frozen=True)
class _Sent(Request):
    """A request as it arrives."""

    params: dict[str, Any]  # type: ignore[assignment]
    images: tuple[tuple[int, int, _SentImage], ...] = ()  # type: ignore[assignment]


_SENT = msgspec.msgpack.Decoder(_Sent)


def encode_request(request: Request, now: float) -> bytes:
    """Encode a request. ``now``: current time of the clock of its deadline, which is sent as the seconds that are left.

    Raises:
        RequestError: an integer has more than 64 bits, or a text is not Unicode.
    """
    if request.deadline is not None:
        request = dataclasses.replace(request, deadline=request.deadline - now)
    if request.params.top_k > _LARGEST_INTEGER:  # values beyond any vocabulary mean the same
        params = dataclasses.replace(request.params, top_k=_LARGEST_INTEGER)
        request = dataclasses.replace(request, params=params)
    try:
        return encode(request)
    except (OverflowError, UnicodeError) as error:
        reason = f"request {own_id(request.request_id)!r} cannot be sent to the engine: {error}"
        raise RequestError(None, reason) from error


def decode_request(data: bytes, now: float) -> Request:
    """Decode a request. ``now``: current time of the clock of its deadline.

    Raises:
        RequestError: it is no request, or its sampling parameters are invalid.
    """
    try:
        sent = _decoded(_SENT, data)
        deadline = None if sent.deadline is None else now + sent.deadline
        images = tuple(PlacedImage(start, stop, image.image()) for start, stop, image in sent.images)
        own = {"deadline": deadline, "params": SamplingParams(**sent.params), "images": images}
        return Request(**{**vars(sent), **own})
    except (MessageError, TypeError) as error:  # TypeError: there is no such parameter
        raise RequestError(None, f"a request cannot be read: {error}") from error


# ---- deltas


def deltas_of(numbered: Iterable[tuple[int, SequenceDelta]]) -> Deltas:
    """Return the message with the deltas of one step, each with its stream's number. Called in the engine thread: it is
    kept lean."""
    streams: list[int] = []
    indexes: list[int] = []
    tokens: list[int] = []
    others: list[tuple[int, SequenceDelta]] = []
    versions: WeightVersions | None = None  # of the tokens in columns
    for number, delta in numbered:
        ids = delta.token_ids
        if (
            len(ids) == 1
            and delta.finish_reason is None
            and not delta.logprobs
            and delta.cached_tokens is None
            and delta.prompt_logprobs is None
            and not delta.draft_tokens
            and (delta.weight_versions == versions or versions is None)
        ):
            versions = delta.weight_versions
            streams.append(number)
            indexes.append(delta.index)
            tokens.append(ids[0])
        else:
            others.append((number, delta))
    return Deltas(streams, indexes, tokens, others, versions[0][0] if versions else 0)


def split(deltas: Deltas) -> list[Deltas]:
    """Split the deltas of one step: each with log probabilities of the whole vocabulary gets a message of its own."""
    large = [pair for pair in deltas.others if _has_vocabulary(pair[1])]
    if not large:
        return [deltas]
    deltas.others = [pair for pair in deltas.others if not _has_vocabulary(pair[1])]
    return [deltas, *(Deltas((), (), (), [pair]) for pair in large)]


def _has_vocabulary(delta: SequenceDelta) -> bool:
    extras = delta.logprobs[0].extras if delta.logprobs else None
    return extras is not None and extras.vocabulary is not None


def is_large(delta: SequenceDelta) -> bool:
    """Whether the prompt log probabilities are too many for one message."""
    known = delta.prompt_logprobs
    return known is not None and len(known) > _positions_at_once(known)


def parts(number: int, delta: SequenceDelta) -> Iterator[Part]:
    """Yield the prompt log probabilities of a large delta in parts, except the last one, which stays in the delta."""
    known = delta.prompt_logprobs
    assert known is not None
    most = _positions_at_once(known)
    last = (len(known) - 1) // most * most
    for first in range(0, last, most):
        yield Part(number, delta.index, known[first : first + most])
    delta.prompt_logprobs = known[last:]


def _positions_at_once(positions: Sequence[PositionLogprobs | None]) -> int:
    widest = positions[-1]  # all positions have the same number; the first token has none
    return MOST_CANDIDATES if widest is None else max(1, MOST_CANDIDATES // widest.weight)
