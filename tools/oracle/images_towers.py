"""Oracle of LLaVA, Gemma 3, Mistral 3 and Idefics3: ``python -m tools.oracle.images_towers {make,check} FOLDER``.

See `tools.oracle.images`, whose cases are made and checked, too. ``expansions FILE`` writes prompts before and after
the processors of transformers replace their placeholders; ``digests FILE`` digests of the pixels of many pictures.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import PIL.Image
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers.image_utils import load_image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tools.oracle.golden import write_json
from tools.oracle.images import CASES as QWEN
from tools.oracle.images import END, IMAGE, START, ImageCase, Pixels, Plan, _as_url, main
from tools.oracle.pictures import FILES, HANDED

with mock.patch(
    "transformers.utils.is_vision_available", return_value=False
):  # its module imports torchvision otherwise
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

NEWLINE, NEWLINES = 56, 57
BREAK = 63
TILES = ((55, 58), (59, 63))


def patches(pixels: np.ndarray, patch: int) -> np.ndarray:
    """Return the patches of an image [3, height, width], row by row."""
    colours, height, width = pixels.shape
    parts = pixels.reshape(colours, height // patch, patch, width // patch, patch)
    return parts.transpose(1, 3, 0, 2, 4).reshape(-1, colours * patch**2)


def _pixels(
    process: Callable[[Mapping[str, Any]], Callable[..., Any]],
    case: ImageCase,
    shown: list[PIL.Image.Image],
    plan: Plan,
) -> Pixels:
    """Return the patches of all images row by row; ``inputs`` are their pixels as the model takes them."""
    if not shown:
        return Pixels(np.zeros((0, 0), np.float32), [], {})
    config = case.files["config.json"]
    patch = config["vision_config"]["patch_size"]
    unit = {"patch_size": patch * config["spatial_merge_size"]} if "spatial_merge_size" in config else {}
    made = process(case.files["preprocessor_config.json"])(images=shown, return_tensors="np", **unit)
    inputs = {name: made[name] for name in ("pixel_values", "image_sizes") if name in made}
    sizes = inputs.get("image_sizes", [image.shape[1:] for image in inputs["pixel_values"]])
    images = [image[:, :height, :width] for image, (height, width) in zip(made["pixel_values"], sizes, strict=True)]
    grids = [[1, int(height) // patch, int(width) // patch] for height, width in sizes]
    return Pixels(np.concatenate([patches(image, patch) for image in images]), grids, inputs)


def _tiles(process: Any, image: PIL.Image.Image) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the pixels of an image's tiles [tiles, 3, side, side], and their rows and columns; 0: it is not cut."""
    made = process(images=[image], return_tensors="np", return_row_col_info=True)
    return made["pixel_values"][0], (int(made["rows"][0][0]), int(made["cols"][0][0]))


def _tile_patches(pixels: np.ndarray, patch: int) -> np.ndarray:
    """Return the patches of all tiles, row by row; pixels that fill no patch are left out."""
    side = pixels.shape[-1] // patch * patch
    return np.concatenate([patches(tile[:, :side, :side], patch) for tile in pixels])


