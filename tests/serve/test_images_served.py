"""Images in a real server with a tiny random model: every API answers as `LLM` does, to the bit."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from jaxinfer.client import Client
from jaxinfer.config import EngineConfig
from jaxinfer.llm import LLM
from jaxinfer.serve.settings import ServeConfig
from tests.images.pictures import picture, saved
from tests.serve.live import Live, live
from tests.serve.vision import url_of
from tools.oracle.images_golden import read_images, write_image_checkpoint

GOLDENS = pathlib.Path(__file__).resolve().parents[1] / "goldens" / "images"
ENGINE: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "page_size": 16, "prefill_sizes": (16, 32)}
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %} {{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %} <start> <image> <end>{% elif p.type == 'video' %} <start> <video> <end>"
    "{% else %} {{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %} w9"
)
FILES = [saved(picture(40, 24, seed=1)), saved(picture(21, 50, seed=2), "JPEG"), saved(picture(8, 8, seed=3), "WEBP")]
FRAMES = [saved(picture(40, 24, seed=seed), "JPEG") for seed in range(5)]
TEXT = {"type": "text", "text": "w5 w6 w7"}
SAMPLING = {"temperature": 0.0, "max_tokens": 6, "logprobs": 1, "ignore_eos": True}


Media = bytes | list[bytes]
"""An image, or the frames of a video."""


def held(media: Media) -> dict[str, Any]:
    if isinstance(media, bytes):
        return {"type": "image", "image": media}
    return {"type": "video", "video": media, "fps": 4}


def sent(media: Media) -> dict[str, Any]:
    if isinstance(media, bytes):
        return {"type": "image_url", "image_url": {"url": url_of(media)}}
    return {"type": "video", "video": list(map(url_of, media)), "fps": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return the folder of a Qwen2-VL."""
    return with_words(write_image_checkpoint(read_images(GOLDENS / "qwen2_vl"), tmp_path_factory.mktemp("m") / "tiny"))


def with_words(made: pathlib.Path) -> pathlib.Path:
    """Add a vocabulary of words, of which 62 is the placeholder of images, and a chat template to a folder."""
    named = {0: "<eos>", 60: "<start>", 61: "<end>", 62: "<image>", 63: "<video>"}
    words = {named.get(token, f"w{token}"): token for token in range(64)}
    library = Library(models.WordLevel(words, unk_token="w1"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(list(named.values()))
    library.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def server(folder: pathlib.Path) -> Iterator[Live]:
    config = ServeConfig(
        model=str(folder), grpc_port=0, http_port=0, dtype="float32", engine=EngineConfig(**ENGINE, max_logprobs=5)
    )
    with live(config) as found:
        yield found


@pytest.fixture(scope="module")
def llm(folder: pathlib.Path) -> Iterator[LLM]:
    with LLM(str(folder), "float32", show_progress=False, **ENGINE) as found:
        yield found


def by_llm(llm: LLM, files: Sequence[Media], **options: Any) -> tuple[list[int], list[int], list[float]]:
    """Return the prompt's token ids, the output's, and their log probabilities."""
    content = [*map(held, files), TEXT]
    params = llm.default_sampling_params(**SAMPLING)
    (found,) = llm.chat([{"role": "user", "content": content}], params, **options)
    output = found.outputs[0]
    logprobs = [each[token].logprob for token, each in zip(output.token_ids, output.logprobs or [], strict=True)]
    return found.prompt_token_ids, output.token_ids, logprobs


def by_http(server: Live, files: Sequence[Media], **fields: Any) -> tuple[list[int], list[int], list[float]]:
    content = [*map(sent, files), TEXT]
    extra = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, **fields}
    body = {**SAMPLING, "messages": [{"role": "user", "content": content}], **extra}
    url = f"http://127.0.0.1:{server.server.http_port}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=120).raise_for_status().json()
    choice = answer["choices"][0]
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    return answer["prompt_token_ids"], choice["token_ids"], logprobs


def by_grpc(server: Live, files: Sequence[Media]) -> tuple[int | None, list[int], list[float]]:
    content = [*map(held, files), TEXT]
    with Client(f"127.0.0.1:{server.server.grpc_port}") as client:
        found = client.generate(messages=[{"role": "user", "content": content}], **SAMPLING)
    output = found.outputs[0]
    return found.usage.prompt_tokens, list(output.token_ids), [each.chosen.logprob for each in output.logprobs]


@pytest.mark.parametrize(
    "files",
    [FILES[:1], FILES, FILES[2:] * 2, [FRAMES], [FILES[0], FRAMES, FRAMES[:1]]],
    ids=["one", "three", "twice", "video", "image and videos"],
)
def test_every_api_answers_as_llm_does(server: Live, llm: LLM, files: list[Media]) -> None:
    prompt, tokens, logprobs = by_llm(llm, files)
    assert prompt.count(62) + prompt.count(63) > len(files)
    assert (63 in prompt) == any(isinstance(each, list) for each in files)
    for _ in range(2):  # the second time from the prefix cache
        assert by_http(server, files) == (prompt, tokens, logprobs)
        assert by_grpc(server, files) == (len(prompt), tokens, logprobs)


def test_another_image_gives_another_answer(server: Live, llm: LLM) -> None:
    turned = saved(picture(40, 24, seed=9))
    same, other = (by_http(server, [file]) for file in (FILES[0], turned))
    assert same[0] == other[0]
    assert same[2] != other[2]
    assert other == by_llm(llm, [turned])


def test_options_of_the_processor_change_the_tokens(server: Live, llm: LLM) -> None:
    options = {"max_pixels": 256}
    small = by_http(server, FILES[:1], mm_processor_kwargs=options)
    assert len(small[0]) < len(by_http(server, FILES[:1])[0])
    assert small == by_llm(llm, FILES[:1], mm_processor_kwargs=options)


def test_broken_files_are_refused_and_nothing_else_ends(server: Live) -> None:
    with pytest.raises(httpx.HTTPStatusError) as refused:
        by_http(server, [FILES[0], FILES[0][:60]])
    assert refused.value.response.status_code == 400
    assert refused.value.response.json()["error"]["param"] == "messages[0].content[1].image_url.url"
    by_http(server, FILES)
