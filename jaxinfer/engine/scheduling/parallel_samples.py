"""Samples of one request: the first one computes the prompt, the others wait for it and share its pages. No jax."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxinfer.engine.scheduling.sequence import Sequence, Status


class Siblings:
    """Samples ``waiting`` for the prompt of their first one; each is passed to ``enqueue`` when the prompt is ready."""

    def __init__(self, enqueue: Callable[[Sequence], None]) -> None:
        self._enqueue = enqueue
        self.waiting = 0

    def add(self, samples: list[Sequence]) -> None:
        """Add all samples of a new request: the first one leads the others."""
        samples[0].followers = samples[1:]
        for sample in samples[1:]:
            sample.status, sample.leader = Status.WAITING_FOR_PROMPT, samples[0]
        self.waiting += len(samples) - 1

    def release(self, leaders: Iterable[Sequence]) -> None:
        """Enqueue the followers of leaders whose prompt is planned to its end."""
        for leader in leaders:
            if leader.followers and not leader.prefilling:
                self.release_of(leader)

    def release_of(self, leader: Sequence) -> None:
        """Enqueue the followers of a leader that has ended, or whose prompt is computed."""
        for follower in leader.followers:
            if follower.status is Status.WAITING_FOR_PROMPT:
                self.waiting -= 1
                self._enqueue(follower)
        leader.followers = []

    def ended(self) -> None:
        """Record that a sample has ended while it waited."""
        self.waiting -= 1
