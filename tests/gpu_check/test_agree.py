"""Section agree: bitwise identical results, a differing one, and when the exit code depends on it."""

import types

import jax.numpy as jnp
import pytest

from jaxinfer.gpu_check import agree
from pallas_kernels.check.cases import attention_case
from pallas_kernels.choice import Choice, Target

PLAIN = {"page": 16, "head_dim": 64}
HOPPER, AMPERE = (9, 0), (8, 0)


def compared(monkeypatch: pytest.MonkeyPatch, differs: str, capability: tuple[int, int] | None, promised: bool, **case):
    """Run the comparison with kernels that are batch-invariant, except for one number of the program ``differs``."""

    def program(name, q):
        result = q * 2
        return result.at[(0,) * result.ndim].add(jnp.asarray(1, q.dtype)) if name == differs else result

    monkeypatch.setattr(agree, "lowering_target", lambda: Target("gpu", capability))
    kernels = types.SimpleNamespace(
        prefill=lambda q, *_: program("drafts" if q.shape[1] == agree._DRAFTS else "chunk", q),
        decode=lambda q, *_: program("decode", q),
        explain_decode=lambda *_: Choice("mosaic", "stood in"),
    )
    monkeypatch.setattr(agree, "paged_attention", kernels)
    return agree._compared(attention_case(lengths=(70,), counts=(20,), **PLAIN, **case), promised)


def test_equal_bits_are_found(monkeypatch):
    found = compared(monkeypatch, "", HOPPER, promised=True)
    assert found == {"same_bits_decoded": True, "same_bits_as_drafts": True, "promised": True, "ok": True}


@pytest.mark.parametrize(
    ("differs", "same"), [("decode", (False, True)), ("drafts", (True, False)), ("chunk", (False, False))]
)
def test_one_number_that_differs_is_found(monkeypatch, differs, same):
    found = compared(monkeypatch, differs, HOPPER, promised=True)
    assert (found["same_bits_decoded"], found["same_bits_as_drafts"]) == same
    assert not found["ok"]


@pytest.mark.parametrize(
    ("capability", "promised", "case", "expected"),
    [
        (HOPPER, False, {}, False),
        (AMPERE, False, {}, True),
        (AMPERE, False, {"pool_dtype": jnp.int8, "scales": "head"}, False),
        (None, True, {}, False),
    ],
)
def test_what_is_not_promised_is_told_and_fails_nothing(monkeypatch, capability, promised, case, expected):
    found = compared(monkeypatch, "decode", capability, promised, **case)
    assert not found["same_bits_decoded"]
    assert (found["promised"], found["ok"]) == (expected, not expected)
