"""Tests of loading, encoding and decoding, against the libraries and against published pairs of text and ids."""

import json
import pathlib
import random
import time

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, processors
from tokenizers import Tokenizer as Library

from jaxinfer.text import Tokenizer, TokenizerError, files, spm, tokenizer
from jaxinfer.text.pieces import library_rule
from jaxinfer.text.tokenizer import LibraryBackend
from tests.text.build import CORPUS, byte_fallback, byte_level, metaspace, write_folder

SAMPLES = (*CORPUS, "", " ", "  two  spaces ", "a\tb\n\nc", "\u0000\u007f", "ﷺ\u200d🏳️‍🌈")


# --------------------------------------------------------------------------------------------------------------
# Encoding and decoding


def test_encode_is_the_librarys(pair: tuple[Tokenizer, Library]) -> None:
    ours, library = pair
    for text in SAMPLES:
        for special in (True, False):
            assert ours.encode(text, special) == library.encode(text, add_special_tokens=special).ids


def test_a_tokenizer_shows_itself_in_a_line(tmp_path: pathlib.Path) -> None:
    folder = write_folder(tmp_path, byte_level(), config={"eos_token_id": [7, 9]})
    assert repr(Tokenizer.load(folder)) == "<Tokenizer: 331 tokens, bos None, eos (7, 9), pad None>"


@pytest.mark.parametrize("name", ["gpt2", "llama-2", "llama-3"])
def test_published_encodings(test_data: pathlib.Path, name: str) -> None:
    ours = Tokenizer.load(test_data / "tokenizers" / name)
    lines = (test_data / "tokenizers" / "encoding_cases.jsonl").read_text(encoding="utf-8").splitlines()
    cases = [case for case in map(json.loads, lines) if case["tokenizer"] == name]
    assert len(cases) == 47
    for case in cases:
        assert ours.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert ours.decode(case["ids"]) == case["text"]


def test_long_text_is_not_truncated(test_data: pathlib.Path) -> None:
    ours = Tokenizer.load(test_data / "tokenizers" / "gpt2")  # its file has truncation to 50 tokens
    assert len(ours.encode(" the" * 200)) == 200


def test_stored_truncation_and_padding_are_switched_off(tmp_path: pathlib.Path) -> None:
    library = byte_level()
    library.enable_truncation(3)
    library.enable_padding(length=8)
    ours = Tokenizer.load(write_folder(tmp_path, library))
    assert len(ours.encode("xyzzy xyzzy")) > 8
    assert len(ours.encode("a")) == 1


@pytest.mark.parametrize("skip", [True, False])
def test_decode_is_the_librarys(pair: tuple[Tokenizer, Library], skip: bool) -> None:
    ours, library = pair

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.integers(0, ours.vocab_size - 1), max_size=12))
    def check(ids: list[int]) -> None:
        if not _mixes_valid_and_bad_bytes(ours, ids, skip):
            assert ours.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)

    check()


def _mixes_valid_and_bad_bytes(ours: Tokenizer, ids: list[int], skip: bool) -> bool:
    """Return whether a run of byte tokens has good and bad bytes; the library replaces all, jaxinfer the bad ones."""
    if ours.rule.errors == "replace":
        return False
    runs, run = [], b""
    for token in [*map(ours.id_to_token, ours.visible(ids, skip)), ""]:
        if token and token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
        elif run:
            runs, run = [*runs, run], b""
    texts = [run.decode(errors="surrogateescape") for run in runs]
    return any(0 < sum("\udc80" <= character <= "\udcff" for character in text) < len(text) for text in texts)


def test_valid_characters_beside_bad_bytes_are_kept(tmp_path: pathlib.Path) -> None:
    ours = Tokenizer.load(write_folder(tmp_path, byte_fallback()))
    ids = [ours.token_to_id(f"<0x{byte:02X}>") for byte in (*"é".encode(), 0xFF, 0xE2, 0x82)]
    assert ours.decode(ids) == "é\ufffd\ufffd\ufffd"


