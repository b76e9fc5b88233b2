"""Probe at startup of which compiled programs are bitwise equivalent and may be substituted for each other.

Whether two programs sum in the same order is a property of the programs, not of the data: random tokens would show a
difference in a good part of the elements. No property of a platform is assumed: where results differ, the other program
is not used.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Int32, UInt8

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.execution import commands
from jaxinfer.engine.execution.commands import (
    Command,
    DecodeBatch,
    Executor,
    PrefillBatch,
    as_text,
    idle_batch,
    with_rows,
)
from jaxinfer.kv.transfer import TRANSFERS
from jaxinfer.lora.parts import random_parts
from jaxinfer.sampling import HostSlots, SamplingLimits, SlotParams
from jaxinfer.sampling_params import PARAMETERS, SamplingParams
from jaxinfer.types import NO_STATE, STATE, LoRATarget, Request

# Rounding to 16 bits hides all but some 2**-16 of the differences in a last bit of float32. So more elements of keys
# and values must be compared: these are the result of ten times as many roundings. A model that needs too many rounds
# for this is too small to be worth a probe.
_ELEMENTS = {4: 1, 2: 600_000}
_ROUNDS = 32

# Probes cut a chunk at a third of its size: in general not at a page boundary.
_FIRST = 3
# Ends of the context ranges in which decode rows are compared with chunks: attention sums longer contexts in further
# blocks and splits.
_CONTEXTS = (64, 512, 1024, 2048)
_SNAPSHOT = -1  # greatest of the snapshot numbers reserved for the probe, which has one for each row
# Limits for decode steps: a step is cheaper than a chunk, with fewer tokens. Up to this many rows are compared.
_DECODE_ROUNDS, _SEEN_ROWS = 400, 16
_DRAWS = 8  # attempts to find steps in which not all rows sample a stop token, which ends them
_ADAPTERS = 2  # adapters used by the probe


class Probe:
    """Runs probes on the engine's own programs. The contents of the pools are invalid afterwards.

    Args:
        windows: windows of the cache groups.
        element: bytes of an element of the pools, of which a token has ``per_token`` in all layers.
    """

    def __init__(
        self,
        executor: Executor,
        engine: ResolvedEngine,
        vocab: int,
        windows: tuple[int | None, ...],
        element: int,
        per_token: int,
    ) -> None:
        self._executor, self._engine, self._vocab, self._groups = executor, engine, vocab, len(windows)
        self._state = windows.index(STATE) if STATE in windows else None
        self._rng = np.random.default_rng(0)
        self._enough, self._per_token = _ELEMENTS[element], max(per_token, 1)
        self._room = engine.table_width * engine.page_size
        self._most_rows = engine.rows // engine.microbatches

    # ---- chunks that share a program

    def prefill_batches(self) -> dict[int, int]:
        """Return the chunks per wide program, by size, for programs that are bitwise equivalent to the narrow one.

        The first and the last chunk are compared, in all layers, for a first chunk and for one with context.
        """
        return {size: count for size, count in self._engine.wide_prefills if self._wide_agrees(size, count)}

    def _wide_agrees(self, size: int, count: int) -> bool:
        probes = self._wide_probes(size, count)
        rounds = self._rounds(sum(int(batch.lengths[[0, -1]].sum()) for batch in probes))
        for _ in range(rounds if rounds <= _ROUNDS else 0):
            batches = self._wide_probes(size, count)
            for batch in batches:
                self._executor.run(commands.Prefill(batch))
            want = self._outer_bits(batches)
            for batch in batches:
                for index in (0, count - 1):
                    self._executor.run(commands.Prefill(_chunk_of(batch, index)))
            if not _equal(want, self._outer_bits(batches)):
                return False
        return rounds <= _ROUNDS

    def _wide_probes(self, size: int, count: int) -> list[PrefillBatch]:
        """Make batches of random tokens, each chunk with another length and its own pages."""
        width = self._engine.table_width
        tables = np.arange(count * width, dtype=np.int32).reshape(count, width)
        lengths = (min(size, self._room) - np.arange(count) % size).clip(1).astype(np.int32)
        tokens = self._tokens(2 * count * size).reshape(2, count, size)
        return [
            self._batch(tokens[i], np.full(count, start, np.int32), lengths, tables)
            for i, start in enumerate(self._starts(size))
        ]

    def _outer_bits(self, batches: list[PrefillBatch]) -> list[np.ndarray]:
        outer = (0, len(batches[0].starts) - 1)
        bits = [
            self._bits(batch.tables[0, index], int(batch.starts[index]), int(batch.lengths[index]))
            for batch in batches
            for index in outer
        ]
        return bits if self._state is None else [*bits, self._state_bits(outer)]

    # ---- prefill sizes

    def size_classes(self) -> dict[int, int]:
        """Return a number for each prefill size: equal numbers for bitwise equivalent programs.

        A piece of a prompt is run whole in the larger program, in chunks in the smaller one, and its end once more in
        the larger one, as after a cache hit; at the start of a prompt, and with context.
        """
        sizes, numbers = self._engine.prefill_sizes, dict[int, int]()
        for number, size in enumerate(sizes):
            provable = self._rounds(self._piece_tokens(size)) <= _ROUNDS
            firsts = [other for place, other in enumerate(sizes[:number]) if numbers[other] == place and provable]
            numbers[size] = next((numbers[other] for other in firsts if self._sizes_agree(other, size)), number)
        return numbers

    def exact_resume(self, classes: dict[int, int]) -> bool:
        """Whether a chunk of a size with its own class may begin anywhere, as after a cache hit."""
        numbers = list(classes.values())
        return all(self._sizes_agree(size, size) for size, number in classes.items() if numbers.count(number) == 1)

    def size_class_tokens(self) -> int:
        """Return the maximum prompt tokens that `size_classes` and `exact_resume` run: their cost."""
        sizes = self._engine.prefill_sizes
        pairs = [(small, large) for at, large in enumerate(sizes) for small in sizes[: at + 1]]
        return sum(2 * (3 * large + 2 * small) * self._piece_rounds(large) for small, large in pairs)

    def _piece_rounds(self, size: int) -> int:
        return min(_ROUNDS, self._rounds(self._piece_tokens(size)))

    def _piece_tokens(self, size: int) -> int:
        """Return the tokens that a round of probes compares."""
        return sum(min(size, self._room - start) for start in self._starts(size))

    def _sizes_agree(self, small: int, large: int) -> bool:
        if self._state is not None and (small % self._engine.page_size or self._cut(large) >= large):
            return small == large  # no prompt chunk is cut within a page
        return all(
            self._pieces_agree(start, small, large)
            for _ in range(self._piece_rounds(large))
            for start in self._starts(large)
        )

    def _pieces_agree(self, start: int, small: int, large: int) -> bool:
        table = np.arange(self._engine.table_width, dtype=np.int32)
        tokens = self._tokens(min(large, self._room - start))
        ends = [*range(self._cut(small), len(tokens), small), len(tokens)]
        third = self._cut(len(tokens))
        # The input of a chunk is in the pages of the run before, or is the state of the run's own first chunk.
        first = [] if self._state is None else [(0, third, large)]
        runs = [
            [(0, len(tokens), large)],
            [(begin, end, small) for begin, end in itertools.pairwise([0, *ends])],
            [*first, (third, len(tokens), large)],
        ]
        bits = []
        for run in runs:
            for begin, end, size in run:
                self._executor.run(commands.Prefill(self._chunk(tokens[begin:end], start + begin, size, begin == 0)))
            bits.append([self._bits(table, start, len(tokens)), *self._last_state()])
        return all(_equal(bits[0], other) for other in bits[1:])

    def _cut(self, size: int) -> int:
        """Return the cut position in a chunk of this size: with states a page boundary, as in all prefills."""
        page = 1 if self._state is None else self._engine.page_size
        return max(page, size // _FIRST // page * page)

    def _chunk(self, tokens: np.ndarray, start: int, size: int, first: bool) -> PrefillBatch:
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(tokens)] = tokens
        table = np.arange(self._engine.table_width, dtype=np.int32)[None]
        return self._batch(
            padded, np.array([start], np.int32), np.array([len(tokens)], np.int32), table, untouched=first
        )

    def _batch(
        self, tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tables: np.ndarray, untouched: bool = False
    ) -> PrefillBatch:
        """Make chunks of sequences with one state each; ``untouched``: the initial state is in an unused page."""
        whole = self._for_groups(tables)
        if self._state is not None:
            whole[self._state], page = NO_STATE, self._engine.page_size
            for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                whole[self._state, index, max(start - 1, 0) // page] = (
                    self._engine.num_states - 1 if untouched else index
                )
                whole[self._state, index, (start + length - 1) // page] = index
        return as_text(PrefillBatch(tokens, starts, lengths, whole), self._engine)

    def _last_state(self) -> list[np.ndarray]:
        return [] if self._state is None else [self._state_bits((0,))]

    def _state_bits(self, states: tuple[int, ...]) -> np.ndarray:
        return self._executor.run(commands.ReadStates(states))

    # ---- decode rows instead of chunks

    def decode_agrees(self, classes: dict[int, int]) -> bool:
        """Whether decode rows and prefill chunks, which must have sizes of one class, write bitwise identical keys and
        values: then tokens may be computed by either.

        Tokens of a sequence are fed once more to its own pages, one row each, after contexts of several lengths. All
        rows overwrite the keys that they attend to, so nothing changes if results are identical, and one step tries as
        many tokens as there are rows. Not tried where layers have states, which only hold one position of a sequence,
        nor where programs draft: they have not seen all features of generated tokens that they see of a prompt.
        """
        if len(set(classes.values())) > 1 or self._state is not None or self._engine.drafts_on_device:
            return False
        rounds = self._rounds(self._seen_rows())
        return rounds <= _ROUNDS and all(self._rows_agree() for _ in range(rounds))

    def decode_tokens(self) -> int:
        """Return the maximum tokens that `decode_agrees` runs."""
        each = min(_CONTEXTS[-1], self._room) + self._seen_rows()
        return each * min(_ROUNDS, self._rounds(self._seen_rows()))

    def _seen_rows(self) -> int:
        return sum(min(self._most_rows, end - begin) for begin, end in self._contexts())

    def _rows_agree(self) -> bool:
        tokens, size = self._tokens(min(_CONTEXTS[-1], self._room)), self._engine.prefill_sizes[-1]
        for start in range(0, len(tokens), size):
            chunk = self._chunk(tokens[start : start + size], start, size, start == 0)
            self._executor.run(commands.Prefill(chunk))
        table = np.arange(self._engine.table_width, dtype=np.int32)
        want = self._bits(table, 0, len(tokens))
        for positions in self._row_positions():
            self._executor.run(commands.Decode(0, self._fed_again(tokens, positions, table)))
        return _equal([want], [self._bits(table, 0, len(tokens))])

    def _row_positions(self) -> list[Int32[np.ndarray, " fed"]]:
        """Return the positions of rows by step, at random between the ends of contexts."""
        ranges = [np.arange(begin, end, dtype=np.int32) for begin, end in self._contexts()]
        return [self._rng.permutation(each)[: self._most_rows] for each in ranges]

    def _contexts(self) -> list[tuple[int, int]]:
        ends = sorted({min(end, self._room) for end in _CONTEXTS})
        return list(itertools.pairwise([0, *ends]))

    def _fed_again(self, tokens: np.ndarray, positions: np.ndarray, table: np.ndarray) -> DecodeBatch:
        batch = idle_batch(self._engine, self._groups)
        fed, places = batch.tokens.copy(), batch.positions.copy()
        fed[: len(positions)], places[: len(positions)] = tokens[positions], positions
        tables = np.broadcast_to(table, batch.tables.shape).copy()
        return batch._replace(tokens=fed, positions=places, generated=np.zeros_like(fed), tables=tables)

    # ---- decode programs of fewer rows

    def decode_sizes(self, limits: SamplingLimits) -> list[int]:
        """Return the rows of decode programs equivalent to the largest, and of that one: tokens, log probabilities, and
        bitwise keys and values agree, at the first and the last rows and after contexts of several lengths."""
        *smaller, largest = self._engine.decode_sizes
        if not smaller:
            return [largest]
        self._executor.run(commands.SetSlots(0, _every_feature(largest, limits)._asdict()))
        found = [size for size in smaller if self._fewer_rows_agree(size)]
        self._executor.run(commands.SetSlots(0, HostSlots(largest, limits).snapshot()._asdict()))
        return [*found, largest]

    def _fewer_rows_agree(self, size: int) -> bool:
        rows = np.unique(np.linspace(0, size - 1, min(size, self._most_seen())).round().astype(np.int32))
        rounds = self._rounds(len(rows))
        return rounds <= _DECODE_ROUNDS and all(self._steps_agree(rows, size, number) for number in range(rounds))

    def _most_seen(self) -> int:
        """Return the maximum rows to compare: each has its own page, and state, besides those that it reads."""
        places = self._engine.num_pages if self._state is None else min(self._engine.num_pages, self._engine.num_states)
        return max(1, min(_SEEN_ROWS, places // 2))

    def _steps_agree(self, rows: Int32[np.ndarray, " seen"], size: int, number: int) -> bool:
        """Run one step in both programs; between them another step overwrites the results."""
        batch, own = self._step_probe(rows, size, number)
        whole, slots = idle_batch(self._engine, self._groups), [int(row) for row in rows]
        self._save(slots)
        bits = []
        for step in (with_rows(batch, like=whole), batch):
            sampled = self._executor.run(commands.Decode(0, step))
            written = self._page_bytes(own)
            bits.append([written, *(np.asarray(leaf)[rows] for leaf in jax.tree.leaves(sampled))])
            others = with_rows(batch, like=whole)._replace(tokens=(whole.tokens + 2).clip(0))
            self._executor.run(commands.Decode(0, others))
            self._executor.wait()  # ranks would restore before they decode
            self._restore(slots)
        self._drop(slots)
        return _equal(*bits)

    def _step_probe(self, rows: Int32[np.ndarray, " seen"], size: int, number: int) -> tuple[DecodeBatch, np.ndarray]:
        """Make a step of these rows, each at a position of its own page after pages that all read; and the own pages.
        With states, each row reads its own state."""
        page, count = self._engine.page_size, len(rows)
        batch, own = idle_batch(self._engine, self._groups, size), np.arange(count, dtype=np.int32)
        free = min(self._engine.num_pages - count, self._engine.table_width - 1)
        before = 1 if self._state is not None else min(free, _CONTEXTS[number % len(_CONTEXTS)] // page)
        shared = np.broadcast_to(np.arange(count, count + before, dtype=np.int32), (count, before))
        earlier = own[:, None] + count if self._state is not None else shared
        offsets = np.zeros(count, np.int32) if self._state is not None else self._rng.integers(page, size=count)
        tables, positions, tokens = batch.tables.copy(), batch.positions.copy(), batch.tokens.copy()
        tables[:, rows, : before + 1] = np.concatenate([earlier, own[:, None]], axis=1)
        positions[rows], tokens[rows] = before * page + offsets, self._tokens(count)
        return batch._replace(tokens=tokens, positions=positions, generated=np.zeros_like(tokens), tables=tables), own

    # ---- several decode steps at once

    def multi_step(self, limits: SamplingLimits, sizes: Sequence[int]) -> bool:
        """Whether ``decode_many`` of all these ``sizes`` gives the results of as many calls of the largest ``decode``:
        tokens, log probabilities, and bitwise keys and values. Rows use every feature of the sampler."""
        if self._engine.multi_step == 1 or self._engine.speculative is not None:
            return False
        self._executor.run(commands.SetSlots(0, _every_feature(self._engine.rows, limits)._asdict()))
        self._save(slots := range(self._engine.rows))
        equal = all(map(self._multi_step_agrees, sizes))
        self._drop(slots)
        self._executor.run(commands.SetSlots(0, HostSlots(self._engine.rows, limits).snapshot()._asdict()))
        return equal

    def _multi_step_agrees(self, size: int) -> bool:
        batch, whole = self._decode_probe(size), idle_batch(self._engine, self._groups)
        tokens = self._engine.multi_step * int((batch.positions >= 0).sum())
        for _ in range(min(_ROUNDS, self._rounds(tokens))):
            for _ in range(_DRAWS):
                batch = self._decode_probe(size)
                at_once = self._multi_step_bits(self._at_once, batch, batch, size)
                if at_once[-1] == self._engine.multi_step:
                    break
            one_by_one = self._multi_step_bits(self._one_by_one, with_rows(batch, like=whole), batch, size)
            if not _equal(at_once, one_by_one):
                return False
        return True

    def _multi_step_bits(self, run: Any, given: DecodeBatch, batch: DecodeBatch, size: int) -> list[np.ndarray]:
        """Return the results of the rows of ``batch``, and last the number of steps."""
        self._restore(range(self._engine.rows))
        *found, ran, last = run(given)
        return [*_of_rows([*found, last], size), *self._rows_bits(batch), ran]

    def _at_once(self, batch: DecodeBatch) -> list[np.ndarray]:
        sampled, ran = self._executor.run(commands.DecodeMany(batch, self._engine.multi_step))
        return [*map(np.asarray, jax.tree.leaves(sampled)), np.asarray(ran), self._last_tokens()]

    def _one_by_one(self, batch: DecodeBatch) -> list[np.ndarray]:
        each, steps = list[list[np.ndarray]](), self._engine.multi_step
        for step in range(steps):
            now = batch._replace(
                tokens=batch.tokens if step == 0 else np.full_like(batch.tokens, -1),
                positions=np.where(batch.positions >= 0, batch.positions + step, -1).astype(np.int32),
                generated=batch.generated + np.int32(step),
            )
            each.append([np.asarray(x) for x in jax.tree.leaves(self._executor.run(commands.Decode(0, now)))])
        sampled = [np.stack(of_steps) for of_steps in zip(*each, strict=True)]
        return [*sampled, np.asarray(steps, np.int32), self._last_tokens()]

    def _last_tokens(self) -> np.ndarray:
        """Return the tokens that slots sampled last, with a step axis of 1."""
        return self._executor.run(commands.ReadLastTokens(0))[None]

    def _decode_probe(self, rows: int) -> DecodeBatch:
        """Make ``rows`` rows with their own pages, as many as there are pages for, that cross a page boundary."""
        engine = self._engine
        start = max(0, min(engine.page_size, self._room - engine.multi_step) - engine.multi_step // 2)
        need = -(-(start + engine.multi_step) // engine.page_size)
        most = engine.num_pages if self._state is None else min(engine.num_pages, engine.num_states)
        active = np.arange(rows) < most // need
        tables = np.zeros((rows, engine.table_width), np.int32)
        tables[:, :need] = np.arange(rows * need).reshape(-1, need) * active[:, None]
        positions = np.where(active, start, -1).astype(np.int32)
        batch = idle_batch(self._engine, self._groups, rows)
        none = np.zeros(rows, np.int32)
        return batch._replace(
            tokens=self._tokens(rows), positions=positions, generated=none, tables=self._for_groups(tables), loras=None
        )

    def _rows_bits(self, batch: DecodeBatch) -> list[np.ndarray]:
        end = int(batch.positions.max()) + self._engine.multi_step
        return [self._bits(batch.tables[0, row], 0, end) for row in np.flatnonzero(batch.positions >= 0)]

    # ---- shared by all probes

    def _save(self, rows: Sequence[int]) -> None:
        """Save the sampler state of the slots of these rows, in the first microbatch."""
        for row in rows:
            self._executor.run(commands.SaveSlot(row * self._engine.microbatches, _SNAPSHOT - row))

    def _restore(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._executor.run(commands.RestoreSlot(row * self._engine.microbatches, _SNAPSHOT - row))

    def _drop(self, rows: Sequence[int]) -> None:
        self._executor.run(commands.DropSnapshots([_SNAPSHOT - row for row in rows]))

    def _rounds(self, tokens: int) -> int:
        """Return the number of rounds of ``tokens`` that must be probed."""
        return -(-self._enough // (tokens * self._per_token))

    def _starts(self, size: int) -> list[int]:
        """Return the start positions to probe for chunks of this size: 0, and a later one if it fits the context."""
        later = self._engine.prefill_sizes[-1]
        return [0, later] if later + size <= self._room else [0]

    def _tokens(self, count: int) -> Int32[np.ndarray, " count"]:
        return self._rng.integers(self._vocab, size=count, dtype=np.int32)

    def _for_groups(self, tables: np.ndarray) -> np.ndarray:
        return np.broadcast_to(tables, (self._groups, *tables.shape)).copy()

    def _bits(self, table: np.ndarray, start: int, length: int) -> UInt8[np.ndarray, "tokens bytes"]:
        """Return the bytes of keys and values of ``length`` tokens from ``start``, in all layers."""
        page = self._engine.page_size
        ids = table[start // page : -(-(start + length) // page)]
        whole = self._page_bytes(ids)
        return whole[start % page :][:length]

    def _page_bytes(self, ids: np.ndarray) -> np.ndarray:
        """Return the slots of pages one after another, each with its bytes in all layers."""
        parts, most = [], TRANSFERS[0]
        for at in range(0, len(ids), most):
            some = np.zeros((self._groups, most), np.int32)
            some[:, : len(ids[at:])] = ids[at : at + most]
            parts.append(self._executor.run(commands.ReadPages(some))[: len(ids[at:])])
        return np.concatenate(parts).reshape(len(ids) * self._engine.page_size, -1)


class AdaptedExecutor(Executor):
    """Executor wrapper that gives all chunks and rows random adapters: a `Probe` on it tries the programs with
    adapters.

    Args:
        targets: adapter targets of the model, without replicated heads.
        slots: slots of the banks; the first ones are overwritten.
    """

    def __init__(self, executor: Executor, targets: Mapping[tuple[str, ...], LoRATarget], slots: int) -> None:
        self._executor, self._slots = executor, min(slots, _ADAPTERS)
        for slot in range(self._slots):
            for part, arrays in enumerate(random_parts(targets, slot)):
                executor.run(commands.LoadLora(slot, part, arrays))

    def run[Result](self, command: Command[Result]) -> Result:
        return self._executor.run(cast(Command[Result], self._with_adapters(command)))

    def _with_adapters(self, command: Any) -> Command[Any]:
        if isinstance(command, commands.Prefill | commands.Decode | commands.DecodeMany):
            given: Any = command
            return dataclasses.replace(given, batch=given.batch._replace(loras=self._loras(given.batch)))
        return cast(Command[Any], command)

    def _loras(self, batch: DecodeBatch | PrefillBatch) -> Int32[np.ndarray, " rows"]:
        """Return adapters chosen by a chunk's or row's own data: it has the same adapter at any position."""
        return (batch.tables[0, :, 0] % self._slots).astype(np.int32)

    def wait(self) -> None:
        self._executor.wait()


def joint(classes: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Return a number for each size: equal where the numbers in all ``classes`` are."""
    firsts = dict[tuple[int, ...], int]()
    return {
        size: firsts.setdefault(tuple(each[size] for each in classes), number) for number, size in enumerate(classes[0])
    }


