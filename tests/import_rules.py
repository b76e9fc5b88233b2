"""Import rules between packages, checked on the syntax trees: nothing is imported, so no import is missed.

``violations(root)`` checks the packages under ``root``; the table ``LAYER`` gives the layer of each package.
"""

import ast
import dataclasses
import functools
import graphlib
import pathlib
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence

PACKAGES = ("jaxinfer", "pallas_kernels")
SCRIPTS = ("tools", "benchmarks")
"""Packages of the source tree that are not installed. They may import late and import undeclared dependencies."""

# A package may import packages of lower layers only: never of its own layer (sideways), never of a higher one.
LAYER = {
    "brief": -1,
    "sampling_params": -1,
    "helper_process": -1,
    "pallas_kernels": 0,
    "types": 0,
    "request_checks": 0,
    "version": 0,
    "protos": 0,  # generated from protos/
    "parsers": 0,
    "formats": 0,
    "client": 1,
    "compilations": 1,
    "v1": 1,  # public name of protos/v1
    "config": 1,
    "images": 1,
    "parallel": 2,
    "planner": 2,
    "quant": 3,
    "layers": 4,
    "kv": 4,
    "models": 5,
    "weights": 5,
    "sampling": 5,
    "spec": 6,
    "structured": 6,
    "lora": 6,
    "engine": 7,
    "serve": 8,
    "draft_heads": 8,
    "agreement": 8,
    "opening": 8,
    # entry points, each above those that it uses
    "outputs": 9,
    "quantize": 9,
    "research": 9,
    "served": 9,
    "loading": 10,
    "cli": 11,
    "group_weights": 11,
    "llm": 11,
    "async_llm": 12,
    "generate": 13,
    "terminal": 13,
    "bench": 13,
    "integrations": 13,
    "convert": 13,
    "compile": 13,
    "eval": 13,
    "check_on_policy": 13,
    "gpu_check": 13,
    "plan": 13,
    "__main__": 14,
    "jaxinfer": 14,  # jaxinfer/__init__.py
    "tools": 15,
    "benchmarks": 16,
}
# Layers within a package: a module belongs to the longest matching name and may import names of lower layers only.
LAYER_WITHIN = {
    "jaxinfer.engine.scheduling": 0,
    "jaxinfer.engine.execution": 1,
    "jaxinfer.engine": 2,
    "jaxinfer.engine.distributed": 3,
    "pallas_kernels": 0,
    "pallas_kernels.check": 1,
    "pallas_kernels.tune": 2,
}
TEXT_NEEDS = {"formats", "request_checks", "sampling_params", "types"}
ENGINE = LAYER["engine"]
ENTRY_POINTS = LAYER["loading"]

# Modules that may import by a computed name: the package for its lazy names; the command line, which reads a command's
# flags before it imports what the command needs; the registry of families, which imports a family on lookup; the specs
# of kernels, which are found by folders; the GPU check, which has a module for each section (in a checkout, also
# benchmarks) and names kernels by their path; the registry of image processors; a worker, which imports what its task
# needs.
COMPUTES_NAMES = {
    "jaxinfer",
    "jaxinfer.cli.app",
    "jaxinfer.gpu_check.__main__",
    "jaxinfer.gpu_check.kernels",
    "jaxinfer.gpu_check.problem",
    "jaxinfer.gpu_check.sections",
    "jaxinfer.images.registry",
    "jaxinfer.models",
    "jaxinfer.models.lazy",
    "jaxinfer.serve.workers.worker",
    "pallas_kernels.specs",
}
# Modules that import inside functions: one needs packages that may be missing, one imports in an idle-priority thread.
IMPORTS_LATE = {"jaxinfer.gpu_check.greedy", "jaxinfer.structured.helper"}

# The only module that imports tests: it draws the package diagram from the table above.
IMPORTS_TESTS = "tools.draw_packages"

# Modules of a package that are entry points themselves: no other module imports them.
SERVERS = {"jaxinfer.serve.__main__", "jaxinfer.serve.core.__main__", "jaxinfer.serve.keys"}

