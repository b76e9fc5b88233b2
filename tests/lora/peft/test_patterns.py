"""Regular expressions of adapters: the same matches as Python's, in a bounded number of steps."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.peft.patterns import LONGEST, Budget, Pattern, Suffix

ATOMS = st.sampled_from(["a", "b", r"\.", ".", "[ab]", "[^a.]", r"\d", "1", r"\w", "^", "$", r"\b"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{1,}", "{,2}", "{1,2}?"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
        inner.map(lambda one: f"(?={one})"),
        inner.map(lambda one: f"(?!{one})"),
    ),
    max_leaves=6,
)
NAMES = st.text("ab1.", max_size=7)


@given(PATTERNS, NAMES)
def test_whole_matches_are_those_of_python(pattern: str, name: str):
    assert Pattern(pattern, "key").fullmatch(name, Budget()) == (re.fullmatch(pattern, name) is not None)


@given(st.one_of(PATTERNS, st.text("ab1.", min_size=1, max_size=4)), NAMES)
def test_matches_of_ends_are_those_of_peft(key: str, name: str):
    expected = re.match(rf"(.*\.)?({key})$", name) is not None
    assert Suffix(key, "key").matches(name, Budget()) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        r".*?layers\.[\d]{1,}\.(?:self_attn|mlp).*(q_proj|up_proj)",
        r"^(?!.*vision).*(?:language|text|model).*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?",
        r"(?:.*?\.)?layers\.(1|2)\..*\.(q|v)_proj",
    ],
)
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj", "model.vision.layers.2.mlp.down_proj", "lm_head"])
def test_patterns_that_people_write(pattern: str, name: str):
    assert Pattern(pattern, "key").fullmatch(name, Budget()) == (re.fullmatch(pattern, name) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a*)*b", "(a|a)*b", "(a?){40}" + "a" * 40 + "b", "(((a*)*)*)*b", "(a|aa)+$b"),
        *("(?:|a){9999}" * 100 + "b", "(?:(?:a?){9999}){9999}b"),  # the package `regex` crashes, and hangs
    ],
)
def test_patterns_that_take_for_ever_elsewhere_do_not_here(pattern: str):
    begin = time.process_time()
    assert not Pattern(pattern, "key").fullmatch("a" * 60, Budget())
    assert time.process_time() - begin < 5.0


def test_steps_run_out():
    with pytest.raises(AdapterError, match="take too long"):
        Pattern("((.*)*)*(.*)*b", "key").fullmatch("a" * 60, Budget(100))


@pytest.mark.parametrize("pattern", ["(a", r"(a)\1", "(?<=a)b", "a*+", "a" * (LONGEST + 1), "(" * 33 + ")" * 33])
def test_what_is_not_supported_is_refused_by_the_key(pattern: str):
    with pytest.raises(AdapterError, match=r"^target_modules: "):
        Pattern(pattern, "target_modules")
    with pytest.raises(AdapterError, match=r"^rank_pattern: "):
        Suffix(pattern if len(pattern) < LONGEST else f"{pattern}*", "rank_pattern")
