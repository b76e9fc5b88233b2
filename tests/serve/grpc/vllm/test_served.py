"""Tests of the service in a whole server: it exists if enabled, and stops when the server drains."""

import pathlib

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2_grpc

from jaxinfer.serve.grpc.vllm.messages import common, pb
from tests.serve.live import live_fake


def test_a_server_serves_it_if_it_is_asked_for(tmp_path: pathlib.Path) -> None:
    with live_fake(tmp_path, vllm_grpc=True) as server, grpc.insecure_channel(server.target) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        assert stub.HealthCheck(pb.HealthCheckRequest()).healthy
        asked = pb.GenerateRequest(text="Hi", sampling_params=pb.SamplingParams(max_tokens=3))
        (answer,) = stub.Generate(asked)
        assert (len(answer.complete.output_ids), answer.complete.finish_reason) == (3, "length")
        assert stub.GetModelInfo(pb.GetModelInfoRequest()).served_model_name == "fake"
        assert sum(len(part.data) for part in stub.GetTokenizer(common.GetTokenizerRequest())) > 100
        frontend = server.server.frontend
        assert frontend is not None
        frontend.leaving = True
        health = stub.HealthCheck(pb.HealthCheckRequest())
        assert (health.healthy, health.message) == (False, "the server is draining")
        frontend.leaving = False


def test_a_server_does_not_serve_it_otherwise(tmp_path: pathlib.Path) -> None:
    with live_fake(tmp_path) as server, grpc.insecure_channel(server.target) as channel:
        with pytest.raises(grpc.RpcError) as refusal:
            vllm_engine_pb2_grpc.VllmEngineStub(channel).HealthCheck(pb.HealthCheckRequest())
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
