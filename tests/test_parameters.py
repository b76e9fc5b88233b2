"""Each sampling parameter reaches every API, the command line, the client, the sampler, its tests and the docs.

A parameter that is left out of one of these places fails here.
"""

import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest

from jaxinfer.cli.engine import add_sampling, sampling_settings
from jaxinfer.cli.flags import all_flags, attribute_docs
from jaxinfer.cli.parser import Parser
from jaxinfer.client.requests import SamplingOptions, generate_request
from jaxinfer.engine.execution.probe import _every_feature
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.sampling import HostSlots, SlotParams, neutral_slots
from jaxinfer.sampling_params import PARAMETERS, Parameter, SamplingParams
from jaxinfer.serve.core.messages import decode_request, encode_request
from jaxinfer.serve.grpc import convert
from jaxinfer.serve.grpc.oip_request import _sampling
from jaxinfer.serve.http.anthropic import bodies as anthropic
from jaxinfer.serve.http.fields import Body
from jaxinfer.serve.http.requests import ChatCompletionRequest, CompletionRequest
from jaxinfer.serve.http.responses import bodies as responses
from jaxinfer.types import Request
from tests.sampling import test_distribution
from tests.sampling.reference import LIMITS
from tools.settings_tables import with_tables

# A valid value, other than the default, for each kind of parameter that the table has no value of.
VALUES: dict[str, Any] = {
    "int": 3,
    "bool": True,
    "Sequence[str]": ["a"],
    "str | Sequence[str]": ["a"],
    "Sequence[int]": [3],
    "Speculation | Mapping[str, Any]": {"max_tokens": 2},
    "StructuredOutputs | Mapping[str, Any]": {"regex": "a"},
}
RESPONSES = (responses.ResponsesRequest, responses.PASSED)
MESSAGES = (anthropic.MessagesRequest, anthropic.PASSED)
NO_FLAG = {"logit_bias", "allowed_token_ids"}
OWN_FLAGS = {"speculation": "--speculation", "structured_outputs": "--regex"}
# The sampler's arrays that no request of a probe can set: its grammars and drafts have probes of their own.
NOT_PROBED = {"sample_index", "typical", "constrained"}
each = pytest.mark.parametrize("row", PARAMETERS.values(), ids=PARAMETERS.keys())


def value_of(row: Parameter) -> Any:
    """Return a valid value of a parameter, as JSON has it, that is not its default."""
    value = row.probe if row.probe is not None else row.choices[-1] if row.choices else VALUES[row.kind]
    return not row.default if row.kind == "bool" else value


def as_params(row: Parameter, value: Any) -> SamplingParams:
    return SamplingParams(**{row.name: value})


def encoded(row: Parameter) -> dict[str, Any]:
    """Return the JSON of a request with this parameter."""
    return json.loads(json.dumps({row.name: value_of(row)}))


@each
def test_http_takes_it(row: Parameter) -> None:
    assert row.name in CompletionRequest.model_fields
    assert row.name in ChatCompletionRequest.model_fields
    if row.name == "logprobs":  # each has its own: a number, and a switch with `top_logprobs`
        return
    want = getattr(as_params(row, value_of(row)), row.name)
    for body in (
        CompletionRequest(**encoded(row), prompt="a"),
        ChatCompletionRequest(**encoded(row), messages=[{"role": "user"}]),
    ):
        assert getattr(SamplingParams(**body.sampling(8)), row.name) == want


@each
@pytest.mark.parametrize(("api", "body", "passed"), [("responses", *RESPONSES), ("messages", *MESSAGES)])
def test_responses_and_messages_take_it_where_the_table_says_so(
    row: Parameter, api: str, body: type[Body], passed: tuple[str, ...]
) -> None:
    if row.name != "max_tokens":  # required in Messages, and max_output_tokens in Responses
        assert (row.name in body.model_fields) is (row.name in passed) is (api in row.also_in)


@each
def test_grpc_and_the_client_take_it(row: Parameter) -> None:
    value = value_of(row)
    request = generate_request("a", None, None, {row.name: value})
    sent = pb.SamplingParams.FromString(request.sampling.SerializeToString())
    assert SamplingParams(**convert.sampling_of(sent)) == as_params(row, value)
    assert _sampling(encoded(row), None).keys() == {row.name}


