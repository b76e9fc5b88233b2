"""Text models inside multimodal wrappers."""

import json
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer import LLM, SamplingParams, load_model
from jaxinfer.convert import main
from jaxinfer.formats.multimodal import is_wrapper, names_of, spelling, text_model
from jaxinfer.models.config import ConfigError
from jaxinfer.models.model import abstract
from tests.models.parity import load_case
from tools.oracle.golden import load, write_checkpoint

GOLDENS = pathlib.Path(__file__).parent / "goldens" / "models"
TIES = pathlib.Path(__file__).parent / "goldens" / "wrapper_ties.json"
SIZES = {"vocab_size": 32, "intermediate_size": 48, "num_key_value_heads": 4, "head_dim": 16}
SMALL = {
    "model_type": "qwen3_vl_moe_text",
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
}
MISTRAL = {"model_type": "mistral", "hidden_size": 64, "dtype": "bfloat16"}


def wrapper(architecture: str, **fields: object) -> dict:
    return {"architectures": [architecture], "vision_config": {"hidden_size": 7}, **fields}


def test_a_text_model_has_its_own_fields_and_what_the_wrapper_says_of_both() -> None:
    config = wrapper(
        "Mistral3ForConditionalGeneration", text_config=MISTRAL, quantization_config={"quant_method": "fp8"}
    )
    found = text_model({**config, "tie_word_embeddings": True, "hidden_size": 9})
    assert found["architectures"] == ["MistralForCausalLM"]
    assert (found["model_type"], found["hidden_size"], found["dtype"]) == ("mistral", 64, "bfloat16")
    assert found["quantization_config"] == {"quant_method": "fp8"}
    assert found["tie_word_embeddings"] is True
    assert "vision_config" not in found
    assert text_model(found) == found


def test_sizes_that_a_text_model_leaves_out_are_those_of_transformers() -> None:
    """Missing sizes take the defaults of transformers: LLaVA 1.5's file gives only the differences from Llama 2."""
    inner = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    llava = abstract(wrapper("LlavaForConditionalGeneration", text_config=inner), "bfloat16").config
    assert (llava.hidden_size, len(llava.layers), llava.heads, llava.kv_heads) == (4096, 32, 32, 32)
    assert (llava.intermediate_size, llava.vocab_size, llava.max_position) == (11008, 32064, 4096)
    next_ = abstract(wrapper("LlavaForConditionalGeneration", text_config={"model_type": "mistral"}), "bfloat16").config
    assert (next_.hidden_size, next_.intermediate_size, next_.kv_heads, next_.max_position) == (4096, 14336, 8, 131072)


def test_a_model_that_is_no_wrapper_stays_as_it_is() -> None:
    config = {"architectures": ["LlamaForCausalLM"], "text_config": {"hidden_size": 3}}
    assert text_model(config) is config
    assert not is_wrapper(config)


def test_rotary_embeddings_in_three_dimensions_are_plain_for_a_text() -> None:
    mrope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    found = text_model(wrapper("Qwen2_5_VLForConditionalGeneration", rope_scaling=mrope))
    assert found["rope_scaling"] == {"type": "default", "mrope_section": [16, 24, 24], "mrope_interleaved": False}


def test_a_mixture_inside_of_qwen3_vl_has_its_own_defaults() -> None:
    """transformers always renormalises the expert weights here, and defaults to fewer experts than standalone Qwen3."""
    config = abstract(wrapper("Qwen3VLMoeForConditionalGeneration", text_config=SMALL), "float32").config
    assert (config.rule.renormalise, config.rule.top_k, config.experts, config.expert_size) == (True, 4, 60, 1408)
    assert (config.rope.theta, config.kv_heads) == (5e5, 16)
    said = {**SMALL, "norm_topk_prob": False, "num_experts": 8, "rope_theta": 5e6}
    config = abstract(wrapper("Qwen3VLMoeForConditionalGeneration", text_config=said), "float32").config
    assert (config.rule.renormalise, config.experts, config.rope.theta) == (True, 8, 5e6)


