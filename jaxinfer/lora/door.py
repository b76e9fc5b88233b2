"""Adapters as callers in this process name them. No jax."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxinfer.lora.store import LoadedLoRA, LoRAStore
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import LoRARef, Request


@dataclasses.dataclass(frozen=True)
class LoRARequest:
    """An adapter for a request, as vLLM's record of this name; here no number goes with it.

    Attributes:
        lora_name: the name that it is loaded under, if none is, or one of another folder.
        lora_path: of its folder, in PEFT's format.
    """

    lora_name: str
    lora_path: str

    def __post_init__(self) -> None:
        for field in ("lora_name", "lora_path"):
            if not getattr(self, field):
                raise RequestError(field, "='' must not be empty")


LoRAChoice = LoRARequest | str | None
"""An adapter; the name of one that is loaded; or none."""


@runtime_checkable
class ServesLoRAs(Protocol):
    """Protocol of an engine, as far as adapters are concerned."""

    loras: LoRAStore | None


class LoRADoor:
    """What whoever has an ``engine`` can be asked about adapters."""

    @property
    def engine(self) -> ServesLoRAs:
        raise NotImplementedError

    def load_lora(self, name: str, path: str | os.PathLike[str]) -> None:
        """Read an adapter from a folder in PEFT's format, and let requests name it. A name that is loaded again means
        the new content from then on; requests that run end with the old one.

        Raises:
            LoRAError: the adapter cannot be served; says why.
            RequestError: the engine serves no adapters.
        """
        self._loras.load(name, os.fspath(path))

    def unload_lora(self, name: str) -> None:
        """Let no further request name an adapter; requests that run end with it.

        Raises:
            RequestError: there is none of this name, or the engine serves none.
        """
        self._loras.unload(name)

    def list_loras(self) -> list[LoadedLoRA]:
        """Adapters that requests may name. Raises RequestError where the engine serves none."""
        return self._loras.list()

    @property
    def _loras(self) -> LoRAStore:
        if self.engine.loras is None:
            raise RequestError("lora", "is not served by this engine: it needs enable_lora")
        return self.engine.loras

    def _adapted(self, requests: Sequence[Request], lora: LoRAChoice | Sequence[LoRAChoice]) -> list[Request]:
        """The requests with their adapters."""
        refs = self._refs(lora, len(requests))
        return [dataclasses.replace(each, lora=ref) for each, ref in zip(requests, refs, strict=True)]

    def _refs(self, lora: LoRAChoice | Sequence[LoRAChoice], prompts: int) -> list[LoRARef | None]:
        """The adapter of each prompt; folders that are not loaded are."""
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