def test_the_client_declares_the_same_types() -> None:
    """None means that a parameter is not given. `Speculation` and `StructuredOutputs` are mappings there."""
    declared = {name: hint.__forward_arg__ for name, hint in SamplingOptions.__annotations__.items()}
    ours = {row.name: re.sub(r"(Speculation|StructuredOutputs) \| ", "", row.kind) for row in PARAMETERS.values()}
    assert declared == {name: f"{kind} | None" for name, kind in ours.items()}


@each
def test_the_engine_process_gets_it(row: Parameter) -> None:
    request = Request("r", (1,), as_params(row, value_of(row)))
    assert decode_request(encode_request(request, 0.0), 0.0).params == request.params


@each
def test_the_command_line_takes_it(row: Parameter) -> None:
    if row.name in NO_FLAG:
        return
    parser = Parser("x", "")
    add_sampling(parser)
    flags = [OWN_FLAGS[row.name]] if row.name in OWN_FLAGS else all_flags(row.name)
    (action,) = {action for action in parser._actions if set(flags) & set(action.option_strings)}
    assert set(flags) <= set(action.option_strings)
    if row.kind in ("int", "float"):
        given = sampling_settings(parser.parse_args([flags[0], str(value_of(row))]))
        assert given[row.name] == value_of(row)
        assert attribute_docs(SamplingParams)[row.name] in action.help


def test_the_sampler_has_an_array_with_the_declared_values() -> None:
    rows = {row.name: row for row in PARAMETERS.values() if row.neutral is not None}
    neutral, host = neutral_slots(1, LIMITS), HostSlots(1, LIMITS)
    values = {name: value_of(row) for name, row in rows.items()}
    host.set(0, Request("r", (1,), SamplingParams(seed=0, **values)))
    for name, row in rows.items():
        assert getattr(neutral, name)[0] == row.neutral
        assert getattr(host.snapshot(), name)[0] == pytest.approx(values[name])
        assert row.name == "temperature" or row.neutral == row.default


@pytest.mark.parametrize("rows", [4, 8])
def test_the_probe_of_batch_invariance_uses_every_array_of_the_sampler(rows: int) -> None:
    probed, neutral = _every_feature(rows, LIMITS), neutral_slots(rows, LIMITS)
    unused = [n for n in SlotParams._fields if np.array_equal(getattr(probed, n), getattr(neutral, n))]
    assert set(unused) <= NOT_PROBED


def test_the_probe_has_rows_that_sample_with_each_parameter() -> None:
    """A parameter of a greedy row would be proved only where it changes logits."""
    probed, neutral = _every_feature(4, LIMITS), neutral_slots(4, LIMITS)
    sampled = probed.temperature > 0
    for row in PARAMETERS.values():
        if row.neutral is not None:
            assert (getattr(probed, row.name) != getattr(neutral, row.name))[sampled].any(), row.name


def test_the_distribution_of_each_is_compared_with_the_reference() -> None:
    tested = [case.params for case in test_distribution.CASES.values()]
    sampling = [row for row in PARAMETERS.values() if row.neutral is not None]
    assert [row.name for row in sampling if all(getattr(params, row.name) == row.default for params in tested)] == []


def test_the_docs_have_it(repo: pathlib.Path) -> None:
    assert attribute_docs(SamplingParams).keys() == PARAMETERS.keys()
    page = (repo / "docs/sampling.md").read_text(encoding="utf-8")
    assert with_tables(page) == page, "python -m tools.settings_tables"
    assert [name for name in PARAMETERS if f"| `{name}` |" not in page] == []
    order = page.partition("## Order")[2].partition("## ")[0]
    filters = [row.name for row in PARAMETERS.values() if row.neutral is not None]
    assert [name for name in filters if f"`{name}`" not in order] == []
    apis = (repo / "docs/http_api.md").read_text(encoding="utf-8")
    assert [row.name for row in PARAMETERS.values() if row.also_in and not re.search(f"`{row.name}`", apis)] == []
