"""Settings of adapters. No jax."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Adapters beside the model.

    Attributes:
        enable_lora: requests may name adapters.
        max_loras: adapters that lie on the device at once, and may be mixed in a batch.
        max_lora_rank: the largest rank of an adapter; every slot on the device has room for it.
        lora_target_modules: modules that adapters may change, as the checkpoint calls them (q_proj); "all-linear": all
            products of the layers. "embed_tokens" and "lm_head" are the table of embeddings and the head: for those a
            slot has ``max_lora_rank`` numbers for each token of the vocabulary.
        max_cpu_loras: adapters that are kept in the host's memory; others are read from their folders again (default:
            twice ``max_loras``).
    """

    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 16
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    max_cpu_loras: int | None = None

    @property
    def lora_slots(self) -> int:
        """Slots for adapters on the device; 0: there are none."""
        return self.max_loras if self.enable_lora else 0

    @property
    def host_loras(self) -> int:
        """Adapters in the host's memory."""
        return 2 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
