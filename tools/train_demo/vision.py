"""Training of ``demo-vision``: a Qwen2-VL of 1.6 million parameters that describes pictures of a shape (`pictures`)."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, UInt8
from tokenizers import Tokenizer

from jaxinfer.formats.multimodal import wrapped_name
from jaxinfer.layers.attention import causal_attend
from jaxinfer.layers.merged import Merged
from jaxinfer.layers.rope import AxisPositions
from jaxinfer.models.model import Model, abstract, with_vision
from jaxinfer.models.vision.registry import vision_family_for
from jaxinfer.models.vision.tower import Vision
from jaxinfer.types import VISION, ImageInput
from jaxinfer.weights import save_params
from jaxinfer.weights.tree import with_names
from tools.train_demo.corpus import ASSISTANT, BOS, EOS, SPECIALS, USER, train_tokenizer
from tools.train_demo.folder import CHAT_TEMPLATE, tokenizer_config, write_json
from tools.train_demo.pictures import draw, random_picture
from tools.train_demo.training import initial_params

Tree = Any

START, END, PAD, VIDEO = VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
BLOCK = f"{START}{PAD}{END}"
QUESTIONS = ("", "Describe the picture.", "What is in the picture?", "What do you see?", "Describe this image.")
"""Questions about a picture; the empty one is a picture alone."""
SIDES = (84, 112)
"""Sides of the pictures in training, in pixels: multiples of two patches."""


@dataclasses.dataclass(frozen=True)
class VisionRecipe:
    """Recipe of the model: its shape and its training."""

    hidden: int = 128
    layers: int = 3
    tower: int = 128
    depth: int = 3
    vocab: int = 512
    steps: int = 2000
    rows: int = 32
    learning_rate: float = 2.5e-3
    warmup: int = 100
    report_every: int = 200

    def config_json(self, ids: Mapping[str, int | None]) -> dict[str, Any]:
        """Return config.json as `transformers` writes it; ``ids``: those of the special tokens."""
        text = {
            "model_type": "qwen2_vl_text",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": _sections(self.hidden)},
            "bos_token_id": ids[BOS],
            "eos_token_id": ids[EOS],
            "tie_word_embeddings": True,
        }
        vision = {
            "model_type": "qwen2_vl",
            "depth": self.depth,
            "embed_dim": self.tower,
            "hidden_size": self.hidden,
            "num_heads": 4,
            "mlp_ratio": 4,
            "hidden_act": "quick_gelu",
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        }
        return {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            "text_config": text,
            "vision_config": vision,
            "vision_start_token_id": ids[START],
            "vision_end_token_id": ids[END],
            "image_token_id": ids[PAD],
            "video_token_id": ids[VIDEO],
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }


QUICK = VisionRecipe(hidden=32, layers=2, tower=32, depth=2, steps=6, rows=2, warmup=1, report_every=3)
"""A few steps of a tiny model: does the tool work?"""

PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "merge_size": 2,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": SIDES[0] ** 2, "longest_edge": SIDES[-1] ** 2},
}
TEMPLATE = CHAT_TEMPLATE.replace(
    '(message["content"] | trim)',
    '(message["content"] | trim if message["content"] is string else content(message["content"]))',
)
"""The template of the text model, with a picture's block for each part that is one."""
TEMPLATE = (
    "{%- macro content(parts) -%}"
    "{%- for part in parts -%}"
    '{{- part["text"] | trim if part["type"] == "text" else "' + BLOCK + '" -}}'
    "{%- endfor -%}"
    "{%- endmacro -%}\n"
) + TEMPLATE


@dataclasses.dataclass(frozen=True)
class Batch:
    """Pictures of one size, with a prompt and a description each; ``asked``: tokens whose prediction is trained."""

    patches: UInt8[np.ndarray, "pictures rows values"]
    grid: tuple[int, int, int]
    tokens: Int[np.ndarray, "pictures length"]
    rows: Int[np.ndarray, "pictures length"]
    axes: Int[np.ndarray, "3 pictures length"]
    asked: Bool[np.ndarray, "pictures length"]


