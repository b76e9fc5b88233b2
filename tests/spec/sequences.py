"""Sequences for drafters."""

from collections.abc import Iterable

import numpy as np

from jaxinfer.spec import Drafted


def sequence(tokens: Iterable[int], number: int = 1, namespace: bytes = b"", prompt: int = 0) -> Drafted:
    return Drafted(number, namespace, prompt, np.array(list(tokens), np.int32))
