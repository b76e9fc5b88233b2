"""Token sampling on the device: logits processors, token selection, log probabilities."""

from jaxinfer.sampling.drafts import DraftRows, accepted
from jaxinfer.sampling.logprobs import Logprobs, prompt_logprobs, wanted_logprobs
from jaxinfer.sampling.sample import TYPICAL, Sampled, Typical, guess, guess_scores, sample
from jaxinfer.sampling.slots import (
    HostSlots,
    SlotParams,
    SlotState,
    admit,
    keep_slot,
    neutral_slots,
    new_state,
    resume_slot,
)
from jaxinfer.sampling.training import Extras
from jaxinfer.sampling_params import SamplingLimits

__all__ = [
    "TYPICAL",
    "DraftRows",
    "Extras",
    "HostSlots",
    "Logprobs",
    "Sampled",
    "SamplingLimits",
    "SlotParams",
    "SlotState",
    "Typical",
    "accepted",
    "admit",
    "guess",
    "guess_scores",
    "keep_slot",
    "neutral_slots",
    "new_state",
    "prompt_logprobs",
    "resume_slot",
    "sample",
    "wanted_logprobs",
]
