"""Validation of request grammars in killable helper processes, before the engine gets the request. No jax."""

from __future__ import annotations

import collections
import hashlib

from jaxinfer.helper_process import GOOD
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.serve.api.requests import ModelCard
from jaxinfer.serve.workers.templates import Pool, Sizes
from jaxinfer.structured.helper import MODULE, check, setup
from jaxinfer.structured.masks import CPU_SECONDS
from jaxinfer.text.tokenizer import Tokenizer

_SIZES = Sizes(helpers=3, share=2, waiting=256)
_CPU_SECONDS = CPU_SECONDS / 2
"""CPU seconds of a check. The engine's helper needs about twice as much: grammars accepted here compile there."""
_SECONDS = 10.0
_REMEMBERED = 4096


class Grammars:
    """A validator that compiles grammars and rejects those that cannot be enforced, round-robin by tenant."""

    def __init__(self) -> None:
        self._pool = Pool(MODULE, _SIZES, setup(_CPU_SECONDS), _SECONDS, "grammars")
        # Recently accepted grammars, by tenant: response times must not reveal the grammars of other tenants.
        self._good: collections.OrderedDict[tuple[str, bytes], None] = collections.OrderedDict()

    async def check(self, params: SamplingParams, tenant: str) -> None:
        """Check the grammar of a request, if it has one.

        Raises:
            RequestError: the grammar cannot be enforced exactly, or the check takes too long.
            QueueFullError: too many requests wait.
            ServeError: UNAVAILABLE: no helper can be started.
        """
        if params.grammar is None:
            return
        question = check(*params.grammar)
        key = tenant, hashlib.sha256(question).digest()
        if key not in self._good:
            await self._ask(f"structured_outputs.{params.grammar[0]}", question, tenant)
        self._good[key] = None
        self._good.move_to_end(key)
        if len(self._good) > _REMEMBERED:
            self._good.popitem(last=False)

    async def _ask(self, place: str, question: bytes, tenant: str) -> None:
        answer = await self._pool.ask(tenant, question)
        if answer is None:
            raise RequestError(place, "was stopped: compiled, it takes too long, too much memory or too deep a stack")
        if answer[:1] != GOOD:
            part, _, why = answer[1:].decode().partition("\n")
            raise RequestError(part or place, f"cannot be held: {why}")

    def close(self) -> None:
        """Kill the helpers."""
        self._pool.close()


def has_grammars(card: ModelCard, tokenizer: Tokenizer | None) -> bool:
    """Whether the engine constrains outputs by grammars, see `ResolvedEngine.grammars`."""
    helpers = card.engine.get("structured_output_helpers", 0)
    return helpers > 0 and not card.engine.get("enable_dp_attention") and tokenizer is not None