@pytest.mark.parametrize("ids", [[-1], [10**9], [2**70]])
def test_unknown_ids_stand_for_nothing(pair: tuple[Tokenizer, Library], ids: list[int]) -> None:
    ours, _ = pair
    assert ours.decode(ids) == ""
    assert ours.token_bytes(ids[0]) == b""
    assert ours.id_to_token(ids[0]) is None


def test_token_bytes_make_up_the_text(pair: tuple[Tokenizer, Library]) -> None:
    ours, _ = pair
    ids = ours.encode("the lazy 한국어 🙂", add_special_tokens=False)
    joined = b"".join(map(ours.token_bytes, ids)).decode(errors="replace")
    assert joined.lstrip() == ours.decode(ids, skip_special_tokens=False).lstrip()


def test_lone_surrogate_is_refused(pair: tuple[Tokenizer, Library]) -> None:
    with pytest.raises(TokenizerError, match="lone surrogate at character 2"):
        pair[0].encode("ab\ud800")


def test_text_that_the_vocabulary_cannot_spell_is_refused() -> None:
    ours = Tokenizer(LibraryBackend(Library(models.WordLevel({"one": 0}, "[UNK]"))))
    assert ours.encode("one") == [0]
    with pytest.raises(TokenizerError, match=r"has no tokens for this text: .*UNK"):
        ours.encode("two")


# --------------------------------------------------------------------------------------------------------------
# Special tokens


def load(folder: pathlib.Path, library: Library | None = None, **configs: object) -> Tokenizer:
    return Tokenizer.load(write_folder(folder, library, **configs))


def test_the_models_and_the_tokenizers_ends_end_a_generation(tmp_path: pathlib.Path) -> None:
    names = {"eos_token": "</s>", "bos_token": {"content": "<s>"}}
    assert load(tmp_path, byte_level()).eos_ids == ()
    assert load(tmp_path, tokenizer_config=names).eos_ids == (2,)
    assert load(tmp_path, config={"eos_token_id": 7, "bos_token_id": 9}).eos_ids == (7, 2)
    ours = load(tmp_path, generation_config={"eos_token_id": [5, 2, 5, -1], "pad_token_id": 4})
    assert (ours.eos_ids, ours.bos_id, ours.pad_id) == ((5, 2), 1, 4)


@pytest.mark.parametrize("said", [5.0, "5", [5.0], ["5", 5]])
def test_ids_of_another_type(said: object, tmp_path: pathlib.Path) -> None:
    assert load(tmp_path, byte_level(), generation_config={"eos_token_id": said}).eos_ids == (5,)


def test_special_tokens_map_counts_more_than_the_config(tmp_path: pathlib.Path) -> None:
    config = {"bos_token": "<s>", "eos_token": None}
    tokens = {"bos_token": "</s>", "eos_token": {"content": "</s>"}, "pad_token": "new"}
    files = {"tokenizer_config": config, "special_tokens_map": tokens, "config": {"pad_token_id": -1}}
    ours = load(tmp_path, byte_level(), **files)
    assert (ours.bos_id, ours.eos_ids, ours.pad_id) == (2, (2,), 331)
    ours = load(tmp_path, tokenizer_config={**config, "added_tokens_decoder": {}})
    assert (ours.bos_id, ours.eos_ids, ours.pad_id) == (1, (), None)


def test_a_new_end_ends_a_generation(tmp_path: pathlib.Path) -> None:
    ours = load(tmp_path, byte_level(), tokenizer_config={"eos_token": "<|im_end|>"}, config={"eos_token_id": 2})
    assert ours.eos_ids == (2, 331)
    assert ours.encode("<|im_end|>") == [331]
    assert ours.decode([331]) == ""


