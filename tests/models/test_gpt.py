"""GPT-2, GPT-J, Phi and Falcon: rejected values, tensor names, ALiBi, learned positions."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer import load_model
from jaxinfer.config import EngineConfigError
from jaxinfer.layers.attention import causal_attend
from jaxinfer.llm import LLM
from jaxinfer.models.config import ConfigError
from jaxinfer.models.families.falcon import alibi_bias
from jaxinfer.models.registry import family_for
from jaxinfer.weights import CheckpointError
from tests.models.parity import load_case, logit_faults, teacher_forced
from tests.models.test_parity import golden

TINY = {
    "GPT2LMHeadModel": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "GPTJForCausalLM": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8},
    "PhiForCausalLM": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "FalconForCausalLM": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
}
GPT2, GPTJ, PHI, FALCON = TINY
NEW = {"new_decoder_architecture": True}


def config(architecture: str, **changes):
    described = {"architectures": [architecture], **TINY[architecture], **changes}
    return family_for(described).config(described)


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        (GPT2, {"n_head": 5}, ["n_embd = 32", "n_head (5)"]),
        (GPT2, {"add_cross_attention": True}, ["add_cross_attention = True"]),
        (GPT2, {"activation_function": "mish"}, ["activation_function", "mish", "gelu_new"]),
        (GPT2, {"n_positions": 0}, ["n_positions = 0"]),
        (GPT2, {"scale_attn_weights": 1}, ["scale_attn_weights = 1"]),
        (GPT2, {"layer_norm_epsilon": "small"}, ["layer_norm_epsilon", "small"]),
        (GPTJ, {"n_embd": 33}, ["n_embd = 33", "n_head (2)"]),
        (GPTJ, {"rotary_dim": 7}, ["rotary_dim = 7", "even"]),
        (GPTJ, {"rotary_dim": 18}, ["rotary_dim = 18", "at most 16"]),
        (GPTJ, {"rotary_dim": None}, ["rotary_dim = None"]),
        (PHI, {"num_key_value_heads": 3}, ["num_key_value_heads = 3"]),
        (PHI, {"partial_rotary_factor": 0.45}, ["partial_rotary_factor = 0.45", "7 of 16", "even"]),
        (PHI, {"partial_rotary_factor": 0.01}, ["partial_rotary_factor = 0.01", "0 of 16"]),
        (PHI, {"model_type": "phi-msft"}, ["model_type = 'phi-msft'", "known: phi"]),
        (PHI, {"qk_layernorm": "yes"}, ["qk_layernorm", "yes"]),
        (FALCON, {"hidden_size": 30}, ["hidden_size = 30", "num_attention_heads (4)"]),
        (FALCON, {"alibi": True}, ["alibi = True", "share keys"]),
        (FALCON, {**NEW, "parallel_attn": False}, ["parallel_attn = False", "new_decoder_architecture"]),
        (FALCON, {**NEW, "num_kv_heads": 3}, ["num_kv_heads = 3", "divide"]),
        (FALCON, {"multi_query": False, "num_kv_heads": 2}, ["num_kv_heads = 2", "be num_attention_heads (4)"]),
        (FALCON, {"num_ln_in_parallel_attn": 2}, ["num_ln_in_parallel_attn = 2", "new architecture"]),
        (FALCON, {**NEW, "num_ln_in_parallel_attn": 3}, ["num_ln_in_parallel_attn = 3"]),
        (FALCON, {"rope_scaling": {"rope_type": "spiral"}}, ["rope_type", "spiral"]),
    ],
)
def test_a_bad_field_is_named_with_its_value(architecture, changes, words):
    with pytest.raises(ConfigError) as error:
        config(architecture, **changes)
    assert all(word in str(error.value) for word in words), error.value


def test_fields_go_by_their_general_names_too():
    names = {"hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 5, "max_position_embeddings": 77}
    general = {"architectures": [GPT2], "vocab_size": 64, **names}
    read = family_for(general).config(general)
    assert (read.hidden_size, len(read.layers), read.heads, read.max_position) == (40, 3, 5, 77)
    assert config(FALCON, n_embed=48).hidden_size == 48


def test_defaults_are_those_of_transformers():
    gpt2 = family_for({"architectures": [GPT2]}).config({})
    assert (gpt2.vocab_size, gpt2.hidden_size, gpt2.intermediate_size, gpt2.max_position) == (50257, 768, 3072, 1024)
    assert (gpt2.tied, gpt2.activation, gpt2.scales[11]) == (True, "gelu_new", 1 / 8)
    gptj = family_for({"architectures": [GPTJ]}).config({})
    assert (gptj.vocab_size, gptj.head_dim, gptj.rotary_dim, len(gptj.layers), gptj.tied) == (50400, 256, 64, 28, False)
    phi = family_for({"architectures": [PHI]}).config({})
    assert (phi.vocab_size, phi.kv_heads, phi.rope.partial, phi.intermediate_size) == (51200, 32, 0.5, 8192)
    falcon = family_for({"architectures": [FALCON]}).config({})
    assert (falcon.kv_heads, falcon.norms, falcon.intermediate_size, falcon.tied) == (1, 1, 4 * 4544, True)
    assert config(FALCON, **NEW).kv_heads == 4


def _rewrite(folder: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")


def _load(folder: pathlib.Path):
    return load_model(str(folder), "float32", show_progress=False)


def test_gpt2_as_the_hub_has_it(tmp_path: pathlib.Path):
    """openai-community/gpt2: no name prefix, and a mask tensor in every attention layer."""
    case = golden("gpt2-hub")
    wanted = load_case(case, tmp_path).params
    bare = {name.removeprefix("transformer."): tensor for name, tensor in case.tensors().items()}
    masks = {f"h.{layer}.attn.bias": np.tril(np.ones((1, 1, 8, 8), np.float32)) for layer in range(2)}
    masks["h.0.attn.masked_bias"] = np.array(-1e4, np.float32)
    _rewrite(tmp_path, bare | masks)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, wanted, _load(tmp_path).params))
    _rewrite(tmp_path, bare | {"h.0.attn.c_other.bias": masks["h.0.attn.bias"]})
    with pytest.raises(CheckpointError, match=r"h\.0\.attn\.c_other\.bias"):
        _load(tmp_path)
    del bare["wpe.weight"]
    _rewrite(tmp_path, bare)
    with pytest.raises(CheckpointError, match=r"wpe\.weight"):
        _load(tmp_path)


def test_gpt2_knows_as_many_positions_as_its_table(tmp_path: pathlib.Path):
    model = load_case(golden("gpt2-hub"), tmp_path)
    with pytest.raises(EngineConfigError, match="max_model_len"):
        LLM(model, max_model_len=257, max_num_seqs=1)


def test_a_tied_head_keeps_its_bias(tmp_path: pathlib.Path):
    case = golden("gptj-tied")
    model = load_case(case, tmp_path)
    assert list(model.params["head"]) == ["bias"]
    assert logit_faults(case, teacher_forced(model, case)) == []
    without = model.params | {"head": {"bias": jnp.zeros_like(model.params["head"]["bias"])}}
    assert logit_faults(case, teacher_forced(model.replace(params=without), case)) != []


def _published_slopes(heads: int) -> list[float]:
    """Return the slopes of Press et al. 2022, section 3, with their code for head counts that are not powers of two."""

    def of_power(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start ** (index + 1) for index in range(n)]

    if math.log2(heads).is_integer():
        return of_power(heads)
    nearest = 2 ** math.floor(math.log2(heads))
    return of_power(nearest) + _published_slopes(2 * nearest)[0::2][: heads - nearest]


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 32, 71])
def test_alibi_is_the_published_bias_in_bfloat16(heads: int):
    positions = np.array([0, 1, 7, 255, 257, 2047])
    slopes = np.asarray(_published_slopes(heads), np.float32).astype(ml_dtypes.bfloat16)
    expected = slopes * positions[:, None].astype(ml_dtypes.bfloat16)
    assert expected.dtype == ml_dtypes.bfloat16
    got = jax.jit(alibi_bias, static_argnums=1)(jnp.asarray(positions), heads)
    np.testing.assert_array_equal(np.asarray(got), expected.astype(np.float32))


def test_alibi_biases_each_key_before_the_scale(tmp_path: pathlib.Path):
    """A layer's attention against the equation in float64 numpy."""
    case = golden("falcon-rw-six-heads")
    model = load_case(case, tmp_path)
    cfg, rng = model.config, np.random.default_rng(0)
    seen = {}

    def attend(q, k, v, cache, layer, scale, sinks=None):
        mixed, cache = causal_attend(q, k, v, cache, layer, scale, sinks)
        seen.update(q=q, k=k, v=v, scale=scale, mixed=mixed)
        return mixed, cache

    x = jnp.asarray(rng.standard_normal((9, cfg.hidden_size)), jnp.float32)
    context = model.module.bind({"params": model.params}).context(jnp.arange(9))
    block = model.module.bind({"params": model.params}).block(0, None)
    block.apply({"params": model.params["layers_0"]}, x, context, attend, None)
    assert seen["k"].shape == (9, cfg.heads, model.cache_spec.head_dim)
    q, k, v = (np.asarray(seen[name], np.float64)[..., : cfg.head_dim] for name in "qkv")
    scores = np.einsum("qhd,khd->hqk", q, k) + np.asarray(alibi_bias(jnp.arange(9), cfg.heads), np.float64).T[:, None]
    scores = np.where(np.tril(np.ones((9, 9))), scores / math.sqrt(cfg.head_dim), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(np.asarray(seen["mixed"])[..., : cfg.head_dim], expected, atol=2e-6)
    assert json.loads((tmp_path / "config.json").read_text())["alibi"] is True
