"""Oracle of quantised folders: weights and logits as third-party readers compute them.

    python -m tools.oracle.quantised IDS.npy OUT FOLDER...     writes OUT/<folder's name>.npz

transformers loads the formats of compressed-tensors and bitsandbytes. The packages that read GPTQ and AWQ need a GPU
or a compiler for one: these files are read here, following their format descriptions, without any of jaxinfer's code.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

Tensors = dict[str, np.ndarray]

_WORD = 32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # positions of the nibbles of eight outputs within a word


def main(arguments: Sequence[str]) -> int:
    """Write for each folder ``logits`` [n, t, vocabulary] of the ids, and ``weights/<name>`` [out, in], in float32;
    with quantised inputs also ``rounded``, the logits with those."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    ids = torch.from_numpy(np.load(arguments[0], allow_pickle=False)).long()
    out = pathlib.Path(arguments[1])
    for folder in map(pathlib.Path, arguments[2:]):
        np.savez(out / f"{folder.name}.npz", **cast(Any, answers(folder, ids)))
    return 0


def answers(folder: pathlib.Path, ids: torch.Tensor) -> Tensors:
    """Return weights and logits of one folder.

    Raises:
        ValueError: transformers reports missing or unexpected tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    described = config["quantization_config"]
    method = described["quant_method"]
    if method in _READERS:
        return _of_read(folder, ids, _READERS[method])
    if method == "bitsandbytes":  # its products on a CPU are of bfloat16
        return _of(_loaded(folder).dequantize(), ids)
    plain = transformers.CompressedTensorsConfig(dequantize=True)
    found = _of(_loaded(folder, quantization_config=plain), ids)
    if described["config_groups"]["group_0"]["input_activations"]:
        found["rounded"] = _of(_loaded(folder), ids)["logits"]
    return found


def _loaded(folder: pathlib.Path, **options: object) -> transformers.PreTrainedModel:
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **options
    )
    if any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError(f"{folder} does not fit: {said}")
    return model.eval()


@torch.no_grad()
def _of(model: transformers.PreTrainedModel, ids: torch.Tensor) -> Tensors:
    logits = model(input_ids=ids).logits
    layers = {name: part for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    weights = {f"weights/{name}.weight": part.weight.float().numpy() for name, part in layers.items()}
    return {"logits": logits.numpy(), **weights}


# --------------------------------------------------------------------------------------------------------------
# GPTQ and AWQ


def _of_read(folder: pathlib.Path, ids: torch.Tensor, read: Callable[[Tensors, str, Mapping], np.ndarray]) -> Tensors:
    """Return weights and logits by way of a folder of dequantised weights."""
    config = json.loads((folder / "config.json").read_text())
    described = config.pop("quantization_config")
    packed: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        packed |= load_file(path)
    modules = [name.removesuffix(".qweight") for name in packed if name.endswith(".qweight")]
    plain = {name: tensor for name, tensor in packed.items() if name.rpartition(".")[0] not in modules}
    plain |= {f"{name}.bias": packed[f"{name}.bias"] for name in modules if f"{name}.bias" in packed}
    plain |= {f"{module}.weight": read(packed, module, described) for module in modules}
    with tempfile.TemporaryDirectory() as scratch:
        (pathlib.Path(scratch) / "config.json").write_text(json.dumps(config))
        save_file(plain, f"{scratch}/model.safetensors", metadata={"format": "pt"})
        return _of(_loaded(pathlib.Path(scratch)), ids)


def _bits(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack integers [rows, n * 32 / bits] from little-endian bit streams in int32 words [rows, n]."""
    stream = words.astype("<i4").view(np.uint32)[..., None] >> np.arange(_WORD, dtype=np.uint32) & 1
    fields = stream.reshape(len(words), -1, bits).astype(np.int64)
    return (fields << np.arange(bits)).sum(-1)


def _gptq(packed: Mapping[str, np.ndarray], module: str, described: Mapping) -> np.ndarray:
    """Dequantise GPTQ (Frantar et al. 2022) as GPTQModel 7.7 stores it (version 1): zero points less one, subtracted in
    whole words if none crosses a word boundary."""
    bits, index = described["bits"], packed[f"{module}.g_idx"]
    scales = packed[f"{module}.scales"].astype(np.float32)
    codes = _bits(np.ascontiguousarray(packed[f"{module}.qweight"].T), bits)  # [out, in]
    words, one = packed[f"{module}.qzeros"], sum(1 << place for place in range(0, _WORD, bits))
    stored = words if bits == 3 else (words.view(np.uint32) + np.uint32(one)).view(np.int32)
    zeros = (_bits(stored, bits) + (bits == 3)) % (1 << bits)  # [groups, out]
    return np.float32(codes - zeros[index].T) * scales[index].T


def _awq(packed: Mapping[str, np.ndarray], module: str, described: Mapping) -> np.ndarray:
    """Dequantise AWQ (Lin et al. 2023) as AutoAWQ's GEMM stores it: eight outputs in a word, interleaved."""
    group = described["group_size"]
    codes, zeros = (_outputs(packed[f"{module}.{part}"]) for part in ("qweight", "qzeros"))  # [in, out], [groups, out]
    index = np.arange(len(codes)) // (group if group > 0 else len(codes))
    scales = packed[f"{module}.scales"].astype(np.float32)
    return np.ascontiguousarray((np.float32(codes - zeros[index]) * scales[index]).T)


def _outputs(words: np.ndarray) -> np.ndarray:
    nibbles = _bits(words, 4).reshape(len(words), -1, 8)
    return nibbles[:, :, list(_AWQ_PLACES)].reshape(len(words), -1)


_READERS = {"gptq": _gptq, "awq": _awq}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