WIRE = {"grpc", "google"}
NUMERIC = {"jax", "flax", "numpy", "jaxtyping"}
# Third-party imports allowed per package. Packages above the engine may import anything that pyproject.toml declares.
THIRD_PARTY = {
    "pallas_kernels": {"jax", "jaxtyping", "numpy"},
    "brief": set[str](),
    "sampling_params": set[str](),
    "request_checks": set[str](),
    "helper_process": set[str](),
    "compilations": {"jax", "flax", "numpy"},
    "types": set[str](),
    "protos": WIRE,
    "v1": set[str](),
    "client": WIRE,
    "config": set[str](),
    "images": {"numpy", "PIL"},
    "version": set[str](),
    "parsers": set[str](),
    "formats": set[str](),
    "weights": NUMERIC | {"safetensors", "huggingface_hub", "ml_dtypes", "rich", "orbax", "tensorstore"},
    "structured": {"llguidance", "msgspec", "numpy"},
    "lora": {"jax", "jaxtyping", "numpy"},
    "parallel": NUMERIC | {"pynvml"},
    "text": {"tokenizers", "sentencepiece", "jinja2", "numpy"},
}
# Modules (with their submodules) that run without jax; so does `import jaxinfer` itself.
NO_JAX = (
    "jaxinfer.__main__",
    "jaxinfer.bench.__main__",
    "jaxinfer.bench.commands",
    "jaxinfer.bench.iterations",
    "jaxinfer.bench.transformers_backend",
    "jaxinfer.brief",
    "jaxinfer.cli",
    "jaxinfer.client",
    "jaxinfer.config",
    "jaxinfer.engine.scheduling",
    "jaxinfer.formats",
    "jaxinfer.generate",
    "jaxinfer.helper_process",
    "jaxinfer.images",
    "jaxinfer.integrations.embedded",
    "jaxinfer.integrations.ray",
    "jaxinfer.integrations.replicas",
    "jaxinfer.kv.blocks",
    "jaxinfer.kv.cache_key",
    "jaxinfer.kv.journal",
    "jaxinfer.kv.manager",
    "jaxinfer.kv.radix",
    "jaxinfer.lora.adapter",
    "jaxinfer.lora.door",
    "jaxinfer.lora.errors",
    "jaxinfer.lora.folders",
    "jaxinfer.lora.parts",
    "jaxinfer.lora.peft.config",
    "jaxinfer.lora.peft.patterns",
    "jaxinfer.lora.queue",
    "jaxinfer.lora.slots",
    "jaxinfer.lora.store",
    "jaxinfer.lora.usage",
    "jaxinfer.outputs",
    "jaxinfer.parallel.driver",
    "jaxinfer.parallel.frames",
    "jaxinfer.parsers",
    "jaxinfer.planner",
    "jaxinfer.request_checks",
    "jaxinfer.sampling_params",
    "jaxinfer.serve.__main__",
    "jaxinfer.serve.api",
    "jaxinfer.serve.core.supervisor",
    "jaxinfer.serve.core.async_engine",
    "jaxinfer.serve.core.backend",
    "jaxinfer.serve.core.child",
    "jaxinfer.serve.core.kv_event_encoder",
    "jaxinfer.serve.core.link",
    "jaxinfer.serve.core.messages",
    "jaxinfer.serve.core.operate",
    "jaxinfer.serve.core.operations",
    "jaxinfer.serve.core.pauses",
    "jaxinfer.serve.core.process",
    "jaxinfer.serve.core.service",
    "jaxinfer.serve.api.streams",
    "jaxinfer.serve.core.supervisor",
    "jaxinfer.serve.core.worker_node",
    "jaxinfer.serve.frontend.frontend",
    "jaxinfer.serve.frontend.operations",
    "jaxinfer.serve.grpc",
    "jaxinfer.serve.http",
    "jaxinfer.serve.keys",
    "jaxinfer.serve.kv_events",
    "jaxinfer.serve.runtime",
    "jaxinfer.serve.settings",
    "jaxinfer.serve.workers",
    "jaxinfer.spec",
    "jaxinfer.structured",
    "jaxinfer.text",
    "jaxinfer.types",
    "jaxinfer.version",
)
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
IMPORT = (ast.Import, ast.ImportFrom)


@dataclasses.dataclass(frozen=True)
class Module:
    """A source file: its dotted name, its package, and its imports (absolute dotted names) with their lines."""

    name: str
    is_package: bool
    tree: ast.Module

    @property
    def component(self) -> str:
        parts = self.name.split(".")
        if parts[0] != "jaxinfer" or len(parts) == 1:
            return parts[0]
        return "generate" if self.name in SERVERS else parts[1]

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @functools.cached_property
    def imports(self) -> list[tuple[int, str]]:
        return list(self.among(self.nodes))

    def among(self, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
        """Yield line and target of each import statement among ``nodes``."""
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".")
        up = node.level - self.is_package
        here = package[: len(package) - up] if up else package
        return ".".join([*here, *([node.module] if node.module else [])])


