"""Small tokenizer folders for the tokenizer classes of transformers, with each configuration field varied."""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from jaxinfer.text import Tokenizer, TokenizerError
from jaxinfer.text.classes import declared_tokens, tokenizer_class
from tests.text.build import byte_fallback, byte_level

START, END, NEW, IMAGE = "<|im_start|>", "<|im_end|>", "<|new|>", "<image>"
TEXTS = (
    *("", " ", "Hello there", " a  b", "the lazy dog.\nThe  quick\n\n  brown", "it's 2026, I'LL say 12345 x 7"),
    *(f"<s>{START}user\nhi{END}\n{START}the", f"plain {END} the {NEW} text", f"a{IMAGE}b [PAD] c{NEW}{NEW}"),
    *("한국어 🙂 naïve cafe\u0301 ½", "<s>he</s> the<s> the", "a<|endoftext|>b <unk>c<｜tool▁call｜> d", "a\tb \r\n c"),
)


BEGINS_WITH_SPACE = re.compile(r"^ |> ")
"""Pattern of a text, or of a segment after a special token, that begins with a space."""
Answers = dict[str, Any]


def _pieces(pre: Any = None) -> Library:
    library = byte_fallback()
    if pre is not None:
        library.normalizer, library.pre_tokenizer = None, pre
    return library


def _gemma() -> Library:
    library = byte_fallback()
    library.normalizer = normalizers.Replace(" ", "▁")
    library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return library


def _with_bos() -> Library:
    library = byte_level()
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


def _more_added() -> Library:
    library = byte_level()
    library.add_tokens([AddedToken(START, special=False, normalized=False), AddedToken(END, special=True)])
    return library


def _metaspace(scheme: str) -> Library:
    return _pieces(pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False))


LIBRARIES: Mapping[str, Callable[[], Library]] = {
    "bytes": byte_level,
    "bos": _with_bos,
    "more": _more_added,
    "prepend": _pieces,
    "first": lambda: _metaspace("first"),
    "always": lambda: _metaspace("always"),
    "never": lambda: _metaspace("never"),
    "gemma": _gemma,
}
CLASSES = (
    *(("bytes", "llama", name) for name in ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", None)),
    *(("bytes", model_type, None) for model_type in ("gpt2", "qwen2", "qwen3", "cohere", "gpt_neox", "mistral", "phi")),
    *(("bytes", "qwen2", name) for name in ("Qwen2TokenizerFast", "LlamaTokenizerFast", "PreTrainedTokenizerFast")),
    *(("bytes", "llama", name) for name in ("Qwen2Tokenizer", "CohereTokenizerFast", "GPTNeoXTokenizer")),
    *(("bytes", "granite", "GPT2Tokenizer"), ("bytes", "qwen3_5", "Qwen3_5Tokenizer"), ("bytes", "gpt2", "Unknown")),
    *(("bos", "llama", name) for name in ("PreTrainedTokenizerFast", "GPTNeoXTokenizer", "GPT2TokenizerFast")),
    *(("more", "llama", name) for name in ("PreTrainedTokenizerFast", "Qwen2Tokenizer")),
    *((library, "llama", "LlamaTokenizer") for library in ("prepend", "first", "always", "never")),
    *(("prepend", model_type, "LlamaTokenizerFast") for model_type in ("mistral", "phi3", "gemma")),
    *(("prepend", "llama", name) for name in ("CodeLlamaTokenizer", "PreTrainedTokenizerFast", "GemmaTokenizer")),
    *(("gemma", "gemma2", "GemmaTokenizerFast"), ("gemma", "gemma3_text", None), ("gemma", "gemma4", "GemmaTokenizer")),
    *(
        ("bytes", "unheard_of", "PreTrainedTokenizerFast"),
        ("bytes", "falcon", None),
        ("bytes", "phi3", "LlamaTokenizer"),
    ),
)
"""Tuples of library, ``model_type`` and ``tokenizer_class``."""


def _token(content: str, **flags: Any) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False} | flags


