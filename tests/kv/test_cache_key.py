"""Cache identity: which requests may share cached pages."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.kv.cache_key import cache_identity
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request

texts = st.text("ab:\n\0\x01é", max_size=6)
pairs = st.tuples(texts, texts)


def identity(scope: str, salt: str) -> bytes:
    return cache_identity(Request("r", (1,), SamplingParams(), cache_scope=scope, cache_salt=salt))


@given(pairs, pairs)
def test_equal_only_for_the_same_scope_and_salt(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (identity(*one) == identity(*other)) == (one == other)


def test_a_border_that_moves_is_another_identity() -> None:
    assert len({identity("a", "bc"), identity("ab", "c"), identity("abc", ""), identity("", "abc")}) == 4


def test_nothing_else_that_a_client_says_changes_it() -> None:
    request = Request("r", (1,), SamplingParams(), cache_scope="s")
    others = {"request_id": "q", "tenant": "t", "priority": 3, "params": SamplingParams(n=2)}
    for field, value in others.items():
        assert cache_identity(dataclasses.replace(request, **{field: value})) == cache_identity(request)
