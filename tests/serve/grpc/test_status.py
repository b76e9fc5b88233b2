"""Tests of the gRPC status of each error."""

import pytest

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.grpc.status import trailers_of


@pytest.mark.parametrize(
    ("error", "pushback"),
    [
        (ServeError(Kind.QUEUE_FULL, "full", retry_after=0.25), "250"),
        (ServeError(Kind.TOO_LARGE, "cut"), "-1"),
        (ServeError(Kind.INVALID, "n=0"), None),
    ],
)
def test_a_client_is_told_when_to_come_back_or_that_it_need_not(error, pushback):
    assert dict(trailers_of(error)).get("grpc-retry-pushback-ms") == pushback
