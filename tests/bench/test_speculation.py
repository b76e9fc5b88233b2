"""Tests of draft token metrics in a report: counters of other servers' pages and of jaxinfer's, deltas and bars."""

import asyncio
import contextlib
import http.server
import threading
from collections.abc import Iterator

import pytest

from jaxinfer.bench import speculation
from jaxinfer.bench.options import parse
from jaxinfer.bench.speculation import Counters, Watched, between, lines, read
from jaxinfer.bench.target import Access, TargetError

# Format of vLLM 0.11.
PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 120.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 50.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 0.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.76e+09
"""
BEFORE = Counters(20, 60, 20, {0: 15, 1: 5})
AFTER = Counters(40, 120, 50, {0: 30, 1: 20, 2: 0})


def test_the_counters_of_a_page_of_another_engine() -> None:
    assert read(PAGE) == AFTER
    assert read(PAGE.replace("vllm:", "jaxinfer:")) == AFTER


def test_models_and_engines_are_added_up() -> None:
    twice = [line for line in PAGE.splitlines() if "spec_decode" in line and not line.startswith("#")]
    both = read(PAGE + "\n".join(line.replace('engine="0"', 'engine="1"') for line in twice) + "\n")
    assert both is not None
    assert both.drafts == 80
    assert both.places == {0: 60, 1: 40, 2: 0}


def test_a_page_without_drafts_says_nothing() -> None:
    assert read("\n".join(PAGE.splitlines()[:3]) + "\n") is None
    with pytest.raises(ValueError, match="invalid metric name"):
        read("<!DOCTYPE html>\n<html></html>")


def test_what_a_run_drafted_is_what_lies_between() -> None:
    assert between(BEFORE, AFTER) == {
        "drafts": 20,
        "draft_tokens": 60,
        "accepted": 30,
        "acceptance_length": 2.5,
        "accepted_by_place": [0.75, 0.75, 0.0],
    }
    assert between(None, AFTER) is None
    assert between(AFTER, AFTER) is None
    assert between(AFTER, BEFORE) is None, "the server was started anew"


def test_a_bar_for_each_place_up_to_the_last_that_came_true() -> None:
    said = lines(between(BEFORE, AFTER))
    assert said[0] == "drafts        20 of 3.00 tokens, 30 accepted: mean acceptance length 2.50"
    assert [line.strip() for line in said[1:]] == [
        f"place {place}     {'█' * 22}{' ' * (speculation.WIDTH - 22)} 75%" for place in (1, 2)
    ]
    assert lines(None) == []


@contextlib.contextmanager
def page(body: str, status: int = 200) -> Iterator[tuple[str, list[str | None]]]:
    """Yield the URL of a server with one page, and the keys that it received."""
    keys: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("Authorization"))
            self.send_response(status if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", keys
        finally:
            server.shutdown()
            thread.join()


def counters(access: Access, url: str | None) -> Counters | None:
    return asyncio.run(Watched(access, url).counters())


def test_a_server_that_speaks_http_is_looked_at_with_its_key() -> None:
    with page(PAGE) as (url, keys):
        assert counters(Access(url, api_key="k"), None) == AFTER
        assert counters(Access("grpc://127.0.0.1:1"), f"{url}/metrics") == AFTER
    assert keys == ["Bearer k", None]


@pytest.mark.parametrize(("body", "status"), [(PAGE, 401), ("<!DOCTYPE html>", 200)])
def test_nobody_is_told_of_a_page_that_was_not_asked_for(body: str, status: int) -> None:
    with page(body, status) as (url, _):
        assert counters(Access(url), None) is None
        with pytest.raises(TargetError, match=f"{url}/metrics is no page of metrics: "):
            counters(Access(url), f"{url}/metrics")
    assert counters(Access("grpc://127.0.0.1:1"), None) is None


def test_the_page_of_a_server() -> None:
    target = ["--target", "grpc://localhost"]
    assert parse([*target, "--metrics", "http://a:1"]).metrics == "http://a:1/metrics"
    assert parse([*target, "--metrics", "http://a:1/own"]).metrics == "http://a:1/own"
    with pytest.raises(SystemExit):
        parse([*target, "--metrics", "a:1"])
