"""Tests of tiktoken.model: ids equal those of the tiktoken library with the pattern of Kimi's own code."""

import base64
import json
import pathlib
import random
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, trainers

from jaxinfer.text import Tokenizer, TokenizerError, find_tokenizer
from jaxinfer.text.tiktoken import read_ranks
from tests.text.build import CORPUS, byte_level

# Pattern of tokenization_kimi.py.
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
PARTS = [
    "a",
    "b",
    "A",
    "é",
    "中",
    "国",
    "한",
    "글",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "'s",
    "'LL",
    "1",
    "23",
    "!",
    "::",
    "=",
]
PARTS += [
    "the",
    "ing",
    "🙂",
    "\u0301",
    "ſ",
    "ǅ",
    "ʰ",
    "[EOS]",
    "<|im_end|>",
    "日本",
    "ー",
    "ひ",
    "々",
    "〇",
    "²",
    "\u3000",
    "İ",
]


def trained() -> list[bytes]:
    """Return tokens by rank: all bytes, then the merges of a byte-level trainer."""
    library = byte_level()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator([*CORPUS, "aaaa bbbb abab ====== -------- the theme thesis"], trainer)
    merges = json.loads(library.to_str())["model"]["merges"]
    return [*(bytes([byte]) for byte in range(256)), *dict.fromkeys(spelt("".join(pair)) for pair in merges)]


def spelt(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary, by the library's own table."""
    return b"".join(BYTES[character] for character in token)


def _bytes() -> dict[str, bytes]:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found: dict[str, bytes] = {}
    for text in [*map(chr, range(0x250)), *(chr(at) for at in range(0, 0x110000, 0x40) if not 0xD800 <= at < 0xE000)]:
        ((written, _),) = level.pre_tokenize_str(text)
        found |= dict(zip(written, (bytes([byte]) for byte in text.encode()), strict=True))
    found |= dict(zip(sorted(set(level.alphabet()) - set(found)), (bytes([b]) for b in _UNUSED), strict=False))
    return found


_UNUSED = [0xC0, 0xC1, *range(0xF5, 0x100)]  # bytes of no UTF-8 text, in the order of the table
BYTES = _bytes()


def config(first: int, **changes: Any) -> dict[str, Any]:
    named = {first: "[BOS]", first + 1: "[EOS]", first + 2: "<|im_end|>"}
    entries = {str(index): {"content": text, "special": True} for index, text in named.items()}
    entries[str(first + 5)] = {"content": "<|tool_call_begin|>", "special": False}
    return {
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": entries,
        **changes,
    }


def write(folder: pathlib.Path, tokens: list[bytes], **changes: Any) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config(len(tokens), **changes)))
    return folder


def reference(ours: Tokenizer, tokens: list[bytes]) -> tiktoken.Encoding:
    first = len(tokens)
    special = {ours.id_to_token(index) or "": index for index in range(first, first + 256)}
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, tiktoken.Encoding]:
    tokens = trained()
    ours = Tokenizer.load(write(tmp_path_factory.mktemp("kimi"), tokens))
    return ours, reference(ours, tokens)


def assert_same(pair: tuple[Tokenizer, tiktoken.Encoding], text: str) -> None:
    ours, theirs = pair
    ids = theirs.encode(text, allowed_special="all")
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.decode(ids, skip_special_tokens=False) == text


def test_texts(pair: tuple[Tokenizer, tiktoken.Encoding]) -> None:
    for text in (*CORPUS, "", " ", "I'Ll sayS'S 12345 中文abc한국\r\n \n x", "[BOS]<|reserved_token_999999|>[EOS]"):
        assert_same(pair, text)
    first = len(pair[1]._mergeable_ranks)
    assert_same(pair, f"<|reserved_token_{first + 9}|><|tool_call_begin|>")


@given(st.lists(st.sampled_from(PARTS), max_size=12))
def test_parts_of_texts(pair: tuple[Tokenizer, tiktoken.Encoding], parts: list[str]) -> None:
    assert_same(pair, "".join(parts))


def test_repetitions_where_several_merges_have_one_rank(pair: tuple[Tokenizer, tiktoken.Encoding]) -> None:
    drawn = random.Random(0)
    for _ in range(2000):
        letters = drawn.sample(["a", "b", "e", "s", "t", "h", "=", "-", " "], drawn.randint(1, 3))
        assert_same(pair, "".join(drawn.choice(letters) for _ in range(drawn.randint(1, 24))))


