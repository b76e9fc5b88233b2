"""Tests of tokenizers and chat templates in GGUF files: the ids equal those of the original tokenizer.json."""

import json
import pathlib
import struct
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.text import TemplateError, Tokenizer, TokenizerError, load_template, load_tokenizer
from jaxinfer.text.gguf import MAX_PIECE, gguf_chat_template, gguf_text_files, gguf_tokenizer
from jaxinfer.text.gguf_pre import PRE_TOKENIZERS
from jaxinfer.weights.gguf.tensors import GgufFile
from tests.text.build import CORPUS, byte_level, write_folder
from tests.text.gguf_metadata import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, metadata_of
from tests.weights.gguf.files import TINY, tiny_tensors, write_gguf

PATH = pathlib.Path("model.gguf")
TEXTS = [*CORPUS, "", " ", "  two  spaces ", "\n\n\tx\r\n", "it's 1234567 o'clock", "<s>a</s>b", "\x00é\u0301ﬁ"]


def texts(data: pathlib.Path) -> list[str]:
    stories = (data / "text" / "tinystories" / "tinystories_100.json").read_text(encoding="utf-8")[:40_000]
    lines = (data / "tokenizers" / "encoding_cases.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        *TEXTS,
        *(stories[at : at + 200] for at in range(0, len(stories), 200)),
        *(json.loads(x)["text"] for x in lines),
    ]


# --------------------------------------------------------------------------------------------------------------
# Identical ids


def test_the_file_of_a_published_model(test_data: pathlib.Path) -> None:
    file = GgufFile(test_data / "models" / "quantised" / "gguf-B-Q8_0" / "model.gguf")
    ours = gguf_tokenizer(file.path, file.metadata)
    base = Tokenizer.load(test_data / "models" / "stories260K" / "hf")
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (1, (2,), 512)
    assert ours.special_ids == base.special_ids
    for text in texts(test_data):
        ids = base.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == base.decode(ids), text


@pytest.mark.parametrize(("name", "pre"), [("gpt2", "gpt-2"), ("llama-2", None), ("llama-3", "llama-bpe")])
def test_published_tokenizers(test_data: pathlib.Path, name: str, pre: str | None) -> None:
    folder = test_data / "tokenizers" / name
    ours, base = gguf_tokenizer(PATH, metadata_of(folder / "tokenizer.json", pre)), Tokenizer.load(folder)
    lines = (test_data / "tokenizers" / "encoding_cases.jsonl").read_text(encoding="utf-8").splitlines()
    cases = [case for case in map(json.loads, lines) if case["tokenizer"] == name]
    assert len(cases) > 40
    for case in cases:
        assert ours.encode(case["text"]) == case["ids"], case["text"]
    for text in texts(test_data):
        ids = base.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == base.decode(ids), text


