"""Writer of a Llama checkpoint as GGUF for llama.cpp: ``python -m benchmarks.peers.gguf_llama FOLDER FILE DTYPE``.

Runs in the oracle's Python, which has the `gguf` package. The file has no tokenizer: the benchmark uses token ids.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import gguf
import numpy as np

from benchmarks.peers.checkpoint import from_bfloat16, read_config, read_tensors, to_bfloat16
from benchmarks.peers.gguf_layout import gguf_name, rotate_pairs, unsupported


def write(folder: pathlib.Path, file: pathlib.Path, dtype: str) -> None:
    """Write ``folder`` to ``file`` in ``dtype``; vectors (the norms) stay float32, rounded to ``dtype``.

    Raises:
        ValueError: the writer does not support the model.
    """
    config = read_config(folder)
    reason = unsupported(config)
    if reason is not None:
        raise ValueError(reason)
    unfinished = file.with_suffix(".tmp")
    writer = gguf.GGUFWriter(str(unfinished), "llama")
    _add_config(writer, config, dtype)
    for name, values in read_tensors(folder):
        if name != "lm_head.weight" or not config.get("tie_word_embeddings"):
            _add_tensor(writer, gguf_name(name), rotate_pairs(name, values, config), dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(file)


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], dtype: str) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if dtype == "bfloat16" else gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def rope_theta(config: dict[str, Any]) -> float:
    """Return the RoPE base from an older or newer config."""
    return float(config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta") or 10000.0)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, dtype: str) -> None:
    if dtype == "float32":
        writer.add_tensor(name, np.ascontiguousarray(values))
    elif values.ndim == 1:
        writer.add_tensor(name, from_bfloat16(to_bfloat16(values)))
    else:
        bits = to_bfloat16(values).view(np.uint8)
        writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3])
