"""Lookup of drafters by name."""

import numpy as np
import pytest

from jaxinfer.config import EngineConfigError
from jaxinfer.config.speculative import SpeculativeConfig
from jaxinfer.spec import Bounded, Drafted, NgramDrafter, SuffixDrafter, Tree, drafter, make_drafter, register


def test_drafters_by_name() -> None:
    assert make_drafter(SpeculativeConfig()) is None
    assert make_drafter(SpeculativeConfig(speculative="ngram", prompt_lookup_max=7)) == NgramDrafter(2, 7)
    assert isinstance(make_drafter(SpeculativeConfig(speculative="suffix")), SuffixDrafter)


def test_one_of_your_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "_MAKERS", dict(drafter._MAKERS))
    mine = NgramDrafter(1, 1)
    register("mine", lambda config: mine)
    assert make_drafter(SpeculativeConfig(speculative="mine")) is mine
    with pytest.raises(ValueError, match="there is a drafter 'mine' already"):
        register("mine", lambda config: mine)


class Says:
    def __init__(self, *tokens: int) -> None:
        self.tokens = np.array(tokens, np.int64)

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        return Tree.chain(self.tokens)

    def end(self, sequence: Drafted) -> None: ...
    def reset(self) -> None: ...


@pytest.mark.parametrize(
    ("said", "fed"),
    [((), []), ((1, 2, 3, 4, 5), [1, 2, 3, 4]), ((1, 9, 2), [1]), ((1, 8, -1, 2), [1, 8]), ((2**40,), [])],
)
def test_what_cannot_be_fed_is_cut(said: tuple[int, ...], fed: list[int]) -> None:
    sequence = Drafted(1, b"", 1, np.array([1], np.int32))
    assert Bounded(Says(*said), vocab_size=9).propose(sequence, 4).tokens.tolist() == fed


def test_an_unknown_one_is_refused_with_the_names() -> None:
    names = "None, grammar, ngram, draft_model, medusa, eagle, eagle3, mtp, suffix"
    with pytest.raises(EngineConfigError, match=f"speculative = eagle4 must be one of {names}"):
        make_drafter(SpeculativeConfig(speculative="eagle4"))