def test_built_byte_pairs(tmp_path: pathlib.Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    ours = gguf_tokenizer(PATH, metadata_of(folder / "tokenizer.json", "gpt-2"))
    base = Tokenizer.load(folder)
    for text in TEXTS:
        assert ours.encode(text) == base.encode(text, add_special_tokens=False), text
        assert ours.decode(base.encode(text)) == base.decode(base.encode(text)), text


# --------------------------------------------------------------------------------------------------------------
# Pieces with scores

PIECES = ["<unk>", "<s>", "</s>", "<0x61>", "▁", "a", "b", "ab", "▁a", "aa", "<|user|>"]


def pieces(**changes: Any) -> dict[str, Any]:
    types = [UNKNOWN, CONTROL, CONTROL, BYTE, *[NORMAL] * 6, USER_DEFINED]
    made: dict[str, Any] = {
        "model": "llama",
        "tokens": PIECES,
        "token_type": types,
        "scores": [0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, 0.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in made.items() if value is not None}


def tokens(text: str, **changes: Any) -> list[str]:
    tokenizer = gguf_tokenizer(PATH, pieces(**changes))
    return [tokenizer.id_to_token(token_id) or "" for token_id in tokenizer.encode(text)]


def test_the_best_score_is_joined_first() -> None:
    assert tokens("ab") == ["<s>", "▁a", "b"]
    worse = [0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, 0.0]
    assert tokens("ab", scores=worse) == ["<s>", "▁", "ab"]


def test_what_stands_around_a_text() -> None:
    assert tokens("a", add_bos_token=False) == ["▁a"]
    assert tokens("a", add_eos_token=True) == ["<s>", "▁a", "</s>"]
    assert tokens("a", add_space_prefix=False) == ["<s>", "a"]
    assert tokens("a", bos_token_id=None) == ["▁a"]


def test_tokens_within_a_text() -> None:
    assert tokens("<|user|>b", add_space_prefix=False) == ["<s>", "<|user|>", "b"]
    tokenizer = gguf_tokenizer(PATH, pieces())
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([1, 10, 8, 6, 2]) == "<|user|> ab"
    assert tokenizer.decode([8, 6]) == "ab"


def test_marks_in_tokens_within_a_text() -> None:
    """Tokens in older files contain the space mark where the text has a space."""
    spaces = pieces(tokens=[*PIECES[:-1], "▁▁"], add_space_prefix=False, add_bos_token=False)
    tokenizer = gguf_tokenizer(PATH, spaces)
    assert tokenizer.encode("a  b") == [5, 10, 6]
    assert tokenizer.decode([5, 10, 6]) == "a  b"


def test_blanks_behind_the_special_tokens_of_phi3() -> None:
    changes = {"tokens": [*PIECES[:-1], "<|end|>"], "token_type": [2, 3, 3, 6, *[1] * 6, CONTROL]}
    metadata = pieces(**changes, add_space_prefix=False, add_bos_token=False)
    text = "<|end|> \n<s> a"
    assert gguf_tokenizer(PATH, metadata).encode(text)[:2] == [10, 4]
    phi3 = gguf_tokenizer(PATH, {**metadata, "general.architecture": "phi3"})
    assert phi3.encode(text) == [10, 1, 8]


def test_pieces_that_merges_put_together() -> None:
    """Gemma 4's files have merges: spaces are marks, and unknown text is encoded as bytes."""
    made: dict[str, Any] = {"model": "gemma4", "scores": None, "merges": ["a b", "▁ a"]}
    assert tokens("ab a", **made) == ["<s>", "ab", "▁a"]
    assert tokens(" ab", **made) == ["<s>", "▁", "ab"]
    assert tokens(" ab", **{**made, "merges": ["▁ a", "a b"]}) == ["<s>", "▁a", "b"]
    assert tokens("<|user|>b", **made) == ["<s>", "<|user|>", "b"]
    known = ["<unk>", "<s>", "</s>", "<0xC3>", *PIECES[4:-2], "<0xA9>", "<turn|>"]
    tokenizer = gguf_tokenizer(PATH, pieces(**made, tokens=known))
    assert tokenizer.encode("é a") == [1, 3, 9, 8]
    assert tokenizer.decode([3, 9, 8]) == "é a"
    assert tokenizer.eos_ids == (2, 10)


def test_every_end_of_a_turn() -> None:
    named = gguf_tokenizer(PATH, pieces(eot_token_id=10, eom_token_id=0))
    assert named.eos_ids == (2, 10, 0)
    known = gguf_tokenizer(PATH, pieces(tokens=[*PIECES[:-1], "<|im_end|>"]))
    assert known.eos_ids == (2, 10)


def test_messages_of_harmony_do_not_end_a_turn() -> None:
    types = [*[NORMAL] * 8, *[CONTROL] * 3]
    harmony = [*PIECES[:-3], "<|return|>", "<|call|>", "<|end|>"]
    named = pieces(tokens=harmony, token_type=types, eos_token_id=8, eot_token_id=10)
    assert gguf_tokenizer(PATH, named).eos_ids == (8, 9, 2)
    other = pieces(tokens=[*PIECES[:-3], "<|return|>", "x", "<|end|>"], token_type=types, eos_token_id=8)
    assert gguf_tokenizer(PATH, other).eos_ids == (8, 10, 2)


def ends(*texts: str, **changes: Any) -> list[str]:
    """Return the EOS tokens of a file without explicit ones that has these tokens, of the normal type."""
    metadata = pieces(**{"tokens": [*PIECES, *texts], "eos_token_id": None} | changes)
    metadata["tokenizer.ggml.token_type"] += [NORMAL] * len(texts)
    metadata["tokenizer.ggml.scores"] += [-9.0] * len(texts)
    tokenizer = gguf_tokenizer(PATH, metadata)
    assert tokenizer.special_ids >= set(tokenizer.eos_ids)
    return [tokenizer.id_to_token(token_id) or "" for token_id in tokenizer.eos_ids]


def test_ends_that_llama_cpp_knows_by_name() -> None:
    """EOS tokens are recognised by name, of any type, as in `llama_vocab::impl::load` of llama.cpp."""
    known = ["<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]"]
    known += ["[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|end|>", "<|flush|>"]
    for text in known:
        assert sorted(ends(text)) == sorted(["</s>", text])
    assert ends("<|user|>", "<bos>", "<|turn>", "<pad>") == ["</s>"]
    assert "</s>" not in ends("<|tool_response>", "<eos>", "<turn|>")
    assert "<|end|>" not in ends("<|calls|>", "<|flush|>", "<|end|>")


def test_ends_that_fill_the_middle_names() -> None:
    for texts in (("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"), ("<PAD>", "<REPO>"), ("[PAD]", "<reponame>")):
        assert sorted(ends(*texts)) == sorted(["</s>", *texts])
    assert ends("<|fim_pad|>", "<PAD>") == ["</s>", "<|fim_pad|>"]
    assert ends("<|fim_pad|>", fim_pad_token_id=5, fim_rep_token_id=6, fim_sep_token_id=7) == ["a", "b", "ab", "</s>"]


# --------------------------------------------------------------------------------------------------------------
# Pieces with equal scores


def proto(number: int, content: bytes | int | float) -> bytes:
    """Return a field of a protobuf message."""
    if isinstance(content, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", content)
    kind, head = (2, len(content)) if isinstance(content, bytes) else (0, content)
    key, made = number << 3 | kind, b""
    for value in (key, head):
        while value > 0x7F:
            made, value = made + bytes([value & 0x7F | 0x80]), value >> 7
        made += bytes([value])
    return made + (content if isinstance(content, bytes) else b"")


def sentencepiece_of(metadata: dict[str, Any]) -> sentencepiece.SentencePieceProcessor:
    """Return the sentencepiece library's model of the same pieces."""
    columns = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    made = b"".join(
        proto(1, proto(1, text.encode()) + proto(2, score) + proto(3, kind))
        for text, score, kind in zip(*columns, strict=True)
    )
    trainer = proto(3, 2) + proto(35, 1)  # BPE with byte fallback
    normalizer = proto(1, b"identity") + proto(3, 1) + proto(4, 0) + proto(5, 1)
    return sentencepiece.SentencePieceProcessor(model_proto=made + proto(2, trainer) + proto(3, normalizer))


@given(st.lists(st.text("ab▁", min_size=2, max_size=4), unique=True, max_size=12), st.data())
def test_of_equal_scores_the_leftmost_comes_first(joined: list[str], data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.sampled_from([-1.0, -2.0, -1e9]), min_size=len(joined), max_size=len(joined)))
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (3 + len(joined))]
    listed = [*[0.0] * 259, -9.0, -9.0, -9.0, *scores]
    metadata = pieces(tokens=[*special, "▁", "a", "b", *joined], token_type=types, scores=listed, add_bos_token=False)
    ours, theirs = gguf_tokenizer(PATH, metadata), sentencepiece_of(metadata)
    for text in data.draw(st.lists(st.text("ab é", min_size=1, max_size=16), min_size=3, max_size=6)):
        assert ours.encode(text) == theirs.encode(text), text


def test_runs_of_one_score_that_make_a_difference() -> None:
    runs = {"tokens": [*PIECES[:-2], "aaa", "aaaa"], "add_bos_token": False, "add_space_prefix": False}
    equal = pieces(**runs, token_type=[2, 3, 3, 6, *[1] * 7], scores=[0.0] * 4 + [-9.0] * 5 + [-1.0] * 2)
    equal["tokenizer.ggml.scores"][7] = equal["tokenizer.ggml.scores"][9] = -1.0
    tokenizer = gguf_tokenizer(PATH, {**equal, "tokenizer.ggml.tokens": [*PIECES[:7], "aa", "▁a", "aaa", "aaaa"]})
    assert [tokenizer.id_to_token(token_id) for token_id in tokenizer.encode("aaaaa")] == ["aaaa", "a"]


def test_equal_scores_are_no_tokenizer_json() -> None:
    worse = [0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -1.0, -3.0, 0.0]
    with pytest.raises(TokenizerError, match="has pieces with equal scores"):
        gguf_text_files(PATH, pieces(scores=worse))


# --------------------------------------------------------------------------------------------------------------
# Pre-tokenizer rules


def test_marks_belong_to_the_letters_before_them() -> None:
    """Combining marks belong to the preceding letters in Qwen3.5, and not in Qwen2."""
    found = {rule: len(PRE_TOKENIZERS[rule].rule().pre_tokenize_str("e\u0301a \u0301")) for rule in ("qwen2", "qwen35")}
    assert found == {"qwen2": 3, "qwen35": 2}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("qwen35", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx", "!"]),
        ("gpt-2", ["It", "'s", "Ġ1234", "Ġ", "Ġx", "!"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", "Ġ", "Ġx", "!"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx", "!"]),
        ("falcon", ["It", "'", "s", "Ġ", "123", "4", "Ġ", "Ġx", "!"]),
        ("default", ["It", "'", "s", "Ġ", "123", "4", "Ġ", "Ġx", "!"]),
        ("deepseek-v3", ["It", "'s", "Ġ", "123", "4", "Ġ", "Ġx", "!"]),
        ("tekken", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx", "!"]),
    ],
)
def test_rules(rule: str, expected: list[str]) -> None:
    assert [part for part, _ in PRE_TOKENIZERS[rule].rule().pre_tokenize_str("It's 1234  x!")] == expected


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("gpt-4o", ["He", "LLo's", "Ġ", "123", "456", "7", "!Ċ/", "Ġx"]),
        ("seed-coder", ["HeLLo", "'s", "Ġ", "1", "2", "3", "4", "5", "6", "7", "!", "Ċ", "/", "Ġx"]),
        ("tiny_aya", ["He", "LLo's", "Ġ", "1", "234", "567", "!Ċ/", "Ġx"]),
        ("youtu", ["He", "LLo's", "Ġ", "1", "2", "3", "4", "5", "6", "7", "!Ċ/", "Ġx"]),
        ("glm4", ["HeLLo", "'s", "Ġ", "123", "456", "7", "!Ċ", "/", "Ġx"]),
        ("command-r", ["HeLLo", "'s", "Ġ", "1", "2", "3", "4", "5", "6", "7", "!", "Ċ", "/", "Ġx"]),
    ],
)
def test_rules_of_newer_models(rule: str, expected: list[str]) -> None:
    parts = PRE_TOKENIZERS[rule].rule().pre_tokenize_str("HeLLo's 1234567!\n/ x")
    assert [part for part, _ in parts] == expected


