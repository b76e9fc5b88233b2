"""Outputs for training in JSON, and in the messages of gRPC."""

import math

import numpy as np

from jaxinfer.client.results import read_delta
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.serve.api.arrays import arrays_json
from jaxinfer.serve.grpc import convert
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import PositionExtras, PositionLogprobs, RoutedExperts, TokenLogprob

KEPT = [[3, 70000], [], [5]]
POSITIONS = [
    PositionLogprobs(
        TokenLogprob(token, -0.5 * token, 1),
        (),
        PositionExtras(
            entropy=token / 4,
            token_logprobs=(-1.0, -math.inf),
            kept=np.array(kept, np.int32).tobytes(),
            experts=RoutedExperts(2, np.array([token, 1, 2, 3], np.int32).tobytes()),
            vocabulary=np.array([-math.inf, token], np.float32).tobytes(),
        ),
    )
    for token, kept in enumerate(KEPT)
]


def test_json_has_csr_arrays_and_no_infinity() -> None:
    assert arrays_json(POSITIONS, -9999.0) == {
        "logprobs": [0, -0.5, -1],
        "entropies": [0, 0.25, 0.5],
        "token_logprobs": [[-1, -9999]] * 3,
        "sampling_mask": {"indptr": [0, 2, 2, 3], "indices": [3, 70000, 5]},
        "vocabulary": ["AACA/wAAAAA=", "AACA/wAAgD8=", "AACA/wAAAEA="],
        "routed_experts": [[[token, 1], [2, 3]] for token in range(3)],
    }


def test_no_message_has_more_than_clients_accept() -> None:
    large = PositionExtras(vocabulary=bytes(4 * 300_000))
    positions = [PositionLogprobs(TokenLogprob(token, -1.0, 1), (), large) for token in range(5)]
    responses = list(convert.deltas("a", OutputDelta(0, "", [0, 1, 2, 3, 4], positions), str))
    assert [list(each.delta.token_ids) for each in responses] == [[0], [1], [2], [3], [4]]
    assert max(each.ByteSize() for each in responses) < 4 << 20


def test_json_has_what_was_requested_alone() -> None:
    plain = [PositionLogprobs(TokenLogprob(1, -2.0, 1), ())]
    assert arrays_json(plain, -9999.0) == {"logprobs": [-2.0]}
    assert arrays_json([], -9999.0) == {"logprobs": []}


def test_the_client_reads_what_the_server_sends() -> None:
    delta = OutputDelta(0, "", [0, 1, 2], POSITIONS)
    (response,) = convert.deltas("a", delta, str)
    found = read_delta(pb.GenerateResponse.FromString(response.SerializeToString()).delta)
    assert [list(each.kept_token_ids) for each in found.logprobs] == KEPT
    assert [each.entropy for each in found.logprobs] == [0, 0.25, 0.5]
    assert [each.token_logprobs for each in found.logprobs] == [(-1.0, -math.inf)] * 3
    assert [each.vocabulary.tolist() for each in found.logprobs] == [[-math.inf, 0], [-math.inf, 1], [-math.inf, 2]]
    assert np.asarray(found.logprobs[1].vocabulary).dtype == np.float32
    assert [each.routed_experts for each in found.logprobs] == [((token, 1), (2, 3)) for token in range(3)]
