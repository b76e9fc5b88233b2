"""`JaxinferAsyncSampler`: the `Sampler` protocol of tunix' distributed trainers over `LLM`, with weight sync.

The protocol is that of google/tunix at c7d8950f (``tunix/experimental/rollout/sampler.py``), which no release has yet:
nothing is imported from it, and requests and responses are known by their attributes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxinfer.integrations.rollouts import Sample, samples, update
from jaxinfer.integrations.rounds import Round, StaleRoundError
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.types import walk_specs
from jaxinfer.weights import params_from


@dataclasses.dataclass(kw_only=True)
class SamplingResponse:
    """A sample, or the error of its request; fields as in tunix."""

    request_id: str = ""
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: Any = None
    text: str = ""
    prompt_token_ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    token_ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray | None = None
    finish_reason: str = "stop"
    routed_experts: Any = None


@dataclasses.dataclass(kw_only=True)
class LoadInfo:
    """Load of a sampler; fields as in tunix."""

    num_requests_waiting: int = 0
    num_requests_running: int = 0
    kv_cache_usage_perc: float = 0.0


@dataclasses.dataclass
class _Batch:
    """Requests that the engine serves together. ``task`` gives the sample of each, or its error."""

    requests: list[tuple[list[int], SamplingParams]] = dataclasses.field(default_factory=list)
    task: asyncio.Task[list[Sample | RequestError]] | None = None


class JaxinferAsyncSampler:
    """A sampler of one process, with the engine in it.

    Calls of `sample` that come while the engine generates are served together, in its next batch.

    Args:
        llm: an `LLM`, whose model has the trainer's architecture.
        weights: returns the weights that a `WeightSyncRequest` announces, as `params_from` takes them; None: they are
            its ``source_metadata``.
        names: convention of their names, see `jaxinfer.weights.params_from`.
        mode: what a synchronisation does with running requests, see `LLM.pause`.
    """

    def __init__(
        self,
        llm: LLM,
        weights: Callable[[Any], Any] | None = None,
        *,
        names: str | None = None,
        mode: str = "wait",
    ) -> None:
        self._llm, self._weights, self._names, self._mode = llm, weights, names, mode
        self._round, self._staged = Round(), dict[str, Any]()
        self._phase, self._turn = asyncio.Lock(), asyncio.Lock()
        self._open: _Batch | None = None
        self._published = -1

    def initialize(self) -> None:
        """Do nothing: an `LLM` is ready when it is made."""

    async def start(self, **kwargs: Any) -> None:
        """Do nothing: an `LLM` needs no loop."""

    async def stop(self, **kwargs: Any) -> None:
        """Do nothing: the owner of the `LLM` closes it."""

    async def pause(self, **kwargs: Any) -> None:
        """Pause the engine, see `LLM.pause`."""
        await asyncio.to_thread(self._llm.pause, self._mode)

    async def resume(self, **kwargs: Any) -> None:
        """Resume the engine."""
        await asyncio.to_thread(self._llm.resume)

    async def get_mesh(self, **kwargs: Any) -> Any:
        """Return the mesh of the served parameters; None: they are on one device without one."""
        return getattr(jax.tree.leaves(self._llm.model.params)[0].sharding, "mesh", None)

    # ---- sampling

    async def sample(self, sampling_requests: Any, **kwargs: Any) -> list[SamplingResponse] | SamplingResponse:
        """Return a response for each request; for one request that is not in a sequence, its response.

        A prompt is text or token ids. A request that is rejected has its response with ``error``.
        """
        several = isinstance(sampling_requests, list | tuple)
        requests = list(sampling_requests) if several else [sampling_requests]
        responses = await asyncio.gather(*map(self._respond, requests))
        return list(responses) if several else responses[0]

    async def _respond(self, request: Any) -> SamplingResponse:
        known: dict[str, Any] = {
            "request_id": getattr(request, "request_id", ""),
            "metadata": dict(getattr(request, "metadata", {})),
        }
        try:
            prompt = self._prompt(getattr(request, "prompt", request))
            params = _params(getattr(request, "sampling_params", None))
            sample = await self._sampled(prompt, params)
        except RequestError as error:
            return SamplingResponse(**known, error=error, finish_reason="error")
        return SamplingResponse(
            **known,
            text=sample.text,
            prompt_token_ids=np.asarray(prompt, np.int32),
            token_ids=sample.tokens,
            logprobs=sample.logprobs,
            finish_reason="cancelled" if sample.finish_reason == "abort" else sample.finish_reason,
        )

    def _prompt(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            return np.asarray(prompt).ravel().tolist()
        if self._llm.tokenizer is None:
            raise RequestError("prompt", "is a text, and the model has no tokenizer")
        return self._llm.tokenizer.encode(prompt)

    async def _sampled(self, prompt: list[int], params: SamplingParams) -> Sample:
        if self._open is None:
            self._open = _Batch()
            self._open.task = asyncio.create_task(self._run(self._open))
        batch, index = self._open, len(self._open.requests)
        batch.requests.append((prompt, params))
        assert batch.task is not None
        found = (await asyncio.shield(batch.task))[index]
        if isinstance(found, RequestError):
            raise found
        return found

    async def _run(self, batch: _Batch) -> list[Sample | RequestError]:
        async with self._turn:
            self._open = None
            return await asyncio.to_thread(self._served, batch.requests)

    def _served(self, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Sample | RequestError]:
        prompts, params = zip(*requests, strict=True)
        try:
            return [each for (each,) in samples(self._llm, prompts, params)]
        except RequestError as error:
            if len(requests) == 1:
                return [error]
            return [found for request in requests for found in self._served([request])]

    # ---- weights

    async def bind_weight_sync(self, **kwargs: Any) -> None:
        """Do nothing: the weights are in the memory of this process."""

    async def get_weight_sync_metadata(self, **kwargs: Any) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights, by their Hugging Face names."""
        specs = walk_specs(self._llm.model.declared_specs)
        return {source.name: source.shape for _, spec in specs for source in spec.sources}

    async def pre_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        """Open a round: pause the engine.

        Raises:
            StaleRoundError: a later round was opened, or this one has ended. As in each phase below.
        """
        async with self._phase:
            if self._round.admit(sync_request, "prepared"):
                await self.pause()
                self._round.phase = "prepared"

    async def weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        """Take the weights of a round and check them; the served ones do not change.

        Raises:
            WeightsError: they do not fit the model; the first array that does not is named.
        """
        async with self._phase:
            if self._round.admit(sync_request, "h2d_done"):
                given = self._weights(sync_request) if self._weights else getattr(sync_request, "source_metadata", None)
                self._staged = await asyncio.to_thread(
                    params_from, self._llm.model, given, names=self._names, cast=True
                )
                self._round.phase = "h2d_done"

    async def post_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        """Serve the weights of a round, and resume. May be repeated: it publishes once.

        Raises:
            RequestError: the engine rejects the update; `abort_weight_sync` resumes with the old weights.
        """
        async with self._phase:
            if not self._round.admit(sync_request, "committed"):
                return
            if self._round.phase != "h2d_done":
                raise StaleRoundError(f"committed: round {self._round.uuid} has no weights yet")
            if self._published != self._round.uuid:
                version = self._round.policy_version if self._round.policy_version > 0 else None
                await asyncio.to_thread(update, self._llm, self._staged, "own", version)
                self._published = self._round.uuid
            await self.resume()
            self._round.phase, self._staged = "committed", {}

    async def abort_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        """Drop the weights of a round that is not committed, and resume with the old ones. May be repeated."""
        async with self._phase:
            if self._round.admit(sync_request, "aborted"):
                self._staged = {}
                await self.resume()
                self._round.phase = "aborted"

    async def get_weight_sync_status(self, **kwargs: Any) -> Mapping[str, Any]:
        """Return the current round, and the version that is served."""
        return {**dataclasses.asdict(self._round), "serving_version": self._llm.weight_version}

    async def get_transfer_status(self, req_id: Any, **kwargs: Any) -> str:
        """Return "SUCCESS": a transfer is over when `weight_sync` returns."""
        return "SUCCESS"

    async def migrate_kv_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Return False: pages stay in their engine."""
        return False

    async def get_load_info(self, **kwargs: Any) -> LoadInfo:
        """Return the numbers of sequences, and the share of KV pages in use."""
        stats = self._llm.engine.stats()
        share = 0.0 if stats.kv is None else stats.kv.held / stats.kv.total
        return LoadInfo(
            num_requests_waiting=sum(stats.waiting.values()),
            num_requests_running=stats.running,
            kv_cache_usage_perc=share,
        )


def _params(given: Any) -> SamplingParams:
    """Return the sampling parameters of a request, from those of tunix by their names."""

    def value(name: str, default: Any) -> Any:
        found = getattr(given, name, None)
        return default if found is None else found

    for name in ("beam_size", "return_logits"):
        if value(name, None):
            raise RequestError(name, "is not supported")
    return SamplingParams(
        max_tokens=value("max_tokens", 64),
        temperature=value("temperature", 1.0),
        top_p=value("top_p", 1.0),
        top_k=value("top_k", 0),
        seed=value("seed", None),
    )
