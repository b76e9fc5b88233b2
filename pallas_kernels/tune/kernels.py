"""The kernels that can be tuned, the most informative first."""

from pallas_kernels.tune.problem import Tunable
from pallas_kernels.tune.problems import grouped_matmul as grouped_matmul
from pallas_kernels.tune.problems import matmul as matmul
from pallas_kernels.tune.problems import mla_attention as mla
from pallas_kernels.tune.problems.paged_attention_hopper_decode import DECODE_TUNING
from pallas_kernels.tune.problems.paged_attention_hopper_prefill import PREFILL_TUNING
from pallas_kernels.tune.problems.quant_matmul import MATMUL_TUNING

TUNABLES: tuple[Tunable, ...] = (
    DECODE_TUNING,
    PREFILL_TUNING,
    MATMUL_TUNING,
    mla.DECODE_TUNING,
    grouped_matmul.MATMUL_TUNING,
    matmul.MATMUL_TUNING,
)
