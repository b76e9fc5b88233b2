"""An `LLM` for tests of rollouts, which records the weights and pauses that it is given."""

from typing import Any, NamedTuple

from jaxinfer import LLM
from jaxinfer.models.model import Model
from jaxinfer.served import WeightUpdate
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
    """An `LLM` that records weights and pauses.

    Attributes:
        updates: the weights that it was given.
        paused: the mode of the pause; None: it runs.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model, show_progress=False, **SETTINGS)
        self.updates: list[Update] = []
        self.paused: str | None = None

    def update_weights(self, params: Any, *, mode: str = "wait", **options: Any) -> WeightUpdate:
        """Record weights, and serve them."""
        chosen = {name: options.pop(name) for name in ("names", "cast") if name in options}
        made = params_from(self.model, params, partial=options.get("partial", False), **chosen)
        update = super().update_weights(made, mode=mode, **options)
        self.updates.append(Update(made, update.version, mode))
        return update

    def pause(self, mode: str = "wait") -> None:
        """Record a pause, and pause."""
        super().pause(mode)
        self.paused = mode

    def resume(self) -> None:
        """Record the end of a pause, and go on."""
        super().resume()
        self.paused = None