def test_a_named_token_is_special_even_if_the_file_does_not_say_so(tmp_path: pathlib.Path) -> None:
    library = metaspace()
    ours = load(tmp_path, library, tokenizer_config={"eos_token": "é"})
    assert ours.special_ids == {ours.token_to_id("é")}
    assert ours.encode("aéa", add_special_tokens=False).count(ours.token_to_id("é")) == 1
    assert ours.decode(ours.encode("aéb")) == "a b"


def test_some_special_tokens_can_be_shown(tmp_path: pathlib.Path) -> None:
    ours = load(tmp_path, byte_level(), tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"})
    ids = ours.encode("<s>a</s>b", add_special_tokens=False)
    assert ours.showing(["</s>", "not there", "a"]).decode(ids) == "a</s>b"
    assert ours.decode(ids) == "ab"
    assert ours.showing(["a"]) is ours


def test_special_tokens_are_found_within_a_text(tmp_path: pathlib.Path) -> None:
    library = byte_fallback()
    library.add_tokens([AddedToken("</s>", special=True, normalized=True)])
    ours = load(tmp_path, library)
    assert ours.encode("he</s><s>the</s>", add_special_tokens=False) == [
        *he_of(ours),
        2,
        1,
        ours.token_to_id("▁the"),
        2,
    ]


def he_of(ours: Tokenizer) -> list[int | None]:
    return [ours.token_to_id("▁"), ours.token_to_id("he")]


def test_tokenizer_config_redefines_added_tokens(tmp_path: pathlib.Path) -> None:
    entries = {"2": {"content": "</s>", "rstrip": True, "special": False}, "999": {"content": "new", "special": True}}
    ours = load(tmp_path, byte_level(), tokenizer_config={"added_tokens_decoder": entries})
    x = ours.encode("x")
    assert ours.encode("</s>   x") == [2, *x]
    assert ours.special_ids == {0, 1, 2, 331}, "a special token stays one; a new one has the next id"
    assert ours.token_to_id("new") == 331


def test_bos_comes_from_the_post_processor_alone(tmp_path: pathlib.Path) -> None:
    for flag in (True, False, None):
        config = {"bos_token": "<s>"} | ({} if flag is None else {"add_bos_token": flag})
        ours = load(tmp_path, byte_fallback(), tokenizer_config=config)
        assert ours.encode("he") == [1, *ours.encode("he", add_special_tokens=False)]
    library = byte_level()
    for library.post_processor in (processors.ByteLevel(), None):
        config = {"bos_token": "<s>", "add_bos_token": True}
        assert load(tmp_path, library, tokenizer_config=config).encode("x")[0] != 1


def test_the_published_model_names_two_ends(test_data: pathlib.Path) -> None:
    ours = Tokenizer.load(test_data / "models/stories260K/hf")
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size, ours.special_ids) == (1, (1, 2), 512, {0, 1, 2})


# --------------------------------------------------------------------------------------------------------------
# tokenizer.model


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_prefix=str(folder / "m"),
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        character_coverage=0.98,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    (folder / "m.model").rename(folder / "tokenizer.model")
    return folder / "tokenizer.model"


def sentencepiece_folder(model_file: pathlib.Path, folder: pathlib.Path, **configs: object) -> pathlib.Path:
    write_folder(folder, **configs)
    (folder / "tokenizer.model").write_bytes(model_file.read_bytes())
    return folder


def test_sentencepiece_model(model_file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    ours = Tokenizer.load(sentencepiece_folder(model_file, tmp_path))
    model = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids, ours.special_ids) == (340, 1, (2,), {0, 1, 2})
    for text in SAMPLES:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == model.encode(text)
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids) == model.decode(ids) == text


