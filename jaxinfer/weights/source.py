"""Resolve what a user typed after ``--model`` to a folder on this disk."""

from __future__ import annotations

import pathlib
import re

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from jaxinfer.names import no_model
from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.native.manifest import MANIFEST, PARAMS

# No pickles, nothing in subfolders, and not Mistral's second copy of the weights in its own format.
_WANTED = ["*.json", "*.safetensors", "tokenizer.model", "tiktoken.model", "*.jinja"]
TEMPLATES = "additional_chat_templates"
"""Folder of the templates beside chat_template.jinja."""
_PICKLES = ["*.bin", "*.pt", "*.pth", "*.pkl"]
_UNWANTED = ["*/*", "consolidated*.safetensors", *_PICKLES]

# The library's HTTP client changed over the years; the bases of its error always include that client's own error,
# which also covers proxies and timeouts.
_FAILURES: tuple[type[BaseException], ...] = (
    *HfHubHTTPError.__bases__,
    OSError,
    ValueError,
    RuntimeError,
    EntryNotFoundError,
)


def locate(model: str) -> pathlib.Path:
    """The folder of a model: an existing folder or GGUF file as it is, a hub id ``org/name`` through huggingface_hub.

    A download lands in the library's cache, where a later call finds it without a network; the library's own settings
    (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN) apply. Only JSON, safetensors, tokenizer and template files are fetched, and
    the arrays of a converted folder.

    Raises:
        CheckpointError: there is no such folder, and the hub did not give one; the message says what to do.
    """
    if (reason := no_model(model)) is not None:
        raise CheckpointError(reason)
    path = pathlib.Path(model)
    return path if path.exists() else _download(model)


def _download(model: str) -> pathlib.Path:
    try:
        folder = pathlib.Path(
            huggingface_hub.snapshot_download(model, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
        )
        wanted = [f"{TEMPLATES}/*.jinja", *([f"{PARAMS}/*"] if (folder / MANIFEST).exists() else [])]
        # A snapshot's folder has the commit's name: the arrays are those of this manifest, whatever came since.
        huggingface_hub.snapshot_download(model, revision=folder.name, allow_patterns=wanted, ignore_patterns=_PICKLES)
    except _FAILURES as error:
        raise CheckpointError(
            f"there is no folder {quoted(model)}, and it could not be fetched from the Hugging Face hub "
            f"({_reason(error)}): run `hf download {model} --local-dir DIR` where the network allows it, "
            f"copy DIR here and pass --model DIR"
        ) from error
    return folder


def _reason(error: BaseException) -> str:
    """The first line of the cause, or of the error itself where it has none, without an error number."""
    text = re.sub(r"\[Errno -?\d+\] ", "", str(error.__cause__ or error)).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".:")
