"""Tests of the generator of the blocking client."""

import inspect

import pytest

from jaxinfer.client import AsyncClient, AsyncStream, Client, Stream
from tools import gen_sync_client


def test_the_blocking_client_is_up_to_date() -> None:
    assert gen_sync_client.main(["--check"]) == 0


def test_no_word_of_asyncio_is_left() -> None:
    text = gen_sync_client.generate()
    assert [word for word in ("async", "await", "Async", "aclosing", "grpc.aio") if word in text] == []


@pytest.mark.parametrize(("asynchronous", "blocking"), [(AsyncClient, Client), (AsyncStream, Stream)])
def test_both_clients_have_the_same_methods_and_arguments(asynchronous: type, blocking: type) -> None:
    first, second = (
        {name: list(inspect.signature(value).parameters) for name, value in vars(kind).items() if callable(value)}
        for kind in (asynchronous, blocking)
    )
    assert {name.replace("__a", "__") for name in first} == set(second)
    assert all(second[name] == names for name, names in first.items() if name in second)


def test_a_rule_that_finds_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gen_sync_client._RULES, "no such text", "")
    with pytest.raises(ValueError, match="no such text"):
        gen_sync_client.generate()