@pytest.mark.parametrize(("rule", "composed"), [("command-r", True), ("olmo", True), ("glm4", False)])
def test_composed_characters(rule: str, composed: bool) -> None:
    metadata = pieces(model="gpt2", pre=rule, merges=["a b"], scores=None, tokens=[*PIECES[:-2], "\u00c3", "\u00a9"])
    ids = gguf_tokenizer(PATH, {**metadata, "tokenizer.ggml.token_type": [NORMAL] * 11}).encode("e\u0301")
    assert (ids == [9, 10]) is composed


@pytest.mark.parametrize("rule", sorted(PRE_TOKENIZERS))
def test_every_rule_loses_nothing(rule: str) -> None:
    for text in TEXTS:
        parts = PRE_TOKENIZERS[rule].rule().pre_tokenize_str(text)
        whole = PRE_TOKENIZERS["gpt-2"].rule().pre_tokenize_str(text)
        assert "".join(part for part, _ in parts) == "".join(part for part, _ in whole)


# --------------------------------------------------------------------------------------------------------------
# Rejections


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "'t5', which is not supported"),
        ({"model": None}, "None, which is not supported"),
        ({"tokens": None}, "no list of str as tokenizer.ggml.tokens"),
        ({"tokens": []}, "0 tokens"),
        ({"tokens": [1, 2]}, "no list of str"),
        ({"token_type": [1]}, "11 tokens but 1 types"),
        ({"scores": None}, "no list of float as tokenizer.ggml.scores"),
        ({"scores": [0.0]}, "11 tokens but 1 scores"),
        ({"bos_token_id": 11}, "'11' as bos_token_id, which is none of its tokens"),
        ({"eos_token_id": -1}, "'-1' as eos_token_id"),
        ({"eot_token_id": "2"}, "'2' as eot_token_id"),
        ({"tokens": [*PIECES[:-2], "a" * (MAX_PIECE + 1), "c"]}, "a piece of 257 characters"),
    ],
)
def test_bad_vocabularies(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        gguf_tokenizer(PATH, pieces(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "grok-9"}, "'grok-9', which is not supported .known: .*llama-bpe"),
        ({"merges": None}, "no list of str as tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "'ab' as a merge"),
        ({"merges": ["a "]}, "'a ' as a merge"),
        ({"merges": ["a z"]}, "a vocabulary that is none"),
    ],
)
def test_bad_merges(changes: dict[str, Any], message: str) -> None:
    metadata = pieces(**{"model": "gpt2", "pre": "gpt-2", "merges": ["a b"], "scores": None} | changes)
    with pytest.raises(TokenizerError, match=message):
        gguf_tokenizer(PATH, metadata)


