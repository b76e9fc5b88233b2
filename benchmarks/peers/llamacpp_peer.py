"""llama.cpp as a peer, through the low-level calls of `llama-cpp-python`: the `Llama` class decodes one sequence only.

Runs in the oracle's Python. Weights come from a GGUF that `gguf_llama` wrote; the KV cache has the weights' dtype.
"""

from __future__ import annotations

import ctypes
import importlib.metadata

import llama_cpp
import numpy as np

from benchmarks.peers.protocol import Prompts, Reply, Stopwatch, serve

_KV_TYPES = {"float32": llama_cpp.GGML_TYPE_F32, "bfloat16": 30}  # GGML_TYPE_BF16, which the package does not name


class LlamaCpp:
    """Greedy decoding with one `llama_decode` a step, with one token of each sequence."""

    def __init__(self) -> None:
        llama_cpp.llama_backend_init()
        self._model: llama_cpp.llama_model_p | None = None
        self._context: llama_cpp.llama_context_p | None = None
        self._loaded = ""
        self._vocab = 0

    def versions(self) -> dict[str, str]:
        info = llama_cpp.llama_print_system_info().decode()
        return {"llama-cpp-python": importlib.metadata.version("llama-cpp-python"), "system": info}

    def load(self, folder: str, gguf: str, dtype: str, batch: int, max_len: int, threads: int) -> Reply:
        if self._context is not None:
            llama_cpp.llama_free(self._context)
            self._context = None
        if self._loaded != gguf:
            self._load_model(gguf)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = batch * -(-max_len // 256) * 256  # each sequence has an equal share, in blocks of 256
        params.n_batch = batch * max_len  # all prompts fit one call; it computes n_ubatch (512) tokens at a time
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = _KV_TYPES[dtype]
        params.kv_unified = False  # llama.cpp's advice for sequences that share no prefix
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp could not make a context")
        return {}

    def _load_model(self, gguf: str) -> None:
        if self._model is not None:
            llama_cpp.llama_model_free(self._model)
        self._model = llama_cpp.llama_model_load_from_file(gguf.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {gguf}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._loaded = gguf

    def generate(self, prompts: Prompts, new_tokens: int) -> Reply:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        watch = Stopwatch(len(prompts))
        tokens = self._decode(prompts, 0)
        watch.add_step(tokens)
        for position in range(len(prompts[0]), len(prompts[0]) + new_tokens - 1):
            tokens = self._decode([[token] for token in tokens], position)
            watch.add_step(tokens)
        return watch.reply()

    def _decode(self, rows: Prompts, start: int) -> list[int]:
        """Run equally long ``rows`` from position ``start``; return the next id of each."""
        length, total = len(rows[0]), len(rows) * len(rows[0])
        sequences = np.repeat(np.arange(len(rows), dtype=np.int32), length)
        columns: dict[str, np.ndarray] = {
            "token": np.array(rows, np.int32).reshape(-1),
            "pos": np.tile(np.arange(start, start + length, dtype=np.int32), len(rows)),
            "n_seq_id": np.ones(total, np.int32),
            "seq_id": sequences.ctypes.data + 4 * np.arange(total, dtype=np.uintp),  # one pointer for each token
            "logits": np.tile(np.arange(length) == length - 1, len(rows)).astype(np.int8),
        }
        batch = llama_cpp.llama_batch(n_tokens=total)
        for name, kind in llama_cpp.llama_batch._fields_:
            if name in columns:
                setattr(batch, name, ctypes.cast(columns[name].ctypes.data, kind))
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        logits = llama_cpp.llama_get_logits(self._context)  # the requested rows, in the order of the batch
        return np.ctypeslib.as_array(logits, (len(rows), self._vocab)).argmax(-1).tolist()

    def limits(self, dtype: str, megabytes: int, side: int) -> Reply:
        return {}


if __name__ == "__main__":
    serve(LlamaCpp())
