"""Images that are kept under the uuid of their part: by tenant, within a number of bytes."""

from __future__ import annotations

import dataclasses

import pytest

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.frontend import images
from jaxinfer.serve.frontend.images import KeptMedia
from jaxinfer.text.contents import GivenImage

IMAGE = GivenImage("m", "image_url", "image_url.url", "data:1", uuid="a")
VIDEO = GivenImage("m", "video", "video", ["data:1", "data:22"], video=True, uuid="b")


def named(image: GivenImage) -> GivenImage:
    return dataclasses.replace(image, source=None)


def test_each_tenant_has_its_own() -> None:
    kept = KeptMedia()
    for image in (IMAGE, VIDEO):
        kept.keep(image, "one")
        assert kept.found(named(image), "one") == image
        with pytest.raises(RequestError):
            kept.found(named(image), "two")
        assert kept.found(image, "two") is image


def test_a_later_one_replaces_an_earlier_one() -> None:
    kept = KeptMedia()
    later = dataclasses.replace(IMAGE, source="data:2")
    for image in (IMAGE, later):
        kept.keep(image, "")
    assert kept.found(named(IMAGE), "").source == "data:2"
    with pytest.raises(RequestError):
        kept.found(dataclasses.replace(named(VIDEO), uuid="a"), "")


def test_the_least_recently_used_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_MOST_KEPT", 20)
    kept = KeptMedia()
    of = {name: dataclasses.replace(IMAGE, uuid=name) for name in "abcd"}
    for name in "abc":
        kept.keep(of[name], "")
    kept.keep(kept.found(named(of["a"]), ""), "")  # as each request does
    kept.keep(of["d"], "")  # 24 bytes
    assert kept.found(named(of["a"]), "") == of["a"]
    with pytest.raises(RequestError):
        kept.found(named(of["b"]), "")
    kept.keep(dataclasses.replace(IMAGE, uuid="large", source="x" * 21), "")
    assert kept.found(named(of["d"]), "") == of["d"]
