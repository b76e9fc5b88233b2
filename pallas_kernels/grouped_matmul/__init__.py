"""grouped_matmul: products of rows with the weights of the expert of each row."""

from pallas_kernels.grouped_matmul.api import explain, matmul
from pallas_kernels.grouped_matmul.groups import Groups, group, taken

__all__ = ["Groups", "explain", "group", "matmul", "taken"]