def test_an_unknown_text_model_is_refused_by_the_wrappers_name() -> None:
    config = wrapper("LlavaForConditionalGeneration", text_config={"model_type": "martian"})
    with pytest.raises(ConfigError, match="LlavaForConditionalGeneration"):
        abstract(config, "float32")


WANTED = ("model.norm.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("begin", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("language_model.model.", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("language_model.", "lm_head.weight"),
        ("model.text_model.", "lm_head.weight"),
        ("model.", "lm_head.weight"),
        ("", "lm_head.weight"),
    ],
)
def test_names_are_spelled_as_the_checkpoint_spells_them(begin: str, head: str) -> None:
    names = {f"{begin}norm.weight", f"{begin}layers.0.mlp.down_proj.weight", head, "visual.patch_embed.proj.weight"}
    spell = spelling(names, WANTED, "model.", True)
    assert {spell(name) for name in WANTED} == names - {"visual.patch_embed.proj.weight"}
    assert spell("model.layers.1.mlp.down_proj.weight") == f"{begin}layers.1.mlp.down_proj.weight"


def test_a_text_model_alone_may_leave_out_its_prefix_and_no_more() -> None:
    names = {"norm.weight", "layers.0.mlp.down_proj.weight", "lm_head.weight"}
    assert {spelling(names, WANTED, "model.", False)(name) for name in WANTED} == names
    elsewhere = {f"language_model.{name}" for name in names}
    assert {spelling(elsewhere, WANTED, "model.", False)(name) for name in WANTED} == set(WANTED)


