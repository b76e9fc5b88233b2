"""Oracle of Medusa's typical acceptance: its own ``evaluate_posterior`` in float64.

``answers`` returns the arrays of ``tests/goldens/heads/typical.npz``:

    temperature                 0.7
    thresholds [2, 2]           (posterior_threshold, posterior_alpha): defaults of its command line, of its code
    logits [64, V], tokens [64] of one position each
    accepted [2, 64]            whether the token is accepted, under each of the thresholds
    path_logits [16, 4, 4, V]   16 times four candidates of four tokens; the first token is always kept, and position i
    path_tokens [16, 4, 4]      of the logits judges token i + 1
    best [2, 16], length [2, 16]  the selected candidate, and its number of accepted tokens after the first
"""

from __future__ import annotations

import types

import numpy as np
import torch

from tools.oracle.golden import uniform
from tools.oracle.head_models import running

TEMPERATURE = 0.7
THRESHOLDS = ((0.09, 0.3), (0.3, 0.09))
_VOCABULARY, _ROWS, _GROUPS, _CANDIDATES, _LENGTH = 48, 64, 16, 4, 4
_CLEAR = 1e-5  # a probability this near to its threshold might be judged differently in float32


def answers(medusa: types.SimpleNamespace, seed: int = 1) -> dict[str, np.ndarray]:
    """Return the arrays, from ``seed``.

    Raises:
        ValueError: a probability is too near to its threshold.
    """
    logits, tokens = _questions(seed, "single", (_ROWS,))
    path_logits, likely = _questions(seed, "path", (_GROUPS, _CANDIDATES, _LENGTH))
    path_tokens = np.roll(likely, 1, axis=-1)
    pairs = zip(logits, tokens, strict=True)
    alone = [_judge(medusa, np.stack([row, row])[None], np.array([[0, token]])) for row, token in pairs]
    grouped = [_judge(medusa, *group) for group in zip(path_logits, path_tokens, strict=True)]
    return {
        "temperature": np.array(TEMPERATURE),
        "thresholds": np.array(THRESHOLDS),
        "logits": logits,
        "tokens": tokens,
        "accepted": np.array(alone)[:, :, 1].T == 1,
        "path_logits": path_logits,
        "path_tokens": path_tokens,
        "best": np.array(grouped)[:, :, 0].T,
        "length": np.array(grouped)[:, :, 1].T,
    }


def _questions(seed: int, name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 logits like a model's, some peaked and some flat, and a likely token for each row."""
    sharpness = np.float32(4.0) + np.float32(3.0) * uniform(seed, f"{name} sharpness", (*shape, 1))
    logits = sharpness * uniform(seed, f"{name} logits", (*shape, _VOCABULARY))
    rank = (uniform(seed, f"{name} rank", shape) + 1.0) ** 2 / 4.0 * 24.0
    order = np.argsort(-logits, axis=-1)
    return logits, np.take_along_axis(order, rank.astype(np.int64)[..., None], axis=-1)[..., 0]


def _judge(medusa: types.SimpleNamespace, logits: np.ndarray, tokens: np.ndarray) -> list[tuple[int, int]]:
    """Return best candidate and accepted tokens of logits [candidates, length, V] under each of the thresholds."""
    return [_once(medusa, torch.from_numpy(logits).double(), torch.from_numpy(tokens), *pair) for pair in THRESHOLDS]


def _once(
    medusa: types.SimpleNamespace, logits: torch.Tensor, tokens: torch.Tensor, threshold: float, alpha: float
) -> tuple[int, int]:
    found = []
    for nudge in (-_CLEAR, 0.0, _CLEAR):
        scale = 1.0 + nudge
        with running(torch.float64):
            best, length = medusa.evaluate_posterior(logits, tokens, TEMPERATURE, threshold * scale, alpha * scale)
        found.append((int(best), int(length)))
    if len(set(found)) > 1:
        raise ValueError("a probability lies at its threshold: take another seed")
    return found[1]
