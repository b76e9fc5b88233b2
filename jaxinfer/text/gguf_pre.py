r"""Pre-tokenizers of byte-level BPE tokenizers, by the names that llama.cpp has for them.

Each follows the tokenizer.json of its models: a sequence of regular expressions, each of which splits the segments left
by those before it; matches and the text between them become separate segments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from tokenizers import Regex, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}|{_REST}"

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
)
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = rf"{_CASED_WORDS}|\p{{N}}{{1,3}}|{_SLASHES}"
_SEED = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_THOUSANDS = r"\d{1,3}(?=(?:\d{3})*\b)"
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_CASED_WORDS}|\p{{N}}|{_SLASHES}",
)

_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}",
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer with related settings.

    Attributes:
        expressions: in the order in which they split.
        ignore_merges: a word that is a token becomes that token, regardless of merges.
        bos: a text begins with the BOS token unless the file sets otherwise.
        composed: text is normalised to NFC first.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    bos: bool = False
    composed: bool = False

    def rule(self) -> pre_tokenizers.PreTokenizer:
        """Return the rule for the tokenizers library: split, then byte-level encoding."""
        cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in self.expressions]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LIKE_LLAMA3 = PreTokenizer((_LLAMA3,), ignore_merges=True, bos=True)
_LIKE_GPT2 = PreTokenizer((_GPT2,))
_LIKE_QWEN2 = PreTokenizer((_QWEN2,), composed=True)
_LIKE_GPT4O = PreTokenizer((_GPT4O,))
_DIGITS_FIRST = PreTokenizer((r"\p{N}", _GPT2))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "default": PreTokenizer(_DEFAULT),
        "gpt-2": _LIKE_GPT2,
        "phi-2": _LIKE_GPT2,
        "llama-bpe": _LIKE_LLAMA3,
        "llama3": _LIKE_LLAMA3,
        "llama-v3": _LIKE_LLAMA3,
        "falcon3": _LIKE_LLAMA3,
        "smaug-bpe": PreTokenizer((_LLAMA3,)),
        "dbrx": PreTokenizer((_LLAMA3,)),
        "pixtral": _LIKE_LLAMA3,
        "chatglm-bpe": PreTokenizer((_LLAMA3,)),
        "glm4": PreTokenizer((_LLAMA3,), ignore_merges=True),
        "qwen2": _LIKE_QWEN2,
        "deepseek-r1-qwen": _LIKE_QWEN2,
        "stablelm2": _LIKE_QWEN2,
        "qwen35": PreTokenizer((_QWEN35,), composed=True),
        "hunyuan": PreTokenizer((_QWEN2,)),
        "seed-coder": PreTokenizer((_SEED,)),
        "gpt-4o": _LIKE_GPT4O,
        "llama4": _LIKE_GPT4O,
        "minimax-m2": _LIKE_GPT4O,
        "tiny_aya": PreTokenizer((_THOUSANDS, _GPT4O), composed=True),
        "youtu": PreTokenizer(_YOUTU, ignore_merges=True),
        "olmo": PreTokenizer((_GPT2,), composed=True),
        "exaone4": _LIKE_GPT2,
        "exaone": _DIGITS_FIRST,
        "command-r": PreTokenizer((r"\p{N}", _GPT2), composed=True),
        "refact": _DIGITS_FIRST,
        "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, bos=True),
        "starcoder": _DIGITS_FIRST,
        "smollm": _DIGITS_FIRST,
        "falcon": PreTokenizer(_FALCON),
        "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
        "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
        "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
        "hunyuan-dense": PreTokenizer(_DEEPSEEK_V3),
    }
)