def _tile_pixels(case: ImageCase, shown: list[PIL.Image.Image], plan: Plan) -> Pixels:
    if not shown:
        return Pixels(np.zeros((0, 0), np.float32), [], {})
    patch = case.files["config.json"]["vision_config"]["patch_size"]
    process = Idefics3ImageProcessorPil(**case.files["preprocessor_config.json"])
    made = [_tiles(process, image) for image in shown]
    grids = [[len(pixels), *[pixels.shape[-1] // patch] * 2] for pixels, _ in made]
    values = np.concatenate([_tile_patches(pixels, patch) for pixels, _ in made])
    inputs = {"pixel_values": np.concatenate([pixels for pixels, _ in made])[None]}
    return Pixels(values, grids, {**inputs, "tiles": [tiles for _, tiles in made]})


def _tile_prompt(case: ImageCase, text: list[int], pixels: Pixels) -> list[int]:
    config, prompt = case.files["config.json"], text[:5]
    for index, (grid, (rows, columns)) in enumerate(zip(pixels.grids, pixels.inputs.get("tiles", []), strict=True)):
        soft = [IMAGE] * (grid[1] // config["scale_factor"]) ** 2
        prompt += text[6 + index : 9 + index]
        for row in range(rows):
            prompt += [each for column in range(columns) for each in (START, TILES[row][column], *soft)]
            prompt += [NEWLINE] if row < rows - 1 else [NEWLINES]
        prompt += [START, END, *soft, START]
    return prompt + text[20 : 24 if pixels.grids else 40]


def _inputs(kinds: bool, model: Any, prompt: list[int], pixels: Pixels, dtype: torch.dtype) -> dict[str, Any]:
    ids = torch.tensor([prompt])
    found = {"input_ids": ids} | ({"token_type_ids": (ids == IMAGE).int()} if kinds else {})
    if pixels.grids:
        found["pixel_values"] = torch.tensor(np.asarray(pixels.inputs["pixel_values"], np.float64)).to(dtype)
    if "image_sizes" in pixels.inputs:
        found["image_sizes"] = torch.tensor(np.asarray(pixels.inputs["image_sizes"]))
    return found


def _rows(model: Any, pixels: Pixels, dtype: torch.dtype) -> torch.Tensor:
    if not pixels.grids:
        return torch.zeros((0, 0), dtype=dtype)
    inputs = _inputs(False, model, [0], pixels, dtype)
    found = model.model.get_image_features(**{name: inputs[name] for name in inputs if name != "input_ids"})
    return torch.cat(list(found.pooler_output))


def _prompt(
    expand: Callable[[Any, list[int]], list[int]], case: ImageCase, text: list[int], pixels: Pixels
) -> list[int]:
    config, prompt = case.files["config.json"], text[:5]
    for index, grid in enumerate(pixels.grids):
        prompt += [*text[6 + index : 9 + index], *expand(config, grid)]
    return prompt + text[20 : 24 if pixels.grids else 40]


def _square(config: Any, grid: list[int]) -> list[int]:
    return [IMAGE] * (grid[1] * grid[2])


def _between(config: Any, grid: list[int]) -> list[int]:
    return [NEWLINES, START, *[IMAGE] * config["mm_tokens_per_image"], END, NEWLINES]


def _rows_of_tokens(config: Any, grid: list[int]) -> list[int]:
    merge = config["spatial_merge_size"]
    found = ([IMAGE] * (grid[2] // merge) + [BREAK]) * (grid[1] // merge)
    return [*found[:-1], END]


_PLANS = {"text": Plan(), "one": Plan(((40, 56),)), "several": Plan(((24, 24), (61, 83), (9, 70)))}
_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_channels": 3,
    "patch_size": 4,
}


_PIXTRAL = {"model_type": "pixtral", "image_size": 64, "hidden_act": "silu", "rope_theta": 50.0}


def _case(
    name: str,
    config: dict[str, Any],
    settings: dict[str, Any],
    process: Callable[[Mapping[str, Any]], Callable[..., Any]],
    expand: Callable[[Any, list[int]], list[int]],
    kinds: bool = False,
    **others: Any,
) -> ImageCase:
    ways = functools.partial(_pixels, process), functools.partial(_prompt, expand), _rows
    inputs = functools.partial(_inputs, kinds)
    return ImageCase(
        name, {"config.json": config, "preprocessor_config.json": settings}, _PLANS, *ways, inputs, **others
    )


def _clip(settings: Mapping[str, Any]) -> Callable[..., Any]:
    kind = LlavaImageProcessorPil if settings.get("do_pad") else CLIPImageProcessorPil
    return kind(**settings)


def _mistral3(name: str, text: dict[str, Any]) -> ImageCase:
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
        "vision_config": {
            **_TOWER,
            "model_type": "pixtral",
            "image_size": 64,
            "hidden_act": "silu",
            "rope_theta": 50.0,
        },
        "text_config": {**_TEXT, "rms_norm_eps": 1e-3, **text},
    }
    settings = {"image_processor_type": "PixtralImageProcessor", "patch_size": 4, "size": {"longest_edge": 48}}
    return _case(name, config, settings, lambda own: PixtralImageProcessorPil(**own), _rows_of_tokens)


def _idefics3(kind: str, tower: dict[str, Any], scale: int, settings: dict[str, Any], plans: Any) -> ImageCase:
    config = {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "model_type": kind.lower(),
        "image_token_id": IMAGE,
        "scale_factor": scale,
        "tie_word_embeddings": False,
        "vision_config": {**_TOWER, "model_type": f"{kind.lower()}_vision", **tower},
        "text_config": {**_TEXT, "model_type": "llama", "pad_token_id": None},
    }
    own = {"image_processor_type": f"{kind}ImageProcessor", "max_image_size": {"longest_edge": tower["image_size"]}}
    files = {"config.json": config, "preprocessor_config.json": {**own, **settings}}
    ways = (_tile_pixels, _tile_prompt, _rows, functools.partial(_inputs, False))
    return ImageCase(kind.lower(), files, plans, *ways)


CASES = (
    _idefics3(
        "Idefics3",
        {"image_size": 18, "num_hidden_layers": 2},
        2,
        {"size": {"longest_edge": 36}},
        {"text": Plan(), "one": Plan(((40, 56),)), "several": Plan(((20, 61), (70, 9), (30, 30)))},
    ),
    _idefics3(
        "SmolVLM",
        {"image_size": 16, "patch_size": 2, "num_hidden_layers": 2},
        4,
        {"size": {"longest_edge": 40}, "do_image_splitting": False},
        _PLANS,
    ),
    _case(
        "llava",
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "image_token_index": IMAGE,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "tie_word_embeddings": False,
            "vision_config": {**_TOWER, "model_type": "clip_vision_model", "image_size": 16},
            "text_config": {**_TEXT, "model_type": "llama", "num_key_value_heads": 4},
        },
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
        },
        _clip,
        _square,
    ),
    _case(
        "gemma3",
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "boi_token_index": START,
            "eoi_token_index": END,
            "image_token_index": IMAGE,
            "mm_tokens_per_image": 9,
            "vision_config": {
                **_TOWER,
                "model_type": "siglip_vision_model",
                "num_hidden_layers": 2,
                "image_size": 24,
                "patch_size": 2,
                "vision_use_head": False,
            },
            "text_config": {
                **_TEXT,
                "model_type": "gemma3_text",
                "num_hidden_layers": 3,
                "query_pre_attn_scalar": 8,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        },
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 24, "width": 24},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 2,
        },
        lambda own: Gemma3ImageProcessorPil(**own),
        _between,
        kinds=True,
        norm_centre=0.0,
    ),
    _mistral3("mistral3", {"model_type": "mistral", "sliding_window": None}),
    _mistral3(
        "mistral3-ministral3",
        {
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
)


# ---- prompts


def _tokenizer() -> Tokenizer:
    """Make a tokenizer in which a run of newlines is one token, as in Gemma's."""
    longest = 7
    runs = ["\n" * count for count in range(1, longest + 1)]
    merges = [(a, b) for a in reversed(runs) for b in runs if len(a + b) <= longest]
    pieces = ["<unk>", *"ab ", *runs]
    made = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    made.decoder = decoders.Fuse()
    made.normalizer = normalizers.Sequence([])
    marks = ("<boi>", "<soft>", "<eoi>", "<image>", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
    tiles = (f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
    special = (*marks, "<fake_token_around_image>", "<global-img>", *tiles)
    made.add_special_tokens([AddedToken(token, special=True) for token in special])
    return made


_TEXTS = ("{}a", "ab\n{}\nb", "{}{}", "a\n\n{}\n\n\n{}b", "a {} b\n\n{}")


def expansions() -> dict[str, Any]:
    """Return the vocabulary, and by family ids of prompts with placeholders, sizes of images, and expanded ids."""
    tokenizer, found = _tokenizer(), dict[str, Any]()
    clip = SimpleNamespace(patch_size=4, num_additional_image_tokens=1, vision_feature_select_strategy="default")
    clip.image_token = "<image>"
    gemma = SimpleNamespace(full_image_sequence=f"\n\n<boi>{'<soft>' * 4}<eoi>\n\n")
    pixtral = SimpleNamespace(patch_size=4, spatial_merge_size=2, image_token="[IMG]")
    pixtral.image_break_token, pixtral.image_end_token = "[IMG_BREAK]", "[IMG_END]"
    idefics = SimpleNamespace(image_token="<image>", image_seq_len=4, global_image_tag="<global-img>")
    idefics.fake_image_token = "<fake_token_around_image>"
    squares = [np.zeros((3, 8, 8))] * 2
    ways = {
        "clip": ("<image>", LlavaProcessor, clip, {"pixel_values": squares}, [(8, 8)] * 2),
        "siglip": ("<boi>", Gemma3Processor, gemma, {"num_crops": [0, 0]}, [(8, 8)] * 2),
        "pixtral": ("[IMG]", PixtralProcessor, pixtral, {"image_sizes": [(16, 8), (8, 24)]}, [(16, 8), (8, 24)]),
        # sizes are rows and columns of tiles
        "idefics3": ("<image>", Idefics3Processor, idefics, {"rows": [[2, 0]], "cols": [[1, 0]]}, [(2, 1), (0, 0)]),
    }
    for family, (mark, processor, own, inputs, sizes) in ways.items():
        rows = []
        for text in _TEXTS:
            count = text.count("{}")
            shown = [processor.replace_image_token(own, inputs, index) for index in range(count)]
            ids = [tokenizer.encode(text.format(*each)).ids for each in ([mark] * count, shown)]
            rows.append({"prompt": ids[0], "sizes": sizes[:count], "expanded": ids[1]})
        found[family] = rows
    return {"vocabulary": tokenizer.get_vocab(), **found}


# ---- pictures

_KINDS = {
    "clip": CLIPImageProcessorPil,
    "siglip": Gemma3ImageProcessorPil,
    "pixtral": PixtralImageProcessorPil,
    "idefics3": Idefics3ImageProcessorPil,
}
DIGESTED: Sequence[dict[str, Any]] = (
    {"kind": "clip", "patch": 14, "settings": {"size": {"shortest_edge": 336}, "crop_size": 336}},
    {"kind": "clip", "patch": 8, "settings": {"size": {"height": 40, "width": 23}, "crop_size": 32, "resample": 2}},
    {
        "kind": "clip",
        "patch": 8,
        "settings": {
            "image_processor_type": "LlavaImageProcessor",
            "size": {"shortest_edge": 48},
            "crop_size": 48,
            "do_pad": True,
        },
    },
    {"kind": "siglip", "patch": 14, "settings": {}},
    {"kind": "siglip", "patch": 14, "merge": 4, "settings": {"size": {"height": 896, "width": 896}, "resample": 3}},
    {"kind": "pixtral", "patch": 14, "merge": 2, "settings": {"size": {"longest_edge": 1540}}},
    {"kind": "pixtral", "patch": 16, "settings": {"size": {"longest_edge": 100}, "do_normalize": False}},
    {
        "kind": "idefics3",
        "patch": 16,
        "merge": 2,
        "settings": {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}},
    },
    {
        "kind": "idefics3",
        "patch": 14,
        "settings": {"size": {"longest_edge": 100}, "max_image_size": {"longest_edge": 54}, "resample": 3},
    },
    {
        "kind": "idefics3",
        "patch": 16,
        "settings": {
            "size": {"longest_edge": 200},
            "max_image_size": {"longest_edge": 96},
            "do_image_splitting": False,
        },
    },
)
"""Processors whose pixels are digested: family, pixels of a patch, patches of a token's side, and settings."""


def digests() -> dict[str, Any]:
    """Return `DIGESTED`, each with shapes and SHA-256 of the pixels of all pictures; null: transformers fails."""
    shown: dict[str, Callable[[], Any]]
    shown = {name: functools.partial(lambda data: load_image(_as_url(data())), data) for name, data in FILES.items()}
    shown |= {f"handed {mode}": made for mode, made in HANDED.items()}
    return {f"processor {index}": {**each, "pictures": _digested(each, shown)} for index, each in enumerate(DIGESTED)}


def _digested(each: Mapping[str, Any], shown: Mapping[str, Callable[[], PIL.Image.Image]]) -> dict[str, Any]:
    settings = dict(each["settings"])
    kind = LlavaImageProcessorPil if settings.pop("image_processor_type", None) else _KINDS[each["kind"]]
    patch, process = each["patch"], kind(**settings)
    options = {"patch_size": patch * each.get("merge", 1)} if each["kind"] == "pixtral" else {}
    return {name: _digest(process, made(), patch, options) for name, made in shown.items()}


def _digest(process: Any, image: PIL.Image.Image, patch: int, options: Mapping[str, Any]) -> list[Any] | None:
    if isinstance(process, Idefics3ImageProcessorPil):
        pixels, tiles = _tiles(process, image)
        return [list(tiles), hashlib.sha256(_tile_patches(pixels, patch).tobytes()).hexdigest()]
    try:
        (pixels,) = process(images=[image], return_tensors="np", **options)["pixel_values"]
    except ValueError:
        return None
    return [list(pixels.shape[1:]), hashlib.sha256(patches(pixels, patch).tobytes()).hexdigest()]


def run(arguments: Sequence[str]) -> int:
    """Run one command; return the exit code."""
    written = {"expansions": expansions, "digests": digests}
    if arguments and arguments[0] in written:
        write_json(pathlib.Path(arguments[1]), written[arguments[0]]())
        return 0
    return main(arguments, (*QWEN, *CASES))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
