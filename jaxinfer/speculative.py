"""Settings of speculation, and what can draft for what. No jax."""

from __future__ import annotations

import dataclasses

GRAMMAR = "grammar"
"""The method that drafts nothing but what grammars leave no choice about."""

HEADS = ("medusa", "eagle", "eagle3", "mtp")
"""Methods of speculation that read states of the model."""

# Ids by which the vocabularies of one tokenizer may differ from model to model: llama.cpp's bound, too.
_PADDING = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: guesses are verified in rows of a step that would be idle. Output stays the same.

    Attributes:
        speculative: None; "grammar": of structured outputs what their grammars leave no choice about, which all other
            methods draft, too; "ngram": what followed the last tokens where they occurred before in the sequence;
            "suffix": the most frequent continuation there and in earlier answers; "draft_model": what a smaller model
            of the same vocabulary says; "medusa", "eagle", "eagle3", "mtp": what heads on the model's own states say;
            or a drafter that was registered.
        speculative_model: that model, or those heads: a folder or a hub id (default: for the demo model its own; of
            "mtp" the model's own folder).
        num_speculative_tokens: most draft tokens per sequence and step (Medusa: as many as there are heads).
        speculative_tree: most paths of a draft; 1: chains. Further ones take idle rows and copies of a page each.
        speculative_adaptive: drafts as long as they pay, by what was measured of steps and acceptance.
        prompt_lookup_min: fewest tokens in a row that the n-gram drafter looks for.
        prompt_lookup_max: most tokens in a row that it looks for.
        suffix_cache_tokens: tokens of earlier answers that the suffix drafter keeps.
    """

    speculative: str | None = None
    speculative_model: str | None = None
    num_speculative_tokens: int = 4
    speculative_tree: int = 1
    speculative_adaptive: bool = True
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    suffix_cache_tokens: int = 1 << 18

    @property
    def guesses(self) -> bool:
        """Whether there are drafts besides those of what must follow."""
        return self.speculative not in (None, GRAMMAR)

    @property
    def drafts_on_device(self) -> bool:
        """Whether drafts come from programs, and go to the step that verifies them without the host."""
        return self.speculative == "draft_model" or self.drafts_by_head

    @property
    def drafts_by_head(self) -> bool:
        """Whether these programs read the model's own states."""
        return self.speculative in HEADS

    @property
    def drafts_from_one_state(self) -> bool:
        """Whether they guess all tokens from the newest one, and have no cache."""
        return self.speculative == "medusa"

    @property
    def drafts_trees(self) -> bool:
        """Whether a draft may have several paths."""
        return self.speculative is not None and self.speculative_tree > 1


def other_vocabulary(own: int, drafts: int) -> str | None:
    """Why a model of so many tokens cannot draft for one of ``own``; None: it can, sizes differ by padding at most (as
    those of Qwen2.5 do)."""
    if abs(own - drafts) <= _PADDING:
        return None
    return f"cannot draft: its vocabulary has {drafts} tokens, the model's {own}"
