"""Golden records of trainers: what their own code makes of weights in their names.

In an environment of its own, with the package of the trainer:

    python -m venv TUNIX && TUNIX/bin/pip install google-tunix==0.1.7
    TUNIX/bin/python -m tools.oracle.trainers tunix tests/goldens/trainers
    pip download --no-deps maxtext==0.2.5, unpacked to FOLDER
    TUNIX/bin/python -m tools.oracle.trainers maxtext tests/goldens/trainers --mapping \
        FOLDER/maxtext/checkpoint_conversion/utils/param_mapping.py

`tunix.json` and `maxtext.json` have each model's config.json and the shapes of its arrays by name, whose values are
`values` of them. `tunix.npz` has the logits of tunix' models for `TOKENS`, `maxtext.npz` the Hugging Face tensors that
MaxText's converter makes.
"""

import argparse
import json
import pathlib
import runpy
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tools.oracle.golden import uniform

TOKENS = (3, 1, 14, 7, 0, 9, 2, 11, 5, 13, 8, 4)
_SIZES = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4,
}
_KINDS = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_TIED = ("gemma", "gemma2", "gemma3_text")


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the values of an array: about those that a trained model has, and never 0 in a norm of MaxText."""
    return uniform(1, name, shape) * np.float32(0.4) + np.float32("norm" in name)


def config_json(kind: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a tiny model of a type."""
    gemma = {"query_pre_attn_scalar": 4, "hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 10000.0}
    names = {"architectures": [_KINDS[kind]], "model_type": kind, "tie_word_embeddings": kind in _TIED}
    if kind == "gemma":
        gemma = {"hidden_act": "gelu_pytorch_tanh"}
    return {**_SIZES, **(gemma if kind in _TIED else {"use_sliding_window": False}), **names, **changes}


# tunix' Llama and Qwen rotate with this theta, whatever their configs say (google-tunix 0.1.7).
_THETA = 1e6
TUNIX = {
    "llama": config_json("llama", rope_theta=_THETA),
    "llama-tied": config_json("llama", rope_theta=_THETA, tie_word_embeddings=True),
    "qwen2": config_json("qwen2", rope_theta=_THETA),
    "qwen3": config_json("qwen3", rope_theta=_THETA),
    "gemma": config_json("gemma", num_key_value_heads=1),
    "gemma2": config_json("gemma2"),
    "gemma2-fused": config_json("gemma2", num_key_value_heads=4),
    "gemma3": config_json("gemma3_text", num_hidden_layers=7),
}
MAXTEXT = {
    "llama": config_json("llama"),
    "qwen2": config_json("qwen2"),
    "qwen3": config_json("qwen3"),
    "gemma2": config_json("gemma2"),
    "gemma3": config_json("gemma3_text", num_hidden_layers=8),
}
_MAPPINGS = {
    "llama": "llama3.1-8b",
    "qwen2": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
    "gemma2": "gemma2-2b",
    "gemma3": "gemma3-4b",
}
# Shapes of MaxText's arrays without the axis of layers, by the end of their names: those of its modules.
_SHAPES: dict[str, Callable[[dict[str, Any]], tuple[int, ...]]] = {
    "query-kernel": lambda c: (c["hidden_size"], c["num_attention_heads"], c["head_dim"]),
    "key-kernel": lambda c: (c["hidden_size"], c["num_key_value_heads"], c["head_dim"]),
    "value-kernel": lambda c: (c["hidden_size"], c["num_key_value_heads"], c["head_dim"]),
    "out-kernel": lambda c: (c["num_attention_heads"], c["head_dim"], c["hidden_size"]),
    "query-bias": lambda c: (c["num_attention_heads"], c["head_dim"]),
    "key-bias": lambda c: (c["num_key_value_heads"], c["head_dim"]),
    "value-bias": lambda c: (c["num_key_value_heads"], c["head_dim"]),
    "query_norm-scale": lambda c: (c["head_dim"],),
    "key_norm-scale": lambda c: (c["head_dim"],),
    "wi_0-kernel": lambda c: (c["hidden_size"], c["intermediate_size"]),
    "wi_1-kernel": lambda c: (c["hidden_size"], c["intermediate_size"]),
    "wo-kernel": lambda c: (c["intermediate_size"], c["hidden_size"]),
    "logits_dense-kernel": lambda c: (c["hidden_size"], c["vocab_size"]),
    # its converter leaves padding out, but for Llama
    "token_embedder-embedding": lambda c: (c["vocab_size"] + 3 * (c["model_type"] != "llama"), c["hidden_size"]),
    "scale": lambda c: (c["hidden_size"],),
}


def tunix_model(case: str) -> Any:
    """Return tunix' own model of a case, an `nnx.Module` with these values."""
    import jax.numpy as jnp
    from flax import nnx

    model = _tunix_model(case, TUNIX[case], nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    for path, leaf in nnx.to_flat_state(state):
        leaf[...] = jnp.asarray(values(".".join(map(str, path)), leaf.shape))
    nnx.update(model, state)
    return model


def _tunix_model(case: str, config: dict[str, Any], rngs: Any) -> Any:
    from tunix.models.gemma import model as gemma
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.llama3 import model as llama
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3

    sizes = {
        "num_layers": config["num_hidden_layers"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config["intermediate_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
    }
    rotary = {"vocab_size": config["vocab_size"], "rope_theta": int(_THETA), "norm_eps": 1e-6}
    kind, tied = config["model_type"], config["tie_word_embeddings"]
    if kind == "llama":
        return llama.Llama3(llama.ModelConfig(**sizes, **rotary, weight_tying=tied), rngs=rngs)
    if kind.startswith("qwen"):
        library, name = (qwen2, "Qwen2") if kind == "qwen2" else (qwen3, "Qwen3")
        return getattr(library, name)(library.ModelConfig(**sizes, **rotary, use_tied_embedding=tied), rngs=rngs)
    vocab = {"num_embed": config["vocab_size"], "sliding_window_size": config["sliding_window"]}
    if kind == "gemma3_text":
        import jax.numpy as jnp

        return gemma3.Gemma3(gemma3.ModelConfig(**sizes, **vocab, param_dtype=jnp.float32), rngs=rngs)
    near, far = gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL
    second = kind == "gemma2"
    return gemma.Gemma(
        gemma.ModelConfig(
            **sizes,
            **vocab,
            final_logit_softcap=30.0 if second else None,
            attn_logits_soft_cap=50.0 if second else None,
            use_post_attn_norm=second,
            use_post_ffw_norm=second,
            attention_types=(near, far) if second else (far, far),
        ),
        rngs=rngs,
    )


def _tunix(folder: pathlib.Path) -> None:
    import jax.numpy as jnp
    from flax import nnx

    records, arrays = {}, {}
    for case, config in TUNIX.items():
        model = tunix_model(case)
        shapes = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
        records[case] = {"config": config, "shapes": shapes}
        length = len(TOKENS)
        mask = jnp.tril(jnp.ones((1, length, length), bool))
        logits, _ = model(jnp.asarray([TOKENS]), jnp.arange(length)[None], None, mask)
        arrays[case] = np.asarray(logits[0], np.float32)
    _write(folder, "tunix", records, arrays)


def _maxtext(folder: pathlib.Path, mapping: pathlib.Path) -> None:
    library = runpy.run_path(str(mapping))
    records: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for case, config in MAXTEXT.items():
        for scanned in (True, False):
            name = f"{case}-{'scanned' if scanned else 'apart'}"
            shapes: dict[str, tuple[int, ...]] = {}
            tensors: dict[str, np.ndarray] = {}
            for key, shape, made in _converted(library, _MAPPINGS[case], config, scanned):
                shapes[key] = shape
                tensors |= made
            records[name] = {"config": config, "shapes": shapes}
            arrays |= {f"{name}/{tensor}": value for tensor, value in tensors.items()}
    _write(folder, "maxtext", records, arrays)


def _converted(
    library: dict[str, Any], model: str, config: dict[str, Any], scanned: bool
) -> Iterator[tuple[str, tuple[int, ...], dict[str, np.ndarray]]]:
    """Yield each array of MaxText: its name, its shape, and the tensors that MaxText's converter makes of it."""
    towers = {"text_config": config, "vision_config": {"num_hidden_layers": 0}}
    both = {**config, **towers}
    mine = types.SimpleNamespace(head_dim=config["head_dim"])
    hooks = library["HOOK_FNS"][model](both, mine, scan_layers=scanned, saving_to_hf=True)
    for key, tensors in library["PARAM_MAPPING"][model](both, mine, scan_layers=scanned).items():
        if "vision" in key or not _exists(key, config):
            continue
        own = next(shape(config) for end, shape in _SHAPES.items() if key.endswith(end))
        several = isinstance(tensors, list)
        shape = (*own[:1], len(tensors), *own[1:]) if several else own
        array = values(key, shape)
        slices = np.moveaxis(array, 1, 0) if several else [array]
        names = [name.replace("model.language_model.", "model.") for name in (tensors if several else [tensors])]
        chain = hooks.get(key) or []
        made = {}
        for tensor, value in zip(names, slices, strict=True):
            for hook in chain if isinstance(chain, list) else [chain]:
                value = hook(value, _tensor_shape(key, own, config))
            made[tensor] = np.asarray(value, np.float32).reshape(_tensor_shape(key, own, config))
        yield key, shape, made


def _exists(key: str, config: dict[str, Any]) -> bool:
    """Return whether the model has the array: the mapping of Qwen lists those of all its models."""
    if "bias" in key:
        return config["model_type"] == "qwen2"
    if "query_norm" in key or "key_norm" in key:
        return config["model_type"] != "qwen2"
    return "moe" not in key


def _tensor_shape(key: str, own: tuple[int, ...], config: dict[str, Any]) -> tuple[int, ...]:
    if "embedding" in key:
        return (config["vocab_size"], own[1])
    if "kernel" not in key:
        return (int(np.prod(own)),)
    inputs = int(np.prod(own[:-1])) if "out-kernel" in key else own[0]
    return (int(np.prod(own)) // inputs, inputs)


def _write(folder: pathlib.Path, name: str, records: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(records, indent=1) + "\n")
    save: Any = np.savez_compressed
    save(folder / f"{name}.npz", **arrays)


def main() -> None:
    """Write the records of a trainer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainer", choices=("tunix", "maxtext"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--mapping", type=pathlib.Path)
    given = parser.parse_args()
    _tunix(given.folder) if given.trainer == "tunix" else _maxtext(given.folder, given.mapping)


if __name__ == "__main__":
    main()
