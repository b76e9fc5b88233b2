"""Speculative decoding settings, and which draft models fit which model. No jax."""

from __future__ import annotations

import dataclasses

GRAMMAR = "grammar"
"""Method that drafts only the tokens that a grammar forces."""

HEADS = ("medusa", "eagle", "eagle3", "mtp")
"""Speculation methods that read hidden states of the model."""

# Vocabulary sizes of models with the same tokenizer may differ by this many padding ids; llama.cpp has the same bound.
_PADDING = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: draft tokens are verified in rows of a step that would be idle. The output does not change.

    Attributes:
        speculative: None; "grammar": draft only the tokens that the grammars of structured outputs force, which all
            other methods draft, too; "ngram": what followed the last tokens at their earlier occurrence in the
            sequence; "suffix": the most frequent continuation there and in earlier answers; "draft_model": tokens of a
            smaller model with the same vocabulary; "medusa", "eagle", "eagle3", "mtp": tokens of draft heads on the
            model's hidden states; or the name of a registered drafter.
        speculative_model: draft model or draft heads: a folder or a hub id (default: the shipped one for the demo
            model; for "mtp" the model's own folder). Alone it means the method "draft_model".
        num_speculative_tokens: maximum draft tokens per sequence and step (Medusa: at most the number of heads).
        speculative_tree: maximum paths of a draft; 1: chains. Each further path takes idle rows and a copy of a page.
        speculative_adaptive: choose the draft length by measured step times and acceptance.
        typical_threshold: highest bound of typical acceptance: requests for it keep drafts with a probability above it,
            or above typical_alpha * exp(-entropy).
        typical_alpha: factor of that bound.
        prompt_lookup_min: minimum n-gram length that the n-gram drafter matches.
        prompt_lookup_max: maximum n-gram length that it matches.
        suffix_cache_tokens: tokens of earlier answers that the suffix drafter keeps.
    """

    speculative: str | None = None
    speculative_model: str | None = None
    num_speculative_tokens: int = 4
    speculative_tree: int = 1
    speculative_adaptive: bool = True
    typical_threshold: float = 0.09
    typical_alpha: float = 0.3
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    suffix_cache_tokens: int = 1 << 18

    def __post_init__(self) -> None:
        if self.speculative is None and self.speculative_model is not None:
            object.__setattr__(self, "speculative", "draft_model")

    @property
    def guesses(self) -> bool:
        """Whether any drafts are not forced by a grammar."""
        return self.speculative not in (None, GRAMMAR)

    @property
    def drafts_on_device(self) -> bool:
        """Whether compiled programs make the drafts, which reach the verifying step without the host."""
        return self.speculative == "draft_model" or self.drafts_by_head

    @property
    def drafts_by_head(self) -> bool:
        """Whether these programs read hidden states of the model."""
        return self.speculative in HEADS

    @property
    def drafts_from_one_state(self) -> bool:
        """Whether the heads draft all tokens from the newest hidden state, without a cache of their own."""
        return self.speculative == "medusa"

    @property
    def drafts_trees(self) -> bool:
        """Whether a draft may have several paths."""
        return self.speculative is not None and self.speculative_tree > 1


def other_vocabulary(own: int, drafts: int) -> str | None:
    """Return the reason why a model with ``drafts`` tokens cannot draft for one with ``own``; None if it can: the sizes
    differ at most by padding (as in Qwen2.5)."""
    if abs(own - drafts) <= _PADDING:
        return None
    return f"cannot draft: its vocabulary has {drafts} tokens, the model's {own}"
