"""Resolution of the ``--model`` argument to a local folder."""

from __future__ import annotations

import pathlib
import re

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from jaxinfer.config.aliases import no_model
from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.native.manifest import MANIFEST, PARAMS

# Excludes pickles, subfolders, and Mistral's duplicate of the weights in its own format.
_WANTED = ["*.json", "*.safetensors", "tokenizer.model", "tiktoken.model", "*.jinja"]
TEMPLATES = "additional_chat_templates"
"""Folder of the chat templates in addition to chat_template.jinja."""
_PICKLES = ["*.bin", "*.pt", "*.pth", "*.pkl"]
_UNWANTED = ["*/*", "consolidated*.safetensors", *_PICKLES]

# The HTTP client of huggingface_hub changed between versions; the bases of HfHubHTTPError always include the client's
# own error, which also covers proxies and timeouts.
_FAILURES: tuple[type[BaseException], ...] = (
    *HfHubHTTPError.__bases__,
    OSError,
    ValueError,
    RuntimeError,
    EntryNotFoundError,
)


def locate(model: str) -> pathlib.Path:
    """Return the folder of a model: an existing folder or GGUF file as is, a hub id ``org/name`` through
    huggingface_hub.

    Downloads are cached by the library, whose settings (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN) apply. Only JSON,
    safetensors, tokenizer and template files are fetched, and the arrays of a converted folder.

    Raises:
        CheckpointError: there is no such folder, and the download failed; the message gives the remedy.
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
        # A snapshot folder is named after its commit, so the arrays match this manifest even if the repository changes.
        huggingface_hub.snapshot_download(model, revision=folder.name, allow_patterns=wanted, ignore_patterns=_PICKLES)
    except _FAILURES as error:
        raise CheckpointError(
            f"there is no folder {quoted(model)}, and it could not be fetched from the Hugging Face hub "
            f"({_reason(error)}): run `hf download {model} --local-dir DIR` where the network allows it, "
            f"copy DIR here and pass --model DIR"
        ) from error
    return folder


def _reason(error: BaseException) -> str:
    """Return the first line of the error's cause, or of the error if it has none, without an error number."""
    text = re.sub(r"\[Errno -?\d+\] ", "", str(error.__cause__ or error)).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".:")
