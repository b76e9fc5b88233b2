"""Settings of quantisation while a model is loaded. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType

CALIBRATED = ("gptq", "awq", "smoothquant")
"""Methods that run the model on sample text."""

ON_LOAD = ("int8", "fp8", "w8a8", "int4", "nf4", "fp4", "mxfp4", *CALIBRATED)
"""Methods by which a checkpoint that is not quantised can be quantised while it is loaded."""

OF_CHECKPOINTS = (
    *("auto-round", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gguf", "gptq", "mlx"),
    *("modelopt", "modelopt_fp4", "mxfp4"),
)
"""Methods by which a checkpoint may be quantised already."""

# vLLM's names that mean the same: a kernel is never chosen by the method here
_SAME: Mapping[str, str] = MappingProxyType({"awq_marlin": "awq", "gptq_marlin": "gptq"})
_BITSANDBYTES = "nf4"  # of vLLM's "bitsandbytes" on a plain checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Quantisation while the model is loaded.

    Attributes:
        quantization: method by which a checkpoint that is not quantised is quantised while it is loaded, a weight after
            the other: "int8", "fp8", "w8a8" (int8 weights and inputs), "int4", "nf4", "fp4", "mxfp4"; or, on
            ``calibration_data``, "gptq", "awq", "smoothquant". For a checkpoint that is quantised already it must be
            its ``quant_method`` (default: weights stay as they are).
        quantization_group_size: inputs that share a scale, for int4, gptq and awq; -1: all.
        calibration_data: text on which gptq, awq and smoothquant run the model, like that which will be served: a
            UTF-8 file, or .jsonl with a text on each line; "built-in": the package's text of 20 kB, for trials.
        calibration_samples: samples from ``calibration_data``, evenly spread over it.
        calibration_length: tokens of a sample.
    """

    quantization: str | None = None
    quantization_group_size: int = 128
    calibration_data: str | None = None
    calibration_samples: int = 512
    calibration_length: int = 512

    @property
    def method_on_load(self) -> str | None:
        """Method for a checkpoint that is not quantised; None: there is none."""
        method = _SAME.get(self.quantization or "", self.quantization)
        return _BITSANDBYTES if method == "bitsandbytes" else method

    def is_of(self, method: str) -> bool:
        """Return whether ``quantization`` is the given method of a quantised checkpoint."""
        return self.quantization is None or _SAME.get(self.quantization, self.quantization) == method.lower()

    def faults(self) -> Iterator[tuple[str, object, str]]:
        """Yield the name and the value of each invalid setting, with what it must be."""
        known = tuple(dict.fromkeys((*ON_LOAD, *OF_CHECKPOINTS)))
        if self.quantization is not None and self.quantization not in (*known, *_SAME):
            yield "quantization", self.quantization, f"must be one of {', '.join(known)}"
        if self.quantization_group_size != -1 and self.quantization_group_size < 8:
            yield "quantization_group_size", self.quantization_group_size, "must be -1 or at least 8"
        if self.calibration_samples < 1:
            yield "calibration_samples", self.calibration_samples, "must be at least 1"
        if self.calibration_length < 2:
            yield "calibration_length", self.calibration_length, "must be at least 2"
        if self.calibration_data is not None and self.method_on_load not in CALIBRATED:
            yield "calibration_data", self.calibration_data, f"is for quantization = {', '.join(CALIBRATED)}"
