"""Images through each HTTP API: the prompt and the images that reach the engine, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from msgspec.structs import replace

from jaxinfer.images.processor import ImageError
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.frontend.images import Images
from jaxinfer.serve.runtime.fetch import MediaFetcher
from jaxinfer.serve.workers.tasks import TASKS
from jaxinfer.types import Request
from tests.fake_vision_processor import GREEDY, HANGS
from tests.images.pictures import pixels
from tests.serve.http.support import run, serving
from tests.serve.vision import LIMITS, fake_images, file_of, ids_of, part_of, url_of, video_source, watch

FIRST, SECOND = file_of(4, 2), file_of(6, 4, "JPEG")
URL = url_of(FIRST)
TEXT = {"type": "text", "text": "hi"}


@contextlib.asynccontextmanager
async def watched(
    images: Images | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, list[Request]]]:
    async with serving(vision=images or fake_images(), limits=LIMITS, **settings) as running, running.http() as http:
        assert running.engine is not None
        yield http, watch(running.engine)


async def asked(http: httpx.AsyncClient, content: Any, role: str = "user", **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": role, "content": content}], "max_tokens": 2, **fields}
    return await http.post("/v1/chat/completions", json=body)


def test_chat_completions() -> None:
    async def test() -> None:
        async with watched() as (http, seen):
            answer = await asked(http, [part_of(URL, detail="auto"), TEXT, part_of(url_of(SECOND))])
            assert answer.status_code == 200, answer.text
            (request,) = seen
            assert request.prompt_token_ids == ids_of("[user] ", 2, "hi", 6, "\n[a] ")
            assert answer.json()["usage"]["prompt_tokens"] == len(request.prompt_token_ids)
            assert [(each.start, each.stop) for each in request.images] == [(7, 9), (11, 17)]
            first = request.images[0].image
            assert first.grid == (1, 2, 4)
            np.testing.assert_array_equal(first.patches, pixels(4, 2).reshape(-1, 3))
            assert first.digest != request.images[1].image.digest
            assert (await asked(http, [part_of(url_of(file_of(4, 2, "BMP")))])).status_code == 200
            assert seen[1].images[0].image == first  # equal pixels in another format

    run(test)


def test_texts_of_a_model_that_reads_images() -> None:
    async def test() -> None:
        async with watched() as (http, seen):
            assert (await asked(http, [TEXT, TEXT])).status_code == 200
            assert (await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})).status_code == 200
            assert [request.images for request in seen] == [(), ()]
            assert seen[0].prompt_token_ids == ids_of("[user] hi\nhi\n[a] ")

    run(test)


def test_responses() -> None:
    async def test() -> None:
        async with watched() as (http, seen):
            content = [
                {"type": "input_text", "text": "hi"},
                {"type": "input_image", "image_url": URL, "detail": "auto"},
            ]
            call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
            output = {"type": "function_call_output", "call_id": "c", "output": [content[1]]}
            body = {"instructions": "s", "input": [{"role": "user", "content": content}, call, output]}
            answer = await http.post("/v1/responses", json={**body, "max_output_tokens": 2})
            assert answer.status_code == 200, answer.text
            prompt = ids_of("[system] s\n[user] hi", 2, "\n[assistant] \n[tool] ", 2, "\n[a] ")
            assert seen[0].prompt_token_ids == prompt
            assert answer.json()["usage"]["input_tokens"] == len(prompt)
            for part, field in (
                ({"type": "input_image", "image_url": url_of(b"no image")}, "input[0].content[0].image_url"),
                ({"type": "input_image", "image_url": URL, "detail": "no"}, "input[0].content[0].detail"),
                ({"type": "input_image", "file_id": "f"}, "input[0].content[0].file_id"),
            ):
                body = {"instructions": "s", "input": [{"role": "user", "content": [part]}]}
                refused = await http.post("/v1/responses", json=body)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)

    run(test)


def test_messages() -> None:
    async def test() -> None:
        async with watched() as (http, seen):
            data = URL.partition(",")[2]
            image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
            result = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, image]}
            use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
            messages = [
                {"role": "user", "content": [image, {**TEXT, "cache_control": {"type": "ephemeral"}}, TEXT, image]},
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]},
            ]
            body = {"messages": messages, "max_tokens": 2}
            answer = await http.post("/v1/messages", json=body)
            assert answer.status_code == 200, answer.text
            prompt = ids_of("[user] ", 2, "hi\nhi", 2, "\n[assistant] \n[tool] hi", 2, "\n[a] ")
            assert seen[0].prompt_token_ids == prompt
            counted = await http.post("/v1/messages/count_tokens", json={"messages": messages})
            assert counted.json() == {"input_tokens": len(prompt)}
            source: dict[str, Any]
            for source in (
                {"type": "base64", "media_type": "image/tiff", "data": data},
                {"type": "base64", "media_type": "image/png", "data": "AAAA"},
                {"type": "url", "url": "https://example.com/a.png"},
                {"type": "file", "file_id": "f"},
            ):
                body["messages"] = [{"role": "user", "content": [{"type": "image", "source": source}]}]
                refused = await http.post("/v1/messages", json=body)
                assert refused.status_code == 400
                assert refused.json()["error"]["message"].startswith("messages[0].content[0].source")

    run(test)


def test_tokenize_counts_images() -> None:
    async def test() -> None:
        async with watched() as (http, _):
            body = {"messages": [{"role": "user", "content": [part_of(URL)]}]}
            answer = await http.post("/tokenize", json=body)
            assert tuple(answer.json()["tokens"]) == ids_of("[user] ", 2, "\n[a] ")

    run(test)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([part_of("https://example.com/a.png")], {}, "messages[0].content[0].image_url.url"),
    ([part_of("file:///etc/passwd")], {}, "messages[0].content[0].image_url.url"),
    ([part_of("/etc/passwd")], {}, "messages[0].content[0].image_url.url"),
    ([TEXT, part_of(url_of(b"\0\0\0\x18ftypisom"))], {}, "messages[0].content[1].image_url.url"),
    ([part_of(URL[:102])], {}, "messages[0].content[0].image_url.url"),
    ([part_of(url_of(bytes((1 << 16) + 1)))], {}, "messages[0].content[0].image_url.url"),
    ([part_of(url_of(file_of(200, 100)))], {}, "messages[0].content[0].image_url.url"),
    ([part_of(URL, detail="ultra")], {}, "messages[0].content[0].image_url.detail"),
    ([part_of(URL)] * 4, {}, "messages[0].content[3]"),
    ([{"type": "image_url", "uuid": "7", "image_url": None}], {}, "messages[0].content[0].uuid"),
    ([{"type": "image", "image": "/etc/passwd"}], {}, "messages[0].content[0].type"),
    ([{"type": "video_url", "video_url": "data:video/mp4;base64,AA"}], {}, "messages[0].content[0].video_url"),
    ([{"type": "video", "video": [URL]}], {}, "messages[0].content[0].type"),
    ([part_of(URL)], {"mm_processor_kwargs": {"max_pixels": 0}}, "mm_processor_kwargs.max_pixels"),
    ([part_of(URL)], {"mm_processor_kwargs": {"max_pixels": "9"}}, "mm_processor_kwargs.max_pixels"),
    ([part_of(URL)], {"mm_processor_kwargs": {"size": 3}}, "mm_processor_kwargs.size"),
    ([part_of(URL)], {"mm_processor_kwargs": {"max_pixels": 10**9}}, "messages[0].content[0].image_url.url"),
    ([part_of(URL), {"type": "text", "text": "<image>"}], {}, "messages"),
    ("<image>", {}, "messages"),
]


def test_what_is_refused() -> None:
    async def test() -> None:
        async with watched(fake_images(most=3)) as (http, seen):
            for content, fields, field in REFUSED:
                answer = await asked(http, content, **fields)
                assert answer.status_code == 400, (content, answer.text)
                assert answer.json()["error"]["param"] == field, answer.text
            for prompt in ("<image>", list(ids_of(1))):
                answer = await http.post("/v1/completions", json={"prompt": prompt})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt"), answer.text
            begun = {"continue_final_message": True, "add_generation_prompt": False}
            answer = await asked(http, [part_of(URL)], "assistant", **begun)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content")
            assert seen == []

    run(test)


def test_options_of_the_processor_reach_it() -> None:
    async def test() -> None:
        async with watched() as (http, seen):
            options = {"max_pixels": 8, "fps": 2.0}  # a rate does not matter to images
            answer = await asked(http, [part_of(URL)], mm_processor_kwargs=options)
            assert answer.status_code == 200, answer.text
            assert (await asked(http, [part_of(URL)], mm_processor_kwargs={"max_pixels": 7})).status_code == 400
            assert len(seen) == 1

    run(test)


BEGIN, END = "<|vision_start|>", "<|vision_end|>"
FRAMES = [url_of(file_of(8, 4, seed=seed)) for seed in range(2)]
VIDEO_PART = {"type": "video", "video": FRAMES, "fps": 4}


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("Qwen2VL", (BEGIN, [16], END)),
        ("Qwen3VL", ("<0.0 seconds>", BEGIN, [8], END, "<0.2 seconds>", BEGIN, [8], END)),
    ],
)
def test_videos(model: str, wanted: tuple[Any, ...]) -> None:
    async def test() -> None:
        async with watched(fake_images(source=video_source(model))) as (http, seen):
            frames = ",".join(url.partition(",")[2] for url in FRAMES)
            packed = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}
            for content, options in (
                ([part_of(URL), VIDEO_PART, TEXT], {}),
                ([part_of(URL), packed, TEXT], {"mm_processor_kwargs": {"fps": 4}}),
            ):
                answer = await asked(http, content, **options)
                assert answer.status_code == 200, answer.text
                assert seen[-1].prompt_token_ids == ids_of("[user] ", 2, *wanted, "hi\n[a] ")
                assert [each.image.video for each in seen[-1].images] == [False, True]
                assert seen[-1].images[1].image.grid == (2, 4, 8)
            assert seen[0].images == seen[1].images

    run(test)


REFUSED_VIDEOS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({**VIDEO_PART, "fps": 0}, {}, "messages[0].content[0].fps"),
    ({**VIDEO_PART, "fps": "2"}, {}, "messages[0].content[0].fps"),
    (VIDEO_PART, {"mm_processor_kwargs": {"fps": -1}}, "mm_processor_kwargs.fps"),
    ({**VIDEO_PART, "video": []}, {}, "messages[0].content[0].video"),
    ({**VIDEO_PART, "video": FRAMES * 400}, {}, "messages[0].content[0].video"),
    ({**VIDEO_PART, "video": [URL, URL[:102]]}, {}, "messages[0].content[0].video[1]"),
    ({**VIDEO_PART, "video": [URL, "https://example.com/a.png"]}, {}, "messages[0].content[0].video[1]"),
    ({**VIDEO_PART, "video": [URL, url_of(b"\0\0\0\x18ftypisom")]}, {}, "messages[0].content[0].video[1]"),
    ({**VIDEO_PART, "video": [URL, FRAMES[0]]}, {}, "messages[0].content[0].video"),
    ({"type": "video", "uuid": "7"}, {}, "messages[0].content[0].uuid"),
]


def test_videos_that_are_refused() -> None:
    async def test() -> None:
        async with watched(fake_images(3, source=video_source())) as (http, seen):
            for part, fields, field in REFUSED_VIDEOS:
                answer = await asked(http, [part], **fields)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
            answer = await asked(http, [VIDEO_PART, TEXT, VIDEO_PART])
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[2]"), answer.text
            assert seen == []

    run(test)


def test_a_uuid_stands_for_an_earlier_image() -> None:
    async def test() -> None:
        async with watched(fake_images(source=video_source())) as (http, seen):
            for sent, named in (
                (part_of(URL) | {"uuid": "a"}, {"type": "image_url", "image_url": None, "uuid": "a"}),
                (VIDEO_PART | {"uuid": "b"}, {"type": "video", "uuid": "b", "fps": 4}),
            ):
                assert (await asked(http, [named])).status_code == 400
                for part in (sent, named):
                    answer = await asked(http, [part])
                    assert answer.status_code == 200, answer.text
                assert seen[-1].images == seen[-2].images
                assert seen[-1].prompt_token_ids == seen[-2].prompt_token_ids
            assert (await asked(http, [{"type": "image_url", "image_url": None, "uuid": "b"}])).status_code == 400
            assert (await asked(http, [part_of(URL[:102]) | {"uuid": "c"}])).status_code == 400
            assert (await asked(http, [{"type": "image_url", "image_url": None, "uuid": "c"}])).status_code == 400

    run(test)


def test_images_of_more_tokens_than_the_context_are_refused() -> None:
    async def test() -> None:
        async with watched() as (http, seen):
            large = url_of(file_of(64, 64))
            answer = await asked(http, [part_of(large)] * 3)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded"), answer.text
            body = {"messages": [{"role": "user", "content": [part_of(large)] * 3}]}
            answer = await http.post("/tokenize", json=body)
            assert answer.status_code == 400, answer.text
            assert seen == []

    run(test)


def test_errors_of_the_engine_name_the_part() -> None:
    async def test() -> None:
        async with serving(vision=fake_images(), limits=LIMITS) as running, running.http() as http:
            for place, field in (("images[1]", "messages[0].content[2].image_url.url"), ("images", "messages")):

                async def refuse(request: Request, place: str = place) -> None:
                    raise RequestError(place, "is too large")

                running.frontend._backend.submit = refuse  # type: ignore[assignment, method-assign]
                answer = await asked(http, [part_of(URL), TEXT, part_of(URL)])
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, field)
                assert error["message"] == f"{field} is too large"

    run(test)


def test_urls_of_allowed_hosts_are_fetched() -> None:
    async def test() -> None:
        fetched: list[tuple[str, str]] = []

        class Media(MediaFetcher):
            async def fetch(self, url: str, tenant: str = "") -> bytes:
                fetched.append((url, tenant))
                if url.endswith("absent.png"):
                    raise ImageError("it is not there")
                return FIRST

        async with watched(fake_images(media=Media(["example.com"]))) as (http, seen):
            answer = await asked(http, [part_of("https://example.com/a.png"), part_of(URL)])
            assert answer.status_code == 200, answer.text
            assert seen[0].images[0].image == seen[0].images[1].image
            answer = await asked(http, [part_of(URL), part_of("https://example.com/absent.png")])
            field = "messages[0].content[1].image_url.url"
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
            assert [url for url, _ in fetched] == ["https://example.com/a.png", "https://example.com/absent.png"]

    run(test)


def test_images_for_a_model_that_reads_text_only() -> None:
    async def test() -> None:
        async with serving() as running, running.http() as http:
            answer = await asked(http, [TEXT, part_of(URL)])
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[1].type")

    run(test)


@pytest.mark.parametrize("width", [HANGS, GREEDY])
def test_a_helper_that_is_stopped_ends_its_request_alone(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "prepare_image", replace(TASKS["prepare_image"], seconds=5.0))

    async def test() -> None:
        async with watched() as (http, seen):
            stopped = asyncio.create_task(asked(http, [part_of(url_of(file_of(width, 2)))]))
            assert (await asked(http, [part_of(URL)])).status_code == 200
            answer = await stopped
            assert (answer.status_code, answer.json()["error"]["param"]) == (
                400,
                "messages[0].content[0].image_url.url",
            )
            assert (await asked(http, [part_of(URL)])).status_code == 200
            assert len(seen) == 2

    run(test)


def test_logs_have_nothing_of_an_image(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        data = URL.partition(",")[2]
        async with watched(fake_images(most=3)) as (http, _):
            with caplog.at_level(logging.DEBUG):
                for content, fields, _ in REFUSED:
                    await asked(http, content, **fields)
                await asked(http, [part_of(URL)])
            assert not any(data[60:70] in record.getMessage() for record in caplog.records)

    run(test)


def test_the_limit_of_an_image_fits_into_a_body() -> None:
    limits = ServeLimits()
    assert limits.image_bytes * 4 / 3 < limits.message_bytes
