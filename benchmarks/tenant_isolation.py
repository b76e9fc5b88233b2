"""Test whether a tenant can detect another tenant's prompts: an attack on a server of the demo model, with two keys.

    python benchmarks/tenant_isolation.py                            400 probes: some minutes on two cores
    python benchmarks/tenant_isolation.py --sharing all              the leak where tenants share prefixes
    python benchmarks/tenant_isolation.py --probes 4000 --out FILE

Probes come in pairs of two fresh prompts. A fair coin decides which of them the victim sends; then the attacker, with a
key of its own, sends both, in an order that another coin decides, and records the time to the first token,
``cached_tokens`` and the time of Tokenize. The area under the ROC curve (AUC) is how often a primed prompt looks more
primed than a fresh one: 1 is a full leak, 0.5 none. Without a leak it still has a standard error of
sqrt((2n + 1) / 12 n^2) for n primed probes: 0.029 for 400 probes, so one such run in four shows 0.52 or more.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import pathlib
import random
import string
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import grpc

from benchmarks.serving.started import started
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.protos.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.serve.api.auth import key_entry, new_key
from jaxinfer.serve.api.tenants import SHARING, TENANT

_ENGINE = ("--max-num-seqs", "4", "--max-model-len", "1024", "--page-size", "16", "--prefill-sizes", "64", "256")


@dataclasses.dataclass(frozen=True)
class Seen:
    """Figures of one probe; each is larger where a prompt looks more primed."""

    ttft: float
    cached_tokens: float
    tokenize: float


Probes = Mapping[bool, Sequence[Seen]]
"""Probes of prompts that the victim had sent (true) and of fresh prompts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    options = parse(arguments)
    with served(options.sharing) as (target, victim, attacker):
        seen = attack(Tenant(target, victim), Tenant(target, attacker), options.probes, options.characters)
    result = {"sharing": options.sharing, "probes": options.probes, **figures(seen)}
    print(table(result))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sharing", choices=SHARING, default=TENANT, help="prefix_cache_sharing of the server (default: tenant)")
    add("--probes", type=int, default=400, help="by the attacker, half of them primed (default 400)")
    add("--characters", type=int, default=700, help="of a prompt (default 700)")
    add("--out", type=pathlib.Path, help="JSON file (default: none)")
    return parser.parse_args(arguments)


# ---- the attack


class Tenant:
    """Client with a key and a connection of its own."""

    def __init__(self, target: str, key: str) -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._stub = InferenceStub(grpc.insecure_channel(target, options))
        self._metadata = (("authorization", f"Bearer {key}"),)

    def ask(self, prompt: str) -> tuple[float, int]:
        """Return the seconds to the first token, and the number of cached tokens."""
        request = pb.GenerateRequest(prompt=prompt, sampling={"max_tokens": 2, "seed": 1, "ignore_eos": True})
        begun, first, cached = time.perf_counter(), math.inf, 0
        for event in self._stub.Generate(request, metadata=self._metadata):
            if event.HasField("delta"):
                first = min(first, time.perf_counter() - begun)
            cached = max(cached, event.finished.usage.cached_tokens)
        return first, cached

    def tokenize(self, text: str) -> float:
        """Return the seconds that Tokenize takes."""
        begun = time.perf_counter()
        self._stub.Tokenize(pb.TokenizeRequest(text=text), metadata=self._metadata)
        return time.perf_counter() - begun


def attack(victim: Tenant, attacker: Tenant, probes: int, characters: int, seed: int = 0) -> Probes:
    """Probe pairs of prompts: the victim sends one of each, the attacker both."""
    chance, seen = random.Random(seed), {True: list[Seen](), False: list[Seen]()}
    for tenant in (victim, attacker):  # warm up connections and helpers
        for _ in range(5):
            tenant.ask(_prompt(chance, characters))
    for _ in range(probes // 2):
        pair = [(_prompt(chance, characters), primed) for primed in (True, False)]
        victim.ask(pair[0][0])
        chance.shuffle(pair)
        for prompt, primed in pair:
            seen[primed].append(_probe(attacker, prompt))
    return seen


def _probe(attacker: Tenant, prompt: str) -> Seen:
    tokenize = attacker.tokenize(prompt)  # before the attacker's own request caches the words
    ttft, cached = attacker.ask(prompt)
    return Seen(-ttft, cached, -tokenize)


def _prompt(chance: random.Random, characters: int) -> str:
    """Return words that were never sent before, nearly as long as the tokenizer's word cache accepts."""
    words = ("".join(chance.choices(string.ascii_lowercase, k=200)) for _ in range(1 + characters // 200))
    return " ".join(words)[:characters]


# ---- figures


def figures(seen: Probes) -> dict[str, dict[str, float]]:
    """Return the AUC of each figure of the probes, its standard error without a leak, and medians."""
    found = {}
    for field in dataclasses.fields(Seen):
        primed, fresh = ([getattr(each, field.name) for each in seen[kind]] for kind in (True, False))
        medians = {"primed": abs(sorted(primed)[len(primed) // 2]), "fresh": abs(sorted(fresh)[len(fresh) // 2])}
        found[field.name] = {"auc": auc(primed, fresh), "error": null_error(len(primed), len(fresh)), **medians}
    return found


def auc(primed: Sequence[float], fresh: Sequence[float]) -> float:
    """Return the share of pairs in which the primed probe has the larger figure; ties count half."""
    wins = sum((one > other) + (one == other) / 2 for one in primed for other in fresh)
    return wins / (len(primed) * len(fresh))


def null_error(primed: int, fresh: int) -> float:
    """Return the standard error of an AUC of samples of one distribution (Mann and Whitney 1947)."""
    return math.sqrt((primed + fresh + 1) / (12 * primed * fresh))


def table(result: Mapping[str, object]) -> str:
    """Format a line for each figure."""
    lines = [f"prefix_cache_sharing = {result['sharing']}, {result['probes']} probes, half of them primed"]
    for field in dataclasses.fields(Seen):
        row = result[field.name]
        assert isinstance(row, dict)
        spread = 1.96 * row["error"]
        lines.append(
            f"{field.name:14} AUC {row['auc']:.3f} (0.5 +- {spread:.3f} if nothing is told, at 95 %), "
            f"medians {row['primed']:.6g} primed, {row['fresh']:.6g} fresh"
        )
    return "\n".join(lines)


# ---- the server


@contextlib.contextmanager
def served(sharing: str) -> Iterator[tuple[str, str, str]]:
    """Start a server of the demo model; yield its gRPC target, and the keys of two tenants."""
    victim, attacker = new_key(), new_key()
    with tempfile.NamedTemporaryFile("w") as keys:
        keys.write(key_entry(victim, "victim", ["infer"]) + key_entry(attacker, "attacker", ["infer"]))
        keys.flush()
        options = ["--api-keys", keys.name, "--prefix-cache-sharing", sharing]
        with started("--model", "demo", *options, *_ENGINE) as target:
            yield target, victim, attacker


if __name__ == "__main__":
    sys.exit(main())