def read_modules(root: pathlib.Path, packages: Sequence[str] = (*PACKAGES, *SCRIPTS)) -> dict[str, Module]:
    """Return every Python file of ``packages`` under ``root``, by dotted name."""
    modules = {}
    for path in sorted(p for package in packages for p in (root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = Module(name, is_package, ast.parse(path.read_text(encoding="utf-8"), str(path)))
    return modules


def violations(root: pathlib.Path, declared: set[str]) -> list[str]:
    """Return all broken rules, one sentence each. ``declared``: the third-party packages that pyproject.toml names."""
    modules = read_modules(root)
    found = []
    for module in modules.values():
        if module.component != "text" and module.component not in LAYER:
            found.append(f"{module.name}: {module.component} is not a component of the design (tests/import_rules.py)")
            continue
        found += _direction(module, modules)
        if module.component not in SCRIPTS:
            found += _hidden(module)
            found += _third_party(module, declared)
    return [*found, *_jax_where_there_is_none(modules), *_cycles(modules)]


def _direction(module: Module, modules: dict[str, Module]) -> Iterator[str]:
    for line, target in module.imports:
        if target.split(".")[0] == "tests" and module.name != IMPORTS_TESTS:
            yield f"{module.name}:{line} imports {target}: only tests import tests"
        if (to := resolve(target, modules)) is None:
            continue
        component = modules[to].component
        if (
            reason := _refusal(module.component, component)
            if component != module.component
            else _refusal_within(module.name, to)
        ):
            yield f"{module.name}:{line} imports {to}: {reason}"


def _refusal(component: str, imported: str) -> str | None:
    if component == "text":
        return None if imported in TEXT_NEEDS else f"text imports {', '.join(sorted(TEXT_NEEDS))} only"
    if imported == "text":
        return None if LAYER[component] > ENGINE else "engine and below speak token ids, text is the front end's"
    if imported not in LAYER or LAYER[imported] < LAYER[component]:
        return None
    return "sideways" if LAYER[imported] == LAYER[component] else "upwards"


def _refusal_within(name: str, imported: str) -> str | None:
    """Return why an import within one package breaks the order of its internal layers, or None."""
    here, there = _layer_within(name), _layer_within(imported)
    return None if here is None or there is None or there <= here else "upwards"


def _layer_within(name: str) -> int | None:
    return next((LAYER_WITHIN[package] for package in (name, *_parents(name)[::-1]) if package in LAYER_WITHIN), None)


def _hidden(module: Module) -> Iterator[str]:
    may = module.name in IMPORTS_LATE or not any(node.col_offset for node in module.nodes if isinstance(node, IMPORT))
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not may:
            for line, target in module.among(ast.walk(node)):
                if target.split(".")[0] in {*PACKAGES, *JAX}:
                    yield f"{module.name}:{line} imports {target} inside a function"
        if module.name not in COMPUTES_NAMES and isinstance(node, ast.Name | ast.Attribute) and _names_importlib(node):
            yield f"{module.name}:{node.lineno} imports by a computed name"


def _names_importlib(node: ast.Name | ast.Attribute) -> bool:
    return (node.id if isinstance(node, ast.Name) else node.attr) in {"import_module", "__import__"}


def _third_party(module: Module, declared: set[str]) -> Iterator[str]:
    below = module.component in LAYER and LAYER[module.component] <= ENGINE
    allowed = THIRD_PARTY.get(module.component, NUMERIC if below else declared) & declared
    for line, target in module.imports:
        top = target.split(".")[0]
        if top not in allowed and top not in PACKAGES and top not in sys.stdlib_module_names:
            yield f"{module.name}:{line} imports {top}, which {module.component} may not use"


def _jax_where_there_is_none(modules: dict[str, Module]) -> Iterator[str]:
    graph = _graph(modules, at_run_time=True)
    uses = {
        module.name: f"{module.name}:{line} imports {target}"
        for module in modules.values()
        for line, target in _run_time_imports(module)
        if target.split(".")[0] in JAX
    }
    for start in modules:
        if start == "jaxinfer" or any(start == component or start.startswith(f"{component}.") for component in NO_JAX):
            reached = _reached_from(start, graph)
            yield from (f"{start} reaches jax: {use}" for name, use in uses.items() if name in reached)


def _reached_from(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen, todo = {start}, [start]
    while todo:
        more = graph[todo.pop()] - seen
        todo += more
        seen |= more
    return seen


def _graph(modules: dict[str, Module], at_run_time: bool) -> dict[str, set[str]]:
    """Map each module to its imports and, with ``at_run_time``, its parent packages, whose __init__ run first."""
    graph = {}
    for module in modules.values():
        pairs = _run_time_imports(module) if at_run_time else module.imports
        names = {to for _, target in pairs if (to := resolve(target, modules))}
        if at_run_time:
            names |= {p for name in (module.name, *names) for p in _parents(name) if p in modules}
        graph[module.name] = names - {module.name}
    return graph


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _run_time_imports(module: Module) -> Iterator[tuple[int, str]]:
    guarded = {
        line
        for node in module.nodes
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for line, _ in module.among(ast.walk(statement))
    }
    return ((line, target) for line, target in module.imports if line not in guarded)


def _cycles(modules: dict[str, Module]) -> Iterator[str]:
    graph = _graph(modules, at_run_time=False)
    graph.pop("jaxinfer", None)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield f"import cycle: {' -> '.join(error.args[1])}"


def resolve(target: str, modules: Collection[str]) -> str | None:
    """Return the longest prefix of a dotted name that is a module of this tree; None for third-party packages."""
    parts = target.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in prefixes if name in modules), None)
