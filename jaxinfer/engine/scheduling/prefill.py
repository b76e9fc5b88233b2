"""Planning of the prompt chunks of a step under its token budget. No jax."""

from __future__ import annotations

import numpy as np

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.scheduling.buckets import Chunk
from jaxinfer.engine.scheduling.encoder_cache import EncoderCache
from jaxinfer.engine.scheduling.pages import SequencePages
from jaxinfer.engine.scheduling.plan import PrefillPlan
from jaxinfer.engine.scheduling.queues import Queue
from jaxinfer.engine.scheduling.sequence import Sequence, Status
from jaxinfer.engine.scheduling.stats import StatsRecorder
from jaxinfer.types import ImageInput


class PrefillPlanner:
    """Plans chunks, advances the scheduled lengths of their sequences, and takes the pages that they need.

    Args:
        queue: bounds and counts the prompt tokens of its sequences.

    Attributes:
        budget: tokens that are left in the step.
        plans: chunks of the step that is being planned.
        encoder: images whose encoder outputs are on the device.
        filled: sequences with chunks in it: their pages may be shared from the next step on.
    """

    def __init__(self, engine: ResolvedEngine, pages: SequencePages, queue: Queue, stats: StatsRecorder) -> None:
        self._pages, self._queue, self._stats = pages, queue, stats
        self.encoder = EncoderCache(engine.encoder_cache_size, engine.images.merged if engine.images else 1)
        self._tokens = engine.max_num_batched_tokens - engine.max_num_seqs
        self.budget = 0
        self.plans: list[PrefillPlan] = []
        self.filled: list[Sequence] = []
        self._ahead = False

    def begin(self, *, decoding: bool) -> None:
        """Begin a step. Pages filled by the step before are launched: later steps may read them.

        Args:
            decoding: sequences decode. Then images are encoded a step before the chunk that reads them: tokens wait for
                one of both at a time.
        """
        for sequence in self.filled:
            if sequence.status is Status.RUNNING:
                self._pages.publish(sequence)
        self.budget = self._tokens
        self.plans, self.filled, self._ahead = [], [], decoding
        self.encoder.begin()

    def extend(self, sequence: Sequence, spare: int = 0, *, limited: bool = True) -> None:
        """Plan chunks of one prompt as far as the budget, pages less ``spare``, and the queue's limit allow.

        Args:
            limited: false: there is no such limit, as no other prompt could proceed.
        """
        if not sequence.prefilling:
            return
        before, limit = len(self.plans), self._queue.prompt_limit(sequence) if limited else None
        kept = 0 if limit is None else max(0, self._tokens - limit)
        while sequence.prefilling:
            chunk = self._pages.next_chunk(sequence, sequence.scheduled)
            end, first = sequence.scheduled + chunk.length, len(self.plans) == before
            images = [] if sequence.images is None else sequence.images.within(sequence.scheduled, end)
            if self._ahead and images and self._waits(images):
                break
            cost = self._cost(chunk, images, self.budget - kept)
            if cost is None or not self._pages.extend(sequence, end, slide=first, spare=spare):
                break
            self.budget = max(0, self.budget - cost)
            sequence.scheduled += chunk.length
            rows = self._rows(sequence, chunk, images)
            self.plans.append(PrefillPlan(sequence, chunk, sequence.params.prompt_logprobs is not None, rows))
        if len(self.plans) > before:
            self.filled.append(sequence)
            # Tokens recomputed after a preemption were charged before.
            computed = min(sequence.scheduled, sequence.prompt_end)
            self._queue.charge(sequence, prompt=max(0, computed - sequence.charged))
            sequence.charged = max(sequence.charged, computed)

    def _waits(self, images: list[ImageInput]) -> bool:
        """Encode images that are missing, as far as the budget allows; return whether their chunk waits for it."""
        missing = self.encoder.cost(images)
        if missing and (missing <= self.budget or not (self.plans or self.encoder.encodes)):
            self.budget = max(0, self.budget - missing)
            self._stats.encoder(*self.encoder.keep(images, ahead=True))
        return bool(missing) or self.encoder.encodes_any(images)

    def _cost(self, chunk: Chunk, images: list[ImageInput], budget: int) -> int | None:
        """Return the tokens of the budget that a chunk takes, those of images to encode included; None: too many. The
        first chunk of a step may encode its images in any case."""
        encoded = self.encoder.cost(images) if images else 0
        if chunk.size > budget or encoded is None or (encoded and self.plans and chunk.size + encoded > budget):
            return None
        return chunk.size + encoded

    def _rows(self, sequence: Sequence, chunk: Chunk, images: list[ImageInput]) -> np.ndarray | None:
        """Keep the images of a chunk for this step; return the rows of the encoder cache that its tokens read."""
        if not images:
            return None
        assert sequence.images is not None
        self._stats.encoder(*self.encoder.keep(images))
        return sequence.images.rows(chunk.start, chunk.start + chunk.length, self.encoder.rows)
