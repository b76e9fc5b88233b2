"""Baseline character n-gram model: interpolated modified Kneser-Ney (Chen & Goodman 1999)."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Int

MAX_ORDER = 10  # an n-gram is one int64: the alphabet's size to this power must stay below 2**63


@dataclasses.dataclass(frozen=True)
class Order:
    """Counts of one order. Contexts and n-grams are numbers in base ``alphabet``, the newest character last.

    Attributes:
        grams, kept: the sorted n-grams and their discounted counts.
        contexts, totals, freed: the sorted contexts, their counts, and the mass that discounting took from each.
    """

    grams: Int[np.ndarray, " grams"]
    kept: Float[np.ndarray, " grams"]
    contexts: Int[np.ndarray, " contexts"]
    totals: Float[np.ndarray, " contexts"]
    freed: Float[np.ndarray, " contexts"]


@dataclasses.dataclass(frozen=True)
class NGram:
    """A trained model: orders 1 to n, and the alphabet (one index is for characters outside the training text)."""

    orders: tuple[Order, ...]
    alphabet: str

    @staticmethod
    def train(text: str, order: int) -> NGram:
        """Count ``text``.

        Raises:
            ValueError: ``order`` is out of range, or the text has too many different characters for it.
        """
        alphabet = "".join(sorted(set(text)))
        base = len(alphabet) + 1
        if not 1 <= order <= MAX_ORDER or base**order >= 2**63:
            raise ValueError(f"order {order} over {base} characters is not within 1 and what an int64 can number")
        grams, counts = np.unique(_numbers(_ids(text, alphabet), order, base), return_counts=True)
        orders = [_discounted(grams, counts, base)]
        for lower in range(order - 1, 0, -1):
            grams, counts = np.unique(grams % base**lower, return_counts=True)
            orders.append(_discounted(grams, counts, base))
        return NGram(tuple(reversed(orders)), alphabet)

    def bits_per_character(self, text: str) -> float:
        """Return the mean of -log2 p over ``text``; characters before it count as unknown."""
        base = len(self.alphabet) + 1
        ids = _ids(text, self.alphabet)
        probability = np.full(len(ids), 1.0 / base)
        for length, order in enumerate(self.orders, start=1):
            probability = _interpolated(order, _numbers(ids, length, base), base, probability)
        return float(-np.log2(probability).mean())


def _ids(text: str, alphabet: str) -> Int[np.ndarray, " n"]:
    places = {character: index for index, character in enumerate(alphabet, start=1)}
    return np.array([places.get(character, 0) for character in text], np.int64)


def _numbers(ids: Int[np.ndarray, " n"], length: int, base: int) -> Int[np.ndarray, " n"]:
    """Return the n-gram that ends at each character; positions before the first one count as unknown characters."""
    padded = np.concatenate([np.zeros(length - 1, np.int64), ids])
    windows = np.lib.stride_tricks.sliding_window_view(padded, length)
    return windows @ base ** np.arange(length - 1, -1, -1, dtype=np.int64)


def _discounts(counts: Int[np.ndarray, " grams"]) -> Float[np.ndarray, "4"]:
    """Return the discounts of counts of 0, 1, 2 and 3 or more."""
    ones, twos, threes, fours = (max(int((counts == value).sum()), 1) for value in (1, 2, 3, 4))
    share = ones / (ones + 2 * twos)
    raw = np.array([0.0, 1 - 2 * share * twos / ones, 2 - 3 * share * threes / twos, 3 - 4 * share * fours / threes])
    return np.clip(raw, [0.0, 0.05, 0.05, 0.05], [0.0, 0.95, 1.95, 2.95])


def _discounted(grams: Int[np.ndarray, " grams"], counts: Int[np.ndarray, " grams"], base: int) -> Order:
    lost = _discounts(counts)[np.minimum(counts, 3)]
    contexts, where = np.unique(grams // base, return_inverse=True)
    totals = np.bincount(where, weights=counts)
    return Order(grams, counts - lost, contexts, totals, np.bincount(where, weights=lost))


def _interpolated(
    order: Order, grams: Int[np.ndarray, " n"], base: int, shorter: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    place = _find(order.contexts, grams // base)
    at = _find(order.grams, grams)
    kept = np.where(at >= 0, order.kept[at], 0.0)
    longer = (kept + order.freed[place] * shorter) / order.totals[place]
    return np.where(place >= 0, longer, shorter)


def _find(table: Int[np.ndarray, " size"], values: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Return indices of the values in the sorted table, -1 for missing values."""
    at = np.minimum(np.searchsorted(table, values), len(table) - 1)
    return np.where(table[at] == values, at, -1)
