"""Servicer of the Open Inference Protocol, used by KServe's and Triton's clients, based on a `Frontend`.

The model, and each LoRA adapter under its own name, has the inputs and outputs of Triton's LLM backends, see
`jaxinfer.serve.grpc.oip_request`.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Sequence
from typing import override

from jaxinfer.protos.oip import open_inference_pb2 as pb
from jaxinfer.protos.oip.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from jaxinfer.serve.api.errors import Kind, ServeError, prompt_as, rename_fields
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.frontend.generation import Generation
from jaxinfer.serve.grpc import status
from jaxinfer.serve.grpc.bidi_stream import ManyRequests
from jaxinfer.serve.grpc.oip_request import INPUTS, OUTPUTS, Ask, ask_of
from jaxinfer.serve.grpc.rpc import Rpc
from jaxinfer.serve.grpc.tensors import Value, add_output, refuse
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import version_ranges

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
FINAL = "triton_final_response"
"""Parameter of every streamed response: whether it is the last one of its request."""
ACCEPTANCE = "acceptance"
"""Parameter of a response that ends an output: the acceptance rule of its draft tokens, if not exact ("typical")."""
VERSION, RANGES = "weight_version", "weight_versions"
"""Parameters of a response that ends outputs: the newest version of weights that computed a token, and, if there are
several, JSON with [version, start, end] of each output's tokens."""

_VERSION = "1"
_TENSOR = pb.ModelMetadataResponse.TensorMetadata


class OpenInference(GRPCInferenceServiceServicer):
    """All RPCs of `SERVICE`.

    Args:
        frontend: returns the front end, or raises `ServeError` while the model is loading.
        is_ready: whether requests are served now.
        size: maximum number of requests in flight per stream; further ones are read when one has ended.
    """

    def __init__(self, frontend: Callable[[], Frontend], is_ready: Callable[[], bool], size: int = 64) -> None:
        self._frontend, self._is_ready, self._size = frontend, is_ready, size

    @override
    async def ServerLive(self, request: pb.ServerLiveRequest, rpc: Rpc) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    @override
    async def ServerReady(self, request: pb.ServerReadyRequest, rpc: Rpc) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._is_ready())

    @override
    async def ModelReady(self, request: pb.ModelReadyRequest, rpc: Rpc) -> pb.ModelReadyResponse:
        known = self._is_ready() and _is_known(self._frontend(), request.name)
        return pb.ModelReadyResponse(ready=known and request.version in ("", _VERSION))

    @override
    async def ServerMetadata(self, request: pb.ServerMetadataRequest, rpc: Rpc) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="jaxinfer", version=importlib.metadata.version("jaxinfer"))

    @override
    async def ModelMetadata(self, request: pb.ModelMetadataRequest, rpc: Rpc) -> pb.ModelMetadataResponse:
        frontend = self._frontend()
        _check_model(frontend, request.name, request.version)
        return pb.ModelMetadataResponse(
            name=request.name,
            versions=[_VERSION],
            platform="jaxinfer",
            inputs=[_TENSOR(name=name, datatype=datatype, shape=[1]) for name, datatype in INPUTS.items()],
            outputs=[_TENSOR(name=name, datatype=kind, shape=[size]) for name, (kind, size) in OUTPUTS.items()],
        )

    @override
    async def ModelInfer(self, request: pb.ModelInferRequest, rpc: Rpc) -> pb.ModelInferResponse:
        frontend = self._frontend()
        ask = _ask(frontend, request, rpc)
        if ask.stream:
            raise refuse("stream", "ModelInfer has one response: use ModelStreamInfer")
        async with await _generate(frontend, ask) as generation:
            return _response(request, ask, await _whole(ask, generation))

    @override
    async def ModelStreamInfer(self, requests: Rpc, rpc: Rpc) -> None:
        await _Requests(self._frontend(), rpc, self._size).run()


