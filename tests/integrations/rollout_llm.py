"""An `LLM` for tests of rollouts: it generates, and records the weights and pauses that it is given."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxinfer import LLM
from jaxinfer.models.model import Model
from jaxinfer.weights import params_from

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 48,
    "num_pages": 32,
    "page_size": 8,
    "prefill_sizes": (16,),
}


class Update(NamedTuple):
    """An update of weights."""

    params: Any
    version: int
    mode: str


class RolloutLLM(LLM):
    """Generates with the weights that it was made with.

    Attributes:
        updates: the weights that it was given.
        paused: the mode of the pause; None: it runs.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model, show_progress=False, **SETTINGS)
        self.updates: list[Update] = []
        self.paused: str | None = None
        self.weight_version = 0

    def update_weights(
        self,
        params: Any,
        *,
        version: int | None = None,
        mode: str = "wait",
        partial: bool = False,
        names: str | None = None,
    ) -> Update:
        """Record weights."""
        made = params_from(self.model, params, names=names, partial=partial)
        self.weight_version = self.weight_version + 1 if version is None else version
        self.updates.append(Update(made, self.weight_version, mode))
        return self.updates[-1]

    def logprobs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return log-probabilities by `score`."""
        scores = [self.score(list(prompt), [list(ids)])[0] for prompt, ids in zip(prompts, completions, strict=True)]
        return [
            np.asarray([found[token].logprob for token, found in zip(s.token_ids, s.logprobs, strict=True)], np.float32)
            for s in scores
        ]

    def pause(self, mode: str = "wait") -> None:
        """Record a pause."""
        self.paused = mode

    def resume(self) -> None:
        """Record the end of a pause."""
        self.paused = None