def train_vision(recipe: VisionRecipe, out: pathlib.Path, seed: int, say: Callable[[str], None]) -> float:
    """Train the model, write its folder, and return the share of unseen pictures that it describes without an error."""
    tokenizer = make_tokenizer(recipe.vocab, seed)
    config_json = recipe.config_json({name: tokenizer.token_to_id(name) for name in (*SPECIALS, *VISION_TOKENS)})
    model = build(config_json, seed)
    params = _trained(model, recipe, batches(model, tokenizer, recipe.rows, seed), say)
    exact = accuracy(model, params, batches(model, tokenizer, recipe.rows, seed + 1), 8)
    say(f"vision: {exact:.1%} of unseen pictures are described without an error")
    write(out, config_json, model, params, tokenizer)
    return exact


def make_tokenizer(vocab: int, seed: int) -> Tokenizer:
    """Train a tokenizer on descriptions and questions."""
    rng = np.random.default_rng(seed)
    text = "\n".join([*QUESTIONS, *(str(random_picture(rng)) for _ in range(500))])
    tokenizer = train_tokenizer(text, vocab - len(VISION_TOKENS))
    tokenizer.add_special_tokens(list(VISION_TOKENS))
    return tokenizer


def build(config_json: dict[str, Any], seed: int) -> Model:
    """Build an untrained model with its tower, float32."""
    family = vision_family_for(config_json)
    assert family is not None
    config = family.config(config_json)
    processor = family.processor(config_json, {"preprocessor_config.json": PREPROCESSOR})
    text = abstract(config_json, "float32", "vision")
    model = with_vision(text, Vision(family.module(config), config, family, processor), "float32")
    return model.replace(params=initial_params(model.specs, seed, len(model.cache_spec.layers)))


def batches(model: Model, tokenizer: Tokenizer, rows: int, seed: int) -> Iterator[Batch]:
    """Yield batches without end, each of pictures of one size."""
    rng = np.random.default_rng([seed, 7])
    while True:
        width, height = (int(side) for side in rng.choice(SIDES, 2))
        yield _batch(model, tokenizer, rows, width, height, rng)


