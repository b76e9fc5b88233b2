"""Golden records: the oracle writes them and the parity tests read them. Needs numpy and safetensors only.

Weights are not stored. Every checkpoint tensor follows from a seed, its name and its shape by way of PCG64's raw
64-bit stream, which numpy promises never to change, so that both environments derive bitwise identical tensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from safetensors.numpy import save_file

Shapes = Mapping[str, tuple[int, ...]]


_NORM = re.compile(
    r"(norm([._]\d+|_f)?|\bln_\w+)\.weight$|\.(layer_scalar|router\.scale|per_expert_scale|correct_output_scale)$"
)
_VOCABULARY = re.compile(
    r"^((language_model\.)?model\.(language_model\.)?embed_tokens|(language_model\.)?lm_head|transformer\.(wte|wpe|word_embeddings)"
    r"|backbone\.embeddings"
    r"|embed_tokens|\d+\.\d+\.weight|model\.layers\.\d+\.(embed_tokens|shared_head\.head))\b"  # draft heads
)
_TRANSPOSED = re.compile(r"\b(c_attn|c_proj|c_fc)\.weight$|\.experts\.\w+_proj$")  # GPT-2, gpt-oss: [in, out]


def uniform(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return exact float32 multiples of 2**-23 in [-1, 1) that depend on ``seed``, ``name`` and ``shape`` only."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    raw = np.random.PCG64(key).random_raw(int(np.prod(shape)))
    return ((raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)).reshape(shape)


def spread(name: str, shape: tuple[int, ...], norm_centre: float = 1.0) -> tuple[float, float]:
    """Return the centre and half-width of a tensor's values (uniform: deviation is half-width / sqrt(3)).

    Projections keep unit variance, so that scores differ from key to key; logits have a standard deviation of 1/4.
    """
    if _NORM.search(name):
        return norm_centre, 0.4
    if len(shape) <= 1 or name.endswith("_bias"):
        return 0.0, 0.3
    deviation = 0.25 if _VOCABULARY.search(name) else 1.0
    return 0.0, deviation * (3.0 / shape[-2 if _TRANSPOSED.search(name) else -1]) ** 0.5


def make_tensor(seed: int, name: str, shape: tuple[int, ...], norm_centre: float = 1.0) -> np.ndarray:
    """Return the float32 checkpoint tensor ``name`` of shape [..., out, in], [out] or [] under ``seed``."""
    centre, width = spread(name, shape, norm_centre)
    return np.asarray(np.float32(centre) + np.float32(width) * uniform(seed, name, shape))


def make_tensors(
    seed: int, shapes: Shapes, norm_centre: float = 1.0, query_share: float = 1.0
) -> dict[str, np.ndarray]:
    """Return all tensors of a checkpoint, float32, in the order of ``shapes``.

    Args:
        norm_centre: the mean weight of norms.
        query_share: factor of the weights of query norms.
    """
    tensors = {name: make_tensor(seed, name, tuple(shape), norm_centre) for name, shape in shapes.items()}
    share = np.float32(query_share)
    return {name: tensor * share if name.endswith("q_norm.weight") else tensor for name, tensor in tensors.items()}


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 over names and bytes: it separates a wrong derivation of weights from a wrong model."""
    state = hashlib.sha256()
    for name in sorted(tensors):
        state.update(name.encode())
        state.update(np.ascontiguousarray(tensors[name]).tobytes())
    return state.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
    """Golden logits of one tiny model. Sizes: T prompt tokens, N decode steps, V vocabulary.

    Attributes:
        name: name of the case, and of its folder.
        config: config.json as a dict.
        seed: seed of the weights and of the prompt.
        shards: number of safetensors files of the checkpoint.
        shapes: checkpoint tensors, as transformers names them.
        weights_sha256: ``digest`` of the weights.
        prompt: T token ids.
        greedy: N + 1 ids. The first follows from the prefill, id i + 1 from decode step i, which was fed id i.
        prefill: [T, V] float64 logits at every prompt position.
        decode: [N, V] float64 logits of the decode steps.
        prefill_error: max abs difference of transformers' float32 prefill logits to ``prefill``.
        decode_error: [N], the same for each decode step.
        margin: the smallest difference of the two largest logits over all N + 1 choices.
        versions: versions of torch, transformers and numpy that made this.
        norm_centre, query_share: parameters of the weights, see `make_tensors`.
    """

    name: str
    config: dict
    seed: int
    shards: int
    shapes: dict[str, tuple[int, ...]]
    weights_sha256: str
    prompt: list[int]
    greedy: list[int]
    prefill: np.ndarray
    decode: np.ndarray
    prefill_error: float
    decode_error: np.ndarray
    margin: float
    versions: dict[str, str]
    norm_centre: float = 1.0
    query_share: float = 1.0

    def tensors(self) -> dict[str, np.ndarray]:
        """Derive the checkpoint's weights again.

        Raises:
            ValueError: they differ from the oracle's.
        """
        tensors = make_tensors(self.seed, self.shapes, self.norm_centre, self.query_share)
        if digest(tensors) != self.weights_sha256:
            raise ValueError(f"{self.name}: the weights derived from seed {self.seed} are not those of the oracle")
        return tensors

    def save(self, root: pathlib.Path) -> None:
        """Write ``root/name/{config.json,case.json,logits.npz}``."""
        folder = root / self.name
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", self.config)
        unusual = {key: getattr(self, key) for key in ("norm_centre", "query_share") if getattr(self, key) != 1.0}
        write_json(folder / "case.json", {**unusual, **{key: getattr(self, key) for key in _CASE_KEYS}})
        np.savez_compressed(folder / "logits.npz", **{key: getattr(self, key) for key in _ARRAY_KEYS})


