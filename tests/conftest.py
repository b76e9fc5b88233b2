"""Fixtures of the whole suite."""

import collections
import functools
import os
import pathlib
import secrets
import subprocess
import sys

import pytest
from hypothesis import settings

import tests.typecheck  # noqa: F401  jaxtyping imports `tests` alone and then looks the checker up in it

TESTS = pathlib.Path(__file__).resolve().parent
REPO = TESTS.parent

# Half of the suite's time, in files that seldom are the first to fail: left to `make test-extended` and CI.
EXTENDED = (
    "bench/test_command.py",
    "compilations/test_fingerprints.py",
    "compilations/test_programs.py",
    "demo/test_demo_adapters.py",
    "demo/test_demo_models.py",
    "engine/distributed/test_leader.py",
    "engine/execution/test_adapters.py",
    "engine/execution/test_compiled.py",
    "engine/execution/test_memory.py",
    "engine/execution/test_probe.py",
    "engine/scheduling/test_adapter_fairness.py",
    "engine/scheduling/test_adapter_schedules.py",
    "engine/scheduling/test_fair.py",
    "engine/scheduling/test_tenants.py",
    "engine/test_adapter_identity.py",
    "engine/test_draft_model.py",
    "engine/test_generated_pages.py",
    "engine/test_grammars.py",
    "engine/test_heads.py",
    "engine/test_identity.py",
    "engine/test_invariance.py",
    "engine/test_kv_dtype.py",
    "engine/test_llm.py",
    "engine/test_quantised.py",
    "engine/test_state_drafts.py",
    "engine/test_states.py",
    "engine/test_structured.py",
    "engine/test_thinking.py",
    "engine/test_trees.py",
    "engine/test_typical.py",
    "eval/",
    "gpu_check/test_hangs.py",
    "kernels/paged_attention/test_api.py",
    "kernels/test_grouped_matmul.py",
    "kernels/test_kv_write.py",
    "kernels/test_linear_attention.py",
    "kernels/test_lora.py",
    "kernels/test_lora_cpu.py",
    "kernels/test_matmul.py",
    "kernels/test_models_by_matmul.py",
    "kernels/test_quant_matmul.py",
    "kernels/test_stepped_tune.py",
    "kernels/test_token_index.py",
    "kv/test_fused.py",
    "kv/test_index_pool.py",
    "kv/test_latent_pool.py",
    "kv/test_quantized_pool.py",
    "kv/test_state_pool.py",
    "layers/test_moe.py",
    "layers/test_recurrent.py",
    "layers/test_top_k.py",
    "lora/test_goldens.py",
    "lora/test_hostile_adapters.py",
    "lora/test_served.py",
    "lora/test_trainable.py",
    "models/test_deepseek.py",
    "models/test_deepseek_sparse.py",
    "models/test_families.py",
    "models/test_heads.py",
    "models/test_lora.py",
    "models/test_nearest.py",
    "models/test_parity.py",
    "models/test_shapes.py",
    "models/test_sparse.py",
    "parallel/test_group.py",
    "parsers/response_template/test_regions.py",
    "parsers/test_recorded.py",
    "quant/",
    "quantize/",
    "sampling/test_distribution.py",
    "sampling/test_drafts.py",
    "sampling/test_sample.py",
    "sampling/test_search.py",
    "sampling/test_typical.py",
    "serve/attack/",
    "serve/core/test_core.py",
    "serve/core/test_restarts.py",
    "serve/grpc/test_bounds.py",
    "serve/grpc/test_loras_served.py",
    "serve/http/anthropic/test_client.py",
    "serve/http/responses/test_client.py",
    "serve/http/test_connections.py",
    "serve/http/test_framing.py",
    "serve/kv_events/test_live.py",
    "serve/test_adapters.py",
    "serve/test_bad_inputs.py",
    "serve/test_descriptors.py",
    "serve/test_faults.py",
    "serve/test_frontend_identity.py",
    "serve/test_holds.py",
    "serve/test_identity.py",
    "serve/test_log_queue.py",
    "serve/test_process.py",
    "serve/test_structured.py",
    "serve/test_templates.py",
    "serve/test_tenants.py",
    "serve/test_tool_calls.py",
    "spec/test_page.py",
    "structured/test_hostile.py",
    "structured/test_tool_grammars.py",
    "terminal/test_chat.py",
    "test_compile.py",
    "test_convert.py",
    "test_edited.py",
    "test_functional.py",
    "test_python_page.py",
    "test_stories.py",
    "test_wrapped.py",
    "text/test_detokenizer.py",
    "tools/test_census.py",
    "tools/test_train_demo.py",
    "tools/test_train_heads.py",
    "weights/formats/test_folders.py",
    "weights/gguf/test_checkpoint.py",
    "weights/gguf/test_hybrids.py",
    "weights/gguf/test_joined.py",
    "weights/gguf/test_newer_models.py",
    "weights/gguf/test_per_layer.py",
    "weights/gguf/test_storages.py",
    "weights/test_hostile_folders.py",
    "weights/test_quantized.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity")
    group.addoption(
        "--oracle-python", help="interpreter with torch and transformers (default: .venv-oracle, made here)"
    )
    group.addoption("--oracle-seed", type=int, help="first seed of the live comparison (default: a fresh one)")
    group = parser.getgroup("slices")
    group.addoption(
        "--part",
        help="K/N: of the files of the extended tests every N-th, from the K-th on; one test a file of those in turns",
    )
    group.addoption("--files", help="K/N: of the files with tests that would run every N-th, from the K-th on")
    group.addoption("--tests", help="K/N: of a file's tests that would run every N-th, from the K-th on")
    group = parser.getgroup("random tests")
    group.addoption("--fresh", action="store_true", help="draw anew what is drawn alike in each run otherwise")
    group.addoption("--seed", type=int, help="of the tests that draw anew: what a failure printed")


