"""Small tokenizers of each kind, built with the tokenizers library, so that the tests run without test data."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 4,
    "한국어 문장은 여러 토큰으로 나뉩니다. 안녕하세요, 세계!",
    "Grüße aus München: naïve café, 你好世界, emoji 🙂👍🏽👩‍👩‍👧 and more 🙂🙂.",
    "def add(a, b):\n    return a + b\n",
]
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> Library:
    """Return a tokenizer like GPT-2's, with few merges, so that characters of several bytes span several tokens."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    # Outside the byte table, so it is encoded as its own UTF-8.
    library.add_tokens([AddedToken("<｜tool▁call｜>", special=False)])
    return library


def byte_fallback() -> Library:
    """Return a tokenizer like Llama 2's: a leading space mark, byte fallback, and <s> added."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlorstw", "he", "▁t", "▁the", "▁▁"]
    vocab = {piece: rank for rank, piece in enumerate(pieces)}
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he"), ("▁", "▁")]
    library = Library(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.add_special_tokens(SPECIAL)
    return library


def metaspace() -> Library:
    vocab = [
        ("<unk>", 0.0),
        ("▁", -1.0),
        ("▁a", -1.5),
        ("a", -2.0),
        ("b", -2.0),
        ("▁b", -1.5),
        ("▁▁", -3.0),
        ("é", -2.0),
    ]
    library = Library(models.Unigram(vocab, 0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    return library


def word_piece() -> Library:
    vocab = {"[UNK]": 0, "a": 1, "##b": 2, "é": 3, ".": 4, "##c": 5, "n't": 6, "do": 7}
    library = Library(models.WordPiece(vocab, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return library


def spaced() -> Library:
    library = Library(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "세": 3}, "[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return library


MAKERS: dict[str, Callable[[], Library]] = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "metaspace": metaspace,
    "word-piece": word_piece,
    "spaced": spaced,
}


def write_folder(folder: pathlib.Path, library: Library | None = None, **files: object) -> pathlib.Path:
    """Write a checkpoint folder with ``library`` as tokenizer.json and each of ``files`` (without suffix) as JSON."""
    folder.mkdir(exist_ok=True)
    if library is not None:
        library.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
