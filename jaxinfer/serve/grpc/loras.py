"""LoRA adapters in the messages of `jaxinfer.v1`."""

from __future__ import annotations

from jaxinfer.lora.store import LoadedLoRA
from jaxinfer.protos.v1 import control_pb2
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.serve.api.errors import Kind, ServeError, invalid, rename_fields, short
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.grpc.chat import optional


def model_of(frontend: Frontend, request: pb.GenerateRequest | pb.ScoreRequest) -> str | None:
    """Return the model name for the front end: the adapter name if the request names an adapter.

    Raises:
        ServeError: NOT_FOUND: the adapter is unknown; PRECONDITION: LoRA is disabled; INVALID: ``model`` names another.
    """
    model, name = optional(request, "model"), optional(request, "lora_name")
    if name is None:
        return model
    if frontend.loras is None:
        reason = f"lora_name={short(name)} is not served: this server was started without enable_lora"
        raise ServeError(Kind.PRECONDITION, reason, "lora_name")
    with rename_fields({"model": "lora_name"}):
        frontend.loras.resolve(name)
    if model not in (None, name, frontend.card.name):
        frontend.check_model(model)
        raise invalid("lora_name", name, f"is another adapter than model={short(model)}")
    return str(name)


def lora_message(loaded: LoadedLoRA, parent: str) -> control_pb2.Lora:
    """Return the message of a loaded adapter. ``parent``: name of the served model."""
    return control_pb2.Lora(**loaded._asdict(), parent=parent)
