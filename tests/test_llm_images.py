"""Images of offline calls: what `LLM` makes of prompts and conversations, with an engine that has no device."""

from __future__ import annotations

import itertools
import pathlib
import types
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxinfer.images.processor import Processor
from jaxinfer.llm import LLM
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import RequestError, SamplingLimits, SamplingParams
from jaxinfer.served import ServedModel
from jaxinfer.text.intake import Intake
from jaxinfer.types import Request
from tests.fake_vision_processor import FakeProcessor
from tests.images.pictures import picture, pixels
from tests.serve.fake_engine import FakeEngine
from tests.serve.vision import (
    NEEDS,
    VIDEO,
    VIDEO_BLOCK,
    file_of,
    ids_of,
    part_of,
    url_of,
    video_source,
    vision_template,
    vision_tokenizer,
)

FILE = file_of(4, 2)
TEXT = {"type": "text", "text": "hi"}


class Recording(FakeEngine):
    """An engine that keeps the requests that it gets."""

    def __init__(self) -> None:
        super().__init__(images=NEEDS)
        self.seen: list[Request] = []

    def add(self, request: Request) -> Request:
        self.seen.append(request)
        return super().add(request)


class FakeLLM(LLM):
    """An `LLM` whose model has only what makes requests of texts and images."""

    def __init__(self, processor: Processor | None) -> None:
        vision = None if processor is None else types.SimpleNamespace(processor=processor)
        texts = {"tokenizer": vision_tokenizer(), "chat_template": vision_template()}
        known = {"name": "fake", "generation_config": {}, "params": {}, "draft": None}
        model: Any = types.SimpleNamespace(vision=vision, **known, **texts)
        self.recording: Any = Recording()
        self._served = ServedModel(model, self.recording)
        self._intake = Intake(model.tokenizer, VIDEO + 1, 2048, SamplingLimits())
        self._ids = itertools.count()


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM(FakeProcessor())


PARAMS = SamplingParams(max_tokens=2)
FRAMES = [pixels(8, 4, seed=seed) for seed in range(2)]
VIDEO_PROMPT = f"a{VIDEO_BLOCK}b"


@pytest.mark.parametrize("options", [{}, {"mm_processor_kwargs": {"fps": 4.0}}])
def test_prompts_with_videos(options: dict[str, Any]) -> None:
    llm = FakeLLM(video_source("Qwen3VL").processor())
    forms: list[dict[str, Any]] = [
        {"videos": [FRAMES]},
        {"videos": np.stack(FRAMES)},
        {"videos": np.stack(FRAMES)[None]},
        {"multi_modal_data": {"video": [picture(8, 4, seed=seed) for seed in range(2)]}},
        {"multi_modal_data": {"video": [np.stack(FRAMES)]}},
    ]
    llm.generate([{"prompt": VIDEO_PROMPT, **form, **options} for form in forms], PARAMS)
    first, second = ("<0.0 seconds>", "<0.2 seconds>") if options else ("<0.0 seconds>", "<0.5 seconds>")
    pair = ("<|vision_start|>", [8], "<|vision_end|>")
    for request in llm.recording.seen:
        assert request.prompt_token_ids == ids_of("a", first, *pair, second, *pair, "b")
        assert [each.image for each in request.images] == [llm.recording.seen[0].images[0].image]
    two = {"prompt": "<image>" + VIDEO_PROMPT * 2, "videos": [FRAMES, FRAMES[:1]], "images": [FILE]}
    llm.generate([two], PARAMS)
    assert [(each.image.video, each.image.grid) for each in llm.recording.seen[-1].images] == [
        (False, (1, 2, 4)),
        (True, (2, 4, 8)),
        (True, (1, 4, 8)),
    ]


def test_conversations_with_videos() -> None:
    llm = FakeLLM(video_source("Qwen3VL").processor())
    llm.chat([{"role": "user", "content": [{"type": "video", "video": FRAMES, "fps": 4}, TEXT]}], PARAMS)
    pair = ("<|vision_start|>", [8], "<|vision_end|>")
    (request,) = llm.recording.seen
    assert request.prompt_token_ids == ids_of("[user] <0.0 seconds>", *pair, "<0.2 seconds>", *pair, "hi\n[a] ")


@pytest.mark.parametrize(
    ("videos", "options", "place"),
    [
        (["a.mp4"], {}, "videos[0]"),
        ([[]], {}, "videos[0]"),
        ([FRAMES], {"fps": 0}, "videos[0]"),
        ([FRAMES], {"fps": "2"}, "videos[0]"),
        ([FRAMES], {"count": 2}, "videos[0]"),
        ([[FRAMES[0], FRAMES[0][:2]]], {}, "videos[0]"),
        ([[b"no image"]], {}, "videos[0]"),
    ],
)
def test_videos_that_are_refused(videos: Any, options: dict[str, Any], place: str) -> None:
    llm = FakeLLM(video_source().processor())
    with pytest.raises(RequestError) as refused:
        llm.generate({"prompt": VIDEO_PROMPT, "videos": videos, "mm_processor_kwargs": options}, PARAMS)
    assert refused.value.place == place


