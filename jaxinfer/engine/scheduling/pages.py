"""Pages of sequences: the adapter between the scheduler and the KV manager. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.scheduling.buckets import Chunk, next_chunk, page_code
from jaxinfer.engine.scheduling.sequence import Sequence, Status
from jaxinfer.kv.manager import KVManager
from jaxinfer.kv.radix import PageKeys
from jaxinfer.kv.store import Match


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of device time, measured at start-up: a page to the host and back, a prompt token, a decode step."""

    swap_page: float = 1e-4
    prefill_token: float = 1e-5
    decode_step: float = 5e-3


def prefer_swap(sequence: Sequence, pages: int, costs: Costs, chunks_end: int) -> bool:
    """Whether swapping the pages to the host and back is cheaper than recomputing them.

    Tokens before ``chunks_end`` are recomputed in chunks, generated ones after it one decode step each.
    """
    steps = len(sequence.tokens) - 1 - chunks_end
    again = chunks_end * costs.prefill_token + steps * costs.decode_step
    return pages * costs.swap_page < again


class SequencePages:
    """Keeps ``scheduled``, ``capacity`` and ``swapped`` of sequences consistent with the pages that they hold.

    Args:
        classes: prefill sizes with bitwise identical results, see `buckets.next_chunk`.
        decode_agrees: decode rows give bitwise identical pages too: the pages of all tokens are equivalent.
    """

    def __init__(
        self, engine: ResolvedEngine, kv: KVManager, classes: Mapping[int, int], *, decode_agrees: bool = False
    ) -> None:
        self._kv, self._page, self._sizes = kv, engine.page_size, engine.prefill_sizes
        self._free_branches = list(range(engine.rows, engine.rows + engine.branches))
        relaxed = engine.exactness == "relaxed"
        self._alike = relaxed or decode_agrees
        self._classes = dict.fromkeys(engine.prefill_sizes, 0) if relaxed else dict(classes)

    def chunks_end(self, sequence: Sequence) -> int:
        """Return the first token that runs as a decode row when a sequence is recomputed: the last known one, if pages
        from chunks are equivalent to pages from rows.

        Otherwise the last prompt token: also where the sampler counts generated tokens as their rows run, and after a
        prompt that ran in the program for prompt log probabilities.
        """
        rows = sequence.stateful or sequence.params.prompt_logprobs is not None
        return len(sequence.tokens) - 1 if self._alike and not rows else sequence.prompt_end

    def next_chunk(self, sequence: Sequence, start: int) -> Chunk:
        wants = sequence.params.prompt_logprobs is not None
        whole = sequence.images.spans if sequence.images is not None else ()
        return next_chunk(start, sequence.prefill_end, self._sizes, self._classes, largest_only=wants, whole=whole)

    def extend(self, sequence: Sequence, length: int, *, slide: bool = False, spare: int = 0) -> bool:
        """Take pages for the first ``length`` tokens, never more than the sequence can need. False: too few pages, or
        less than ``spare`` pages would be left.

        ``slide`` releases pages that slid out of every window. Not in a step that already computes several prompt
        chunks or known tokens of the sequence: their queries are still to be launched. A row that is launched and not
        read may have to be rolled back, so the last known token keeps the pages that it sees.
        """
        length = min(length, sequence.final_length)
        if length <= sequence.capacity:
            return True
        if slide:
            self._kv.slide(sequence.slot, min(sequence.scheduled, len(sequence.tokens) - 1))
        fresh = self._kv.pages_for(length) - sequence.capacity // self._page
        if (spare and self._kv.available < fresh + spare) or not self._kv.extend(sequence.slot, length):
            return False
        sequence.capacity = self._kv.pages_for(length) * self._page
        return True

    def place(self, sequence: Sequence, slot: int, budget: int, spare: int) -> int | None:
        """Give a waiting sequence the pages to continue in ``slot``, if that leaves ``spare`` pages. Returns its
        already computed tokens; None: too few pages, or its next chunk exceeds ``budget``."""
        leader = sequence.leader
        if sequence.swapped is not None:
            return self._swap_in(sequence, slot, spare)
        if leader is not None and leader.status is Status.RUNNING and not (sequence.generated or leader.prefilling):
            forked = self._fork(sequence, slot, leader, spare)
            if forked is not None:
                return forked  # else perhaps the leader has released pages that slid out of its window
        return self._admit(sequence, slot, budget, spare)

    def _swap_in(self, sequence: Sequence, slot: int, spare: int) -> int | None:
        assert sequence.swapped is not None
        needed = self._kv.pages_for(sequence.scheduled)
        if self._kv.available < needed + spare or not self._kv.swap_in(slot, sequence.swapped):
            return None
        sequence.swapped = None
        return self._placed(sequence, sequence.scheduled, sequence.scheduled)

    def _fork(self, sequence: Sequence, slot: int, leader: Sequence, spare: int) -> int | None:
        length = sequence.prompt_end
        if self._kv.available < 1 + spare or not self._kv.fork(leader.slot, slot, length):
            return None
        sequence.prompt_logprobs = leader.prompt_logprobs
        sequence.base, sequence.drafted = 0, length
        return self._placed(sequence, length, length)

    def _admit(self, sequence: Sequence, slot: int, budget: int, spare: int) -> int | None:
        match = self._match(sequence)
        start, length, sequence.prefill_end = match.tokens, match.tokens + 1, self.chunks_end(sequence)
        if start < sequence.prefill_end:
            chunk = self.next_chunk(sequence, start)
            length = start + chunk.length
            if chunk.size > budget:
                return None
        fresh = self._kv.pages_for(length) - start // self._page
        if self._kv.available < fresh + spare or not self._kv.admit(slot, match, length):
            return None
        seen = start <= sequence.prompt_end  # drafters may not have seen generated tokens found in the cache
        sequence.base, sequence.drafted = 0, sequence.prefill_end if seen else sequence.prompt_end
        return self._placed(sequence, start, length)

    def _placed(self, sequence: Sequence, computed: int, length: int) -> int:
        sequence.scheduled = computed
        sequence.kept = max(computed, sequence.prefill_end)
        sequence.capacity = self._kv.pages_for(length) * self._page
        return computed

    def cached(self, sequence: Sequence) -> int:
        """Return how many tokens of a waiting sequence would hit the prefix cache now."""
        return self._match(sequence).tokens

    def _match(self, sequence: Sequence) -> Match:
        limit = len(sequence.tokens) - 1
        if sequence.params.prompt_logprobs is not None:
            limit = 0  # log probabilities are wanted of every prompt token
        elif sequence.stateful:
            limit = sequence.prompt_end  # the sampler counts the generated tokens as they come
        return self._kv.match(self.keys(sequence), self._codes(sequence), limit)

    def preempt(self, sequence: Sequence, costs: Costs, *, swap: bool = True) -> bool:
        """Take the pages of a preempted sequence; return whether they are swapped to the host, if they may be.
        Otherwise its pages may still be found in the radix tree when it resumes."""
        swap = swap and prefer_swap(sequence, self._kv.pages_for(sequence.scheduled), costs, self.chunks_end(sequence))
        # The sampler state is that of the winning path, which may use a branch's pages: swapped ones might not match.
        if swap and not sequence.branches:
            sequence.swapped = self._kv.swap_out(sequence.slot, sequence.scheduled)
        if sequence.swapped is None:
            self._publish(sequence, min(sequence.scheduled, len(sequence.tokens)))
            self.release(sequence)
            sequence.scheduled = 0
        sequence.capacity = 0
        return sequence.swapped is not None

    def publish(self, sequence: Sequence) -> None:
        """Publish pages that launched steps have filled; those of generated tokens only where they are equivalent to
        prompt pages."""
        known = len(sequence.tokens) if self._alike else sequence.prompt_end
        self._publish(sequence, min(sequence.scheduled, known))

    def _publish(self, sequence: Sequence, length: int) -> None:
        if sequence.params.prompt_logprobs is None:
            self._kv.publish(sequence.slot, self.keys(sequence), self._codes(sequence), length)

    def release(self, sequence: Sequence) -> None:
        """Release the pages of a running sequence; where decode pages are equivalent, its output is cached for a
        follow-up turn."""
        if self._alike:
            self.publish(sequence)
        self.drop_branches(sequence)
        self._kv.release(sequence.slot)

    # ---- further paths of a draft

    def branch(self, sequence: Sequence, tokens: int, spare: int) -> int | None:
        """Return a KV slot with a sequence's pages before its last known token, and fresh ones for that and ``tokens``
        more. None: no slot is free, or less than ``spare`` pages would be left."""
        last = len(sequence.tokens) - 1
        length = last + 1 + tokens
        fresh = self._kv.pages_for(length) - last // self._page
        if not self._free_branches or self._kv.available < fresh + spare:
            return None
        slot = self._free_branches[-1]
        if not self._kv.fork(sequence.slot, slot, last):
            return None
        self._kv.extend(slot, length)
        sequence.branches.append(self._free_branches.pop())
        return slot

    def adopt(self, sequence: Sequence, slot: int, length: int) -> None:
        """Continue with the pages of a branch, whose first ``length`` tokens are scheduled."""
        self._kv.adopt(sequence.slot, slot)
        sequence.scheduled = length
        sequence.capacity = self._kv.pages_for(length) * self._page

    def drop_branches(self, sequence: Sequence) -> None:
        """Release a sequence's branches. Their pages are free at once, as those of a finished sequence."""
        for slot in sequence.branches:
            self._kv.release(slot)
        self._free_branches += sequence.branches
        sequence.branches.clear()

    def check(self, running: Iterable[Sequence], branches: int) -> None:
        """Check that all ``branches`` are free or held by a running sequence."""
        held = sum(len(sequence.branches) for sequence in running)
        if held + len(self._free_branches) != branches:
            raise AssertionError(f"{held} branches are held and {len(self._free_branches)} free, of {branches}")

    # ---- swapping and prefix cache

    def drop(self, sequence: Sequence) -> None:
        """Drop the swapped pages of a waiting sequence."""
        if sequence.swapped is not None:
            self._kv.drop(sequence.swapped)
            sequence.swapped = None

    def keys(self, sequence: Sequence) -> PageKeys:
        """Return the sequence's keys up to the last known token."""
        sequence.keys.extend(sequence.tokens[len(sequence.keys.tokens) :])
        return sequence.keys

    def _codes(self, sequence: Sequence) -> list[int]:
        """Return the code of the programs that compute each page of the known tokens."""
        pages = self._kv.pages_for(len(sequence.tokens))
        if self._alike:
            return [0] * pages
        for page in range(len(sequence.codes), pages):
            sequence.codes.append(page_code(page, self._page, sequence.prompt_end, self._sizes, self._classes))
        return sequence.codes
