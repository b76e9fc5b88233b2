"""vLLM's gRPC service over the fake engine, with a client."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import Any

from smg_grpc_proto import vllm_engine_pb2_grpc

from jaxinfer.serve.core.supervisor import READY, Condition
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.grpc.vllm.messages import pb
from jaxinfer.serve.grpc.vllm.service import Served, VllmEngine, service
from tests.serve.fake_engine import FIRST_BYTE, Mischief, write_fake_folder
from tests.serve.grpc.running import FakeSupervisor, Running, running

WELL = Mischief()
PROMPT = "Hi ö"
IDS = [FIRST_BYTE + byte for byte in PROMPT.encode()]


@dataclasses.dataclass
class State:
    """Server state that a test may change: the condition of the engine, and the tokenizer folder."""

    condition: Condition = dataclasses.field(default_factory=lambda: Condition(READY))
    folder: pathlib.Path = pathlib.Path("/nowhere")
    supervisor: FakeSupervisor = dataclasses.field(default_factory=FakeSupervisor)
    profiling: bool = False
    operated: bool = True

    @property
    def served(self) -> Served:
        return Served(
            lambda: self.condition, lambda: self.folder, "fake", self.supervisor, self.profiling, self.operated
        )


def vllm_service(frontend: Callable[[], Frontend], state: State | None = None) -> list[Any]:
    """Return the argument ``more`` of `running`."""
    return [(service(), VllmEngine(frontend, (state or State()).served))]


@contextlib.asynccontextmanager
async def serving(
    mischief: Mischief = WELL, profiling: bool = False, operated: bool = True, **how: Any
) -> AsyncIterator[tuple[Running, Any, State]]:
    """Yield a server, a stub of the service, and the mutable state."""
    with tempfile.TemporaryDirectory() as folder:
        state = State(folder=write_fake_folder(pathlib.Path(folder) / "model"), profiling=profiling, operated=operated)
        async with running(mischief, more=lambda frontend: vllm_service(frontend, state), **how) as run:
            yield run, vllm_engine_pb2_grpc.VllmEngineStub(run.channel), state


def request(**fields: Any) -> Any:
    """Return a request for four tokens after `IDS`, unless given otherwise; ``sampling``: fields of SamplingParams."""
    sampling = pb.SamplingParams(**{"max_tokens": 4, "seed": 1, **fields.pop("sampling", {})})
    given = fields if fields.keys() & {"tokenized", "text"} else {"tokenized": {"input_ids": IDS}, **fields}
    return pb.GenerateRequest(sampling_params=sampling, **given)
