"""Malformed GGUF files: each is loaded or rejected with one sentence, in bounded memory and time."""

import pathlib
import random
import re
import struct
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from jaxinfer.formats.gguf import BLOCKS, MAX_KEYS, MAX_STRINGS, MAX_TENSORS, PLAIN, SIZES, GgufError
from jaxinfer.models.config import ConfigError
from jaxinfer.models.model import abstract
from jaxinfer.text import TemplateError, TokenizerError
from jaxinfer.text.gguf import gguf_chat_template, gguf_tokenizer
from jaxinfer.weights import CheckpointError
from jaxinfer.weights.gguf.checkpoint import open_gguf
from jaxinfer.weights.gguf.tensors import GgufFile
from tests.weights.files import refused
from tests.weights.gguf.files import (
    MIXED_TINY,
    NUMBERS,
    TINY,
    entry,
    gguf_bytes,
    mixed_tensors,
    text,
    tiny_tensors,
    typed,
)

ONES = bytes(4 * 64)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "model.gguf"


def head(tensors: int, keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def pair(key: str, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def array(kind: int, count: int, raw: bytes = b"") -> bytes:
    return pair("a", 9, struct.pack("<IQ", kind, count) + raw)


def aligned(raw: bytes, alignment: int = 32) -> bytes:
    return raw + bytes(-len(raw) % alignment)


def two(first: int, second: int, count: int = 4, alignment: bytes = b"") -> bytes:
    """Return a file of two F32 tensors at two offsets."""
    entries = entry("x", (count,), 0, first) + entry("y", (count,), 0, second)
    return aligned(head(2, 1 if alignment else 0) + alignment + entries) + ONES


HUGE = 2**64 - 1

LIES: dict[str, tuple[bytes, str]] = {
    "another format": (b"GGML" + bytes(20), "does not begin with GGUF"),
    "version 1": (head(0, 0, 1), "version 1 is not 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it is big-endian"),
    "too many tensors": (head(MAX_TENSORS + 1, 0), "claims 131073 tensors"),
    "too many keys": (head(0, MAX_KEYS + 1), "claims 65537 keys"),
    "tensors that are not there": (head(MAX_TENSORS, 0), "ends within a tensor's name"),
    "a key twice": (head(0, 2) + 2 * pair("k", 4, bytes(4)), "has the key 'k' twice"),
    "an endless key": (head(0, 1) + struct.pack("<Q", HUGE), "a key claims 18446744073709551615 bytes"),
    "a long key": (head(0, 1) + text("k" * 2000), "a key claims 2000 bytes"),
    "an endless text": (head(0, 1) + pair("k", 8, struct.pack("<Q", HUGE)), "the value of 'k' claims"),
    "a text behind the end": (head(0, 1) + pair("k", 8, struct.pack("<Q", 100)), "ends within the value of 'k'"),
    "a key that is no text": (head(0, 1) + text(b"\xff\xfe") + bytes(8), "a key is not UTF-8"),
    "a value that is no text": (head(0, 1) + pair("k", 8, text(b"\xff")), "the value of 'k' is not UTF-8"),
    "a type that is none": (head(0, 1) + pair("k", 13, bytes(8)), "'k' has the unknown type 13"),
    "an array of no type": (head(0, 1) + array(99, 1, bytes(8)), "an array of the unknown type 99"),
    "arrays of arrays": (head(0, 1) + array(9, 1, bytes(12)), "an array of arrays"),
    "a long array": (head(0, 1) + array(0, HUGE), "ends within the value of 'a'"),
    "an array whose size wraps around": (head(0, 1) + array(10, 2**61 + 1, bytes(8)), "ends within the value of 'a'"),
    "too many texts": (head(0, 1) + array(8, MAX_STRINGS + 1), "all arrays together may have"),
    "texts that are not there": (head(0, 1) + array(8, MAX_STRINGS), "ends within the value of 'a'"),
    "a text of an array behind the end": (head(0, 1) + array(8, 1, struct.pack("<Q", HUGE)), "ends within the value"),
    "an alignment of 0": (two(0, 32, alignment=text("general.alignment") + typed(0)), "'0', not a power of two"),
    "an alignment of 24": (two(0, 32, alignment=text("general.alignment") + typed(24)), "'24', not a power of two"),
    "an alignment that is text": (two(0, 32, alignment=text("general.alignment") + typed("8")), "'8', not a power"),
    "an alignment that is a list": (two(0, 32, alignment=text("general.alignment") + typed([8])), "is an array, not"),
    "an alignment of all": (two(0, 32, alignment=text("general.alignment") + typed(1 << 30)), "not a power of two up"),
    "overlap": (two(0, 32, 16), "tensor 'y' overlaps tensor 'x'"),
    "same place": (two(0, 0), "overlaps"),
    "unaligned": (two(0, 20), "tensor 'y' does not begin at a multiple of 32"),
    "behind the end": (two(0, 1024), "tensor 'y' ends at byte .*: is it truncated"),
    "far behind the end": (two(0, 2**60), "tensor 'y' ends at byte .*: is it truncated"),
    "an offset that wraps around": (two(0, HUGE - 31), "tensor 'y' has a shape or an offset that no file"),
    "a name twice": (aligned(head(2, 0) + 2 * entry("x", (4,), 0, 0)) + ONES, "two tensors of the name 'x'"),
    "no dimension": (aligned(head(1, 0) + entry("x", (), 0, 0)) + ONES, "'x' has 0 dimensions"),
    "five dimensions": (aligned(head(1, 0) + entry("x", (1,) * 5, 0, 0)) + ONES, "'x' has 5 dimensions"),
    "nothing in it": (aligned(head(1, 0) + entry("x", (4, 0), 0, 0)) + ONES, "'x' has a shape or an offset"),
    "a product that wraps around": (aligned(head(1, 0) + entry("x", (2**33, 2**33), 0, 0)), "'x' has a shape"),
    "a type of no number": (aligned(head(1, 0) + entry("x", (4,), 2**32 - 1, 0)) + ONES, "unknown type 4294967295"),
    "half a block": (aligned(head(1, 0) + entry("x", (2, 16), 8, 0)) + ONES, "rows of 16, which are no whole blocks"),
    "control characters": (head(0, 2) + 2 * pair("\x1b[2J\n", 4, bytes(4)), r"the key '\\x1b\[2J\\n' twice"),
    "an endless name": (aligned(head(1, 0) + text("n" * 1000) + struct.pack("<I", 9)), r"'n{120}\.\.\.' has 9 dim"),
}


@pytest.mark.parametrize("lie", sorted(LIES))
def test_lies(path: pathlib.Path, lie: str) -> None:
    content, pattern = LIES[lie]
    path.write_bytes(content)
    with refused(f"not a valid GGUF file: .*{pattern}"):
        GgufFile(path)


NO_TYPES = {
    4: "Q4_2, which llama.cpp removed in 2023: quantise the model again",
    5: "Q4_3, which llama.cpp removed in 2023: quantise the model again",
    9: "Q8_1, which llama.cpp makes of a product's inputs while it runs: .* files have Q8_0",
    15: "Q8_K, which llama.cpp makes of a product's inputs while it runs: .* files have Q8_0",
    31: "Q4_0_4_4, which llama.cpp reads from files no more: quantise the model again as Q4_0, ",
    32: "Q4_0_4_8, which llama.cpp reads from files no more: quantise the model again as Q4_0, ",
    33: "Q4_0_8_8, which llama.cpp reads from files no more: quantise the model again as Q4_0, ",
    36: "IQ4_NL_4_4, which llama.cpp reads from files no more: quantise the model again as IQ4_NL, ",
    37: "IQ4_NL_4_8, which llama.cpp reads from files no more: quantise the model again as IQ4_NL, ",
    38: "IQ4_NL_8_8, which llama.cpp reads from files no more: quantise the model again as IQ4_NL, ",
    43: "the unknown type 43, which a fork of llama.cpp has, or a later one: quantise the model again",
    138: "the unknown type 138, which a fork of llama.cpp has, or a later one: quantise the model again",
}


@pytest.mark.parametrize("number", NO_TYPES)
def test_what_is_refused_says_which_and_why(path: pathlib.Path, number: int) -> None:
    path.write_bytes(aligned(head(1, 0) + entry("x", (256,), number, 0)) + ONES)
    with refused(rf"tensor 'x' is stored as {NO_TYPES[number]}.*\(known: BF16, .* IQ1_M, .*, TQ2_0\)"):
        GgufFile(path)


def test_every_other_number_of_ggml_is_read() -> None:
    """Every type number from 0 to 42, as of August 2026, is read or listed as no type of files."""
    assert {*PLAIN, *BLOCKS} == set(range(43)) - NO_TYPES.keys()


def test_the_docs_name_every_kind(repo: pathlib.Path) -> None:
    told = set(re.findall(r"\w+", (repo / "docs" / "gguf.md").read_text()))
    assert {*BLOCKS.values(), *(why.split(",")[0] for number, why in NO_TYPES.items() if number < 43)} <= told


@pytest.mark.parametrize("kind", sorted(BLOCKS.values()))
def test_blocks_that_a_file_does_not_hold(path: pathlib.Path, kind: str) -> None:
    """Rows of half a block; a last block short of a byte; a tensor that begins within another's last block."""
    elements, size = SIZES[kind]
    number = NUMBERS[kind]

    def content(row: int, rows: int, nbytes: int, *more: bytes) -> bytes:
        return aligned(head(1 + len(more), 0) + entry("x", (rows, row), number, 0) + b"".join(more)) + bytes(nbytes)

    path.write_bytes(content(elements // 2, 2, size))
    with refused(f"'x' has rows of {elements // 2}, which are no whole blocks of {kind}"):
        GgufFile(path)
    path.write_bytes(content(2 * elements, 3, 6 * size - 1))
    with refused("'x' ends at byte .*: is it truncated"):
        GgufFile(path)
    path.write_bytes(content(2 * elements, 3, 6 * size))
    assert GgufFile(path).read("x").shape == (3, 2, size)
    inside = 6 * size // 32 * 32 - 32
    path.write_bytes(content(2 * elements, 3, 6 * size + 64, entry("y", (1,), 0, inside)))
    with refused("overlaps tensor"):
        GgufFile(path)


@pytest.mark.parametrize("raw", [text(b"\xff"), text("x" * (1 << 24) + "y")], ids=["not UTF-8", "too long"])
def test_texts_are_checked_when_they_are_read(path: pathlib.Path, raw: bytes) -> None:
    path.write_bytes(head(0, 1) + array(8, 1, raw))
    metadata = GgufFile(path).metadata
    assert metadata.count("a") == 1
    with pytest.raises(GgufError, match="not a valid GGUF file: the value of 'a' "):
        metadata["a"]


def test_long_arrays_are_left_in_the_file(path: pathlib.Path) -> None:
    path.write_bytes(head(0, 1) + array(0, MAX_STRINGS + 1, bytes(MAX_STRINGS + 1)))
    with bounded(megabytes=1):
        file = GgufFile(path)
    with pytest.raises(GgufError, match="8388609 elements"):
        file.metadata["a"]


# --------------------------------------------------------------------------------------------------------------
# Truncated and mutated


WHOLE = gguf_bytes(TINY, tiny_tensors())
MIXED = gguf_bytes(MIXED_TINY, mixed_tensors())


def load(path: pathlib.Path) -> bool:
    """Load a file with config, tokenizer, template and tensors; return False where it is rejected."""
    try:
        checkpoint = open_gguf(path)
        abstract(dict(checkpoint.config_json), "float32", "mutant")
        gguf_chat_template(path, checkpoint.metadata)
        gguf_tokenizer(path, checkpoint.metadata).encode("abc")
        for name in checkpoint.tensors:
            checkpoint.read(name)
        for weight in checkpoint.weights.values():
            [weight.read(part) for part in weight.parts]
    except (CheckpointError, ConfigError, TokenizerError, TemplateError) as error:
        message = str(error)
        assert "\n" not in message, message
        assert len(message) < 1500, message
        return False
    return True


class bounded:  # noqa: N801  reads as a statement
    """A context manager that asserts bounds on the memory and time of its block."""

    def __init__(self, megabytes: int, seconds: float = 20.0) -> None:
        self._bytes, self._seconds = megabytes << 20, seconds

    def __enter__(self) -> None:
        tracemalloc.start()
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        taken, peak = time.monotonic() - self._began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < self._bytes, f"{peak} bytes"
        assert taken < self._seconds, f"{taken} s"


@pytest.mark.parametrize("whole", [WHOLE, MIXED], ids=["tiny", "mixed"])
def test_the_whole_file_loads(path: pathlib.Path, whole: bytes) -> None:
    path.write_bytes(whole)
    assert load(path)


def sizes(whole: bytes, step: int) -> list[int]:
    powers = [1 << power for power in range(len(whole).bit_length())]
    return sorted({0, len(whole) - 1, *powers, *(power - 1 for power in powers), *range(0, len(whole), step)})


@pytest.mark.parametrize(("whole", "step"), [(WHOLE, 997), (MIXED, 9973)], ids=["tiny", "mixed"])
def test_truncated(path: pathlib.Path, whole: bytes, step: int) -> None:
    for size in sizes(whole, step):
        path.write_bytes(whole[:size])
        assert not load(path), size


def described(whole: bytes) -> int:
    """Return the length in bytes of a file's header."""
    return whole.rindex(b"output_norm.weight") + 64


def mutants(whole: bytes, seed: int, count: int) -> Iterator[bytes]:
    """Yield mutants: bytes changed, numbers made large, slices cut, doubled or exchanged, mostly in the header."""
    chance, first = random.Random(seed), described(whole)
    for _ in range(count):
        content = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            _mutate(content, chance, first)
        yield bytes(content)


EXTREMES = (0, 1, 2, 31, 32, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**61, 2**62, 2**63, 2**64 - 1)


def _mutate(content: bytearray, chance: random.Random, first: int) -> None:
    at = chance.randrange(max(1, min(len(content), first if chance.random() < 0.9 else len(content))))
    size = chance.choice((1, 4, 8, 32))
    match chance.randrange(5):
        case 0:
            content[at : at + 1] = bytes([chance.randrange(256)])
        case 1:
            width = chance.choice((4, 8))
            content[at : at + width] = (chance.choice(EXTREMES) % 256**width).to_bytes(width, "little")
        case 2:
            del content[at : at + size]
        case 3:
            content[at:at] = content[at : at + size]
        case _:
            other = chance.randrange(max(1, len(content) - size))
            content[at : at + size] = content[other : other + size]


def fuzz(path: pathlib.Path, whole: bytes, seed: int, count: int) -> None:
    refusals = 0
    for content in mutants(whole, seed, count):
        path.write_bytes(content)
        began = time.monotonic()
        refusals += not load(path)
        assert time.monotonic() - began < 20
    assert count // 4 < refusals


@pytest.mark.parametrize(("whole", "count"), [(WHOLE, 60), (MIXED, 25)], ids=["tiny", "mixed"])
def test_mutated(path: pathlib.Path, whole: bytes, count: int) -> None:
    with bounded(megabytes=8, seconds=120):
        fuzz(path, whole, 1, count)


@pytest.mark.slow
@pytest.mark.parametrize(("whole", "count"), [(WHOLE, 20_000), (MIXED, 5_000)], ids=["tiny", "mixed"])
def test_mutated_long(path: pathlib.Path, whole: bytes, count: int) -> None:
    fuzz(path, whole, 2, count)
