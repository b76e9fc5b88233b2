"""Request validation that needs the loaded model."""

from typing import Any

import numpy as np
import pytest

from jaxinfer.request_checks import validate_request
from jaxinfer.sampling_params import RequestError, SamplingLimits, SamplingParams

VOCAB = 100
SMALL = SamplingLimits(max_stop_ids=3, max_bad_words=2, max_bad_word_tokens=2, max_logprobs=5)


def check(prompt: Any = (1, 2, 3), params: dict[str, Any] | None = None, **more: Any) -> None:
    known = {"vocab_size": VOCAB, "max_model_len": 10} | more
    validate_request(SamplingParams(**(params or {})), prompt, **known)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"prompt": ()}, "prompt_token_ids is empty"),
    "prompt fills the context": ({"prompt": range(10)}, "prompt_token_ids has 10 tokens"),
    "prompt id too large": ({"prompt": (1, 100)}, "prompt_token_ids: 100 must be a token id from 0 to 99"),
    "prompt id negative": ({"prompt": (-1,)}, "prompt_token_ids: -1"),
    "prompt id no integer": ({"prompt": (1.0,)}, "prompt_token_ids: 1.0 must be an integer"),
    "prompt id a bool": ({"prompt": (True,)}, "prompt_token_ids: True must be an integer"),
    "allowed": ({"params": {"allowed_token_ids": [5, 100]}}, "allowed_token_ids: 100"),
    "bias": ({"params": {"logit_bias": {5: 1.0, 200: 1.0}}}, "logit_bias key: 200"),
    "stop id": ({"params": {"stop_token_ids": [100]}}, "stop_token_ids: 100"),
    "many stop ids": (
        {"params": {"stop_token_ids": [1, 2, 3]}, "stop_token_ids": {4}, "limits": SMALL},
        "stop_token_ids must hold at most 3 ids, EOS included, not 4",
    ),
    "many bad words": ({"bad_words_ids": [(1,), (2,), (3,)], "limits": SMALL}, "bad_words must make at most 2"),
    "long bad word": ({"bad_words_ids": [(1, 2, 3)], "limits": SMALL}, "must have 1 to 2 tokens, not 3"),
    "empty bad word": ({"bad_words_ids": [()]}, "must have 1 to 8 tokens, not 0"),
    "bad word id": ({"bad_words_ids": [(1, 100)]}, "bad_words: 100"),
    "logprobs": ({"params": {"logprobs": 21}}, "logprobs=21 must be at most 20"),
    "prompt_logprobs": ({"params": {"prompt_logprobs": 6}, "limits": SMALL}, "prompt_logprobs=6 must be at most 5"),
    "typical without drafts": (
        {"params": {"speculation": {"acceptance": "typical"}}},
        r"speculation.acceptance='typical' needs drafts, and there are none: speculation is off \(speculative\)",
    ),
    "all allowed are bad": (
        {"params": {"allowed_token_ids": [5, 6]}, "bad_words_ids": [(5,), (6,)]},
        r"allowed_token_ids=\[5, 6\] leaves no token",
    ),
    "all allowed stop too early": (
        {"params": {"allowed_token_ids": [5, 6], "min_tokens": 1}, "bad_words_ids": [(5,)], "stop_token_ids": {6}},
        "leaves no token",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    arguments, sentence = REFUSED[name]
    with pytest.raises(RequestError, match=sentence):
        check(**arguments)


def test_accepts_what_just_fits() -> None:
    check(params={"speculation": {"acceptance": "typical"}}, limits=SamplingLimits(drafts=True))
    check(params={"speculation": {"max_tokens": 9}})
    check(prompt=range(9))
    check(prompt=list(np.array([0, 99], np.int32)))
    check(
        params={"stop_token_ids": [1, 2], "logprobs": 5, "prompt_logprobs": 5, "allowed_token_ids": [0, 99]},
        stop_token_ids={2, 3},
        bad_words_ids=[(1, 99), (0,)],
        limits=SMALL,
    )
    check(params={"allowed_token_ids": [5], "min_tokens": 0}, stop_token_ids={5})
    check(params={"allowed_token_ids": [5]}, bad_words_ids=[(5, 6)])
