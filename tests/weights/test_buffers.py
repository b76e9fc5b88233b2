"""Host memory."""

import numpy as np
import pytest

from jaxinfer.weights.buffers import copy_blocks


@pytest.mark.parametrize("shape", [(300, 257), (129, 3, 50), (257, 2, 3, 7), (1, 300), (300, 1)])
def test_blocked_copies_are_copies(shape: tuple[int, ...]) -> None:
    tensor = np.arange(np.prod(shape), dtype=np.float32).reshape(shape[::-1]).T
    part = np.full((*shape, 2), -1, np.float32)[..., 0]
    copy_blocks(part, tensor)
    np.testing.assert_array_equal(part, tensor)
