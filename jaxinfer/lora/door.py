"""LoRA management for in-process callers. No jax."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.store import LoadedLoRA, LoRAStore
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import LoRARef, Request


@dataclasses.dataclass(frozen=True)
class LoRARequest:
    """An adapter for a request, like vLLM's class of this name but without an integer id.

    Attributes:
        lora_name: name of the adapter; it is loaded under this name unless already loaded from the same folder.
        lora_path: path of its folder, in PEFT's format.
    """

    lora_name: str
    lora_path: str

    def __post_init__(self) -> None:
        for field in ("lora_name", "lora_path"):
            if not getattr(self, field):
                raise RequestError(field, "='' must not be empty")


LoRAChoice = LoRARequest | str | None
"""An adapter, the name of a loaded adapter, or None."""


@runtime_checkable
class ServesLoRAs(Protocol):
    """Protocol of an engine with LoRA support."""

    loras: LoRAStore | None


class LoRAFrontend:
    """Mixin with the LoRA methods of classes that have an ``engine``."""

    @property
    def engine(self) -> ServesLoRAs:
        raise NotImplementedError

    def load_lora(self, name: str, adapter: str | os.PathLike[str] | Adapter) -> None:
        """Load an adapter so that requests may name it. Reloading a name replaces the content for new requests; running
        requests finish with the old content.

        Args:
            adapter: a folder in PEFT's format, or the arrays themselves, which are copied
                (`jaxinfer.lora.trainable.init_adapter`).

        Raises:
            LoRAError: the adapter cannot be served, with the reason.
            RequestError: the engine serves no adapters.
        """
        self._loras.load(name, adapter if isinstance(adapter, Adapter) else os.fspath(adapter))

    def unload_lora(self, name: str) -> None:
        """Reject further requests for an adapter; running requests finish with it.

        Raises:
            RequestError: no adapter has this name, or the engine serves none.
        """
        self._loras.unload(name)

    def list_loras(self) -> list[LoadedLoRA]:
        """Return the adapters that requests may name; raise RequestError if the engine serves none."""
        return self._loras.list()

    @property
    def _loras(self) -> LoRAStore:
        if self.engine.loras is None:
            raise RequestError("lora", "is not served by this engine: it needs enable_lora")
        return self.engine.loras

    def _adapted(self, requests: Sequence[Request], lora: LoRAChoice | Sequence[LoRAChoice]) -> list[Request]:
        """Return the requests with their adapters."""
        refs = self._refs(lora, len(requests))
        return [dataclasses.replace(each, lora=ref) for each, ref in zip(requests, refs, strict=True)]

    def _refs(self, lora: LoRAChoice | Sequence[LoRAChoice], prompts: int) -> list[LoRARef | None]:
        """Return the adapter of each prompt, loading folders that are not yet loaded."""
        if lora is None:
            return [None] * prompts
        if isinstance(lora, LoRARequest | str):
            return [self._ref(lora)] * prompts
        if len(lora) != prompts:
            raise RequestError("lora", f": {len(lora)} given for {prompts} prompts")
        return [self._ref(each) for each in lora]

    def _ref(self, lora: LoRAChoice) -> LoRARef | None:
        if lora is None:
            return None
        if isinstance(lora, str):
            return self._loras.resolve(lora)
        name, path = lora.lora_name, lora.lora_path
        known = {each.name: each.path for each in self._loras.list()}
        return self._loras.resolve(name) if known.get(name) == path else self._loras.load(name, path)
