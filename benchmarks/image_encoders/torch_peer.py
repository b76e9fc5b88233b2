"""The PyTorch peer: the tower of transformers with its default attention (SDPA)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from benchmarks.image_encoders.towers import TOWERS, VALUES, Grid, serve


def prepare(tower: str, grid: Grid, dtype: str) -> Callable[[], Any]:
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    config = Qwen2VLVisionConfig(**TOWERS[tower])
    config._attn_implementation = "sdpa"
    model = Qwen2VisionTransformerPretrainedModel(config).to(kind).eval()
    frames, height, width = grid
    patches, shape = torch.randn(frames * height * width, VALUES).to(kind), torch.tensor([grid])

    @torch.inference_mode()
    def call() -> Any:
        return model(patches, grid_thw=shape)

    return call


if __name__ == "__main__":
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    serve({"torch": torch.__version__, "transformers": transformers.__version__}, prepare)