def test_prompts_with_images(llm: FakeLLM, tmp_path: pathlib.Path) -> None:
    (path := tmp_path / "a.png").write_bytes(FILE)
    forms = (FILE, path, str(path), url_of(FILE), picture(4, 2), pixels(4, 2), Image.open(path))
    prompts: list[Any] = [{"prompt": "a<image>b", "images": [form]} for form in forms]
    prompts += [
        {"prompt": "a<image>b", "images": FILE},
        {"prompt_token_ids": ids_of("a", 1, "b"), "images": [FILE]},
        {"prompt": "a<image>b", "multi_modal_data": {"image": FILE}},
        {"prompt": "a<image>b", "multi_modal_data": {"image": [FILE]}, "mm_processor_kwargs": {"max_pixels": 8}},
    ]
    outputs = llm.generate(prompts, PARAMS)
    for output, request in zip(outputs, llm.recording.seen, strict=True):
        assert tuple(output.prompt_token_ids) == request.prompt_token_ids == ids_of("a", 2, "b")
        assert [(each.start, each.stop) for each in request.images] == [(1, 3)]
        assert request.images[0].image == llm.recording.seen[0].images[0].image
    assert outputs[0].prompt == "a<image>b"


def test_texts_beside_prompts_with_images(llm: FakeLLM) -> None:
    llm.generate(["hi", list(ids_of("hi")), {"prompt": "hi"}, {"prompt": "<image>a", "images": [FILE]}], PARAMS)
    assert [len(request.images) for request in llm.recording.seen] == [0, 0, 0, 1]
    assert {request.prompt_token_ids for request in llm.recording.seen[:3]} == {ids_of("hi")}
    llm.generate({"prompt": "<image>a", "images": [FILE]}, PARAMS)
    assert len(llm.recording.seen) == 5


def test_conversations_with_images(llm: FakeLLM) -> None:
    parts = (
        {"type": "image", "image": FILE},
        {"type": "image", "image": picture(4, 2)},
        {"type": "image_pil", "image_pil": picture(4, 2)},
        part_of(url_of(FILE)),
    )
    conversations = [[{"role": "user", "content": [part, TEXT]}] for part in parts]
    for conversation in (*conversations, conversations):
        llm.chat(conversation, PARAMS)  # type: ignore[arg-type]
    llm.chat(conversations[0], PARAMS, mm_processor_kwargs={"max_pixels": 8})
    assert len(llm.recording.seen) == 9
    for request in llm.recording.seen:
        assert request.prompt_token_ids == ids_of("[user] ", 2, "hi\n[a] ")
        assert [(each.start, each.stop) for each in request.images] == [(7, 9)]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"prompt": "<image>", "images": [b"no image"]}, "images"),
        ({"prompt": "<image>", "images": ["nowhere.png"]}, "images"),
        ({"prompt": "<image>", "images": ["https://example.com/a.png"]}, "images"),
        ({"prompt": "<image>", "multi_modal_data": {"image": 7}}, "multi_modal_data"),
        ({"prompt": "<image>", "multi_modal_data": {"audio": FILE}}, "multi_modal_data"),
        ({"prompt": "<image>", "multi_modal_data": {"video": [FILE]}}, "multi_modal_data"),
        ({"prompt": "<image>", "videos": [[FILE]]}, "videos"),
        ({"prompt": "<image>", "images": [FILE], "multi_modal_data": {"image": FILE}}, "images"),
        ({"prompt": "<image>", "images": [FILE], "mm_processor_kwargs": 7}, "mm_processor_kwargs"),
        ({"prompt": "<image>", "images": [FILE], "mm_processor_kwargs": {"size": 7}}, "images"),
        ({"prompt": "<image>", "images": [FILE], "mm_processor_kwargs": {"picture": 7}}, "images"),
        ({"prompt": "<image>"}, "prompt"),
        ({"prompt": "", "images": [FILE]}, "prompt"),
        ({"prompt": "<image><image>", "images": [FILE]}, "prompt"),
        ({"images": [FILE]}, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [5]}, "prompt"),
        ({"text": "a"}, "text"),
        ("<image>", "prompt"),
    ],
)
def test_prompts_that_are_refused(llm: FakeLLM, prompt: Any, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate([prompt], PARAMS)
    assert refused.value.field == field
    assert llm.recording.seen == []


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "image", "image": b"no image"}, "messages[0].content[0].image"),
        ({"type": "image", "image": "nowhere.png"}, "messages[0].content[0].image"),
        (part_of("https://example.com/a.png"), "messages[0].content[0].image_url.url"),
        ({"type": "image"}, "messages[0].content[0].type"),
        ({"type": "video", "video": "a.mp4"}, "messages[0].content[0].video"),
        ({"type": "video", "video": [FILE]}, "messages[0].content[0].video"),
    ],
)
def test_conversations_that_are_refused(llm: FakeLLM, part: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.chat([{"role": "user", "content": [part]}], PARAMS)
    assert refused.value.place == place


def test_images_for_a_model_that_reads_text_only() -> None:
    llm = FakeLLM(None)
    with pytest.raises(RequestError) as refused:
        llm.generate({"prompt": "a<image>", "images": [FILE]}, PARAMS)
    assert refused.value.place == "images[0]"
    with pytest.raises(RequestError) as refused:
        llm.chat([{"role": "user", "content": [{"type": "image", "image": FILE}]}], PARAMS)
    assert refused.value.field == "messages"
    assert isinstance(llm.generate({"prompt": "hi"}, PARAMS)[0], RequestOutput)
