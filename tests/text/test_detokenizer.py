"""Tests of incremental detokenisation: for any tokens and any split, the deltas add up to the whole text."""

import codecs
import functools
import itertools
import pathlib
import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from jaxinfer.text import Detokenizer, Tokenizer
from jaxinfer.text.tokenizer import LibraryBackend
from tests.text.build import byte_fallback, byte_level, metaspace, write_folder

TEXTS = st.text(st.characters(codec="utf-8"), max_size=24) | st.text("aé한🙂 \n▁\u200d\ufffd", max_size=16)


REPLACED = re.compile("[\udc80-\udcff]")
BYTE_LEVEL = (Tokenizer(LibraryBackend(byte_level())), byte_level())


def whole(ours: Tokenizer, library: Library, ids: Sequence[int], skip: bool) -> str:
    """Return the text of ``ids`` independently of jaxinfer: by the library, or (byte fallback) from the token bytes.

    The library drops all characters of a run of byte tokens with one bad byte, so it is no reference there.
    """
    if ours.rule.errors == "replace":
        return library.decode(list(ids), skip_special_tokens=skip)
    tokens = [library.id_to_token(token_id) for token_id in ids if not (skip and token_id in (0, 1, 2))]
    data = b"".join(
        bytes.fromhex(token[3:5]) if token.startswith("<0x") else token.replace("▁", " ").encode() for token in tokens
    )
    text = data.decode(errors="surrogateescape")
    return "".join("\ufffd" if "\udc80" <= c <= "\udcff" else c for c in text).removeprefix(" ")


def continuation(full: str, prompt: str) -> str:
    """Return ``full`` without ``prompt``; a character that only ``full`` completes belongs to the rest."""
    while not full.startswith(prompt):
        prompt = prompt[:-1]
    return full[len(prompt) :]


def split(ids: Sequence[int], cuts: random.Random) -> list[Sequence[int]]:
    """Return ``ids`` in runs of random lengths, some of them empty."""
    runs, rest = [], list(ids)
    while rest:
        size = cuts.choice([0, 1, 1, 1, 2, 5])
        runs.append(rest[:size])
        rest = rest[size:]
    return runs


@pytest.mark.parametrize("skip", [True, False])
def test_random_tokens(pair: tuple[Tokenizer, Library], skip: bool) -> None:
    ours, library = pair
    ids = st.lists(st.integers(0, ours.vocab_size - 1), max_size=10)

    @settings(max_examples=150, deadline=None)
    @given(ids, ids, st.randoms(use_true_random=False))
    def check(prompt: list[int], output: list[int], cuts: random.Random) -> None:
        # A literal U+FFFD across the border cannot be distinguished from an incomplete character in the text.
        assume(b"\xef\xbf\xbd" not in ours.to_bytes([*prompt, *output]))
        detokenizer = Detokenizer(ours, prompt, skip)
        deltas = [detokenizer.push(run) for run in split(output, cuts)]
        text = "".join(deltas) + detokenizer.finish()
        full = whole(ours, library, [*prompt, *output], skip)
        assert text == continuation(full, whole(ours, library, prompt, skip))

    check()


def test_text_streams_whole_characters_at_once(pair: tuple[Tokenizer, Library]) -> None:
    """The text shown after each token is the longest prefix that the tokens so far determine."""
    ours, library = pair

    @settings(max_examples=100, deadline=None)
    @given(TEXTS, TEXTS)
    def check(before: str, text: str) -> None:
        prompt, ids = ours.encode(before), ours.encode(text, add_special_tokens=False)
        detokenizer = Detokenizer(ours, prompt)
        expected = continuation(whole(ours, library, [*prompt, *ids], True), whole(ours, library, prompt, True))
        shown = ""
        for token_id in ids:
            shown += detokenizer.push([token_id])
            assert expected.startswith(shown)
        assert shown == expected
        assert detokenizer.finish() == ""

    check()


@pytest.mark.parametrize("text", ["한국어 문장", "🙂👍🏽👩‍👩‍👧", "naïve café", "你好，世界"])
def test_split_characters_come_out_when_they_are_complete(tmp_path: pathlib.Path, text: str) -> None:
    ours = Tokenizer.load(write_folder(tmp_path, byte_fallback()))
    ids = ours.encode(text, add_special_tokens=False)
    assert len(ids) > len(text), "the test needs characters of several tokens"
    detokenizer = Detokenizer(ours, [ours.bos_id or 1])
    deltas = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(deltas) == text
    assert all(len(delta) <= 1 for delta in deltas)


def byte_ids(ours: Tokenizer, data: bytes) -> list[int]:
    """Return one token per byte, from a byte-level vocabulary or from byte-fallback tokens."""
    every = {ours.token_bytes(token_id): token_id for token_id in reversed(range(3, 3 + 256))}
    return [every[bytes([byte])] for byte in data]


@pytest.mark.parametrize("maker", [byte_level, byte_fallback])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_prompt_may_end_within_a_character(tmp_path: pathlib.Path, maker: object, at: int) -> None:
    ours = Tokenizer.load(write_folder(tmp_path, maker()))  # type: ignore[operator]
    smile, a = "🙂".encode(), byte_ids(ours, b"a")
    prompt = [*a, *byte_ids(ours, smile[:at])]
    completed = Detokenizer(ours, prompt)
    assert completed.push(byte_ids(ours, smile[at:])) == "🙂"
    abandoned = Detokenizer(ours, prompt)
    assert abandoned.push(a) + abandoned.finish() == "a", "U+FFFD is the prompt's own"
    assert Detokenizer(ours, prompt).finish() == ""


