"""Operations of a prefill chunk, counted by hand."""

from benchmarks.gpu.bounds import prefill_operations
from jaxinfer.gpu_check.llama import TINY


def test_operations_by_hand():
    shape = {**TINY, "num_hidden_layers": 2}
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96
    assert prefill_operations(shape, 3, 1) == 2 * (layer + 2 * 64 * 32) + 4 * 64 * 4
