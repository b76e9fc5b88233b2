"""Tests that the lower bound on a text's token count never rejects a text that would fit."""

import sys
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from jaxinfer.sampling_params import RequestError, SamplingLimits
from jaxinfer.text.intake import Intake
from jaxinfer.text.lengths import _NFC_SHRINKS, longest, utf8_length
from jaxinfer.text.tokenizer import LibraryBackend, SpecialIds, Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["the", "aaaa", " " * 9, "K", "Ķ", "각"]
TEXTS = st.text(max_size=60) | st.lists(st.sampled_from([*WORDS, "\u212a", "\u1100\u1161\u11a8", "a\u0327"])).map(
    "".join
)

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def byte_level(normalizer=None, pre=()) -> Library:
    vocab = {token: rank for rank, token in enumerate(ALPHABET)}
    merges = [("a", "a"), ("aa", "aa"), ("t", "h"), ("th", "e"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("ĠĠĠĠ", "ĠĠĠĠ")]
    vocab |= {left + right: len(vocab) + rank for rank, (left, right) in enumerate(merges)}
    library = Library(models.BPE(vocab, merges))
    library.normalizer = normalizer
    library.pre_tokenizer = pre_tokenizers.Sequence([*pre, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    library.add_special_tokens(["<|end|>"])
    return library


def byte_fallback() -> Library:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁▁", "aa", "the", "t", "h", "e", "th"]
    vocab = {piece: rank for rank, piece in enumerate(pieces)}
    merges = [("▁", "▁"), ("a", "a"), ("t", "h"), ("th", "e")]
    library = Library(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return library


SOUND = {
    "plain": (byte_level(), 8),
    "composed": (byte_level(normalizers.NFC()), 8 * _NFC_SHRINKS),
    "digits": (byte_level(None, [pre_tokenizers.Digits(individual_digits=True)]), 8),
    "isolated": (byte_level(None, [pre_tokenizers.Split(Regex(r"\s+"), "isolated")]), 8),
    "fallback": (byte_fallback(), 6),
}


@pytest.mark.parametrize("name", SOUND)
@patient
@given(text=TEXTS)
def test_a_text_has_no_fewer_tokens(name, text):
    library, most = SOUND[name]
    assert longest(library) == most
    tokens = library.encode(text, add_special_tokens=False).ids
    assert len(tokens) >= -(-len(text.encode()) // most)


def _unsound() -> dict[str, Library]:
    stripping = byte_level()
    stripping.add_special_tokens([AddedToken("<|x|>", rstrip=True)])
    some_bytes = Library(models.BPE({"a": 0, "b": 1}, []))
    some_bytes.pre_tokenizer = pre_tokenizers.ByteLevel()
    words = Library(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return {
        "a token takes the spaces behind it": stripping,
        "most bytes are no token": some_bytes,
        "a word is a token": words,
        "spaces are taken away": byte_level(normalizers.Strip()),
        "accents are taken away": byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
        "a pattern is taken away": byte_level(normalizers.Replace(Regex(" +"), " ")),
        "a text is made shorter": byte_level(normalizers.Replace("aa", "a")),
        "forms are replaced": byte_level(normalizers.NFKC()),
        "what splits is taken away": byte_level(None, [pre_tokenizers.Split(" ", "removed")]),
        "words are split at spaces": byte_level(None, [pre_tokenizers.WhitespaceSplit()]),
    }


@pytest.mark.parametrize("name", _unsound())
def test_where_it_is_not_certain_there_is_no_bound(name):
    assert longest(_unsound()[name]) is None


def test_composing_makes_nothing_shorter_than_we_think():
    """NFC shrinks no character by more than the assumed factor from its longest form (longest form of each part)."""
    spelt: dict[str, int] = {}
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    for character in characters:
        apart = unicodedata.normalize("NFD", character)
        if len(apart) == 1:
            spelt[apart] = max(spelt.get(apart, 0), len(character.encode()))
    for character in characters:
        longest_form = sum(spelt[part] for part in unicodedata.normalize("NFD", character))
        assert len(character.encode()) <= longest_form, hex(ord(character))
        if unicodedata.is_normalized("NFC", character):
            assert longest_form <= _NFC_SHRINKS * len(character.encode()), hex(ord(character))


@patient
@given(TEXTS)
def test_bytes_are_counted(text):
    assert utf8_length(text) == len(text.encode())
    assert utf8_length(text * 5000) == 5000 * len(text.encode())


@patient
@given(TEXTS, st.integers(2, 40))
def test_what_is_refused_by_its_length_would_be_refused_by_its_tokens(text, context):
    tokenizer = Tokenizer(LibraryBackend(byte_level(normalizers.NFC())), SpecialIds())
    intake = Intake(tokenizer, 300, context, SamplingLimits())
    if len(tokenizer.encode(text)) < context:
        intake.check_text("prompt", text)
    elif len(text.encode()) > 8 * _NFC_SHRINKS * context:
        with pytest.raises(RequestError, match="characters, which are at least"):
            intake.check_text("prompt", text)
