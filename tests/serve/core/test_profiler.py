"""Tests of device traces: the real profiler, alone and through the Control API on the demo model."""

import pathlib

import grpc
import jax
import jax.numpy as jnp
import pytest

from jaxinfer.client import Client
from jaxinfer.config import EngineConfig
from jaxinfer.protos.v1 import control_pb2 as pb
from jaxinfer.protos.v1.control_pb2_grpc import ControlStub
from jaxinfer.serve.core.__main__ import JaxProfiler
from jaxinfer.serve.settings import ServeConfig
from tests.serve.live import live


def traces(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.rglob("*.xplane.pb"))


def test_a_trace_is_written_below_the_folder_and_one_at_a_time(tmp_path):
    folder = tmp_path / "not" / "yet" / "there"
    profiler = JaxProfiler(folder)
    with pytest.raises(RuntimeError, match="No profile started"):
        profiler.stop()
    profiler.start()
    with pytest.raises(RuntimeError, match="already been started"):
        profiler.start()
    jax.block_until_ready(jnp.ones(8) + 1)
    assert profiler.stop() == str(folder)
    (trace,) = traces(tmp_path)
    assert trace.is_relative_to(folder)
    assert trace.stat().st_size > 0
    with pytest.raises(RuntimeError, match="No profile started"):
        profiler.stop()


def test_a_folder_that_cannot_be_written_leaves_no_profile_behind(tmp_path):
    (tmp_path / "file").write_text("")
    bad, good = JaxProfiler(tmp_path / "file"), JaxProfiler(tmp_path / "good")
    bad.start()
    with pytest.raises(RuntimeError, match="not a directory"):
        bad.stop()
    good.start()
    assert good.stop() == str(tmp_path / "good")
    assert len(traces(tmp_path)) == 1


def test_a_full_folder_takes_no_more_profiles(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "trace").write_bytes(bytes(100))
    with pytest.raises(RuntimeError, match="100 bytes"):
        JaxProfiler(tmp_path, max_bytes=100).start()
    profiler = JaxProfiler(tmp_path, max_bytes=101)
    profiler.start()
    profiler.stop()


@pytest.mark.slow
def test_a_profile_of_the_demo_model(tmp_path):
    folder = tmp_path / "traces"
    engine = EngineConfig(max_num_seqs=2, max_model_len=256)
    config = ServeConfig(
        model="demo", grpc_port=0, http_port=None, control_port=0, profile_dir=str(folder), engine=engine
    )
    with live(config) as server, grpc.insecure_channel(f"127.0.0.1:{server.server.control_port}") as channel:
        control = ControlStub(channel)
        refused(lambda: control.StopProfile(pb.StopProfileRequest()), "No profile started")
        control.StartProfile(pb.StartProfileRequest())
        refused(lambda: control.StartProfile(pb.StartProfileRequest()), "already been started")
        with Client(server.target) as client:
            completion = client.generate("ROMEO:", max_tokens=16, temperature=0)
        assert control.StopProfile(pb.StopProfileRequest()).folder == str(folder)
        (trace,) = traces(tmp_path)
        assert trace.is_relative_to(folder)
        assert b"decode" in trace.read_bytes()
        refused(lambda: control.StopProfile(pb.StopProfileRequest()), "No profile started")
        trace.unlink()  # JAX names traces by the second
        control.StartProfile(pb.StartProfileRequest(steps=4))
        with Client(server.target) as client:
            assert client.generate("ROMEO:", max_tokens=16, temperature=0).text == completion.text
        assert control.StopProfile(pb.StopProfileRequest()).folder == str(folder)
        assert len(traces(tmp_path)) == 1
        with Client(server.target) as client:  # the engine still works
            assert client.generate("ROMEO:", max_tokens=16, temperature=0).text == completion.text


def refused(call, says):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert says in caught.value.details()
