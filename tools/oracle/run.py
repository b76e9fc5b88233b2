"""Oracle of model logits: transformers in float64 and in float32, at prefill and step by step with its KV cache.

transformers computes some steps of a float64 model in float32: the inverse frequencies, the angles and the cos and sin
of RoPE (``.float()``, ``dtype=torch.float``), the variance and scaling of RMSNorm (``.to(torch.float32)``) and the
softmax of attention (``dtype=torch.float32``). ``AllDouble`` turns these into float64 while the model is built and run,
and ``NoFloat32`` fails on any operation that still yields a float32 tensor, so that the reference is all float64.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers.core_model_loading import revert_weight_conversion

from tools.oracle.cases import ARCHITECTURES, COMMON, Case
from tools.oracle.golden import Golden, digest, make_tensors, uniform

DECODE_STEPS = 32
MIN_MARGIN = 0.005  # thousands of times the float32 error of these models: rounding cannot change a choice
MIN_CHOICE = 1e-5  # the same for indexer scores: torch leaves ties undefined, and rectified sums often are 0
MIN_DISTINCT = 6  # a model that repeats one token proves little about decoding
SEED_TRIES = 500


class AllDouble(TorchFunctionMode):
    """Replace every request for float32 by one for float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = tree_map(_widen, (args, kwargs or {}))
        return func(*args, **kwargs)


class NoFloat32(TorchDispatchMode):
    """Raise as soon as an operation yields a float32 tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 for leaf in tree_leaves(result)):
            raise TypeError(f"{func} yields float32 within the float64 reference")
        return result


class Choices(TorchFunctionMode):
    """Observe ``margin``, the smallest gap between the scores that a model's indexers select and those they drop."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.margin, self._inside = float("inf"), False
        for module in model.modules():
            if type(module).__name__.endswith("Indexer"):
                module.register_forward_pre_hook(lambda *_: self._enter(True))
                module.register_forward_hook(lambda *_: self._enter(False))

    def _enter(self, inside: bool) -> None:
        self._inside = inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk and self._inside and args[1] < args[0].shape[-1]:
            best = args[0].topk(args[1] + 1).values
            left = best[..., -1] > -1e30  # not masked
            self.margin = min([self.margin, *(best[..., -2] - best[..., -1])[left].tolist()])
        return func(*args, **(kwargs or {}))


def _widen(leaf: object) -> object:
    return torch.float64 if leaf is torch.float32 else leaf


def config_json(case: Case) -> dict:
    """Return the content of ``case``'s config.json, in its style."""
    config = {"architectures": [ARCHITECTURES[case.model_type]], "model_type": case.model_type, **case.config}
    config = COMMON.get(case.model_type, {"max_position_embeddings": 256, "hidden_act": "silu"}) | config
    if case.style == "hub":
        return config
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoConfig.for_model(**config, dtype="float32").save_pretrained(folder)
        return json.loads((pathlib.Path(folder) / "config.json").read_text())


def read_config(config: Mapping) -> transformers.PreTrainedConfig:
    """Parse a config.json with transformers, by way of a file as users have it."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
        return transformers.AutoConfig.from_pretrained(folder)


def build(config: Mapping, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Build a model of ``dtype`` without weights, with eager attention; for float64, buffers are float64, too."""
    parsed = read_config(config)
    if dtype != torch.float64:
        return _from_config(parsed, dtype)
    with AllDouble():
        return _from_config(parsed, dtype)


def _from_config(config: transformers.PreTrainedConfig, dtype: torch.dtype) -> transformers.PreTrainedModel:
    # Falcon's eager attention adds ALiBi twice: in the mask, and separately. The default attention adds it once.
    attention = "sdpa" if getattr(config, "alibi", False) else "eager"
    options = {"attn_implementation": attention, "experts_implementation": "eager"}
    return _auto_class(config.to_dict()).from_config(config, dtype=dtype, **options).eval()


def _auto_class(config: Mapping) -> Any:
    """Return the auto class: text models may be wrapped in a model that takes images."""
    wrapper = any(name.endswith("ForConditionalGeneration") for name in config["architectures"])
    return transformers.AutoModelForImageTextToText if wrapper else transformers.AutoModelForCausalLM