def test_no_output_is_no_text_after_half_a_surrogate() -> None:
    """Python's decoder holds back ED A1 as if a byte could complete it; it then becomes two U+FFFD, not one."""
    ours, _ = BYTE_LEVEL
    assert ours.to_bytes([172, 97]) == b"\xed\xa1"
    assert Detokenizer(ours, [172, 97]).finish() == ""


@pytest.mark.parametrize("maker", [byte_level, byte_fallback])
def test_every_end_of_a_prompt(tmp_path: pathlib.Path, maker: object) -> None:
    """Tests all prompts of up to three bytes at the limits of UTF-8's ranges, each with outputs of up to two."""
    ours = Tokenizer.load(write_folder(tmp_path, maker()))  # type: ignore[operator]
    borders = bytes([0x41, 0xC2, 0xE0, 0xED, 0xF0, 0x80, 0x90, 0xA0, 0xBF])
    id_of = dict(zip(borders, byte_ids(ours, borders), strict=True))
    shown = functools.cache(lambda data: REPLACED.sub("\ufffd", data.decode(errors=ours.rule.errors)))
    for prompt in (bytes(p) for n in (1, 2, 3) for p in itertools.product(borders, repeat=n)):
        for output in (b"", b"\xbf", b"\xa0\x80", b"\xed\xa0"):
            detokenizer = Detokenizer(ours, [id_of[byte] for byte in prompt])
            text = "".join(detokenizer.push([id_of[byte]]) for byte in output) + detokenizer.finish()
            assert text == continuation(shown(prompt + output), shown(prompt)), (prompt, output)


@pytest.mark.parametrize("maker", [byte_level, byte_fallback])
def test_incomplete_characters_are_held_and_then_replaced(tmp_path: pathlib.Path, maker: object) -> None:
    ours = Tokenizer.load(write_folder(tmp_path, maker()))  # type: ignore[operator]
    detokenizer = Detokenizer(ours, byte_ids(ours, b"x"))
    assert [detokenizer.push([token_id]) for token_id in byte_ids(ours, "한".encode()[:2])] == ["", ""]
    assert set(detokenizer.finish()) == {"\ufffd"}


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=12) | st.lists(st.sampled_from([0x41, 0xC3, 0xE0, 0xED, 0xF0, 0xF4, 0x80, 0x9F, 0xA0, 0xBF])))
def test_ill_formed_bytes_are_replaced_as_the_library_does(data: bytes | list[int]) -> None:
    ours, library = BYTE_LEVEL
    ids = byte_ids(ours, bytes(data))
    detokenizer = Detokenizer(ours, [])
    text = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.finish()
    assert text == library.decode(ids) == bytes(data).decode(errors="replace")


def test_the_space_mark_in_front_belongs_to_the_first_word_of_a_text(tmp_path: pathlib.Path) -> None:
    for maker, token in ((byte_fallback, "▁the"), (metaspace, "▁a")):
        ours = Tokenizer.load(write_folder(tmp_path, maker()))
        word = ours.token_to_id(token)
        assert word is not None
        text = token.replace("▁", " ")
        assert Detokenizer(ours, []).push([word]) == text[1:]
        assert Detokenizer(ours, [word]).push([word]) == text
        assert Detokenizer(ours, [word]).push([word, word]) == text * 2
    ours = Tokenizer.load(write_folder(tmp_path, byte_fallback()))
    the, bos = ours.encode("the")[1], 1
    assert Detokenizer(ours, [bos]).push([the]) == "the"
    assert Detokenizer(ours, [bos], skip_special_tokens=False).push([the]) == " the"


def test_special_tokens_are_shown_on_request(tmp_path: pathlib.Path) -> None:
    ours = Tokenizer.load(write_folder(tmp_path, byte_level()))
    a = ours.encode("a")
    assert Detokenizer(ours, a).push([*a, 2]) == "a"
    assert Detokenizer(ours, a, skip_special_tokens=False).push([*a, 2]) == "a</s>"
    half = byte_ids(ours, "é".encode())
    skipped = Detokenizer(ours, a)
    assert skipped.push([half[0], 2]) == ""
    assert skipped.push([half[1]]) == "é", "a skipped token is not there"


def test_an_added_token_outside_the_byte_table(tmp_path: pathlib.Path) -> None:
    ours = Tokenizer.load(write_folder(tmp_path, byte_level()))
    added = ours.token_to_id("<｜tool▁call｜>")
    assert added is not None
    assert Detokenizer(ours, []).push([added]) == "<｜tool▁call｜>"


class CountedIds(Sequence[int]):
    """A sequence of ids that counts accesses."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.seen = ids, 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        found = self.ids[index]
        self.seen += len(found) if isinstance(found, list) else 1
        return found


def test_cost_does_not_grow_with_the_text(pair: tuple[Tokenizer, Library], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair
    ids = [token_id for token_id in range(ours.vocab_size) if token_id not in ours.special_ids][:256]
    prompt = CountedIds(ids * 40)
    detokenizer = Detokenizer(ours, prompt)
    assert prompt.seen <= 40
    fed: list[int] = []
    utf8 = codecs.getincrementaldecoder("utf-8")

    class Counting(utf8):  # type: ignore[misc, valid-type]
        def decode(self, data: bytes, final: bool = False) -> str:
            fed.append(len(data) + len(self.getstate()[0]))
            return super().decode(data, final)

    monkeypatch.setattr(codecs, "getincrementaldecoder", lambda name: Counting)
    detokenizer = Detokenizer(ours, [])
    longest = max(len(ours.token_bytes(token_id)) for token_id in ids)
    for token_id in ids * 4:
        detokenizer.push([token_id])
    assert len(fed) >= 4 * len(ids)
    assert max(fed) <= longest + 3
