"""Images over gRPC: the parts of messages, the Python client, and what is refused."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from jaxinfer.client import AsyncClient
from jaxinfer.protos.v1 import inference_pb2 as pb
from tests.serve.grpc.running import failure, running
from tests.serve.vision import LIMITS, fake_images, file_of, ids_of, part_of, url_of, video_source, watch

FILE = file_of(4, 2)
PROMPT = ids_of("[user] ", 2, "hi\n[a] ")
TEXT = pb.Content(text="hi")


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


def asked(*parts: pb.Content, **fields: Any) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role="user", parts=parts, **fields)])


def image(**fields: Any) -> pb.Content:
    return pb.Content(image=pb.Image(**fields))


def test_parts_of_a_message() -> None:
    async def story() -> None:
        async with running(vision=fake_images(), limits=LIMITS) as server:
            seen = watch(server.frontend._backend)
            sampling = pb.SamplingParams(max_tokens=2)
            for source in ({"data": FILE}, {"url": url_of(FILE)}, {"data": FILE, "max_pixels": 8}):
                call = server.inference.Generate(
                    pb.GenerateRequest(chat=asked(image(**source), TEXT), sampling=sampling)
                )
                found = [response async for response in call]
                assert found[0].started.prompt_tokens == len(PROMPT) == found[-1].finished.usage.prompt_tokens
                assert seen[-1].prompt_token_ids == PROMPT
                assert [(each.start, each.stop) for each in seen[-1].images] == [(7, 9)]
            ids = await server.inference.Tokenize(pb.TokenizeRequest(chat=asked(image(data=FILE), TEXT)))
            assert tuple(ids.token_ids) == PROMPT

    run(story)


def test_what_is_refused() -> None:
    async def story() -> None:
        async with running(vision=fake_images(most=2), limits=LIMITS) as server:
            for chat, field in (
                (asked(image(data=b"no image")), "chat.messages[0].parts[0].image.data"),
                (asked(TEXT, image(data=b"")), "chat.messages[0].parts[1].image.data"),
                (asked(image(data=bytes((1 << 16) + 1))), "chat.messages[0].parts[0].image.data"),
                (asked(image(url="https://example.com/a.png")), "chat.messages[0].parts[0].image.url"),
                (asked(image(data=FILE, max_pixels=0)), "chat.messages[0].parts[0].max_pixels"),
                (asked(image(data=FILE, max_pixels=7)), "chat.messages[0].parts[0].image.data"),
                (asked(*[image(data=FILE)] * 3), "chat.messages[0].parts[2]"),
                (asked(image()), "chat.messages[0].parts[0].image"),
                (asked(pb.Content()), "chat.messages[0].parts[0]"),
                (asked(TEXT, content="hi"), "chat.messages[0].parts"),
                (asked(image(data=FILE), pb.Content(text="<image>")), "chat.messages"),
            ):
                failed = await failure(server.inference.Generate(pb.GenerateRequest(chat=chat)))
                assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
                assert list(failed.violations) == [field], failed.message
            continuation = pb.Continuation(text="a")
            score = pb.ScoreRequest(chat=asked(image(data=FILE)), continuations=[continuation])
            failed = await failure(server.inference.Score(score))
            assert list(failed.violations) == ["chat.messages[0].parts[0].type"]

    run(story)


def video(count: int = 2, **fields: Any) -> pb.Content:
    return pb.Content(video=pb.Video(frames=[file_of(8, 4, seed=seed) for seed in range(count)], **fields))


def test_videos() -> None:
    async def story() -> None:
        async with running(vision=fake_images(1, source=video_source()), limits=LIMITS) as server:
            seen = watch(server.frontend._backend)
            call = server.inference.Generate(pb.GenerateRequest(chat=asked(video(fps=4.0), TEXT)))
            assert [response async for response in call]
            block = ("<|vision_start|>", [16], "<|vision_end|>")
            assert seen[-1].prompt_token_ids == ids_of("[user] ", *block, "hi\n[a] ")
            assert [(each.image.video, each.image.grid) for each in seen[-1].images] == [(True, (2, 4, 8))]
            for part, field in (
                (video(0), "video.frames"),
                (video(fps=0.0), "fps"),
                (video(max_pixels=0), "max_pixels"),
                (pb.Content(video=pb.Video(frames=[FILE, b"no image"])), "video.frames[1]"),
            ):
                failed = await failure(server.inference.Generate(pb.GenerateRequest(chat=asked(part))))
                assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
                assert list(failed.violations) == [f"chat.messages[0].parts[0].{field}"], failed.message

    run(story)


def test_images_for_a_model_that_reads_text_only() -> None:
    async def story() -> None:
        async with running() as server:
            failed = await failure(server.inference.Generate(pb.GenerateRequest(chat=asked(image(data=FILE)))))
            assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
            assert list(failed.violations) == ["chat.messages[0].parts[0].type"]

    run(story)


def test_the_client_sends_images(tmp_path: pathlib.Path) -> None:
    (path := tmp_path / "a.png").write_bytes(FILE)

    async def story() -> None:
        async with running(vision=fake_images(), limits=LIMITS) as server:
            seen = watch(server.frontend._backend)
            async with AsyncClient(f"127.0.0.1:{server.servers.port}") as client:
                for part in (
                    *({"type": "image", "image": source} for source in (FILE, path, str(path), url_of(FILE))),
                    part_of(url_of(FILE)),
                    {"type": "image_url", "image_url": url_of(FILE)},
                    {"type": "image", "image": FILE, "max_pixels": 8},
                ):
                    message = {"role": "user", "content": [part, {"type": "text", "text": "hi"}]}
                    found = await client.generate(messages=[message], max_tokens=1)
                    assert found.usage.prompt_tokens == len(PROMPT)
                    assert seen[-1].prompt_token_ids == PROMPT
                text = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
                assert await client.tokenize(messages=[text]) == list(ids_of("[user] hi\n[a] "))

    run(story)
