"""Text models of vision-language models, tested on text alone."""

from typing import Any

from tools.oracle.cases.case import Case, rope, sizes

ARCHITECTURES = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
}

COMMON: dict[str, dict] = {name: {} for name in ARCHITECTURES}

_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
_MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1}


def _text(kind: str, *numbers: Any, **others: Any) -> dict:
    return {"text_config": {"model_type": kind, "max_position_embeddings": 256, **sizes(*numbers, **others)}}


WRAPPED = (
    Case(
        "gemma3-hub",
        {
            **_text(
                "gemma3_text",
                *(64, 96, 3, 4, 2),
                head_dim=16,
                sliding_window=8,
                query_pre_attn_scalar=16,
                rope_scaling={"rope_type": "linear", "factor": 8.0},
            ),
            "vision_config": {"model_type": "siglip_vision_model", **_TOWER, "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
        },
        style="hub",
        prompt_length=40,
        norm_centre=0.0,
        served=True,
    ),
    Case(
        "mistral3-hub",
        {
            **_text("mistral", *(64, 96, 2, 4, 2), head_dim=16, sliding_window=None, rope_theta=1e6),
            "vision_config": {"model_type": "pixtral", **_TOWER, "image_size": 28, "patch_size": 14, "head_dim": 8},
            "tie_word_embeddings": False,
        },
        style="hub",
    ),
    Case(
        "mistral3-two-tables-hub",
        {
            **_text("mistral", *(48, 64, 1, 2, 1), head_dim=16, sliding_window=None, tie_word_embeddings=False),
            "vision_config": {"model_type": "pixtral", **_TOWER, "image_size": 28, "patch_size": 14, "head_dim": 8},
        },
        style="hub",
        served=True,
        tables=("embed", "head"),
    ),
    Case(
        "mistral3-ministral-hub",
        {
            **_text("ministral3", *(64, 96, 2, 4, 2), head_dim=16, **rope("yarn", 1e6, **_YARN)),
            "vision_config": {"model_type": "pixtral", **_TOWER, "image_size": 28, "patch_size": 14, "head_dim": 8},
            "tie_word_embeddings": False,
        },
        style="hub",
        prompt_length=70,
        served=True,
    ),
    Case(
        "qwen2_5_vl-hub",
        {
            **sizes(64, 96, 2, 4, 2, rope_theta=1e6, rope_scaling=_MROPE, tie_word_embeddings=True),
            "max_position_embeddings": 256,
            "vision_config": {**_QWEN_TOWER, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
        },
        style="hub",
        served=True,
    ),
    Case(
        "qwen3_vl-hub",
        {
            **_text(
                "qwen3_vl_text",
                *(64, 96, 2, 4, 2),
                head_dim=16,
                rope_theta=5e6,
                rope_scaling={"mrope_interleaved": True, "mrope_section": [2, 3, 3], "rope_type": "default"},
            ),
            "vision_config": {**_QWEN_TOWER, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
            "tie_word_embeddings": False,
        },
        style="hub",
        served=True,
    ),
    Case(
        "qwen3_vl_moe-hub",
        {
            **_text(
                "qwen3_vl_moe_text",
                *(64, 96, 2, 4, 2),
                head_dim=16,
                rope_theta=5e6,
                rope_scaling={"mrope_interleaved": True, "mrope_section": [2, 3, 3], "rope_type": "default"},
                num_experts=8,
                num_experts_per_tok=3,
                moe_intermediate_size=24,
                decoder_sparse_step=1,
                mlp_only_layers=[],
            ),
            "vision_config": {**_QWEN_TOWER, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
            "tie_word_embeddings": False,
        },
        style="hub",
        served=True,
    ),
    Case(
        "llama4-hub",
        {
            **_text(
                "llama4_text",
                *(64, 24, 2, 4, 2),
                num_local_experts=8,
                num_experts_per_tok=1,
                head_dim=16,
                intermediate_size_mlp=72,
                attention_chunk_size=256,
                floor_scale=8,
                no_rope_layers=[1, 0],
                rope_theta=5e5,
            ),
            "vision_config": {
                "model_type": "llama4_vision_model",
                **_TOWER,
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
            "tie_word_embeddings": False,
        },
        style="hub",
        served=True,
    ),
)

CASES = WRAPPED
