"""Imports follow the layering of packages, checked on the syntax trees (rules: import_rules.py)."""

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from tests.import_rules import PACKAGES, SCRIPTS, violations

IMPORTED_AS = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "protobuf": "google",
    "googleapis-common-protos": "google",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-grpc": "opentelemetry",
    "pillow": "PIL",
    "google-tunix": "tunix",
    "pyyaml": "yaml",
    "fastapi-swagger": "fastapi_swagger",
    "orbax-checkpoint": "orbax",
    "smg-grpc-proto": "smg_grpc_proto",
    "nvidia-ml-py": "pynvml",
    "pyzmq": "zmq",
}
DECLARED = {"jax", "flax", "jaxtyping", "numpy", "safetensors", "tokenizers", "rich"}


def _write(root: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in path.relative_to(root).parents[:-1]:
            (root / folder / "__init__.py").touch()


def _declared(repo: pathlib.Path) -> set[str]:
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [
        line
        for extra in ("bench", "nvml", "ray", "routing", "transformers", "tunix")
        for line in project["optional-dependencies"][extra]
    ]
    packages = {re.split(r"[<>=\[; ]", line)[0] for line in lines}
    return {IMPORTED_AS.get(package, package) for package in packages}


def test_the_tree_keeps_the_rules(repo: pathlib.Path) -> None:
    found = violations(repo, _declared(repo))
    assert not found, "\n".join(found)


def test_the_rules_allow_the_design(tmp_path: pathlib.Path) -> None:
    files = {
        "jaxinfer/types.py": "import enum",
        "jaxinfer/kv/manager.py": "from jaxinfer.types import CacheSpec\nfrom jaxinfer.kv.blocks import Blocks",
        "jaxinfer/kv/blocks.py": "import heapq",
        "jaxinfer/kv/pool.py": "import jax\nfrom pallas_kernels.kv_write import write",
        "jaxinfer/weights/read.py": "import safetensors\nfrom .place import put",
        "jaxinfer/weights/place.py": "import jax.numpy as jnp",
        "jaxinfer/engine/execution/step.py": "from flax import linen\nfrom jaxinfer import kv, types",
        "jaxinfer/text/tokenizer.py": "import tokenizers\nfrom jaxinfer.types import SamplingParams",
        "jaxinfer/llm.py": "from jaxinfer.text.tokenizer import Tokenizer\nfrom jaxinfer.engine.execution import step",
        "jaxinfer/terminal/complete.py": "import rich\nfrom jaxinfer.llm import LLM\ndef f():\n    import tokenizers",
        "pallas_kernels/kv_write/api.py": "import jax",
        "tools/a.py": "import torch\ndef f():\n    from jaxinfer import llm",
        "benchmarks/a.py": "from pallas_kernels import kv_write",
    }
    _write(tmp_path, files)
    assert violations(tmp_path, DECLARED) == []


REFUSED = {
    "upwards": ({"jaxinfer/layers/a.py": "import jaxinfer.models", "jaxinfer/models/b.py": ""}, "upwards"),
    "sideways": ({"jaxinfer/models/a.py": "from jaxinfer import weights", "jaxinfer/weights/b.py": ""}, "sideways"),
    "sideways below": ({"jaxinfer/types.py": "import pallas_kernels", "pallas_kernels/a.py": ""}, "sideways"),
    "upwards within a component": (
        {"jaxinfer/engine/scheduling/a.py": "import jaxinfer.engine.execution.b", "jaxinfer/engine/execution/b.py": ""},
        "upwards",
    ),
    "a kernel and its check": (
        {"pallas_kernels/kv_write/a.py": "import pallas_kernels.check.b", "pallas_kernels/check/b.py": ""},
        "upwards",
    ),
    "upwards to the top of a component": (
        {
            "jaxinfer/engine/execution/a.py": "from jaxinfer.engine.engine import Engine",
            "jaxinfer/engine/engine.py": "",
        },
        "upwards",
    ),
    "package's own face": ({"jaxinfer/kv/a.py": "from jaxinfer import LLM"}, "upwards"),
    "relative": ({"jaxinfer/kv/a.py": "from ..engine import step", "jaxinfer/engine/execution/step.py": ""}, "upwards"),
    "kernels stand alone": ({"pallas_kernels/a.py": "import jaxinfer.quant", "jaxinfer/quant/b.py": ""}, "upwards"),
    "type checking": (
        {"jaxinfer/kv/a.py": "if TYPE_CHECKING:\n    import jaxinfer.engine", "jaxinfer/engine/b.py": ""},
        "upwards",
    ),
    "text above": (
        {"jaxinfer/text/a.py": "import jaxinfer.config", "jaxinfer/config.py": ""},
        "text imports formats, request_checks, sampling_params, types only",
    ),
    "text below": ({"jaxinfer/engine/a.py": "import jaxinfer.text", "jaxinfer/text/b.py": ""}, "speak token ids"),
    "hidden": (
        {"jaxinfer/engine/a.py": "def f():\n    import jaxinfer.kv", "jaxinfer/kv/b.py": ""},
        "inside a function",
    ),
    "hidden jax": ({"jaxinfer/text/a.py": "def f():\n    import jax"}, "inside a function"),
    "computed": ({"jaxinfer/kv/a.py": "import importlib\nimportlib.import_module('x')"}, "computed name"),
    "third party": ({"jaxinfer/engine/a.py": "import rich"}, "imports rich, which engine may not use"),
    "undeclared": ({"jaxinfer/generate.py": "import requests"}, "imports requests"),
    "no jax": ({"jaxinfer/engine/scheduling/scheduler.py": "import jax"}, "reaches jax"),
    "no jax, indirect": (
        {"jaxinfer/kv/manager.py": "import jaxinfer.kv.pool", "jaxinfer/kv/pool.py": "from jax import numpy"},
        "jaxinfer.kv.manager reaches jax: jaxinfer.kv.pool:1",
    ),
    "no jax, package": (
        {"jaxinfer/kv/manager.py": "", "jaxinfer/kv/__init__.py": "import jax"},
        "jaxinfer.kv.manager reaches jax: jaxinfer.kv:1",
    ),
    "no jax at the top": (
        {"jaxinfer/__init__.py": "from jaxinfer import llm", "jaxinfer/llm.py": "import jax"},
        "reaches",
    ),
    "cycle": (
        {"jaxinfer/kv/a.py": "import jaxinfer.kv.b", "jaxinfer/kv/b.py": "import jaxinfer.kv.a"},
        "import cycle",
    ),
    "a package and a tool": ({"jaxinfer/kv/a.py": "import tools.b", "tools/b.py": ""}, "upwards"),
    "a kernel and a benchmark": ({"pallas_kernels/a.py": "import benchmarks.b", "benchmarks/b.py": ""}, "upwards"),
    "benchmarks in tools": ({"tools/a.py": "import benchmarks.b", "benchmarks/b.py": ""}, "upwards"),
    "tools in a circle": (
        {"tools/a.py": "import tools.b", "tools/b.py": "def f():\n    from tools import a"},
        "import cycle",
    ),
    "tests": ({"benchmarks/a.py": "from tests import fakes"}, "only tests import tests"),
    "unknown component": ({"jaxinfer/misc/a.py": ""}, "misc is not a component"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_rules_refuse(name: str, tmp_path: pathlib.Path) -> None:
    files, reason = REFUSED[name]
    _write(tmp_path, files)
    found = violations(tmp_path, DECLARED)
    assert any(reason in sentence for sentence in found), found


def test_every_package_folder_has_an_init(repo: pathlib.Path) -> None:
    folders = {path.parent for package in (*PACKAGES, *SCRIPTS) for path in (repo / package).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_import_jaxinfer_loads_neither_jax_nor_text(repo: pathlib.Path) -> None:
    program = (
        "import sys, jaxinfer; jaxinfer.SamplingParams; dir(jaxinfer);"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in {'jax', 'flax', 'numpy', 'tokenizers'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=repo)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "first",
    [
        "import jaxinfer.v1.inference_pb2",
        "from jaxinfer.v1.control_pb2_grpc import ControlStub",
        "from jaxinfer.protos.v1 import control_pb2, inference_pb2",
        "import jaxinfer.client",
    ],
)
def test_messages_have_one_home_and_a_public_name(first: str, repo: pathlib.Path) -> None:
    program = (
        f"{first}; import sys, jaxinfer.v1.control_pb2, jaxinfer.v1.inference_pb2_grpc, jaxinfer.v1 as public;"
        "from jaxinfer.protos import v1 as home;"
        "names = ('control_pb2', 'control_pb2_grpc', 'inference_pb2', 'inference_pb2_grpc');"
        "print(all(getattr(public, n) is getattr(home, n) is sys.modules['jaxinfer.v1.' + n] for n in names),"
        " home.inference_pb2.DESCRIPTOR.package)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=repo)
    assert done.stdout.split() == ["True", "jaxinfer.v1"]


def test_public_names_resolve() -> None:
    import jaxinfer

    assert set(jaxinfer.__all__) <= set(dir(jaxinfer))
    for name in jaxinfer.__all__:
        assert getattr(jaxinfer, name).__name__.removeprefix("jaxinfer.") == name


def test_unknown_public_name_is_an_attribute_error() -> None:
    import jaxinfer

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = jaxinfer.nonsense
