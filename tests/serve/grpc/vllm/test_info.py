"""Tests of the service's information on the server and its model."""

import asyncio
import json

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.core.supervisor import READY, Condition
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.grpc.vllm.messages import common, pb
from jaxinfer.serve.grpc.vllm.service import NAME
from tests.serve.fake_engine import BOS, EOS, PAD, VOCAB
from tests.serve.grpc.running import failure
from tests.serve.grpc.vllm.serving import serving


@pytest.mark.parametrize(
    ("condition", "healthy", "message"),
    [
        (Condition(READY), True, ""),
        (Condition("draining", "the server is draining"), False, "the server is draining"),
        (Condition("dead", "the engine core died"), False, "the engine core died"),
        (Condition("stopped"), False, "stopped"),
    ],
)
def test_it_is_healthy_when_a_generation_would_be_accepted(condition: Condition, healthy: bool, message: str) -> None:
    async def story() -> None:
        async with serving() as (_, stub, state):
            state.condition = condition
            assert await stub.HealthCheck(pb.HealthCheckRequest()) == pb.HealthCheckResponse(
                healthy=healthy, message=message
            )

    asyncio.run(story())


def test_while_the_model_is_loading_there_is_no_answer_at_all() -> None:
    def loading() -> Frontend:
        raise ServeError(Kind.UNAVAILABLE, "the model is loading")

    async def story() -> None:
        async with serving(frontend=lambda _: loading) as (_, stub, _state):
            for call in (stub.HealthCheck(pb.HealthCheckRequest()), stub.GetModelInfo(pb.GetModelInfoRequest())):
                found = await failure(call)
                assert (found.code, found.message) == (grpc.StatusCode.UNAVAILABLE, "the model is loading")

    asyncio.run(story())


def test_the_model_is_what_its_folder_and_its_card_say() -> None:
    async def story() -> None:
        async with serving() as (run, stub, state):
            (state.folder / "config.json").write_text('{"model_type": "fakery"}')
            object.__setattr__(run.frontend.card, "defaults", {"temperature": 0.5, "top_k": 7})
            info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.served_model_name, info.model_path, info.tokenizer_path) == ("fake", "fake", "fake")
        assert (info.model_type, list(info.architectures)) == ("fakery", ["FakeForCausalLM"])
        assert (info.is_generation, info.supports_vision, info.vocab_size) == (True, False, VOCAB)
        assert (info.max_context_length, info.max_req_input_len) == (2048, 2047)
        assert (list(info.eos_token_ids), info.bos_token_id, info.pad_token_id) == ([EOS], BOS, PAD)
        assert json.loads(info.default_sampling_params_json) == {"temperature": 0.5, "top_k": 7}

    asyncio.run(story())


def test_the_server_is_what_its_settings_say() -> None:
    async def story() -> None:
        async with serving(settings={"max_num_seqs": 9}) as (_, stub, _state):
            info = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.server_type, info.is_paused, info.active_requests) == ("vllm-grpc", False, 0)
        assert (info.block_size, info.max_num_seqs, info.data_parallel_size) == (16, 9, 1)
        assert (info.model_dtype, info.kv_cache_dtype, info.attention_backend) == ("float32", "auto", "")
        assert (info.engine_reasoning_parser, info.constrained_decoding_start) == ("", "first_token")
        assert (info.kv_connector, info.kv_role, info.mm_processor) == ("", "", "")
        assert 0 <= info.uptime_seconds < 600

    asyncio.run(story())


@pytest.mark.parametrize("method", ["Embed", "SubscribeKvEvents"])
def test_what_is_not_served_says_so(method: str) -> None:
    async def story() -> None:
        async with serving() as (_, stub, _state):
            kinds = {"Embed": pb.EmbedRequest, "SubscribeKvEvents": common.SubscribeKvEventsRequest}
            found = await failure(getattr(stub, method)(kinds[method]()))
            assert (found.code, method in found.message) == (grpc.StatusCode.UNIMPLEMENTED, True)

    asyncio.run(story())


def test_reflection_tells_of_it() -> None:
    async def story() -> None:
        async with serving() as (run, _, _state):
            stub = reflection_pb2_grpc.ServerReflectionStub(run.channel)
            asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME)
            (answer,) = [each async for each in stub.ServerReflectionInfo(iter([asked]))]
            assert any(b"VllmEngine" in each for each in answer.file_descriptor_response.file_descriptor_proto)

    asyncio.run(story())
