"""Model info and server info in the messages of `vllm.grpc.engine`."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from jaxinfer.serve.api.capacity import slots_of
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.grpc.vllm import messages
from jaxinfer.text.files import read_object
from jaxinfer.text.pieces import TokenizerError

AUTO = "auto"
AFTER_REASONING, FIRST_TOKEN = "after_reasoning", "first_token"
"""Start of the grammar constraint if the prompt has opened a reasoning block."""


@dataclasses.dataclass
class Activity:
    """Start time of the server and time of the last request, in seconds since 1970."""

    started: float = dataclasses.field(default_factory=time.time)
    received: float = 0.0

    def receive(self) -> None:
        self.received = time.time()


def model_type(folder: pathlib.Path) -> str:
    """Return the ``model_type`` of config.json; "" if there is none."""
    if folder.is_file():
        return ""
    try:
        return str(read_object(folder / "config.json", TokenizerError).get("model_type", ""))
    except TokenizerError:  # the weights were loaded without it
        return ""


def model_info(frontend: Frontend, model: str, kind: str) -> messages.pb.GetModelInfoResponse:
    """Return the response to GetModelInfo.

    Args:
        model: value of the model setting.
        kind: see `model_type`.
    """
    card, tokenizer = frontend.card, frontend.tokenizer
    bos, pad = (None, None) if tokenizer is None else (tokenizer.bos_id, tokenizer.pad_id)
    return messages.pb.GetModelInfoResponse(
        model_path=model,
        is_generation=True,
        max_context_length=card.max_model_len,
        vocab_size=card.vocab_size,
        served_model_name=card.name,
        tokenizer_path="" if tokenizer is None else model,
        model_type=kind,
        architectures=[card.architecture],
        eos_token_ids=card.eos_token_ids,
        pad_token_id=pad or 0,
        bos_token_id=bos or 0,
        max_req_input_len=card.max_model_len - 1,
        default_sampling_params_json=_json(card.defaults),
    )


def _json(defaults: Mapping[str, Any]) -> str:
    return json.dumps(dict(defaults), separators=(",", ":")) if defaults else ""


def server_info(frontend: Frontend, activity: Activity) -> messages.pb.GetServerInfoResponse:
    """Return the response to GetServerInfo. Fields of unsupported features (KV transfer, media) are left out."""
    card, reasoning = frontend.card, frontend.parsers.reasoning or ""
    engine = card.engine
    return messages.pb.GetServerInfoResponse(
        active_requests=frontend.active,
        last_receive_timestamp=activity.received,
        uptime_seconds=time.time() - activity.started,
        server_type="vllm-grpc",
        data_parallel_size=engine.get("data_parallel_size", 1),
        kv_cache_dtype=engine.get("kv_cache_dtype", ""),
        block_size=engine.get("page_size", 0),
        attention_backend=str(engine.get("attention_backend", AUTO)).removeprefix(AUTO),
        model_dtype=card.dtype,
        max_num_seqs=slots_of(engine),
        engine_reasoning_parser=reasoning,
        constrained_decoding_start=AFTER_REASONING if reasoning else FIRST_TOKEN,
    )