def test_sentencepiece_special_tokens_are_found_in_a_text(model_file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = {"add_bos_token": False, "pad_token": "<|end|>"}
    added = {"<s>": 1, "<|end|>": 340, "<tool>": 341}
    folder = sentencepiece_folder(model_file, tmp_path, tokenizer_config=config, added_tokens=added)
    ours = Tokenizer.load(folder)
    the = ours.encode("the")
    assert ours.encode("<s>the<tool>the<|end|>") == [1, *the, 341, *the, 340]
    assert (ours.vocab_size, ours.special_ids) == (342, {0, 1, 2, 340})
    assert [ours.id_to_token(i) for i in (1, 340, 341, 342)] == ["<s>", "<|end|>", "<tool>", None]
    assert [ours.token_to_id(t) for t in ("<s>", "<tool>", "nothing")] == [1, 341, None]
    assert ours.decode([1, *the, 341, *the, 340]) == "the<tool> the"


@pytest.mark.parametrize(
    ("config", "first", "second"),
    [({"legacy": True}, True, True), ({}, True, False), ({"add_prefix_space": False}, False, False)],
)
def test_where_a_sentencepiece_model_has_a_space_in_front(
    model_file: pathlib.Path, tmp_path: pathlib.Path, config: dict[str, object], first: bool, second: bool
) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", "eos_token": "<new>", **config}
    ours = Tokenizer.load(sentencepiece_folder(model_file, tmp_path, tokenizer_config=config))
    ids = ours.encode("fox<s>fox<new>", add_special_tokens=False)
    at = ids.index(1)
    assert ids[-1] == 340
    assert [ours.id_to_token(part[0])[:1] == "▁" for part in (ids, ids[at + 1 :])] == [first, second]
    assert ours.decode(ids) == ("fox fox" if second else "foxfox")


def test_sentencepiece_and_json_of_one_model_agree(test_data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = test_data / "models/stories260K/hf"
    from_json = Tokenizer.load(folder)
    from_model = Tokenizer.load(sentencepiece_folder(folder / "tokenizer.model", tmp_path))
    for text in ("Once upon a time, there was a little girl named Lily.", "안녕 🙂 é"):
        assert from_model.encode(text) == from_json.encode(text)
        assert from_model.decode(from_json.encode(text)) == text


# --------------------------------------------------------------------------------------------------------------
# Rejections


# The tokenizers library aborts the process where the prefix ends within a character of the second token.
PREFIXED = """{"model": {"type": "BPE", "vocab": {"b": 0, "é": 1}, "merges": ["b é"], "continuing_subword_prefix":
    "PREFIX"}}"""


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has none of tokenizer.json, tokenizer.model, tiktoken.model"),
        ({"tokenizer.json": "{"}, "is not a tokenizer that the tokenizers library reads"),
        ({"tokenizer.json": '{"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}'}, "tokenizers library reads"),
        ({"tokenizer.json": PREFIXED.replace("PREFIX", "x")}, "merges has 'é', which does not begin"),
        ({"tokenizer.json": PREFIXED.replace("PREFIX", "\\u0078")}, "merges has 'é', which does not begin"),
        ({"tokenizer.json": PREFIXED.replace("prefix", "pref\\u0069x")}, "merges has 'é', which does not begin"),
        ({"tokenizer.json": b"\xff"}, "not UTF-8"),
        ({"tokenizer.model": "nonsense"}, "not a sentencepiece model"),
        ({"tokenizer_config.json": "[1]"}, "must hold a JSON object"),
        ({"tokenizer_config.json": "{]"}, "not valid JSON"),
        ({"tokenizer_config.json": "[" * 100_000}, "not valid JSON"),
        (
            {"tokenizer_config.json": '{"added_tokens_decoder": {"x": {"content": "y"}}}'},
            "entry 'x' of added_tokens_decoder in",
        ),
        ({"tokenizer_config.json": '{"added_tokens_decoder": [1]}'}, r"added_tokens_decoder in .* not \[1\]"),
        ({"generation_config.json": '{"eos_token_id": "two"}'}, "eos_token_id in .* must be a token id"),
        ({"config.json": '{"bos_token_id": true}'}, r"bos_token_id in .*config\.json must be a token id"),
        ({"generation_config.json": '{"eos_token_id": [2, 2.5]}'}, r"generation_config\.json must be .*2\.5"),
        ({"generation_config.json": '{"pad_token_id": 4294967296}'}, r"pad_token_id in .* must be .*4294967296"),
        ({"generation_config.json": '{"eos_token_id": NaN}'}, "eos_token_id in .* must be a token id"),
    ],
)
def test_bad_folders(tmp_path: pathlib.Path, files: dict[str, str | bytes], said: str) -> None:
    if any(name.endswith("config.json") for name in files):
        write_folder(tmp_path, byte_level())
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(TokenizerError, match=said) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("added", [{"<x>": "1"}, {"<x>": -1}])
def test_bad_added_tokens(model_file: pathlib.Path, tmp_path: pathlib.Path, added: object) -> None:
    with pytest.raises(TokenizerError, match="must map texts to token ids"):
        Tokenizer.load(sentencepiece_folder(model_file, tmp_path, added_tokens=added))