def pytest_configure(config: pytest.Config) -> None:
    """Random tests are the same in each run; `make attack` and the slow tier draw anew, and print what repeats them."""
    settings.register_profile("fixed", deadline=None, derandomize=True)
    settings.register_profile("fresh", deadline=None, print_blob=True)
    settings.load_profile("fresh" if config.getoption("--fresh") else "fixed")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Files of which no test would be run are not read: to read them all takes longer than a part of them runs."""
    if not collection_path.match("test_*.py"):
        return None
    extended, tiers = _is_extended(collection_path), str(config.getoption("markexpr"))
    if tiers.startswith("extended" if not extended else "not extended"):
        return True
    if tiers == "parity" and "mark.parity" not in collection_path.read_text(encoding="utf-8"):
        return True
    part: str | None = config.getoption("--part")
    if part is None or not tiers.startswith("extended"):
        return None
    return collection_path not in _part(*map(int, part.split("/"))) or None


def pytest_itemcollected(item: pytest.Item) -> None:
    if _is_extended(item.path):
        item.add_marker("extended")


@pytest.hookimpl(trylast=True)  # of those that markers have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = set[pytest.Item]()
    part: str | None = config.getoption("--part")
    if part is not None:
        left |= _not_in_turn(items, int(part.partition("/")[0]))
    files: str | None = config.getoption("--files")
    if files is not None:
        left |= _in_other_files(items, *map(int, files.split("/")))
    tests: str | None = config.getoption("--tests")
    if tests is not None:
        left |= _others_of_files(items, *map(int, tests.split("/")))
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


def _not_in_turn(items: list[pytest.Item], turn: int) -> set[pytest.Item]:
    """Of the tests of a file that take turns all but one."""
    of_files = collections.defaultdict[pathlib.Path, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("turn") is not None:
            of_files[item.path].append(item)
    return {item for each in of_files.values() for item in each if item is not each[turn % len(each)]}


def _in_other_files(items: list[pytest.Item], part: int, parts: int) -> set[pytest.Item]:
    """Tests that are not in every so many-th file."""
    chosen = set(sorted({item.path for item in items})[part - 1 :: parts])
    return {item for item in items if item.path not in chosen}


def _others_of_files(items: list[pytest.Item], part: int, parts: int) -> set[pytest.Item]:
    """Tests that are not every so many-th of their file's."""
    of_files = collections.defaultdict[pathlib.Path, list[pytest.Item]](list)
    for item in items:
        of_files[item.path].append(item)
    return {item for each in of_files.values() for place, item in enumerate(each) if place % parts != part - 1}


@functools.cache
def _is_extended(path: pathlib.Path) -> bool:
    return path.is_relative_to(TESTS) and path.relative_to(TESTS).as_posix().startswith(EXTENDED)


@functools.cache
def _part(part: int, parts: int) -> frozenset[pathlib.Path]:
    """Every so many-th file of the extended tests."""
    return frozenset(sorted(filter(_is_extended, TESTS.rglob("test_*.py")))[part - 1 :: parts])


@pytest.fixture(scope="session")
def repo() -> pathlib.Path:
    """The root of the source tree."""
    return REPO


@pytest.fixture(scope="module", autouse=True)
def shared_programs() -> None:
    """Share compiled programs between test processes: few models make most of the programs."""
    if "jax" in sys.modules:
        from jaxinfer.compilations import cache

        cache.DEFAULT_FOLDER = REPO / "build" / "test-programs"
        cache.use_compilation_cache(None)


@pytest.fixture
def fresh_seed(request: pytest.FixtureRequest) -> int:
    """A seed of this run alone, printed when the test fails; ``--seed`` names one."""
    named: int | None = request.config.getoption("--seed")
    seed = secrets.randbelow(10**9) if named is None else named
    print(f"repeat with --seed {seed}")
    return seed


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The same in each run, unless ``--fresh`` asks for another one."""
    fresh: int = request.getfixturevalue("fresh_seed") if request.config.getoption("--fresh") else 0
    return fresh


@pytest.fixture(scope="session")
def test_data() -> pathlib.Path:
    """The folder of real inputs: ``$JAXINFER_TEST_DATA``, else ``../shared/data``. Skips where it is absent."""
    asked = os.environ.get("JAXINFER_TEST_DATA")
    folder = pathlib.Path(asked) if asked else REPO.parent / "shared" / "data"
    if asked and not folder.is_dir():
        pytest.fail(f"JAXINFER_TEST_DATA={asked} is not a folder")
    if not folder.is_dir():
        pytest.skip("no test data: put it at ../shared/data or set JAXINFER_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def oracle_python(request: pytest.FixtureRequest, repo: pathlib.Path) -> pathlib.Path:
    """The oracle's interpreter; its environment is made if need be. Skips where no Python for it can be found."""
    named = request.config.getoption("--oracle-python")
    if named is not None:
        return pathlib.Path(named).absolute()
    made = subprocess.run(
        [repo / "tools/oracle/make_venv.sh", ".venv-oracle"], cwd=repo, capture_output=True, text=True
    )
    if made.returncode == 3:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    return repo / ".venv-oracle/bin/python"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not _has_gpu():
        pytest.skip("needs an NVIDIA GPU that jax can use")


def _has_gpu() -> bool:
    import jax  # the host-only tests run without it

    return jax.default_backend() == "gpu"
