"""Long prompts: memory outside of the cache does not grow with their length."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.prepare import prepare
from tests.fakes import random_model

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}


def temporaries(length: int) -> int:
    """Return the temporary bytes of the largest program for sequences of up to ``length`` tokens."""
    model = random_model(max_position_embeddings=length, rope_scaling=YARN)
    config = EngineConfig(
        max_num_seqs=2, max_model_len=length, page_size=64, num_pages=length // 64 + 8, prefill_sizes=(256,)
    )
    return Engine(prepare(model, config, "cpu")).temporaries()


@pytest.mark.slow
def test_programs_need_no_more_memory_for_longer_contexts():
    """Temporary memory is constant except for block tables: 4 bytes per 64 tokens of each row, copied a few times."""
    short, long = temporaries(2048), temporaries(32768)
    assert long - short < 40 * 32768 // 64 * 4
    assert long < 4 << 20


_SCRIPT = """
import resource, sys
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from tests.fakes import random_model

yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
model = random_model(max_position_embeddings=32768, rope_scaling=yarn)
llm = LLM(model, max_num_seqs=2, max_model_len=32768, page_size=64, num_pages=520, prefill_sizes=(int(sys.argv[1]),))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
params = SamplingParams(temperature=0.0, max_tokens=4)
llm.generate([list(range(90)) * 10], params)
before = peak()
prompt = [(7 * i + i // 97) % 97 for i in range(32700)]
output = llm.generate([prompt], params)[0].outputs[0]
llm.engine.check()
print("RESULT", peak() - before, output.token_ids)
"""


@pytest.mark.slow
def test_a_prompt_of_32k_tokens(repo: pathlib.Path):
    """A full score matrix of one head would take 4 GiB. Other chunk sizes give the same tokens."""
    results = []
    for chunk in ("256", "1024"):
        command = [sys.executable, "-c", _SCRIPT, chunk]
        done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stderr
        growth, tokens = done.stdout.split("RESULT ")[1].split(" ", 1)
        assert int(growth) < 32 << 20
        results.append(tokens)
    assert results[0] == results[1]
