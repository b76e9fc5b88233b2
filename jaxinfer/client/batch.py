"""State of one GenerateBatch stream, shared by both clients."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

from jaxinfer.client.errors import Truncated, from_message
from jaxinfer.client.requests import Prompt, batch_id, batch_prefix, batch_request
from jaxinfer.client.results import Answer, BatchItem
from jaxinfer.protos.v1 import inference_pb2 as pb


class Batch:
    """Encoder of the requests of a batch, and assembler of their responses to one item per request.

    gRPC consumes the requests in a separate thread or task, where it would only log an exception of the caller's
    iterator. So the requests end there, and `check` raises the exception once the earlier ones have been answered.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._prefix = batch_prefix(options)
        self._sent = 0
        self._ended = 0
        self._answers: dict[str, Answer] = {}
        self._fault: Exception | None = None

    def requests(self, prompts: Iterable[Prompt]) -> Iterator[pb.GenerateRequest]:
        try:
            for prompt in prompts:
                yield self._request(prompt)
        except Exception as fault:  # noqa: BLE001 - any exception of the caller: raised by check
            self._fault = fault

    async def requests_async(
        self, prompts: Iterable[Prompt] | AsyncIterable[Prompt]
    ) -> AsyncIterator[pb.GenerateRequest]:
        try:
            if isinstance(prompts, AsyncIterable):
                async for prompt in prompts:
                    yield self._request(prompt)
            else:
                for prompt in prompts:
                    yield self._request(prompt)
        except Exception as fault:  # noqa: BLE001 - any exception of the caller: raised by check
            self._fault = fault

    def take(self, response: pb.GenerateResponse) -> BatchItem | None:
        """Return the item, if the response ends its request."""
        name, event = response.request_id, response.WhichOneof("event")
        if event == "error":
            self._answers.pop(name, None)
            return self._item(name, error=from_message(response.error))
        answer = self._answers.setdefault(name, Answer())
        answer.take(response)
        if event != "finished":
            return None
        del self._answers[name]
        return self._item(name, completion=answer.completion())

    def check(self) -> None:
        """Check, after the end of the stream, that all requests were answered.

        Raises:
            Exception: raised by the caller's prompts.
            Truncated: a request has not ended.
        """
        if self._fault is not None:
            raise self._fault
        if self._ended < self._sent:
            raise Truncated(f"the stream ended with {self._sent - self._ended} of {self._sent} prompts unanswered")

    def _request(self, prompt: Prompt) -> pb.GenerateRequest:
        request = batch_request(prompt, self._options | {"request_id": batch_id(self._prefix, self._sent)})
        self._sent += 1
        return request

    def _item(self, request_id: str, **how: Any) -> BatchItem:
        self._ended += 1
        return BatchItem(int(request_id.rpartition("-")[2]), **how)