def _batch(model: Model, tokenizer: Tokenizer, rows: int, width: int, height: int, rng: np.random.Generator) -> Batch:
    assert model.vision is not None
    images: list[ImageInput] = []
    texts: list[tuple[list[int], list[int]]] = []
    for _ in range(rows):
        picture = random_picture(rng)
        images.append(model.vision.processor.prepare(draw(picture, width, height, rng)))
        texts.append(_encoded(tokenizer, str(rng.choice(QUESTIONS)), bool(rng.integers(2)), str(picture)))
    pad = model.vision.processor.image_token
    held = images[0].patches.shape[0] // model.vision.config.merged
    prompts = [_expanded(prompt, pad, model.vision.processor.expand(images[0])[0]) for prompt, _ in texts]
    length = -(-max(len(prompt) + len(answer) for prompt, (_, answer) in zip(prompts, texts, strict=True)) // 16) * 16
    tokens, places = np.zeros((rows, length), np.int32), np.full((rows, length), -1, np.int32)
    asked, axes = np.zeros((rows, length), bool), np.zeros((3, rows, length), np.int32)
    for index, (prompt, (_, answer), image) in enumerate(zip(prompts, texts, images, strict=True)):
        end = len(prompt) + len(answer)
        tokens[index, :end] = [*prompt, *answer]
        places[index, tokens[index] == pad] = np.arange(held) + index * held
        asked[index, len(prompt) - 1 : end - 1] = True
        found = model.vision.axes(tokens[index].tolist(), model.vision.place(prompt, [image]))
        assert found is not None
        axes[:, index] = found
    return Batch(np.stack([image.patches for image in images]), images[0].grid, tokens, places, axes, asked)


def _encoded(tokenizer: Tokenizer, question: str, chat: bool, description: str) -> tuple[list[int], list[int]]:
    """Return the ids of a prompt, with one placeholder, and of its answer."""
    text = f"{USER}{BLOCK}{question}{EOS}{ASSISTANT}" if chat else f"{BLOCK}{question}"
    prompt = tokenizer.encode(text).ids
    return prompt, tokenizer.encode(description + EOS, add_special_tokens=False).ids


def _expanded(prompt: Sequence[int], pad: int, rows: Sequence[int]) -> list[int]:
    place = prompt.index(pad)
    return [*prompt[:place], *rows, *prompt[place + 1 :]]


def predictions(
    model: Model, params: Tree, patches: Array, layout: dict[str, Array], tokens: Array, rows: Array, axes: Array
) -> Float[Array, "pictures length vocab"]:
    """Return logits of a batch: the served model, its tower mapped over the pictures."""
    vision = model.vision
    assert vision is not None

    def encode(one: UInt8[Array, "rows values"]) -> Float[Array, "out width"]:
        return vision.run(params[VISION], vision.normalised(one), layout)

    images = jax.vmap(encode)(patches)
    merged = Merged(tokens, rows, images.reshape(-1, images.shape[-1]))
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    apply: Any = model.module.apply
    hidden, _ = apply({"params": params}, merged, AxisPositions(at, axes), causal_attend, None)
    return apply({"params": params}, hidden, method="head")


def _arguments(model: Model, batch: Batch) -> tuple[Any, ...]:
    assert model.vision is not None
    layout = model.vision.module.layout(batch.grid, batch.patches.shape[1])
    return batch.patches, layout, batch.tokens, batch.rows, batch.axes


def _trained(model: Model, recipe: VisionRecipe, data: Iterator[Batch], say: Callable[[str], None]) -> Tree:
    rate = optax.warmup_cosine_decay_schedule(0.0, recipe.learning_rate, recipe.warmup, recipe.steps)
    update = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.01))

    def loss(params: Tree, asked: Array, *batch: Any) -> Array:
        logits = predictions(model, params, *batch)[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[2][:, 1:])
        return jnp.sum(losses * asked[:, :-1]) / jnp.sum(asked)

    @jax.jit
    def step(params: Tree, state: Tree, asked: Array, *batch: Any) -> tuple[Tree, Tree, Array]:
        value, gradients = jax.value_and_grad(loss)(params, asked, *batch)
        changes, state = update.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, value

    params, state, losses = model.params, update.init(model.params), []
    for number in range(1, recipe.steps + 1):
        batch = next(data)
        params, state, value = step(params, state, batch.asked, *_arguments(model, batch))
        losses.append(value)
        if number % recipe.report_every == 0:
            say(f"vision step {number}/{recipe.steps}: loss {float(np.mean(losses)):.4f} nats/token")
            losses.clear()
    return params


def accuracy(model: Model, params: Tree, data: Iterator[Batch], count: int) -> float:
    """Return the share of descriptions that the model would write token by token, over ``count`` batches."""
    compute = jax.jit(lambda *arguments: jnp.argmax(predictions(model, *arguments), -1))
    right = []
    for _ in range(count):
        batch = next(data)
        chosen = np.asarray(compute(params, *_arguments(model, batch)))
        right += ((chosen[:, :-1] == batch.tokens[:, 1:]) | ~batch.asked[:, :-1]).all(axis=1).tolist()
    return float(np.mean(right))


def write(out: pathlib.Path, config_json: dict[str, Any], model: Model, params: Tree, tokenizer: Tokenizer) -> None:
    """Write the folder as `transformers` reads it: weights in bfloat16."""
    spell = functools.partial(wrapped_name, config_json)
    save_params(out, params, with_names(model.specs, spell), config_json, "bfloat16")
    tokenizer.save(str(out / "tokenizer.json"))
    text = config_json["text_config"]
    write_json(out / "tokenizer_config.json", tokenizer_config() | {"model_max_length": 1024})
    ends = {name: text[name] for name in ("bos_token_id", "eos_token_id")}
    write_json(out / "generation_config.json", ends | {"do_sample": False})
    write_json(out / "preprocessor_config.json", PREPROCESSOR)
    (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _sections(hidden: int) -> list[int]:
    """Return the shares of the axes among the frequencies of a head: a quarter for time."""
    half = hidden // 4 // 2
    rest = half - half // 4
    return [half // 4, rest - rest // 2, rest // 2]
