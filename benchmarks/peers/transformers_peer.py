"""transformers as a peer: `model.generate`, greedy, with its KV cache. Runs in the oracle's Python."""

from __future__ import annotations

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.protocol import Prompts, Reply, Stopwatch, best_seconds, serve


class _Timer(BaseStreamer):
    """Streamer that records each step on a stopwatch. `generate` streams the prompts first, which are skipped."""

    def __init__(self, sequences: int) -> None:
        self.watch = Stopwatch(sequences)
        self._prompts_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompts_seen:
            self.watch.add_step(value.tolist())
        self._prompts_seen = True

    def end(self) -> None:
        pass


class Transformers:
    """The checkpoint's transformers class with default attention (sdpa). All prompts have one length: no padding."""

    def __init__(self) -> None:
        self._model: transformers.PreTrainedModel | None = None
        self._loaded: tuple[str, str] | None = None

    def versions(self) -> dict[str, str]:
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def load(self, folder: str, gguf: str, dtype: str, batch: int, max_len: int, threads: int) -> Reply:
        torch.set_num_threads(threads)
        if self._loaded != (folder, dtype):
            self._model = None  # frees the previous model
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
            model.generation_config = transformers.GenerationConfig(do_sample=False, use_cache=True, eos_token_id=None)
            self._model, self._loaded = model.eval(), (folder, dtype)
        return {}

    def generate(self, prompts: Prompts, new_tokens: int) -> Reply:
        assert self._model is not None
        timer = _Timer(len(prompts))
        ids = torch.tensor(prompts)
        self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, streamer=timer)
        return timer.watch.reply()

    def limits(self, dtype: str, megabytes: int, side: int) -> Reply:
        block = torch.ones((megabytes << 18,), dtype=torch.float32)
        square = torch.ones((side, side), dtype=getattr(torch, dtype))
        with torch.inference_mode():
            reading = best_seconds(block.sum)
            product = best_seconds(lambda: square @ square)
        return {"bandwidth": (megabytes << 20) / reading, "gemm": 2 * side**3 / product}


if __name__ == "__main__":
    serve(Transformers())