def test_templates() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    made = gguf_chat_template(PATH, {**pieces(), "tokenizer.chat_template": template})
    assert made is not None
    messages = [{"role": "user", "content": "Hi"}]
    assert made.render(messages) == "<s>Hi</s>"
    named = {"tokenizer.chat_template.tool_use": "tools!", "tokenizer.chat_templates": ["tool_use"]}
    both = gguf_chat_template(PATH, {**pieces(), "tokenizer.chat_template": template, **named})
    assert both is not None
    assert both.render(messages, tools=[{}]) == "tools!"
    assert gguf_chat_template(PATH, pieces()) is None


@pytest.mark.parametrize("template", [3, ["x"], "{{ oops", "x" * (1 << 21)])
def test_bad_templates(template: object) -> None:
    with pytest.raises(TemplateError):
        gguf_chat_template(PATH, {**pieces(), "tokenizer.chat_template": template})


# --------------------------------------------------------------------------------------------------------------
# Files


def test_a_file_as_a_folder(tmp_path: pathlib.Path) -> None:
    metadata = {**TINY, "tokenizer.chat_template": "{{ bos_token }}!"}
    path = write_gguf(tmp_path / "model.gguf", metadata, tiny_tensors())
    assert load_tokenizer(path).encode("ab") == [1, 6, 5]
    template = load_template(path)
    assert template is not None
    assert template.render([]) == "<s>!"