def _of_rows(steps: list[np.ndarray], rows: int) -> list[np.ndarray]:
    """Return the first rows of step results ``[steps, rows, ...]``; scalars are unchanged."""
    return [array if array.ndim == 0 else array[:, :rows] for array in steps]


def _chunk_of(batch: PrefillBatch, index: int) -> PrefillBatch:
    one = slice(index, index + 1)
    parts = {name: None if part is None else part[one] for name, part in batch._asdict().items() if name != "tables"}
    return PrefillBatch(tables=batch.tables[:, one], **parts)


def _equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    """Compare arrays by bytes: a NaN equals itself, and 0 is not -0."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def _every_feature(rows: int, limits: SamplingLimits) -> SlotParams:
    """Return parameters of rows that together use all features of the sampler."""
    asked = [(row.name, row.probe) for row in PARAMETERS.values() if row.probe is not None]
    # Few features per row, so that one does not hide another; greedy rows have all that change their logits.
    mixtures = [{**dict(asked), "temperature": 0.0}, *(dict(asked[first::_MIXTURES]) for first in range(_MIXTURES))]
    host = HostSlots(rows, limits)
    for row in range(rows):
        params = SamplingParams(seed=row, **mixtures[row % len(mixtures)])
        host.set(row, dataclasses.replace(_PROBE, params=params))
    return host.snapshot()


_MIXTURES = 3
_PROBE = Request("probe", (0,), SamplingParams(), stop_token_ids=frozenset({0}), bad_words_ids=((1,),))
