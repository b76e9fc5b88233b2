"""LoRA settings. No jax."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """LoRA adapters served together with the model.

    Attributes:
        enable_lora: requests may name adapters.
        max_loras: adapters resident on the device at the same time, which may be mixed in a batch.
        max_lora_rank: largest rank of an adapter; every slot on the device is allocated for this rank.
        lora_target_modules: modules that adapters may change, by their checkpoint names (q_proj); "all-linear": all
            linear layers of the decoder layers. "embed_tokens" and "lm_head" are the embedding table and the head: for
            these a slot has ``max_lora_rank`` numbers for each token of the vocabulary.
        max_cpu_loras: adapters kept in host memory; further adapters are read from their folders again (default: twice
            ``max_loras``).
    """

    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 16
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    max_cpu_loras: int | None = None

    @property
    def lora_slots(self) -> int:
        """Number of adapter slots on the device; 0 without LoRA."""
        return self.max_loras if self.enable_lora else 0

    @property
    def host_loras(self) -> int:
        """Number of adapters kept in host memory."""
        return 2 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
