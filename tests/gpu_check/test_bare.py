"""gpu_check and vs_gpu_peers run where only JAX, Flax and numpy are installed."""

import importlib.metadata
import os
import re
import subprocess
import sys

from jaxinfer.gpu_check import __main__ as gpu_check

BARE = """
import importlib, importlib.abc, importlib.metadata, importlib.util, sys
from importlib.machinery import PathFinder
given = set(sys.argv[1].split(","))
class Bare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in given:
            return None
        raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Bare())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in given else found(name, *rest)
from jaxinfer.gpu_check import standins
standins.provide()
for name in sys.argv[2].split(","):
    importlib.import_module(name)
"""


def test_it_needs_jax_flax_and_numpy_alone(repo):
    """All other dependencies of the project are hidden."""
    there = with_all_they_need("jax", "flax", "numpy")
    distributions = importlib.metadata.packages_distributions()
    hidden = {module for module, of in distributions.items() if not there & {plain(each) for each in of}}
    hidden -= {"jaxinfer", "pallas_kernels"}
    assert {"jaxtyping", "llguidance", "tokenizers"} <= hidden
    sections = {section.module.partition(":")[0] for section in gpu_check.SECTIONS}
    modules = [
        *sections,
        "jaxinfer.gpu_check.greedy",
        "benchmarks.gpu.start",
        "benchmarks.vs_gpu_peers",
        "benchmarks.gpu_peers.jaxinfer_peer",
    ]
    command = [sys.executable, "-c", BARE, ",".join(hidden), ",".join(modules)]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-2000:]


def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def with_all_they_need(*names):
    """Return these distributions and their direct and indirect requirements."""
    found, waiting = set(), list(names)
    while waiting:
        name = plain(waiting.pop())
        if name not in found:
            found.add(name)
            try:
                needed = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue
            waiting += [re.match(r"[\w.-]+", each)[0] for each in needed if "extra ==" not in each]
    return found