class _Requests(ManyRequests[pb.ModelInferRequest, pb.ModelStreamInferResponse]):
    @override
    async def answer(self, request: pb.ModelInferRequest) -> None:
        ask = _ask(self.frontend, request, self.rpc)
        async with await _generate(self.frontend, ask) as generation:
            if not ask.stream:
                await self._write_delta(request, ask, await _whole(ask, generation), final=True)
                return
            running = generation.n
            async for delta in generation:
                running -= delta.finish_reason is not None
                await self._write_delta(request, ask, _Outputs(generation, [delta]), final=not running)

    @override
    def failure(self, request: pb.ModelInferRequest, error: ServeError) -> pb.ModelStreamInferResponse:
        named = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        return pb.ModelStreamInferResponse(error_message=status.message_of(error), infer_response=named)

    async def _write_delta(self, request: pb.ModelInferRequest, ask: Ask, outputs: _Outputs, *, final: bool) -> None:
        response = _response(request, ask, outputs)
        response.parameters[FINAL].bool_param = final
        await self.write(pb.ModelStreamInferResponse(infer_response=response))


class _Outputs:
    """The ``n`` outputs of a request, accumulated from deltas, by the names of `OUTPUTS`."""

    def __init__(self, generation: Generation, deltas: Sequence[OutputDelta], before: str = "") -> None:
        texts = [[before] for _ in range(generation.n)]
        self._reasons, self._tokens = [b""] * generation.n, [0] * generation.n
        for delta in deltas:
            texts[delta.index].append(delta.text)
            self._reasons[delta.index] = (delta.finish_reason or "").encode()
            self._tokens[delta.index] += len(delta.token_ids)
        self.acceptance = next((delta.acceptance for delta in deltas if delta.acceptance is not None), None)
        self.versions = [delta.weight_versions for delta in deltas if delta.finish_reason is not None]
        self._texts = ["".join(parts).encode() for parts in texts]
        self._prompt_tokens = len(generation.prompt_token_ids)

    def column(self, name: str) -> Sequence[Value]:
        match name:
            case "text_output":
                return self._texts
            case "finish_reason":
                return self._reasons
            case "num_input_tokens":
                return [self._prompt_tokens]
            case _:
                return self._tokens


async def _whole(ask: Ask, generation: Generation) -> _Outputs:
    before = ask.call.prompt if ask.echo and isinstance(ask.call.prompt, str) else ""
    return _Outputs(generation, [delta async for delta in generation], before)


def _ask(frontend: Frontend, request: pb.ModelInferRequest, rpc: Rpc) -> Ask:
    _check_model(frontend, request.model_name, request.model_version)
    return ask_of(request, timeout=rpc.time_remaining(), tenant=rpc.caller.name, trace=rpc.trace())


async def _generate(frontend: Frontend, ask: Ask) -> Generation:
    with rename_fields(prompt_as(ask.named)):
        return await frontend.generate(ask.call)


def _check_model(frontend: Frontend, name: str, version: str) -> None:
    with rename_fields({"model": "model_name"}):
        frontend.check_model(name)
    if version not in ("", _VERSION):
        raise ServeError(
            Kind.NOT_FOUND, f"model_version={version[:100]!r} is not served, only {_VERSION!r}", field="model_version"
        )


def _is_known(frontend: Frontend, name: str) -> bool:
    return name == frontend.card.name or (frontend.loras is not None and name in frontend.loras)


def _response(request: pb.ModelInferRequest, ask: Ask, outputs: _Outputs) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name=request.model_name, model_version=_VERSION, id=request.id)
    for name in ask.outputs:
        add_output(response, name, OUTPUTS[name][0], outputs.column(name), raw=ask.raw)
    if outputs.acceptance is not None:
        response.parameters[ACCEPTANCE].string_param = outputs.acceptance
    if outputs.versions:
        response.parameters[VERSION].int64_param = max((own[-1][0] for own in outputs.versions if own), default=0)
    if len({version for own in outputs.versions for version, _ in own or ((0, 0),)}) > 1:
        ranges = [[list(each) for each in version_ranges(own)] for own in outputs.versions]
        response.parameters[RANGES].string_param = json.dumps(ranges)
    return response
