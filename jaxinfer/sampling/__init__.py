"""Choosing tokens on the device: processors, selection, log probabilities."""

from jaxinfer.sampling.logprobs import Logprobs, prompt_logprobs
from jaxinfer.sampling.sample import Sampled, sample
from jaxinfer.sampling.slots import HostSlots, SlotParams, SlotState, admit, neutral_slots, new_state
from jaxinfer.validate import SamplingLimits

__all__ = [
    "HostSlots",
    "Logprobs",
    "Sampled",
    "SamplingLimits",
    "SlotParams",
    "SlotState",
    "admit",
    "neutral_slots",
    "new_state",
    "prompt_logprobs",
    "sample",
]
