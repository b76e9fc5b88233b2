"""Tests that a call's metadata (tenant, deadline, trace) reaches the front end, and that ended calls leave no state."""

import asyncio
from collections.abc import Sequence
from typing import Any

from jaxinfer.protos.oip import open_inference_pb2 as oip_pb
from jaxinfer.protos.oip.open_inference_pb2_grpc import GRPCInferenceServiceStub
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call
from jaxinfer.serve.grpc import oip
from tests.serve.grpc.running import failure, running

KEYS = {"infers": ("alice", "infer")}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
METADATA = (("authorization", "Bearer infers"), ("traceparent", TRACE))
HOW = {"timeout": 50, "metadata": METADATA}


def test_generations_of_all_services() -> None:
    async def story() -> None:
        seen: list[Call] = []
        more = {"more": lambda frontend: [(oip.SERVICE, oip.OpenInference(frontend, lambda: True))]}
        async with running(keys=KEYS, **more) as server:

            async def watched(call: Call) -> None:
                seen.append(call)
                raise ServeError(Kind.INVALID, "seen")

            server.frontend.generate = watched  # type: ignore[method-assign, assignment]
            asked = pb.GenerateRequest(prompt="a")
            await failure(server.inference.Generate(asked, **HOW))
            await failure(server.inference.GenerateBatch(iter([asked]), **HOW))
            tensor = oip_pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
            tensor.contents.bytes_contents.append(b"a")
            infer = oip_pb.ModelInferRequest(model_name="fake", inputs=[tensor])
            triton = GRPCInferenceServiceStub(server.channel)
            await failure(triton.ModelInfer(infer, **HOW))
            await failure(triton.ModelStreamInfer(iter([infer]), **HOW))
            assert [(call.prompt, call.tenant, call.trace) for call in seen] == [
                ("a", "alice", {"traceparent": TRACE})
            ] * 4
            assert all(
                call.timeout is not None and 40 < call.timeout < 51 for call in seen
            )  # gRPC rounds a deadline up
            assert not server.servers._slow._calls

    asyncio.run(story())


def test_the_other_calls() -> None:
    async def story() -> None:
        seen: list[dict[str, Any]] = []
        async with running(keys=KEYS) as server:

            async def score(prompt: object, continuations: Sequence[object], **how: Any) -> list[Any]:
                seen.append(how)
                return []

            async def tokenize(text: object, **how: Any) -> list[int]:
                seen.append(how)
                return []

            async def detokenize(ids: Sequence[int], **how: Any) -> str:
                seen.append(how)
                return ""

            server.frontend.score = score  # type: ignore[method-assign, assignment]
            server.frontend.tokenize = tokenize  # type: ignore[method-assign, assignment]
            server.frontend.detokenize = detokenize  # type: ignore[method-assign, assignment]
            inference, one = server.inference, [pb.Continuation(text="b")]
            await inference.Score(pb.ScoreRequest(prompt="a", continuations=one), **HOW)
            asked = pb.ScoreRequest(prompt="a", continuations=one, model="fake", add_special_tokens=False)
            await inference.Score(asked, metadata=METADATA)
            await inference.Tokenize(pb.TokenizeRequest(text="a"), metadata=METADATA)
            await inference.Tokenize(
                pb.TokenizeRequest(text="a", model="m", add_special_tokens=False), metadata=METADATA
            )
            await inference.Detokenize(pb.DetokenizeRequest(token_ids=[3]), metadata=METADATA)
            asked = pb.DetokenizeRequest(token_ids=[3], model="m", skip_special_tokens=True)
            await inference.Detokenize(asked, metadata=METADATA)
        timeout = seen[0].pop("timeout")
        assert timeout is not None
        assert 40 < timeout < 51
        assert seen == [
            {"model": None, "add_special_tokens": True, "tenant": "alice"},
            {"model": "fake", "add_special_tokens": False, "tenant": "alice", "timeout": None},
            {"model": None, "add_special_tokens": None, "tenant": "alice"},
            {"model": "m", "add_special_tokens": False, "tenant": "alice"},
            {"model": None, "skip_special_tokens": False},
            {"model": "m", "skip_special_tokens": True},
        ]

    asyncio.run(story())
