"""Short ``repr`` of records."""

import dataclasses

import pytest

from jaxinfer.brief import ShortRepr
from jaxinfer.types import CacheSpec, LayerSpec

FULL, NEAR = LayerSpec(), LayerSpec(window=8)


@pytest.mark.parametrize(
    ("layers", "shown"),
    [
        ((FULL,) * 80, "80 * (LayerSpec(),)"),
        ((NEAR, FULL) * 2, "2 * (LayerSpec(window=8), LayerSpec())"),
        ((NEAR, FULL) * 2 + (NEAR,), "2 * (LayerSpec(window=8), LayerSpec()) + (LayerSpec(window=8),)"),
        ((FULL,), "(LayerSpec(),)"),
        ((NEAR, FULL), "(LayerSpec(window=8), LayerSpec())"),
        (tuple(map(LayerSpec, range(10))), f"({', '.join(repr(LayerSpec(n)) for n in range(8))}, ... 10 in all)"),
    ],
)
def test_a_record_shows_equal_layers_once(layers: tuple[LayerSpec, ...], shown: str) -> None:
    assert repr(CacheSpec(layers, 2, 64)) == f"CacheSpec(layers={shown}, kv_heads=2, head_dim=64)"


def test_a_record_cuts_long_values() -> None:
    @dataclasses.dataclass(repr=False)
    class Long(ShortRepr):
        ids: list[int]
        text: str = ""

    assert repr(Long(list(range(100)))) == "Long(ids=[0, 1, 2, 3, 4, 5, 6, 7, ... 100 in all])"
    assert len(repr(Long([], "a" * 10_000))) < 300
