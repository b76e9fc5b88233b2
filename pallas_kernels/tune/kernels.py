"""The kernels that can be tuned, the most telling first."""

from pallas_kernels.grouped_matmul import tuning as grouped_matmul
from pallas_kernels.mla_attention import tuning as mla
from pallas_kernels.paged_attention.decode_tuning import DECODE_TUNING
from pallas_kernels.paged_attention.prefill_tuning import PREFILL_TUNING
from pallas_kernels.quant_matmul.tuning import MATMUL_TUNING
from pallas_kernels.tune.problem import Tunable

TUNABLES: tuple[Tunable, ...] = (
    DECODE_TUNING,
    PREFILL_TUNING,
    MATMUL_TUNING,
    mla.DECODE_TUNING,
    grouped_matmul.MATMUL_TUNING,
)
