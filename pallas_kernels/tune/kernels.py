"""The kernels that can be tuned: ``TUNED`` of each op's specs, the most informative first."""

from pallas_kernels.specs import Tunable, op_folders, specs_of

_ORDER = ("paged_attention", "quant_matmul", "mla_attention", "grouped_matmul", "matmul")  # all others come after
_OPS = sorted((folder.name for folder in op_folders()), key=lambda op: (*_ORDER, op).index(op))
TUNABLES: tuple[Tunable, ...] = tuple(one for op in _OPS for one in getattr(specs_of(op), "TUNED", ()))
