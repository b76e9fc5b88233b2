"""Tests of jaxinfer/bench: datasets and prompts."""

import itertools
import json
import pathlib
import re
from collections.abc import Iterator

import numpy as np
import pytest

from jaxinfer.bench import traces
from jaxinfer.bench.datasets import DATASETS, Asked, DatasetError, Lengths
from jaxinfer.bench.options import goals, parse
from jaxinfer.bench.prompts import Ids, Words
from jaxinfer.bench.serve import Load
from jaxinfer.bench.target import Item

IDS = Asked(Ids(50), 1.0, input=Lengths(3, 9), output=Lengths(2, 4))
TEXT = Asked(Words(2.0), 2.0, input=Lengths(40, 40), output=Lengths(5, 5))


def some(name: str, asked: Asked, count: int = 50, seed: int = 0) -> list[Item]:
    return list(itertools.islice(DATASETS[name].make(asked, seed), count))


def test_random_prompts() -> None:
    items = some("random", IDS, 200)
    assert {item.prompt_len for item in items} == set(range(3, 10))
    assert {item.output_len for item in items} == {2, 3, 4}
    assert all(len(item.prompt) == item.prompt_len and max(item.prompt) < 50 for item in items)
    assert items == some("random", IDS, 200) != some("random", IDS, 200, seed=1)


def test_random_words() -> None:
    (item,) = some("random", TEXT, 1)
    assert isinstance(item.prompt, str)
    assert (len(item.prompt.split()), item.prompt_len) == (20, 40)


def test_shared_prefixes() -> None:
    items = some("shared-prefix", Asked(Ids(1000), 1.0, input=Lengths(4, 4), prefix_len=16, groups=3), 100)
    assert {item.prompt_len for item in items} == {20}
    assert len({tuple(item.prompt[:16]) for item in items}) == 3
    assert len({tuple(item.prompt[16:]) for item in items}) == 100


@pytest.mark.parametrize("with_file", [False, True])
def test_sonnet(tmp_path: pathlib.Path, with_file: bool) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(f"line {number} has six words here" for number in range(30)) + "\n\n")
    asked = Asked(Words(1.0), 1.0, path=path if with_file else None, input=Lengths(60, 60), prefix_len=25)
    items = some("sonnet", asked)
    words = 6 if with_file else 8
    shared = 25 // words
    beginnings = {tuple(item.prompt.split("\n")[:shared]) for item in items}
    assert len(beginnings) == 1
    assert len({item.prompt for item in items}) == 50
    assert all(60 <= item.prompt_len == len(item.prompt.split()) < 60 + words for item in items)


def test_sharegpt(tmp_path: pathlib.Path) -> None:
    def talk(*values: str) -> dict:
        return {"conversations": [{"from": "human", "value": value} for value in values]}

    path = tmp_path / "talks.json"
    path.write_text(json.dumps([talk("a b", "c d e"), talk("q"), talk("w " * 99, "x"), talk("f", "g"), {}]))
    asked = Asked(Words(2.0), 2.0, max_len=20, path=path)
    items = some("sharegpt", asked, 4)
    assert {(item.prompt, item.prompt_len, item.output_len) for item in items} == {("a b", 4, 6), ("f", 2, 2)}
    assert items[0] != items[1]  # all items are used before any repeats
    with pytest.raises(DatasetError, match="no conversation that fits"):
        some("sharegpt", Asked(Words(2.0), 2.0, max_len=1, path=path))


@pytest.fixture
def azure(tmp_path: pathlib.Path) -> pathlib.Path:
    rows = [f"2023-11-16 18:15:{40 + 2 * i}.{5 + i}000000,{20 * (i + 1)},{10 * (i + 1)}" for i in range(5)]
    path = tmp_path / "azure.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


