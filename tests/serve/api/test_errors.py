"""Tests of the mapping of exceptions to API errors: kind, field and maximum message length."""

import pytest

from jaxinfer.sampling_params import QueueFullError, RequestError
from jaxinfer.serve.api.errors import DuplicateIdError, Kind, ServeError, UnknownModelError, answer_to
from jaxinfer.serve.api.streams import EngineDeadError


@pytest.mark.parametrize(
    ("error", "kind", "field", "comes_back"),
    [
        (RequestError("top_p", "=2 must be at most 1"), Kind.INVALID, "top_p", False),
        (RequestError("stop_token_ids", ": 9 must be less"), Kind.INVALID, "stop_token_ids", False),
        (RequestError("continuations[3]", "is empty"), Kind.INVALID, "continuations", False),
        (RequestError(None, "The model cannot"), Kind.INVALID, None, False),
        (UnknownModelError("model", "other"), Kind.NOT_FOUND, "model", False),
        (DuplicateIdError("request_id", "in use"), Kind.EXISTS, "request_id", False),
        (QueueFullError("full"), Kind.QUEUE_FULL, None, True),
        (EngineDeadError("out of memory at 0x7f"), Kind.UNAVAILABLE, None, True),
        (ZeroDivisionError("secret"), Kind.INTERNAL, None, False),
    ],
)
def test_kinds_and_fields(error, kind, field, comes_back):
    answer = answer_to(error)
    assert (answer.kind, answer.field, answer.retry_after is not None) == (kind, field, comes_back)
    assert "0x7f" not in answer.message
    assert "secret" not in answer.message


def test_a_refused_value_may_be_long_but_not_the_answer():
    assert answer_to(RequestError(None, "x" * 500)).message == "x" * 500
    assert answer_to(RequestError(None, "x" * 501)).message == "x" * 500 + "…"


def test_an_answer_stays_as_it_is():
    answer = ServeError(Kind.DEADLINE, "late")
    assert answer_to(answer) is answer