def test_a_published_vocabulary(test_data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """GPT-2's vocabulary, ordered by token id, gives the same ids."""
    vocabulary = json.loads((test_data / "tokenizers/gpt2/vocab.json").read_text())
    tokens = [spelt(token) for token in sorted(vocabulary, key=vocabulary.__getitem__) if token != "<|endoftext|>"]
    ours = Tokenizer.load(write(tmp_path / "gpt2", tokens))
    both = (ours, reference(ours, tokens))
    lines = (test_data / "tokenizers/encoding_cases.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        assert_same(both, json.loads(line)["text"])


def test_special_tokens(pair: tuple[Tokenizer, tiktoken.Encoding]) -> None:
    ours, theirs = pair
    first = len(theirs._mergeable_ranks)
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (first, (first + 1,), first + 256)
    assert ours.encode("a")[0] != first
    hidden = [first, first + 2, first + 9]
    assert ours.decode([*hidden, *ours.encode("hi"), first + 5]) == "hi<|tool_call_begin|>"
    assert ours.most_bytes == max(len(f"<|reserved_token_{first}|>"), *map(len, theirs._mergeable_ranks))


def test_a_word_that_is_a_token_is_that_token(tmp_path: pathlib.Path) -> None:
    """A word that is a token is encoded as that token, even if no merge makes it."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"xyz"]
    ours = Tokenizer.load(write(tmp_path, tokens))
    for text in ("xyz", "xyz xyz", "axyz"):
        assert_same((ours, reference(ours, tokens)), text)


def test_a_bos_is_added_where_the_configuration_asks(tmp_path: pathlib.Path) -> None:
    tokens = [bytes([byte]) for byte in range(256)]
    assert Tokenizer.load(write(tmp_path, tokens, add_bos_token=True)).encode("a") == [256, 97]


def test_a_folder_with_nothing_else_has_a_tokenizer(tmp_path: pathlib.Path) -> None:
    assert find_tokenizer(tmp_path) is None
    found = find_tokenizer(write(tmp_path, [bytes([byte]) for byte in range(256)]))
    assert found is not None
    assert found.vocab_size == 512


BASE = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([], "has no token for the byte 0"),
        (BASE[:255], "has no token for the byte 255"),
        ([*BASE, b"YWI= 300\n"], "line 257 of .* has rank 300"),
        ([*BASE, b"YQ== 256\n"], "line 257 of .* stands twice"),
        ([*BASE, b"YWI=\n"], "line 257 of .* is not a token of 1 to 512 bytes and its rank"),
        ([*BASE, b"YWI= -1\n"], "line 257 of .* is not a token"),
        ([*BASE, b"YWI= " + b"1" * 5000 + b"\n"], "line 257 of .* is not a token"),
        ([*BASE, b" 256\n"], "line 257 of .* is not a token"),
        ([*BASE, base64.b64encode(b"x" * 513) + b" 256\n"], "line 257 of .* is not a token"),
        ([*BASE, b"Y*I= 256\n"], "line 257 of .* has no token in base64"),
        ([b"\x00\xff\x0a\x12"], "line 1 of .* has no token in base64"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: pathlib.Path, lines: list[bytes], sentence: str) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"".join(lines))
    with pytest.raises(TokenizerError, match=sentence):
        read_ranks(tmp_path / "tiktoken.model")


@pytest.mark.parametrize("name", [None, "QWenTokenizer", 3])
def test_code_that_is_not_known_is_not_guessed(tmp_path: pathlib.Path, name: Any) -> None:
    folder = write(tmp_path, [bytes([byte]) for byte in range(256)], tokenizer_class=name)
    with pytest.raises(TokenizerError, match=f"tokenizer_class = '{name}' is not known .known: TikTokenTokenizer"):
        Tokenizer.load(folder)


def test_a_special_token_that_is_another_token_is_refused(tmp_path: pathlib.Path) -> None:
    entries = {"256": {"content": "a", "special": True}}
    folder = write(tmp_path, [bytes([byte]) for byte in range(256)], added_tokens_decoder=entries)
    with pytest.raises(TokenizerError, match="has 'a' as 256, which is another token, too"):
        Tokenizer.load(folder)
