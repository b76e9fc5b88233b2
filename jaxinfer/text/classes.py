"""Tokenizer classes with rules that override those of tokenizer.json.

``transformers`` 5 takes only the vocabulary and the merges from tokenizer.json if tokenizer_config.json names one of
these classes, or the model type implies one, and builds normalizer, pre-tokenizer and decoder anew. So
``add_prefix_space`` and ``legacy`` of tokenizer_config.json count. All other folders follow their tokenizer.json. The
source is ``AutoTokenizer.from_pretrained`` and the constructors of the classes.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from jaxinfer.text.declared import CONFIG, Declared, read_declared
from jaxinfer.text.files import read_object, read_text

MAX_TOKENIZER_BYTES = 256 << 20
"""Maximum size of tokenizer.json; the largest in the wild are about 35 MiB."""

_SPACE = "\u2581"
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?{letters}+|\p{N}"
    r"| ?[^\s{all}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END = "<|endoftext|>"


@dataclasses.dataclass(frozen=True)
class Class:
    """Rules of a tokenizer class.

    Attributes:
        defaults: special tokens, by name, unless a file names others.
        pieces: SentencePiece tokens, with a mark for each space; else byte-level.
        prefix: ``add_prefix_space`` if the field is absent; None: the class has no such field.
        nfc: text is normalised to NFC.
        words: regular expression of words; None: GPT-2's.
        digits: each digit is a word.
        unknown: the unknown token replaces text outside the vocabulary.
        bos: special tokens around a text: only the BOS (True), none (False), or those of tokenizer.json (None).
        plain: special tokens do not strip whitespace around them.
    """

    defaults: Mapping[str, str]
    pieces: bool = False
    prefix: bool | None = False
    nfc: bool = False
    words: str | None = None
    digits: bool = False
    unknown: bool = False
    bos: bool | None = None
    plain: bool = False


def _named(**texts: str) -> Mapping[str, str]:
    return MappingProxyType({f"{name}_token": text for name, text in texts.items()})


def _qwen(letters: str, plain: bool = False) -> Class:
    words = _QWEN.replace("{letters}", f"[{letters}]").replace("{all}", letters)
    return Class(_named(eos=_END, unk=_END, pad=_END), nfc=True, words=words, plain=plain)


_LLAMA = _named(bos="<s>", eos="</s>", unk="<unk>")
_PARTS = _named(prefix="\u2581<PRE>", middle="\u2581<MID>", suffix="\u2581<SUF>", eot="\u2581<EOT>", fill="<FILL_ME>")
_GEMMA = _named(bos="<bos>", eos="<eos>", unk="<unk>", pad="<pad>", mask="<mask>")
_COHERE = _named(
    bos="<BOS_TOKEN>",
    eos="<|END_OF_TURN_TOKEN|>",
    unk="<UNK>",
    pad="<PAD>",
    cls="<CLS>",
    sep="<SEP>",
    mask="<MASK_TOKEN>",
)
_GPT2 = _named(bos=_END, eos=_END, unk=_END)
CLASSES: Mapping[str, Class] = MappingProxyType(
    {
        "LlamaTokenizer": Class(_LLAMA, pieces=True, prefix=True),
        "CodeLlamaTokenizer": Class({**_LLAMA, **_PARTS}, pieces=True, prefix=True, unknown=True, bos=True),
        "GemmaTokenizer": Class(_GEMMA, pieces=True, prefix=None, unknown=True),
        "GPT2Tokenizer": Class(_GPT2),
        "GPTNeoXTokenizer": Class({**_GPT2, **_named(pad="<|padding|>")}, nfc=True, bos=False),
        "CohereTokenizer": Class(_COHERE, nfc=True, digits=True),
        "Qwen2Tokenizer": _qwen(r"\p{L}", plain=True),
        "Qwen3_5Tokenizer": _qwen(r"\p{L}\p{M}"),
    }
)

_MODEL_TYPES = MappingProxyType(
    {
        "CodeLlamaTokenizer": "code_llama",
        "GemmaTokenizer": (
            "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 t5gemma"
            " zaya"
        ),
        "GPT2Tokenizer": "codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 jais2 opt phi starcoder2",
        "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
        "CohereTokenizer": "aya_vision cohere cohere2",
        "Qwen2Tokenizer": (
            "audioflamingo3 colqwen2 dots3_note hunyuan_vl internvl ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl"
            " qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe"
        ),
        "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
        # Model types that follow their tokenizer.json, whatever class is named.
        "": (
            "arctic aria ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe"
            " gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm"
            " internlm2 internlm3 iquestcoder jamba kimi_k25 kimi_linear llava llava_next mimo_v2_flash minicpm3"
            " minicpmv minicpmv4_6 minimax_m2 ministral ministral3 mistral mistral3 mistral_large4 mixtral molmo"
            " molmo2 nemotron nvfp4 olmo2 olmo3 olmo_hybrid opencua paddleocr_vl persimmon phi3 phi3_v phimoe"
            " pixtral smolvlm stablelm step3_vl vipllava voxtral"
        ),
    }
)
_OF_TYPE = {model_type: name for name, types in _MODEL_TYPES.items() for model_type in types.split()}
_MISNAMED = frozenset({"hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"})
"""Model types that always use their own class, because folders in the wild name wrong ones."""


def tokenizer_class(folder: Path, error: type[ValueError]) -> Class | None:
    """Return the tokenizer class of ``folder``, by ``tokenizer_class`` and the model type; None: no special rules.

    Raises:
        error: a file cannot be read, or a field has an invalid type.
    """
    path = folder / CONFIG
    config, model = read_object(path, error), read_object(folder / "config.json", error)
    model_type = model.get("model_type")
    model_type = model_type if isinstance(model_type, str) else ""
    own = _OF_TYPE.get(model_type)
    named = _text(config, path, error) or _text(model, folder / "config.json", error)
    if named is None or model_type in _MISNAMED or own == "":
        return CLASSES.get(own or "")
    named = named.removesuffix("Fast")
    # Folders of Llama 3 and DeepSeek name Llama's class, but do not follow its rules.
    return None if named == "LlamaTokenizer" and _is_byte_level(folder, error) else CLASSES.get(named)


def declared_tokens(folder: Path, kind: Class | None, error: type[ValueError]) -> Declared:
    """Return special and added tokens of the folder's files, with the defaults of its tokenizer class.

    Raises:
        error: see `read_declared`.
    """
    declared = read_declared(folder, error)
    return declared.with_defaults(kind.defaults, kind.plain) if kind is not None else declared.with_defaults({})


def apply_class(library: Library, kind: Class, scheme: str, bos: str | None) -> None:
    """Apply the rules of a class to a tokenizer from tokenizer.json.

    SentencePiece rules that already put the prefix space where the configuration requests are kept: they also add it
    before a text that begins with a space, as SentencePiece does and transformers does not. Models other than BPE are
    kept, too; these classes cannot have them.

    Args:
        scheme: see `prefix_scheme`.
        bos: text of the BOS, if there is one.
    """
    if not isinstance(library.model, BPE):
        return
    model = library.model
    model.byte_fallback = model.fuse_unk = kind.pieces
    model.ignore_merges = False
    if not kind.unknown:
        model.unk_token = None
    (_set_pieces if kind.pieces else _set_bytes)(library, kind, scheme)
    if kind.bos is not None:
        bos_id = None if bos is None or not kind.bos else library.token_to_id(bos)
        library.post_processor = None if bos_id is None else _in_front(bos or "", bos_id)


def prefix_scheme(folder: Path, kind: Class, error: type[ValueError]) -> str:
    """Return where a space is prepended: to a text ("first"), to segments between special tokens ("always"), "never".

    Raises:
        error: a file cannot be read, or a field has an invalid type.
    """
    prefix, legacy = config_flag(folder, "add_prefix_space", error), config_flag(folder, "legacy", error)
    if kind.prefix is None or not (kind.prefix if prefix is None else prefix):
        return "never"
    legacy = legacy and not kind.bos  # CodeLlama has no such field
    return "always" if legacy or not kind.pieces else "first"


def config_flag(folder: Path, name: str, error: type[ValueError]) -> bool | None:
    """Return a field of tokenizer_config.json that is true, false or absent (None).

    Raises:
        error: it has another value, or the file cannot be read.
    """
    path = folder / CONFIG
    value = read_object(path, error).get(name)
    if value is not None and not isinstance(value, bool):
        raise error(f"{name} in {path} must be true or false, not {reprlib.repr(value)}")
    return value


def _in_front(bos: str, bos_id: int) -> processors.TemplateProcessing:
    token = {"id": "bos", "ids": [bos_id], "tokens": [bos]}
    return processors.TemplateProcessing(single=["bos", "$A"], special_tokens=[token])


def _text(config: Mapping[str, Any], path: Path, error: type[ValueError]) -> str | None:
    value = config.get("tokenizer_class")
    if value is not None and not isinstance(value, str):
        raise error(f"tokenizer_class in {path} must be a text, not {reprlib.repr(value)}")
    return value


def _is_byte_level(folder: Path, error: type[ValueError]) -> bool:
    path = folder / "tokenizer.json"
    return path.exists() and '"ByteLevel"' in read_text(path, MAX_TOKENIZER_BYTES, error)


def _set_bytes(library: Library, kind: Class, scheme: str) -> None:
    words: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if kind.digits else []
    if kind.words is not None:
        words = [pre_tokenizers.Split(Regex(kind.words), "isolated")]
    level = pre_tokenizers.ByteLevel(add_prefix_space=scheme != "never", use_regex=kind.words is None)
    library.normalizer = normalizers.NFC() if kind.nfc else None
    library.pre_tokenizer = pre_tokenizers.Sequence([*words, level])
    library.decoder = decoders.ByteLevel()


def _set_pieces(library: Library, kind: Class, scheme: str) -> None:
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind.prefix is None:
        library.normalizer = normalizers.Replace(" ", _SPACE)
        library.pre_tokenizer = None
    else:
        steps += [decoders.Strip(" ", 1, 0)] if scheme != "never" or kind.bos else []
        if scheme != _scheme_of(library):
            library.normalizer = None
            library.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    library.decoder = decoders.Sequence(steps)


def _scheme_of(library: Library) -> str | None:
    """Return the `prefix_scheme` of a tokenizer.json; None if it is unknown."""
    normalizer = json.loads(library.normalizer.__getstate__()) if library.normalizer is not None else {}
    parts = [part["type"] for part in normalizer.get("normalizers", [normalizer]) if part]
    if library.pre_tokenizer is None:
        return {("Prepend", "Replace"): "always", ("Replace",): "never"}.get(tuple(parts))
    pre = json.loads(library.pre_tokenizer.__getstate__())
    return pre["prepend_scheme"] if pre["type"] == "Metaspace" and not parts else None
