"""Section step: the contexts that fit into the memory of a device."""

import re
from types import SimpleNamespace

import pytest

from benchmarks.gpu import step
from jaxinfer.gpu_check import __main__ as gpu_check
from jaxinfer.gpu_check import goals
from jaxinfer.gpu_check.llama import LLAMA_8B
from jaxinfer.gpu_check.report import Report, read_records
from jaxinfer.models.model import abstract
from pallas_kernels.check.target import DEVICES


@pytest.mark.parametrize("kind", goals.LONGEST_OF_256)
def test_256_rows_have_the_context_for_which_there_is_memory(tmp_path, monkeypatch, kind):
    """The memory is the share that JAX takes of the device in section step."""
    (described,) = (target.description for target in DEVICES.values() if f'name: "{kind}"' in target.description)
    share = gpu_check.BY_NAME["step"].memory
    limit = int(share * int(re.search(r"device_memory_size: (\d+)", described)[1]))
    monkeypatch.setattr(
        step.jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: {"bytes_limit": limit})]
    )
    report = Report(tmp_path / "records", seconds=60, quick=False, limits={})
    model = abstract(LLAMA_8B, "bfloat16")
    contexts = [step._fitting(report, model, 256, context) for context in (4096, 512)]
    assert contexts == [goals.LONGEST_OF_256[kind], 512]
    assert [record["key"] for record in read_records(report.path)] == ["not run: decode, 256 rows, context 4096"]
    assert step._fitting(report, model, 64, 4096) == 4096
