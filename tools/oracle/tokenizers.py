"""Oracle of tokenizers: ``python -m tools.oracle.tokenizers ASKED`` writes ``AutoTokenizer`` results as lines of JSON.

ASKED is a JSON file with ``folders``, ``texts`` and ``chats`` (arguments of ``apply_chat_template``, rendered where a
folder has a template; null where that fails); no code from a folder, and no network is used.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jinja2
import transformers


def main(arguments: Sequence[str]) -> int:
    """Print the results, folder by folder."""
    asked = json.loads(pathlib.Path(arguments[0]).read_text(encoding="utf-8"))
    transformers.logging.set_verbosity_error()
    for folder in asked["folders"]:
        print(json.dumps(_answer(folder, asked["texts"], asked["chats"])), flush=True)
    return 0


def _answer(folder: str, texts: Sequence[str], chats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoded = [tokenizer.encode(text) for text in texts]
    return {
        "size": len(tokenizer),
        "named": tokenizer.special_tokens_map,
        "chats": [_rendered(tokenizer, chat) for chat in chats if tokenizer.chat_template],
        "encoded": encoded,
        "plain": [tokenizer.encode(text, add_special_tokens=False) for text in texts],
        "decoded": [tokenizer.decode(ids) for ids in encoded],
        "visible": [tokenizer.decode(ids, skip_special_tokens=True) for ids in encoded],
    }


def _rendered(tokenizer: Any, chat: dict[str, Any]) -> str | None:
    try:
        text: str = tokenizer.apply_chat_template(**chat, tokenize=False)
    except (jinja2.TemplateError, TypeError):  # raised by Python operators: text + None
        return None
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
