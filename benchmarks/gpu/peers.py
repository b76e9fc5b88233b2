"""Section peers: attention of other libraries at the shapes of section kernels, where they are installed.

torch's scaled_dot_product_attention with each of its backends, on contiguous keys and values; FlashInfer on paged ones.
Each call is captured in a CUDA graph, so that no launch by the host is measured; `eager_ms` is without a graph.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxinfer.gpu_check import workloads
from jaxinfer.gpu_check.kernels import limits, page_table
from jaxinfer.gpu_check.measure import time_calls
from jaxinfer.gpu_check.report import Report
from jaxinfer.gpu_check.workloads import Decode, Prefill

TORCH_BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
_REPEATS = 8
_RESERVE_S = 4.0


class Peer(NamedTuple):
    """A peer library. ``calls`` makes one call per operand set when the peer is measured."""

    name: str
    calls: Callable[[Any, Decode | Prefill, int], list[Callable[[], Any]]]
    refuses: Callable[[Decode | Prefill], str | None] = lambda shape: None


def run(report: Report) -> None:
    if importlib.util.find_spec("torch") is None:
        report.put("torch", skipped="not installed")
        return
    torch = importlib.import_module("torch")
    report.put("torch", version=torch.__version__, cuda=torch.version.cuda, sees_gpu=torch.cuda.is_available())
    if not torch.cuda.is_available() and not report.quick:
        report.put("peers", skipped="torch sees no GPU")
        return
    for peer in _peers(report, torch):
        for shape in workloads.attention(quick=report.quick):
            key = f"{shape}: {peer.name}"
            if not report.time_for(key, _RESERVE_S):
                continue
            if why := peer.refuses(shape):
                report.put(key, skipped=why)
                continue
            with report.attempt(key):
                _measure(report, torch, key, peer, shape)


def _peers(report: Report, torch: Any) -> Iterator[Peer]:
    """Yield the peers, FlashInfer last: its first call of a shape may compile."""
    if not torch.cuda.is_available():
        yield Peer("torch, its choice", _torch_calls(None), _not_square)
        return
    for backend in TORCH_BACKENDS:
        yield Peer(f"torch, {backend.lower()}", _torch_calls(backend), _not_square)
    if importlib.util.find_spec("flashinfer") is None:
        report.put("FlashInfer", skipped="not installed")
    else:
        yield Peer("FlashInfer", _flashinfer_calls)


def _measure(report: Report, torch: Any, key: str, peer: Peer, shape: Decode | Prefill) -> None:
    on_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_gpu else lambda *_: None
    sets = 1 if report.quick or isinstance(shape, Prefill) else workloads.variants(shape.bytes)
    calls = peer.calls(torch, shape, sets)

    def once() -> None:
        for call in calls:
            call()

    eager = time_calls(once, rounds=3, inside=sets, wait=lambda _: wait())
    names = {"shape": str(shape), "path": peer.name, "sets": sets}
    report.put(key, **names, **eager, eager_ms=eager["best_ms"], **limits(report, shape, eager["best_ms"]))
    if on_gpu:
        replay = _graph(torch, once)
        timing = time_calls(replay, rounds=5, inside=sets * _REPEATS, wait=lambda _: wait())
        report.put(key, **names, **timing, eager_ms=eager["best_ms"], **limits(report, shape, timing["best_ms"]))


def _graph(torch: Any, once: Callable[[], None]) -> Callable[[], Any]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(_REPEATS):
            once()
    replay: Callable[[], Any] = graph.replay
    return replay


def _not_square(shape: Decode | Prefill) -> str | None:
    """Return why torch cannot run a chunk after earlier keys: its causal mask begins at the first key. None: it can."""
    if isinstance(shape, Prefill) and shape.chunk != shape.context:
        return "its causal mask cannot begin in the middle of the keys"
    return None


def _random(torch: Any, seed: int, *shape: int) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)


def _torch_calls(backend: str | None) -> Callable[[Any, Decode | Prefill, int], list[Callable[[], Any]]]:
    def calls(torch: Any, shape: Decode | Prefill, sets: int) -> list[Callable[[], Any]]:
        attention = importlib.import_module("torch.nn.attention")
        compute = torch.nn.functional.scaled_dot_product_attention
        rows, queries = (shape.rows, 1) if isinstance(shape, Decode) else (shape.sequences, shape.chunk)
        keys = (rows, shape.kv_heads, shape.context, shape.head_dim)
        options = {"is_causal": isinstance(shape, Prefill), "enable_gqa": True}

        def one(index: int) -> Callable[[], Any]:
            q = _random(torch, 3 * index, rows, shape.heads, queries, shape.head_dim)
            k, v = (_random(torch, 3 * index + side, *keys) for side in (1, 2))

            def call() -> Any:
                if backend is None:
                    return compute(q, k, v, **options)
                with attention.sdpa_kernel([getattr(attention.SDPBackend, backend)]):
                    return compute(q, k, v, **options)

            return call

        return [one(index) for index in range(sets)]

    return calls


def _flashinfer_calls(torch: Any, shape: Decode | Prefill, sets: int) -> list[Callable[[], Any]]:
    """Make calls of FlashInfer, whose page layout "HND" is ours: [pages, 2, kv_heads, page, head_dim]."""
    flashinfer = importlib.import_module("flashinfer")
    decode, rows = isinstance(shape, Decode), shape.rows if isinstance(shape, Decode) else shape.sequences
    queries = 1 if isinstance(shape, Decode) else shape.chunk
    table = page_table(rows, shape.context, shape.page)
    width = table.shape[1]
    indices = torch.tensor(table.reshape(-1), dtype=torch.int32, device="cuda")
    ends = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    last = torch.full((rows,), (shape.context - 1) % shape.page + 1, dtype=torch.int32, device="cuda")
    heads, sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.page), {"q_data_type": torch.bfloat16}

    def one(index: int) -> Callable[[], Any]:
        q = _random(torch, 2 * index, rows * queries, shape.heads, shape.head_dim)
        pool = _random(torch, 2 * index + 1, table.size, 2, shape.kv_heads, shape.page, shape.head_dim)
        workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
        if decode:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
            wrapper.plan(ends * width, indices, last, *heads, **sizes)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            wrapper.plan(ends * queries, ends * width, indices, last, *heads, causal=True, **sizes)
        return lambda: wrapper.run(q, pool)

    return [one(index) for index in range(sets)]
