"""Speculative decoding: drafters that propose draft tokens, which the engine verifies. No jax."""

from jaxinfer.config.speculative import GRAMMAR, HEADS
from jaxinfer.spec.acceptance import WORTH, WORTH_OF_A_PASS, Acceptance, ThroughputMonitor
from jaxinfer.spec.drafter import Bounded, DeviceDrafter, Drafted, Drafter, NoDrafter, make_drafter, register
from jaxinfer.spec.ngram import NgramDrafter
from jaxinfer.spec.static_tree import leading_paths
from jaxinfer.spec.suffix import SuffixDrafter
from jaxinfer.spec.tree import Tree

__all__ = [
    "WORTH",
    "WORTH_OF_A_PASS",
    "Acceptance",
    "Bounded",
    "DeviceDrafter",
    "Drafted",
    "Drafter",
    "NgramDrafter",
    "NoDrafter",
    "SuffixDrafter",
    "ThroughputMonitor",
    "Tree",
    "leading_paths",
    "make_drafter",
    "register",
]

register(GRAMMAR, lambda config: NoDrafter())
register(
    "ngram",
    lambda config: NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max, config.speculative_tree),
)
for method in ("draft_model", *HEADS):
    register(method, lambda config: DeviceDrafter(config.num_speculative_tokens, config.speculative_tree))
register("suffix", lambda config: SuffixDrafter(config.suffix_cache_tokens, config.speculative_tree))