def test_sizes_are_bounded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, byte_level(), config={"filler": "x" * 100})
    (tmp_path / "tokenizer.model").write_bytes(bytes(101))
    for module, limit in ((files, "MAX_JSON_BYTES"), (tokenizer, "MAX_TOKENIZER_BYTES"), (spm, "MAX_MODEL_BYTES")):
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, 100)
            if module is spm:
                (tmp_path / "tokenizer.json").unlink()
            with pytest.raises(TokenizerError, match="larger than the 100 bytes"):
                Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Metaspace(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ],
)
def test_decoders_that_are_no_concatenation_are_refused(decoder: object) -> None:
    library = Library(models.BPE())
    library.decoder = decoder
    with pytest.raises(TokenizerError, match="not supported"):
        library_rule(library)


# --------------------------------------------------------------------------------------------------------------
# Timing side channel of earlier texts


def merging() -> LibraryBackend:
    """Return a tokenizer in which all pairs of letters are tokens, and a text is one word."""
    letters = [chr(ord("a") + k) for k in range(26)]
    merges = [(a, b) for a in letters for b in letters]
    vocab = {token: k for k, token in enumerate([*letters, *(a + b for a, b in merges)])}
    library = Library(models.BPE(vocab, merges))
    library.decoder = decoders.Fuse()
    return LibraryBackend(library)


def seconds(ours: Tokenizer, texts: list[str]) -> float:
    begun = time.process_time()
    for text in texts:
        ours.encode(text)
    return time.process_time() - begun


@pytest.mark.parametrize("forgets", [False, True])
def test_a_text_that_came_before_takes_as_long_as_a_new_one(forgets: bool) -> None:
    """The library's word cache halves the encoding time of earlier texts, which shows unless `forget` is called."""
    chance, ours = random.Random(0), Tokenizer(merging())
    if forgets:
        ours.forget()

    def texts() -> list[str]:
        return ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=250)) for _ in range(100)]

    def shows() -> bool:
        rounds = [(seconds(ours, known), seconds(ours, texts())) for _ in range(15)]
        again, new = (min(each) for each in zip(*rounds, strict=True))
        return again <= 0.8 * new

    known = texts()
    assert ours.decode(ours.encode(known[0])) == known[0]
    seconds(ours, known)
    assert any(shows() != forgets for _ in range(5))  # on a busy machine not every time


def test_tokens_that_were_met_before_are_looked_up_as_new_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, asked = Tokenizer(merging()), []
    ours.forget()
    monkeypatch.setattr(ours, "id_to_token", lambda token: asked.append(token))
    assert b"".join(map(ours.token_bytes, range(ours.vocab_size))).startswith(b"abcdef")
    assert not asked


@pytest.mark.parametrize("model", [models.WordLevel({"one": 0}, "one"), models.Unigram([("one", 0.0)], 0)])
def test_every_kind_of_model_can_forget(model: object) -> None:
    library = Library(model)
    library.decoder = decoders.Fuse()
    ours = Tokenizer(LibraryBackend(library))
    ours.forget()
    assert ours.encode("one") == [0]
