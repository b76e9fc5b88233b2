"""The published text of a third-party checkpoint (karpathy/llama2.c, stories260K)."""

import json
import pathlib

import pytest

from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def folder(test_data: pathlib.Path) -> pathlib.Path:
    return test_data / "models" / "stories260K"


@pytest.fixture(scope="module")
def llm(folder: pathlib.Path) -> LLM:
    return LLM(str(folder / "hf"), dtype="float32", max_num_seqs=4)


def test_the_text_that_its_author_published(llm, folder):
    golden = json.loads((folder / "golden_external.json").read_text())
    params = SamplingParams(temperature=0.0, max_tokens=golden["new_tokens"], ignore_eos=True)
    output = llm.generate([golden["prompt_ids"]], params)[0].outputs[0]
    assert len(output.token_ids) == 200
    assert output.text == golden["text"]


def test_the_second_published_text(llm, folder):
    golden = json.loads((folder / "golden_external.json").read_text())
    prompt = golden["prompt2"]
    output = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=60))[0].outputs[0]
    assert (prompt + output.text)[: len(golden["text2"])] == golden["text2"]


def test_greedy_ids_of_all_prompts_in_one_batch(llm, folder):
    cases = json.loads((folder / "golden_greedy.json").read_text())["cases"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(case["output_ids"]) - len(case["prompt_ids"])) for case in cases
    ]
    for case, output in zip(cases, llm.generate([case["prompt_ids"] for case in cases], params), strict=True):
        assert case["prompt_ids"] + output.outputs[0].token_ids == case["output_ids"]