def test_azure(azure: pathlib.Path) -> None:
    items = some("azure", Asked(Ids(50), 1.0, max_len=75, path=azure))
    assert [(item.prompt_len, item.output_len) for item in items] == [(10, 5), (20, 10), (30, 15), (40, 20), (50, 25)]
    assert [item.due for item in items] == pytest.approx([0.0, 2.1, 4.2, 6.3, 8.4])
    assert [len(item.prompt) for item in items] == [10, 20, 30, 40, 50]


def tokens_by_hand(request: traces.TraceRequest) -> list[int]:
    """Return 16 tokens below 50 for each block, which depend on its number and the seed 4 alone."""
    return [
        token
        for block in request.blocks
        for token in np.random.default_rng((4, block)).integers(50, size=16, dtype=np.int32).tolist()
    ]


def test_prompts_of_mooncake_consist_of_their_blocks(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    rows = [{"timestamp": 1000 * i, "input_length": 700, "output_length": 64, "hash_ids": [0, i]} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    items = some("mooncake", Asked(Ids(50), 1.0, path=path, block_tokens=16), seed=4)
    trace = traces.scale_mooncake(traces.read_mooncake(path), 1000, 16)
    expected = [tokens_by_hand(request)[: request.prompt_len] for request in trace.requests]
    assert [item.prompt for item in items] == expected
    assert [item.due for item in items] == [0.0, 1.0, 2.0]
    words = some("mooncake", Asked(Words(2.0), 2.0, path=path, block_tokens=16))
    assert [len(item.prompt.split()) for item in words] == [10, 10, 10]  # 16 + 5 tokens of the cut block, halved
    assert words[0].prompt.split()[:8] == words[1].prompt.split()[:8]


@pytest.mark.parametrize("name", ["azure", "mooncake", "sharegpt"])
def test_a_file_is_needed_and_must_be_one(name: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(DatasetError, match="--dataset-path"):
        some(name, IDS)
    path = tmp_path / "wrong"
    path.write_text("what is this?\n")
    with pytest.raises((DatasetError, traces.TraceError), match="is not"):
        some(name, Asked(Ids(5), 1.0, path=path))


def load(*words: str) -> Load:
    return Load.of(parse(["serve", "--target", "http://x:1", *words]))


def due(asked: Load, count: int = 1000) -> list[float]:
    items: Iterator[Item] = (Item([1], 1, 1, due=float(number)) for number in range(count))
    return [time for time, _ in asked.due(items, np.random.default_rng(0))]


def test_loads() -> None:
    assert (load().users, load().requests) == (8, 200)
    assert len(due(load("--request-rate", "5"))) == 200
    assert due(load("--request-rate", "inf", "--num-requests", "3")) == [0.0, 0.0, 0.0]
    within = due(load("--request-rate", "10", "--duration", "20"))
    assert 150 < len(within) < 250
    assert max(within) < 20
    assert due(load("--speed", "2", "--dataset", "azure", "--duration", "2")) == [0.0, 0.5, 1.0, 1.5]
    assert (load("--sweep").rate, load("--sweep").duration, load("--sweep").requests) == (1.0, 20.0, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--speed 2", "no|none"),
        ("--sweep --concurrency 3", "rates"),
        ("--request-rate inf", "--num-requests"),
        ("--goodput ttft:x", "ttft:MS"),
        ("--goodput speed:3", "ttft:MS"),
        ("--goodput tpot:-3", "ttft:MS"),
    ],
)
def test_options_that_contradict_each_other(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["serve", "--target", "grpc://a", *words.split()], ["serve"]):
        with pytest.raises(SystemExit) as left:
            parse(arguments)
        assert left.value.code == 2
        assert re.search(said if len(arguments) > 1 else "--target", capsys.readouterr().err)


@pytest.mark.parametrize("words", ["--request-rate 0", "--input-len 9:3", "--target ftp://x", "--num-requests 0"])
def test_options_out_of_range(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(*words.split())
    assert words.split()[0] in capsys.readouterr().err


def test_goals_are_milliseconds() -> None:
    found = goals(["ttft:200", "tpot:50"])
    assert (found.ttft, found.tpot, found.e2e) == (0.2, 0.05, None)
