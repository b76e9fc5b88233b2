"""A model that reads images, for tests: the tokenizer and template of the fake engine, with placeholders."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxinfer.config import ResolvedEngine
from jaxinfer.config.images import ImageNeeds
from jaxinfer.images.registry import ProcessorSource
from jaxinfer.serve.api.requests import ModelCard, ServeLimits
from jaxinfer.serve.core.backend import Backend
from jaxinfer.serve.frontend.images import Images
from jaxinfer.serve.runtime.fetch import MediaFetcher
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.tokenizer import LibraryBackend, SpecialIds, Tokenizer
from jaxinfer.types import Request
from tests.fake_vision_processor import IMAGE, fake_source
from tests.images.pictures import picture, saved
from tests.serve.fake_engine import BOS, EOS, FIRST_BYTE, PAD, fake_card, fake_library

PLACEHOLDER, VIDEO_PLACEHOLDER = "<image>", "<|video_pad|>"
VIDEO_BLOCK = f"<|vision_start|>{VIDEO_PLACEHOLDER}<|vision_end|>"
VIDEO = IMAGE + 1
NEEDS = ImageNeeds((IMAGE, VIDEO), merged=4, values=3, least_rows=4, most_rows=4096)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] "
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    f"{{% if p.type == 'image' %}}{PLACEHOLDER}{{% elif p.type == 'video' %}}{VIDEO_BLOCK}"
    "{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[a] {% endif %}"
)
LIMITS = ServeLimits(image_bytes=1 << 16, image_pixels=1 << 14)


def vision_tokenizer() -> Tokenizer:
    """Return the tokenizer of the fake engine with the placeholder of images."""
    library = fake_library()
    library.add_special_tokens([PLACEHOLDER, VIDEO_PLACEHOLDER])
    assert library.token_to_id(VIDEO_PLACEHOLDER) == VIDEO
    return Tokenizer(LibraryBackend(library), SpecialIds(bos=BOS, eos=(EOS,), pad=PAD))


def vision_template() -> ChatTemplate:
    """Return the template of the fake engine, which also reads lists of parts."""
    return ChatTemplate(TEMPLATE)


def vision_card(engine: ResolvedEngine) -> ModelCard:
    return dataclasses.replace(fake_card(engine), vocab_size=VIDEO + 1)


def fake_images(
    most: int | None = None,
    media: MediaFetcher | None = None,
    limits: ServeLimits = LIMITS,
    source: ProcessorSource | None = None,
) -> Images:
    """Return what reads the images of requests, by the fake processor or another one."""
    limited = {} if most is None else {"image": most, "video": 1}
    return Images(source or fake_source(), limits, vision_tokenizer().token_to_id, limited, 2048, media)


def video_source(model: str = "Qwen2VL") -> ProcessorSource:
    """Return the source of one of Qwen's processors, whose tokens are 2 x 2 pixels."""
    tower = {"patch_size": 1, "spatial_merge_size": 2, "temporal_patch_size": 1}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    config = {"architectures": [f"{model}ForConditionalGeneration"], "vision_config": tower, **tokens}
    size = {"size": {"shortest_edge": 4, "longest_edge": 4096}}
    files = {"preprocessor_config.json": size, "video_preprocessor_config.json": size}
    return ProcessorSource("jaxinfer.images.qwen:make", config, files)


def watch(backend: Backend) -> list[Request]:
    """Return a list that gets each request submitted from now on."""
    seen: list[Request] = []
    submit = backend.submit

    async def watched(request: Request) -> Any:
        seen.append(request)
        return await submit(request)

    backend.submit = watched  # type: ignore[method-assign]
    return seen


def file_of(width: int = 4, height: int = 2, form: str = "PNG", seed: int = 0) -> bytes:
    """Return the file of a random picture."""
    return saved(picture(width, height, seed=seed), form)


def url_of(data: bytes, kind: str = "image/png") -> str:
    """Return a data URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part_of(url: str, **fields: Any) -> dict[str, Any]:
    """Return an image part in OpenAI's format."""
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def ids_of(*pieces: str | int | list[int]) -> tuple[int, ...]:
    """Return the token ids of texts and of images, each given as its number of tokens; of videos in a list."""
    return tuple(token for piece in pieces for token in _ids(piece))


def _ids(piece: str | int | list[int]) -> Sequence[int]:
    if isinstance(piece, list):
        return [VIDEO] * piece[0]
    return [IMAGE] * piece if isinstance(piece, int) else [FIRST_BYTE + byte for byte in piece.encode()]
