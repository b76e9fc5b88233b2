"""Tests of the fuzzer, which keeps requests with new effects and finds forbidden responses, and of the corpus."""

import asyncio
import random

import pytest

from tests.serve import fuzz
from tests.serve.attack import answers, corpus, fuzzing
from tests.serve.doors import Page, Rpc

FAST, SLOW = 3_000, 20_000


@pytest.mark.parametrize("cases", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_fuzzed_requests_are_answered_and_leave_nothing_behind(tmp_path, cases, seed):
    known = corpus.Corpus()
    with fuzzing.fuzzed_server(tmp_path) as target:
        found = asyncio.run(fuzzing.run(*target, known, cases, seed, tmp_path / "failed"))
    assert found.total() == len(corpus.Corpus()) + cases
    # The requests are a mixture: many are rejected, many are not.
    for kind in ("rpc OK", "rpc INVALID_ARGUMENT", "http 200", "http 400"):
        assert found[kind] > cases / 50, found


def test_the_corpus_grows_by_what_is_new(tmp_path):
    file = tmp_path / "corpus.jsonl"
    found, chance = corpus.Corpus(file), random.Random(0)
    drawn = [found.draw(chance) for _ in range(200)]
    short = [each for each in drawn if len(corpus.to_line(each)) <= corpus.MOST_BYTES]
    kept = [each for each in drawn if found.add(each)]
    assert 50 < len(kept) <= len(short) < 200
    assert not any(found.add(each) for each in drawn)
    assert found.save() == len(kept)
    assert corpus.Corpus(file).requests == kept
    assert found.save() == 0


def test_mutations_of_what_is_known_are_of_its_kind_and_differ(seed):
    chance = random.Random(seed)
    requests = list(fuzz.requests(seed, 300))
    changed = 0
    for request in requests:
        found = fuzz.mutated(chance, request, chance.choice(requests))
        assert (type(found), found.path) == (type(request), request.path)
        changed += found != request
    assert changed > 250


class Liar:
    """A client that returns responses which a server must not give."""

    def __init__(self, *, code: str = "OK", page: Page | None = None) -> None:
        self._code, self.page = code, page

    async def rpc(self, path: str, *messages: bytes) -> Rpc:
        return Rpc(self._code)

    async def http(self, *_: object) -> Page | None:
        return self.page


@pytest.mark.parametrize(
    "liar",
    [
        Liar(code="INTERNAL"),
        Liar(code="UNKNOWN"),
        Liar(page=Page(500)),
        Liar(page=Page(0)),
        Liar(page=Page(400, body=b'{"error": {"message": ""}}')),
        Liar(page=Page(400, body=b'{"error": {"message": "internal error %s"}}' % (b"0" * 32))),
        Liar(page=Page(200, {"content-type": "text/event-stream"}, b"data: {}\n\n")),
    ],
)
def test_answers_that_may_not_be_are_found(liar, tmp_path):
    lines = fuzzing.Lines(tmp_path / "lines")
    fuzzer = fuzzing.Fuzzer(liar, corpus.Corpus(tmp_path / "corpus"), lines, tmp_path / "failed")
    request = fuzz.HttpRequest("POST", "/detokenize", {}, b"{}")
    if liar.page is None:
        request = fuzz.RpcRequest("jaxinfer.v1.Inference/Tokenize", (b"",), whole=True)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(fuzzer.send([request]))
    assert caught.group_contains(AssertionError)
    assert (tmp_path / "failed").read_text() == corpus.to_line(request) + "\n"
    assert not fuzzer.answers


def test_what_a_refusal_says_less_what_it_quotes():
    assert answers._said("temperature=1e999 must be 0 to 2, not 'x'") == answers._said(
        "temperature=-3 must be 0 to 2, not '12'"
    )