def fields(library: Library) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each variation and its files by name (without suffix)."""
    size = library.get_vocab_size()
    own = {str(index): token.__getstate__() for index, token in library.get_added_tokens_decoder().items()}
    config: list[tuple[str, dict[str, Any]]] = [("nothing", {})]
    config += [(f"{name}={value}", {name: value}) for name in ("add_prefix_space", "legacy") for value in (True, False)]
    config += [("always", {"add_prefix_space": True, "legacy": True}), ("null", {"legacy": None})]
    config += [(f"{name}", {name: True}) for name in ("add_bos_token", "add_eos_token", "split_special_tokens")]
    config += [("clean", {"clean_up_tokenization_spaces": True}), ("named", {"eos_token": END, "pad_token": "[PAD]"})]
    config += [("objects", {"eos_token": {"__type": "AddedToken"} | _token(END, rstrip=True), "unk_token": "<unk>"})]
    config += [("additional", {"additional_special_tokens": [START, END]}), ("image", {"image_token": IMAGE})]
    config += [("extra", {"extra_special_tokens": [START, NEW]}), ("none", {"eos_token": None, "bos_token": None})]
    config += [("table", {"extra_special_tokens": {"image_token": IMAGE, "eot_token": END}})]
    config += [("both", {"additional_special_tokens": [START], "extra_special_tokens": [NEW], "bos_token": "<s>"})]
    decoder = own | {str(size + 1): _token(END, special=True), str(size): _token(START)}
    config += [("decoder", {"added_tokens_decoder": decoder})]
    config += [("decoder_eos", {"added_tokens_decoder": decoder, "eos_token": START})]
    strips = own | {str(size): _token(END, lstrip=True, special=True), str(size + 5): _token(NEW, rstrip=True)}
    config += [("strips", {"added_tokens_decoder": strips, "additional_special_tokens": [START]})]
    yield from ((name, {"tokenizer_config": fields}) for name, fields in config)
    added = {NEW: size + 1, END: size}
    tokens = {"eos_token": _token(END), "additional_special_tokens": [START, END], "image_token": IMAGE}
    yield "added", {"added_tokens": added}
    yield "added_eos", {"added_tokens": added, "tokenizer_config": {"eos_token": END}}
    yield "added_map", {"added_tokens": added, "special_tokens_map": tokens}
    yield "added_taken", {"added_tokens": {NEW: 1}}
    yield "map", {"special_tokens_map": tokens, "tokenizer_config": {"eos_token": NEW, "pad_token": NEW}}
    yield "map_both", {"special_tokens_map": tokens, "tokenizer_config": {"additional_special_tokens": [NEW]}}
    yield (
        "map_extra",
        {
            "special_tokens_map": {"extra_special_tokens": [START, NEW]},
            "tokenizer_config": {"extra_special_tokens": [NEW, IMAGE]},
        },
    )
    yield "map_ignored", {"special_tokens_map": tokens, "tokenizer_config": {"added_tokens_decoder": own}}


def write(folder: pathlib.Path, library: str, model_type: str, kind: str | None, files: Mapping[str, Any]) -> None:
    """Write a folder with a tokenizer.json, a config.json and ``files``."""
    folder.mkdir(parents=True)
    LIBRARIES[library]().save(str(folder / "tokenizer.json"))
    named = {} if kind is None else {"tokenizer_class": kind}
    files = {
        **files,
        "tokenizer_config": named | files.get("tokenizer_config", {}),
        "config": {"model_type": model_type},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def write_all(root: pathlib.Path) -> list[pathlib.Path]:
    """Write a folder for each class and variation, named by both."""
    folders: list[pathlib.Path] = []
    for library, model_type, kind in CLASSES:
        for name, files in fields(LIBRARIES[library]()):
            folders.append(root / f"{library}-{model_type}-{kind}" / name)
            write(folders[-1], library, model_type, kind, files)
    return folders


def answer(folder: pathlib.Path) -> Answers:
    """Return jaxinfer's results for the texts, with the fields of `tools.oracle.tokenizers`."""
    tokenizer = Tokenizer.load(folder)
    encoded = [tokenizer.encode(text) for text in TEXTS]
    return {
        "size": tokenizer.vocab_size,
        "named": declared_tokens(folder, tokenizer_class(folder, TokenizerError), TokenizerError).texts,
        "encoded": encoded,
        "plain": [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS],
        "decoded": [tokenizer.decode(ids, skip_special_tokens=False) for ids in encoded],
        "visible": [tokenizer.decode(ids) for ids in encoded],
    }


def comparable(folder: pathlib.Path, answers: Answers) -> Answers:
    """Return the fields in which jaxinfer and transformers agree; docs/text.md lists the differences."""
    parts = dict(answers)
    if folder.parent.name.startswith("prepend-") and "LlamaTokenizer" in folder.parent.name:
        keep = [rank for rank, text in enumerate(TEXTS) if not BEGINS_WITH_SPACE.search(text)]
        for part in ("encoded", "plain", "decoded", "visible"):
            parts[part] = [parts[part][rank] for rank in keep]
    if folder.parent.name.startswith("prepend-") and folder.name.startswith("added"):
        del parts["decoded"], parts["visible"]  # a token that is matched in normalised text
    if (folder.parent.name, folder.name) == ("prepend-llama-CodeLlamaTokenizer", "table"):
        del parts["size"]
    return parts


def digest(answers: Answers) -> str:
    """Return a short hash of the results."""
    return hashlib.sha256(json.dumps(answers, sort_keys=True).encode()).hexdigest()[:12]