def checkpoint_shapes(
    model: transformers.PreTrainedModel, tables: Sequence[str] = ("embed",)
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a saved checkpoint: experts as the hub stores them; ``tables``: see `Case`."""
    saved = revert_weight_conversion(model, model.state_dict())
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if not model.config.tie_word_embeddings:
        return shapes
    kinds = {"lm_head.weight": "head", "embed_tokens.weight": "embed", "wte.weight": "embed"}
    left = tuple(name for name, kind in kinds.items() if kind not in tables)
    return {name: shape for name, shape in shapes.items() if not name.endswith(left)}


def read_checkpoint(config: Mapping, tensors: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the weights under the model's names in memory, by way of a checkpoint that transformers loads."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
        state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
        save_file(state, f"{folder}/model.safetensors", metadata={"format": "pt"})
        options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
        model, said = _auto_class(config).from_pretrained(folder, **options)
    if any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError(f"the checkpoint does not fit: {said}")
    return model.state_dict()


# Llama 4's wrapper in transformers 5.24 reads a field that its text model's output lacks.
transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None


@torch.no_grad()
def follow(model: transformers.PreTrainedModel, prompt: list[int], ids: list[int] | None) -> tuple[np.ndarray, ...]:
    """Return prefill logits [T, V] and decode logits [N, V]; feed ``ids``, or greedy choices if None."""
    out = model(input_ids=torch.tensor([prompt]), use_cache=True)
    prefill, decode, last = out.logits[0], [], out.logits[0, -1]
    for step in range(DECODE_STEPS):
        token = int(last.argmax()) if ids is None else ids[step]
        out = model(input_ids=torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
        last = out.logits[0, -1]
        decode.append(last)
    return prefill.numpy(), torch.stack(decode).numpy()


def follow_double(model: transformers.PreTrainedModel, prompt: list[int]) -> tuple[np.ndarray, ...]:
    """Run ``follow`` with greedy choices in float64 only."""
    torch.set_default_dtype(torch.float64)  # dtype of quotients of integers
    try:
        with AllDouble(), NoFloat32():
            return follow(model, prompt, None)
    finally:
        torch.set_default_dtype(torch.float32)


def make_prompt(seed: int, length: int, vocabulary: int) -> list[int]:
    """Return ``length`` token ids that depend on ``seed``."""
    return [int(value) for value in (uniform(seed, "prompt", (length,)) + 1.0) / 2.0 * vocabulary]


def choices(prefill: np.ndarray, decode: np.ndarray) -> tuple[list[int], float]:
    """Return the N + 1 greedy ids and the smallest margin between the best and the second logit."""
    rows = np.concatenate([prefill[-1:], decode])
    best = np.sort(rows, axis=-1)
    return [int(token) for token in rows.argmax(-1)], float((best[:, -1] - best[:, -2]).min())


def ask(case: Case, seed: int) -> Golden | None:
    """Return transformers' results under ``seed``; None if a choice is close or the text monotonous."""
    config = config_json(case)
    apart = {"tie_word_embeddings": False} if len(case.tables) > 1 else {}
    double, single = (build(config | apart, dtype) for dtype in (torch.float64, torch.float32))
    shapes = checkpoint_shapes(build(config, torch.float32), case.tables)
    tensors = make_tensors(seed, shapes, case.norm_centre, case.query_share)
    state = read_checkpoint(config, tensors)
    double.load_state_dict(state)
    single.load_state_dict(state)
    prompt = make_prompt(seed, case.prompt_length, case.config.get("text_config", case.config)["vocab_size"])
    with Choices(double) as chosen:
        prefill, decode = follow_double(double, prompt)
    greedy, margin = choices(prefill, decode)
    if margin < MIN_MARGIN or len(set(greedy)) < MIN_DISTINCT or chosen.margin < MIN_CHOICE:
        return None
    rough_prefill, rough_decode = follow(single, prompt, greedy)
    return Golden(
        name=case.name,
        config=config,
        seed=seed,
        shards=case.shards,
        shapes=shapes,
        weights_sha256=digest(tensors),
        prompt=prompt,
        greedy=greedy,
        prefill=prefill,
        decode=decode,
        prefill_error=float(np.abs(rough_prefill - prefill).max()),
        decode_error=np.abs(rough_decode - decode).max(-1),
        margin=margin,
        norm_centre=case.norm_centre,
        query_share=case.query_share,
        versions={"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__},
    )


def make(case: Case, seed: int) -> Golden:
    """Return the first acceptable record at ``seed``, ``seed + 1``, ...

    Raises:
        RuntimeError: none of ``SEED_TRIES`` seeds has clear margins.
    """
    torch.set_num_threads(1)
    for candidate in range(seed, seed + SEED_TRIES):
        golden = ask(case, candidate)
        if golden is not None:
            return golden
    raise RuntimeError(f"{case.name}: no seed in {seed}..{seed + SEED_TRIES - 1} gives margins of {MIN_MARGIN}")