def test_a_folder_as_before(tmp_path: pathlib.Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    assert load_tokenizer(folder).encode("ab") == Tokenizer.load(folder).encode("ab")
    assert load_template(folder) is None


def test_files_that_are_none(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML and more")
    with pytest.raises(TokenizerError, match="does not begin with GGUF"):
        load_tokenizer(path)
    with pytest.raises(TemplateError, match="does not begin with GGUF"):
        load_template(path)


@pytest.mark.parametrize("key", ["tokenizer.ggml.tokens", "tokenizer.ggml.scores"])
def test_texts_that_are_none(tmp_path: pathlib.Path, key: str) -> None:
    """Invalid UTF-8 is reported when the text is read."""
    path = write_gguf(tmp_path / "model.gguf", {**TINY, key: [b"\xff"], "tokenizer.chat_template": "x"}, tiny_tensors())
    with pytest.raises(TokenizerError, match="is not UTF-8 text"):
        load_tokenizer(path)
    if key.endswith("tokens"):
        with pytest.raises(TemplateError, match="is not UTF-8 text"):
            load_template(path)


def test_a_template_that_is_given_knows_the_files_tokens(tmp_path: pathlib.Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", TINY, tiny_tensors())
    template = load_template(path, "{{ bos_token }}{{ messages[0].content }}")
    assert template is not None
    assert template.render([{"role": "user", "content": "Hi"}]) == "<s>Hi"
