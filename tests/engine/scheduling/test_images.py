"""Prompts with images: what is refused, chunks and their rows, and random requests on a fake device."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from jaxinfer.config import EngineConfig, EngineConfigError, resolve
from jaxinfer.config.images import ImageNeeds
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import CacheSpec, ImageInput, LayerSpec, PlacedImage, Request, StateSpec
from tests.engine.fake_loop import RECOMPUTE, SWAP, Loop, chunks, make_loop, make_request
from tests.engine.scheduling.test_scheduler_machine import (
    LENGTH,
    MOST_LIVE,
    Choose,
    SchedulerMachine,
    World,
    _chooser,
    draw_config,
    draw_request,
)

TOKEN, LARGEST = 9, 8
NEEDS = ImageNeeds((TOKEN,), merged=1, values=3, least_rows=1, most_rows=LARGEST)
BOTH_WAYS = NEEDS._replace(both_ways=True)


def make_image(number: int, rows: int) -> ImageInput:
    digest = hashlib.blake2b(f"{number} {rows}".encode(), digest_size=16).hexdigest()
    return ImageInput(np.full((rows, 3), number % 256, np.uint8), (1, 1, rows), digest)


def with_images(request: Request, *placed: tuple[int, ImageInput]) -> Request:
    """Return the request with images in place of the tokens from these positions on."""
    tokens, images = list(request.prompt_token_ids), list[PlacedImage]()
    for start, image in placed:
        stop = start + len(image.patches)
        tokens[start:stop] = [TOKEN] * len(image.patches)
        images.append(PlacedImage(start, stop, image))
    return dataclasses.replace(request, prompt_token_ids=tuple(tokens), images=tuple(images))


def image_loop(needs: ImageNeeds = NEEDS, **changes: Any) -> Loop:
    return make_loop(images=needs, **{"encoder_sizes": (LARGEST,), "encoder_cache_size": 32, **changes})


# ---- requests that are refused


GOOD = with_images(make_request("a", 20), (2, make_image(1, 4)), (9, make_image(2, 3)))
REFUSED: dict[str, tuple[Request, str]] = {
    "a token without an image": (dataclasses.replace(GOOD, images=GOOD.images[:1]), "prompt"),
    "no tokens for an image": (dataclasses.replace(GOOD, prompt_token_ids=(1,) * 20), "images"),
    "too few tokens": (dataclasses.replace(GOOD, images=(GOOD.images[0]._replace(stop=5),)), "images"),
    "ranges in disorder": (dataclasses.replace(GOOD, images=GOOD.images[::-1]), "images"),
    "a range beyond the prompt": (dataclasses.replace(GOOD, images=(GOOD.images[0]._replace(stop=99),)), "images"),
    "too many patches": (with_images(make_request("a", 20), (2, make_image(1, LARGEST + 1))), "images"),
    "nothing after an image": (with_images(make_request("a", 20), (16, make_image(1, 4))), "prompt"),
    "too many images": (
        with_images(make_request("a", 20), *((3 * i, make_image(i, 2)) for i in range(4))),
        "images",
    ),
    "normalised patches": (
        with_images(make_request("a", 20), (2, dataclasses.replace(make_image(1, 4), patches=np.zeros((4, 3))))),
        "images",
    ),
    "another grid": (
        with_images(make_request("a", 20), (2, dataclasses.replace(make_image(1, 4), grid=(1, 1, 3)))),
        "images",
    ),
    "a grid of no frames": (
        with_images(make_request("a", 20), (2, dataclasses.replace(make_image(1, 4), grid=(0, 1, 4)))),
        "images",
    ),
    "no digest": (with_images(make_request("a", 20), (2, dataclasses.replace(make_image(1, 4), digest=""))), "images"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_request_is_refused(case):
    loop, (request, field) = image_loop(limit_mm_per_prompt=("image=3",)), REFUSED[case]
    with pytest.raises(RequestError) as refused:
        loop.scheduler.add(request)
    assert refused.value.field == field
    assert not loop.busy


def test_images_without_a_tower_are_refused():
    for loop in (
        make_loop(),
        image_loop(limit_mm_per_prompt=("image=0",), encoder_sizes=None, encoder_cache_size=None),
    ):
        with pytest.raises(RequestError) as refused:
            loop.scheduler.add(GOOD)
        assert refused.value.field == "images"


def make_video(number: int, frames: int, rows: int) -> ImageInput:
    image = make_image(number, frames * rows)
    return dataclasses.replace(image, grid=(frames, 1, rows), video=True)


def test_images_and_videos_have_limits_of_their_own():
    loop = image_loop(limit_mm_per_prompt=("image=1", "video=2"))
    image, videos = (1, make_image(1, 2)), [(4 * number, make_video(number, 2, 1)) for number in range(1, 4)]
    loop.add(with_images(make_request("a", 20), image, *videos[:2]))
    for placed in ((image, (16, make_image(2, 2))), videos):
        with pytest.raises(RequestError) as refused:
            loop.scheduler.add(with_images(make_request("b", 20), *placed))
        assert refused.value.field == "images"
    loop.drain()


def test_a_video_is_encoded_frame_by_frame():
    """It is larger than any encoder program; text stands between its frames."""
    video = make_video(1, 3, LARGEST - 1)
    request = with_images(make_request("a", 60), (2, video))
    tokens, (placed,) = list(request.prompt_token_ids), request.images
    tokens[12:12] = [1, 2]
    placed = placed._replace(stop=placed.stop + 2)
    loop = image_loop(prefill_sizes=(8, 16), max_num_batched_tokens=20)
    loop.add(dataclasses.replace(request, prompt_token_ids=tuple(tokens), images=(placed,)))
    encoded = [encode.image for encode in loop.step().encodes]
    while len(encoded) < 3:
        encoded += [encode.image for encode in loop.step().encodes]
    assert encoded == list(video.frames)
    loop.drain()
    with pytest.raises(RequestError):
        loop.scheduler.add(with_images(make_request("b", 60), (2, make_video(1, 2, LARGEST + 1))))


# ---- settings


def resolved(needs: ImageNeeds | None = NEEDS, layer: LayerSpec | None = None, **changes: Any) -> Any:
    cache = CacheSpec((layer or LayerSpec(),), kv_heads=1, head_dim=8)
    return resolve(EngineConfig(**changes), cache, max_position=4096, itemsize=4, images=needs)


def test_encoder_programs_reach_from_the_smallest_to_the_largest_image():
    qwen = ImageNeeds((1,), 4, 1176, 4, 16384)
    assert resolved(qwen).encoder_sizes == (256, 512, 1024, 2048, 4096, 8192, 16384)
    assert resolved(qwen, max_model_len=100).encoder_sizes == (256, 400)
    assert resolved(ImageNeeds((1,), 1, 588, 576, 576)).encoder_sizes == (576,)
    assert resolved(qwen).encoder_cache_size == 256 + 2 * 4096
    assert resolved(None).encoder_sizes == ()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"encoder_sizes": (6,)}, "encoder_sizes"),
        ({"encoder_sizes": (16, 8)}, "encoder_sizes"),
        ({"encoder_cache_size": 100, "prefill_sizes": (64,)}, "encoder_cache_size"),
        ({"limit_mm_per_prompt": ("image=-1",)}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": ("audio=1",)}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": ("image=1", "video=x")}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": ("{image",)}, "limit_mm_per_prompt"),
    ],
)
def test_a_wrong_setting_is_refused(changes, name):
    with pytest.raises(EngineConfigError, match=name):
        resolved(ImageNeeds((1,), 4, 12, 4, 1024), **changes)


def test_settings_of_images_are_refused_without_a_tower():
    with pytest.raises(EngineConfigError, match="encoder_sizes"):
        resolved(None, encoder_sizes=(256,))


BOTH_WAYS_REFUSED: dict[str, dict[str, Any]] = {
    "prefill_sizes": {"needs": ImageNeeds((1,), 1, 12, 512, 512, both_ways=True), "prefill_sizes": (64, 256)},
    "attention_backend = mosaic": {"attention_backend": "mosaic"},
    "limit_mm_per_prompt": {"layer": LayerSpec(latent_rank=6)},
    "limit_mm_per_prompt .* states": {"layer": LayerSpec(states=(StateSpec((2,)),))},
}


@pytest.mark.parametrize("what", BOTH_WAYS_REFUSED)
def test_what_excludes_attention_in_both_directions_is_refused_by_name(what):
    given = BOTH_WAYS_REFUSED[what]
    with pytest.raises(EngineConfigError, match=what):
        resolved(**{"needs": BOTH_WAYS, **given})
    changes = {name: value for name, value in given.items() if name != "needs"}
    assert resolved(NEEDS, **changes).images == NEEDS
    assert resolved(BOTH_WAYS, limit_mm_per_prompt=("image=0",), **changes).images is None


@pytest.mark.parametrize("backend", ["auto", "xla"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_attention_in_both_directions_is_served_by_xla(backend, kv_cache_dtype):
    found = resolved(BOTH_WAYS, attention_backend=backend, kv_cache_dtype=kv_cache_dtype)
    assert found.images.both_ways


def test_the_limit_takes_the_forms_of_vllm():
    for given in (("image=3",), ('{"image": 3}',), {"image": 3}, "image=3"):
        assert EngineConfig(limit_mm_per_prompt=given).mm_limits == {"image": 3}
    assert EngineConfig().mm_limits == {}


# ---- plans


def test_an_image_is_encoded_once_for_several_chunks_and_requests():
    loop = image_loop(max_num_batched_tokens=64)
    image = make_image(1, 8)
    loop.add(with_images(make_request("a", 40), (12, image)))  # in two chunks of 16
    plan = loop.step()
    assert [(encode.image, len(encode.rows)) for encode in plan.encodes] == [(image, 8)]
    loop.add(with_images(make_request("b", 30, cache_salt="other"), (3, image)))
    loop.drain()
    stats = loop.scheduler.stats.snapshot()
    assert (stats.encoder_queries, stats.encoder_hits) == (2, 1)


def test_the_encoder_counts_in_the_budget():
    loop = image_loop(max_num_batched_tokens=16 + 3 + 16)
    for number, name in enumerate("ab"):
        loop.add(with_images(make_request(name, 17), (2, make_image(number, 8))))
    assert [name for name, _ in chunks(loop.step())] == ["a"]
    plan = loop.step()  # "a" decodes
    assert (len(plan.encodes), chunks(plan)) == (1, [])
    assert [name for name, _ in chunks(loop.step())] == ["b"]
    loop.drain()


def test_an_image_is_encoded_a_step_before_its_chunk_while_sequences_decode():
    loop = image_loop(max_num_batched_tokens=96, max_num_seqs=4)
    loop.add(make_request("a", 8))
    loop.step()
    for name, image in (("b", make_image(1, 8)), ("c", make_image(1, 8)), ("d", make_image(2, 8))):
        loop.add(with_images(make_request(name, 17, cache_salt=name), (2, image)))
    plan = loop.step()
    assert [encode.image for encode in plan.encodes] == [make_image(1, 8), make_image(2, 8)]
    assert chunks(plan) == []
    plan = loop.step()
    assert (plan.encodes, [name for name, _ in chunks(plan)]) == ([], ["b", "c", "d"])
    loop.drain()
    stats = loop.scheduler.stats.snapshot()
    assert (stats.encoder_queries, stats.encoder_hits) == (2, 0)  # an image counts once in a step


def test_an_image_in_cached_pages_is_not_encoded_again():
    loop = image_loop()
    for name in "ab":
        loop.add(with_images(make_request(name, 33), (2, make_image(1, 8))))
        loop.drain()
    assert loop.outputs["b"][0].cached_tokens == 32
    assert loop.scheduler.stats.snapshot().encoder_queries == 1


def test_no_chunk_splits_an_image_that_attends_in_both_directions():
    loop = image_loop(BOTH_WAYS, max_num_batched_tokens=99)
    loop.add(with_images(make_request("a", 40), (12, make_image(1, 8))))
    found = [(chunk.start, chunk.length) for _, chunk in chunks(loop.step())]
    assert found == [(0, 12), (12, 8), (20, 12), (32, 7)]
    loop.drain()


def test_a_chunk_that_resumes_in_an_image_ends_with_it():
    loop = image_loop(BOTH_WAYS, page_size=4, num_pages=64, max_num_batched_tokens=64)
    image = make_image(1, 8)
    loop.add(with_images(make_request("a", 19), (10, image)))
    loop.drain()
    loop.add(with_images(make_request("b", 40), (10, image)))
    first = chunks(loop.step())[0][1]
    assert (first.start, first.length) == (16, 2)
    loop.drain()


# ---- random requests


def draw_image_config(choose: Choose) -> dict[str, Any]:
    """Draw settings with as little room for images as is possible, or a little more."""
    config = draw_config(choose)
    largest = min(LARGEST, config["prefill_sizes"][-1])
    needs = choose(NEEDS, NEEDS, BOTH_WAYS)._replace(most_rows=largest)
    least = config["prefill_sizes"][-1] + 2 * largest
    return config | {
        "images": needs,
        "encoder_sizes": choose((largest,), (1, largest)),
        "encoder_cache_size": least + choose(0, 0, 3, 40),
        "costs": choose(SWAP, RECOMPUTE, None),
    }


def draw_image_request(choose: Choose, name: str, now: float) -> Request:
    """Draw a request in which some tokens are those of images, of few contents."""
    request, at, placed = draw_request(choose, name, now), 0, list[tuple[int, ImageInput]]()
    for _ in range(choose(0, 1, 1, 2, 4)):
        at += choose(0, 0, 1, 3, 7, 12)
        image = make_image(choose(1, 2, 3, 4), choose(1, 2, 4, 7, LARGEST))
        if at + len(image.patches) < len(request.prompt_token_ids):
            placed.append((at, image))
            at += len(image.patches)
    return with_images(request, *placed)


class ImageMachine(SchedulerMachine):
    @initialize(data=st.data())
    def start(self, data):
        self.world = World(draw_image_config(_chooser(data)), draw_image_request)


def test_machine(unchecked):
    run_state_machine_as_test(ImageMachine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None))


@pytest.mark.parametrize("episode", range(12))
def test_many_steps(unchecked, episode):
    assert run_image_episode(0, episode).loop.steps


def run_image_episode(seed: int, episode: int, steps: int = 200) -> World:
    rng = random.Random(f"{seed} {episode}")

    def choose(*options):
        return rng.choice(options)

    world = World(draw_image_config(choose), draw_image_request)
    load = choose(0.1, 0.3, 0.7)
    for _ in range(steps):
        while len(world.live) < MOST_LIVE and rng.random() < load:
            world.add(choose)
        if rng.random() < 0.02:
            world.loop.kv.reset_prefix_cache()
        world.step()
    world.drain()
    world.loop.check_empty()
    return world


def test_requests_that_differ_in_one_image_share_no_page_of_it(unchecked):
    """A thousand prompts of equal tokens, with other images from a random place on: no wrong hit (the fake device would
    read other numbers), and right hits for each prompt that comes again."""
    rng, loop = np.random.default_rng(0), image_loop(num_pages=600, max_model_len=LENGTH, host_pages=64)
    for number in range(1000):
        base = make_request(str(number), 40, 1)
        others = [(3, make_image(1, 5)), (14, make_image(2, 4)), (22, make_image(3, 8))]
        which = int(rng.integers(3))
        place, image = others[which]
        others[which] = place, make_image(1000 + int(rng.integers(500)), len(image.patches))
        loop.add(with_images(base, *others))
        loop.drain()
        loop.outputs.clear()
    stats = loop.scheduler.stats.snapshot()
    assert 0 < stats.prefix_hits < stats.prefix_queries