@pytest.mark.parametrize("row", json.loads(TIES.read_text()), ids=lambda row: f"{row['architecture']}")
def test_embeddings_are_tied_where_transformers_ties_them(row: dict) -> None:
    text = {"model_type": row["text"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    for outer, inner, tied in row["tied"]:
        fields = {} if outer is None else {"tie_word_embeddings": outer}
        own = text if inner is None else {**text, "tie_word_embeddings": inner}
        config = abstract(wrapper(row["architecture"], text_config={**SIZES, **own}, **fields), "float32").config
        assert (outer, inner, config.tied) == (outer, inner, tied)


def test_what_is_left_out_is_said_once(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        load_case(load(GOLDENS / "mistral3-hub"), tmp_path)
    said = [record.getMessage() for record in caplog.records if "without images" in record.getMessage()]
    assert len(said) == 1
    assert "multi_modal_projector: 4" in said[0]
    assert "vision_tower: " in said[0]


def test_a_tensor_that_belongs_to_nothing_is_still_refused(tmp_path: pathlib.Path) -> None:
    case = load(GOLDENS / "mistral3-hub")
    case.shapes["language_model.model.layers.0.stray.weight"] = (2, 2)
    object.__setattr__(
        case, "tensors", lambda: {name: np.zeros(shape, np.float32) for name, shape in case.shapes.items()}
    )
    with pytest.raises(ValueError, match="stray"):
        load_case(case, tmp_path)


def test_a_saved_text_model_is_one_alone(tmp_path: pathlib.Path) -> None:
    model = load_case(load(GOLDENS / "gemma3-hub"), tmp_path / "wrapped")
    model.save(tmp_path / "alone")
    again = load_model(str(tmp_path / "alone"), show_progress=False)
    tokens = jnp.arange(12)
    np.testing.assert_array_equal(again(tokens), model(tokens))
    assert json.loads((tmp_path / "alone/config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]


@pytest.mark.parametrize("arguments", [[], ["--output-format", "safetensors"], ["--quantize", "int8"]])
def test_a_converted_text_model_is_one_alone(tmp_path: pathlib.Path, arguments: list[str]) -> None:
    model = load_case(load(GOLDENS / "mistral3-hub"), tmp_path / "wrapped")
    assert main([str(tmp_path / "wrapped"), str(tmp_path / "made"), *arguments]) == 0
    again = load_model(str(tmp_path / "made"), "float32", show_progress=False)
    np.testing.assert_allclose(
        again(jnp.arange(12)), model(jnp.arange(12)), atol=0.2 if arguments[-1:] == ["int8"] else 0
    )


def test_a_folder_without_a_tokenizer_speaks_token_ids(tmp_path: pathlib.Path) -> None:
    write_checkpoint(load(GOLDENS / "llama-mha"), tmp_path)
    few = {"max_model_len": 64, "max_num_seqs": 1, "page_size": 16, "prefill_sizes": (16,)}
    with LLM(str(tmp_path), "float32", show_progress=False, **few) as llm:
        assert llm.tokenizer is None
        [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))
        assert len(output.outputs[0].token_ids) == 4
        with pytest.raises(ValueError, match="has no tokenizer"):
            llm.generate(["text"])


@pytest.mark.parametrize(
    ("architecture", "kind", "inner"),
    [
        ("Gemma3nForConditionalGeneration", "gemma3n_text", "Gemma3nForCausalLM"),
        ("Gemma4ForConditionalGeneration", "gemma4_text", "Gemma4ForCausalLM"),
        ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text", "Gemma4UnifiedForCausalLM"),
    ],
)
def test_gemma_is_found_inside_of_models_that_take_sounds(architecture: str, kind: str, inner: str) -> None:
    found = text_model(wrapper(architecture, text_config={"hidden_size": 7}, audio_config={"hidden_size": 9}))
    assert (found["architectures"], found["model_type"], found["hidden_size"]) == ([inner], kind, 7)


def test_gemma3n_is_read_as_the_hub_has_it(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint with towers, and with keys and values of layers that read other layers' keys and values, loads."""
    case = load(GOLDENS / "gemma3n_text-hub")
    plain = load_model(str(write_checkpoint(case, tmp_path / "plain")), show_progress=False)
    tensors = {name.replace("model.", "model.language_model.", 1): each for name, each in case.tensors().items()}
    others = ("model.vision_tower.stem.weight", "model.audio_tower.conformer.0.weight", "model.embed_audio.weight")
    keys = [f"model.language_model.layers.3.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    tensors |= {name: np.ones((2, 2), np.float32) for name in (*others, *keys)}
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": case.config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        found = load_model(str(tmp_path), show_progress=False)
    assert found.config == plain.config
    assert jax.tree.all(jax.tree.map(jnp.array_equal, found.params, plain.params))
    said = " ".join(record.getMessage() for record in caplog.records)
    assert all(f"{name}: 1" in said for name in ("vision_tower", "audio_tower", "embed_audio"))


@pytest.mark.parametrize("own", ["model.layers.0.mlp.up_proj", "model.norm", "lm_head"])
def test_a_module_has_a_name_in_each_spelling(own: str) -> None:
    prefixes = ("model.language_model.", "language_model.", "model.text_model.")
    within = {f"language_model.{own}", *(own.replace("model.", prefix) for prefix in prefixes)} - {own}
    for name in (own, *within):
        found = names_of(name)
        assert (found[0], {*found}) == (name, {own, *within})
    assert names_of("transformer.h.0.attn") == ("transformer.h.0.attn",)


@pytest.mark.parametrize(
    ("architecture", "kind", "section", "interleaved"),
    [
        ("Qwen2VLForConditionalGeneration", "qwen2_vl_text", [16, 24, 24], False),
        ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", [24, 20, 20], True),
        ("Qwen3_5ForConditionalGeneration", "qwen3_5_text", [11, 11, 10], True),
    ],
)
def test_axes_of_rotary_positions_are_those_of_the_family(
    architecture: str, kind: str, section: list[int], interleaved: bool
) -> None:
    def rope(**text: Any) -> Any:
        return text_model({"architectures": [architecture], "text_config": {"model_type": kind, **text}})

    assert rope()["rope_scaling"] == {"mrope_section": section, "mrope_interleaved": interleaved}
    own = {"type": "mrope", "mrope_section": [1, 2, 3], "mrope_interleaved": not interleaved}
    expected = {"type": "default", "mrope_section": [1, 2, 3], "mrope_interleaved": interleaved}
    assert rope(rope_scaling=own)["rope_scaling"] == expected
