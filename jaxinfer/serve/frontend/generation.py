"""Generation of one accepted request: converts token deltas of the engine to text deltas. No jax."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence

from jaxinfer.serve.api.capacity import Place, nowhere
from jaxinfer.serve.api.errors import Kind, ServeError, answer_to, unavailable
from jaxinfer.serve.api.requests import Usage
from jaxinfer.serve.api.streams import EngineDeadError
from jaxinfer.serve.api.tenants import own_id
from jaxinfer.serve.core.backend import Backend, BackendStream
from jaxinfer.serve.telemetry.tracing import NOTHING, Trace
from jaxinfer.text.output import NOT_FINITE, Output, OutputDelta
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import FinishReason, SequenceDelta, WeightVersions, added_versions

_log = logging.getLogger("jaxinfer.serve")


class Generation:
    """The text delta stream of all outputs of a request, made by `Frontend.generate`.

    ```
    async with await frontend.generate(call) as generation:
        async for delta in generation: ...
    ```

    Leaving it early aborts the request. A slow reader delays no other request: unread deltas are merged.

    Args:
        left: called once, with the engine id, which is free from then on, and the finish reason of each output.
        seconds: seconds until the deadline (None: no deadline). The engine enforces it too, but may hang.
        place: queue reservation until the first token.

    Attributes:
        request_id: id given by the client.
        seed, prompt_token_ids, n, lora: values that the engine accepted.
        trace: gets the result once the generation has ended.
        drafts: for each output, the number of draft tokens verified and accepted so far.
    """

    def __init__(
        self,
        backend: Backend,
        stream: BackendStream,
        tokenizer: Tokenizer | None,
        left: Callable[[str, Collection[FinishReason]], None],
        seconds: float | None,
        place: Place | None = None,
    ) -> None:
        request = stream.request
        assert request.params.seed is not None  # resolved by the engine
        self.request_id, self.seed, self.n = own_id(request.request_id), request.params.seed, request.params.n
        self._engine_id = request.request_id
        self.prompt_token_ids: Sequence[int] = request.prompt_token_ids
        self.lora = request.lora
        self._backend, self._stream, self._left = backend, stream, left
        self._place = place or nowhere()
        self._deltas = aiter(stream)
        self._outputs = [Output(tokenizer, request) for _ in range(self.n)]
        self.drafts = [(0, 0)] * self.n
        self._running = self.n
        self._tokens = [0] * self.n  # of each output
        self._versions: dict[int, WeightVersions] = {}  # of the outputs with tokens of other versions than 0
        self._begun = False
        self._cached = 0
        self._cut: ServeError | None = None
        self._failure: ServeError | None = None
        self._closed = False
        self.trace: Trace = NOTHING
        self._reasons: dict[int, FinishReason] = {}
        self._aborting: set[asyncio.Future[None]] = set()  # referenced, or they could be garbage collected
        self._deadline: asyncio.TimerHandle | None = None
        if seconds is not None:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self.cut, expired())

    @property
    def usage(self) -> Usage:
        """Token counts of prompt and completion so far."""
        return Usage(len(self.prompt_token_ids), sum(self._tokens), self._cached)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> OutputDelta:
        """Return the next text delta of any output. The last delta of an output has the ``weight_versions`` of all its
        tokens.

        Raises:
            StopAsyncIteration: all outputs have ended.
            ServeError: DEADLINE, UNAVAILABLE (the engine died, or the server stops) or INTERNAL. Outputs that have not
                ended then will not.
        """
        try:
            while self._running and self._cut is None:
                delta = await self._deltas.__anext__()
                output = self._take(delta)
                if not self._running:  # at once: after a stop string the engine still generates
                    await self.aclose()
                if output is not None:
                    return output
        except StopAsyncIteration:
            self._notice_truncation()
        except Exception as error:  # front end boundary: every fault gets an error response
            self._failure = answer = answer_to(error)
            await self.aclose()
            raise answer from error
        await self.aclose()
        cut, self._cut = self._cut, None
        if cut is not None:
            raise cut
        raise StopAsyncIteration

    @property
    def idle(self) -> bool:
        """Whether the next delta is not available yet."""
        return bool(self._running) and self._cut is None and self._stream.idle

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` on each delta, or the end, that arrives while no reader waits."""
        self._stream.listen(listener)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort the outputs that still run. May be called more than once."""
        if not self._closed:
            self._closed = True
            if self._deadline is not None:
                self._deadline.cancel()
            cause = (
                FinishReason.DEADLINE
                if self._cut is not None and self._cut.kind is Kind.DEADLINE
                else FinishReason.ABORT
            )
            self._left(self._engine_id, [self._reasons.get(index, cause) for index in range(self.n)])
            self._place.leave()
            self._trace_end()
            await self._stream.aclose()

    def _trace_end(self) -> None:
        self.trace.accepted(self._stream.request)
        if self._running:
            self.trace.failed(self._failure or self._cut or gone(), self.usage)
        else:
            self.trace.finished(self.usage, [reason.value for _, reason in sorted(self._reasons.items())])

    def cut(self, error: ServeError) -> None:
        """End the generation now: the reader gets ``error`` instead of further deltas."""
        if self._running and self._cut is None and not self._closed:
            self._cut = error
            self._aborting.add(asyncio.ensure_future(self._stream.aclose()))  # closing wakes the reader

    def _notice_truncation(self) -> None:
        """Report a stream that ends before its outputs as an engine fault, unless it was ended from here."""
        if self._running and self._cut is None and not self._closed:
            self._cut = answer_to(RuntimeError(f"the stream of request {self.request_id!r} ended before its outputs"))

    def _take(self, delta: SequenceDelta) -> OutputDelta | None:
        """Convert a token delta to a text delta; None: nothing to report."""
        index = delta.index
        output = self._outputs[index]
        if output.ended:  # by a stop string, which the engine does not know of yet
            return None
        new = output.take(delta)
        if delta.draft_tokens:
            tokens, accepted = self.drafts[index]
            self.drafts[index] = (tokens + delta.draft_tokens, accepted + delta.draft_accepted)
        if not self._begun:
            self._begun = bool(new.token_ids)
            self.trace.token()
            self._place.begin()
        if new.weight_versions or self._versions:
            self._add_versions(index, new)
        self._tokens[index] += len(new.token_ids)
        if index == 0:
            self._cached = delta.cached_tokens or self._cached
        else:
            new.prompt_logprobs = None
        if new.finish_reason is None:
            return new
        if not self._tokens[index]:
            new.weight_versions = delta.weight_versions
        stopped = new.finish_reason == FinishReason.STOP  # or by a stop string that the last token completed
        self._reasons[index] = reason = FinishReason.STOP if stopped else delta.finish_reason or FinishReason.ABORT
        if (cut := self._cut_by(reason, delta.stop_reason)) is not None:
            self._cut, new.finish_reason = cut, None
            return new if new.token_ids else None
        self._running -= 1
        self._place.ended()
        if delta.finish_reason is None and self._running:
            self._aborting.add(asyncio.ensure_future(self._abort(index)))
        return new

    def _add_versions(self, index: int, new: OutputDelta) -> None:
        known, count = self._versions.get(index, ()), self._tokens[index]
        new.weight_versions = added_versions(known, count, new.weight_versions, len(new.token_ids))
        self._versions[index] = new.weight_versions

    def _cut_by(self, reason: FinishReason, why: int | str | None) -> ServeError | None:
        """Return the error that ends all outputs when one of them has ended for ``reason``; None: no error."""
        adapter = "" if self.lora is None else f"the adapter {self.lora.name!r}"
        match reason:
            case FinishReason.DEADLINE:
                return expired()
            case FinishReason.NOT_FINITE:
                return ServeError(Kind.INTERNAL, NOT_FINITE + (adapter and f", with {adapter}"))
            case FinishReason.ERROR:
                return ServeError(Kind.INVALID, f"structured_outputs: {why}", "structured_outputs")
            case FinishReason.UNAVAILABLE:  # the log has details of files and processes that clients do not get
                what = f"{adapter or 'a process for structured outputs'} is not available now"
                _log.error("request %r: %s: %s", self.request_id, what, why)
                return unavailable(f"{what}: the server's log says why")
            case _:
                return None

    async def _abort(self, index: int) -> None:
        with contextlib.suppress(EngineDeadError):  # readers get the error from their streams
            await self._backend.abort(self._engine_id, index)


@contextlib.contextmanager
def failing(trace: Trace) -> Iterator[None]:
    """Report the error that ends the block to ``trace``, including the cancellation after a client has disconnected."""
    try:
        yield
    except asyncio.CancelledError:
        trace.failed(gone())
        raise
    except ServeError as error:
        trace.failed(error)
        raise


@contextlib.asynccontextmanager
async def within(seconds: float | None) -> AsyncIterator[None]:
    """Raise `ServeError` DEADLINE after ``seconds``."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise expired() from error


def gone() -> ServeError:
    return ServeError(Kind.CANCELLED, "the client has left")


def expired() -> ServeError:
    return ServeError(Kind.DEADLINE, "the deadline has passed")