_CASE_KEYS = ("seed", "shards", "weights_sha256", "prompt", "greedy", "prefill_error", "margin", "versions", "shapes")
_ARRAY_KEYS = ("prefill", "decode", "decode_error")


def write_json(path: pathlib.Path, value: Mapping) -> None:
    """Write indented JSON, with lists on one line and a final newline."""
    lines = ",\n".join(f"  {json.dumps(key)}: {_json_value(item)}" for key, item in value.items())
    path.write_text("{\n" + lines + "\n}\n")


def _json_value(value: object) -> str:
    if not isinstance(value, dict) or len(value) < 8:
        return json.dumps(value)
    return "{\n" + ",\n".join(f"    {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n  }"


def load(folder: pathlib.Path) -> Golden:
    """Read one case's folder."""
    case = json.loads((folder / "case.json").read_text())
    case["shapes"] = {name: tuple(shape) for name, shape in case["shapes"].items()}
    with np.load(folder / "logits.npz", allow_pickle=False) as arrays:
        case |= {key: arrays[key] for key in _ARRAY_KEYS}
    return Golden(name=folder.name, config=json.loads((folder / "config.json").read_text()), **case)


def names(root: pathlib.Path) -> list[str]:
    """Return the names of the cases below ``root``, sorted."""
    return sorted(path.parent.name for path in root.glob("*/case.json"))


def write_checkpoint(golden: Golden, folder: pathlib.Path) -> pathlib.Path:
    """Write the case as a Hugging Face folder (config.json and safetensors, an index if sharded); return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden.config, indent=2))
    tensors = golden.tensors()
    if golden.shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        _write_shards(tensors, golden.shards, folder)
    return folder


def _write_shards(tensors: Mapping[str, np.ndarray], shards: int, folder: pathlib.Path) -> None:
    weight_map: dict[str, str] = {}
    for index, part in enumerate(_deal(tensors, shards)):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index_json = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2))


def _deal(items: Iterable[str], hands: int) -> Iterator[list[str]]:
    everything = list(items)
    return (everything[start::hands] for start in range(hands))
