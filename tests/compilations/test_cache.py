"""Logged durations of the startup phases."""

import pytest

from jaxinfer import LLM
from tests.fakes import random_model


def test_where_the_seconds_of_a_start_went_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "jaxinfer.start"):
        LLM(random_model(num_hidden_layers=1), max_num_seqs=2, max_model_len=64, prefill_sizes=(16,), page_size=16)
    told = [message.rpartition(":")[0] for message in caplog.messages]
    assert told[:2] == ["memory planned", "weights loaded"]
    parts = ["traced and lowered", "compiled, or read, behind that"]
    assert [line.partition(" programs ")[2] for line in told[2:4]] == parts
    assert told[4:] == ["programs tried out, or what is known of them read", "costs measured"]
