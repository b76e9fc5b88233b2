"""Names of settings: suggestions for misspelled names, and aliases from other engines. No jax."""

from __future__ import annotations

import difflib
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": ("model_path", "m"),
        "served_model_name": ("alias",),
        "family": ("model_impl",),
        "http_port": ("port",),
        "tls_cert": ("ssl_certfile",),
        "tls_key": ("ssl_keyfile",),
        "tls_client_ca": ("ssl_ca_certs",),
        "log_level": ("uvicorn_log_level",),
        "coordinator_address": ("dist_init_addr",),
        "num_processes": ("nnodes",),
        "process_id": ("node_rank",),
        "max_model_len": ("context_length", "ctx_size"),
        "memory_utilization": ("gpu_memory_utilization", "mem_fraction_static"),
        "kv_cache_bytes": ("kv_cache_memory_bytes",),
        "num_pages": ("num_gpu_blocks_override",),
        "page_size": ("block_size",),
        "swap_space_gib": ("swap_space",),
        "max_num_seqs": ("max_running_requests",),
        "scheduling_policy": ("schedule_policy",),
        "tensor_parallel_size": ("tp_size", "tp"),
        "pipeline_parallel_size": ("pp_size", "pp"),
        "data_parallel_size": ("dp_size", "dp"),
        "expert_parallel_size": ("ep_size", "ep"),
        "max_tokens": ("max_new_tokens", "n_predict"),
        "temperature": ("temp",),
        "top_n_sigma": ("top_nsigma",),
        "prompt": ("p",),
        "prompt_file": ("file", "f"),
        "speculative": ("speculative_algorithm",),
        "speculative_model": ("speculative_draft_model_path", "model_draft"),
        "num_speculative_tokens": ("speculative_num_steps", "draft_max"),
    }
)
"""Aliases from vLLM, SGLang and llama.cpp by our name of the setting; accepted on the command line."""

HINTS: Mapping[str, str] = MappingProxyType(
    {
        "api_key": "hashed keys stand in the file that api_keys names (`jaxinfer keys new NAME` makes them)",
        "trust_remote_code": "no code of a checkpoint is ever run",
        "quantization": "it is recognised from the checkpoint, and `jaxinfer convert --quantize` makes one",
        "load_format": "the format is recognised from the files",
        "enforce_eager": "every program is compiled before the first request",
        "enable_expert_parallel": "expert_parallel_size is the number of groups of devices",
        "disable_radix_cache": "enable_prefix_caching is the switch, on the command line --no-enable-prefix-caching",
        "chunked_prefill_size": "prefill_sizes are the sizes of chunks, max_num_batched_tokens bounds a step",
        "speculative_config": "speculative names the drafter, speculative_model its model, num_speculative_tokens how "
        "many tokens it may guess",
        "disable_log_requests": "requests are logged or not by log_requests",
    }
)
"""Hints by names of other engines' settings that have no counterpart here."""

DEMO_ADAPTERS: Mapping[str, str] = MappingProxyType(
    {"austen": "prose after Jane Austen", "melville": "prose after Herman Melville"}
)
"""Adapters for the demo model that ship with the package, with the style of each."""

DEMO_FOLDERS = {
    "demo": "target",
    "demo-vision": "vision",
    "demo-draft": "draft",
    "demo-medusa": "medusa",
    "demo-eagle3": "eagle3",
}
_DRAFTS = {"draft_model": "demo-draft", "medusa": "demo-medusa", "eagle3": "demo-eagle3"}
"""Default draft model of the demo model by speculation method."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_LONGEST = 120
_SIMILAR = 0.72
"""Minimum similarity of a misspelling and a name; num_gpus and num_pages have less."""
_DEMOS = pathlib.Path(__file__).parents[1] / "demo"

DTYPES = ("auto", "float32", "bfloat16", "float16")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def known_dtype(name: str) -> str | None:
    """Return one of `DTYPES`, also for a short name ("bf16"); None for an unknown name."""
    found = _DTYPES.get(name, name)
    return found if found in DTYPES else None


def demo_folder(model: str) -> pathlib.Path | None:
    """Return the folder of a model that ships with the package; None for any other name."""
    return _DEMOS / DEMO_FOLDERS[model] if model in DEMO_FOLDERS else None


def demo_adapter(model: str, name: str) -> pathlib.Path | None:
    """Return the folder of an adapter that ships with the package for ``model``; None if there is none of that name."""
    return _DEMOS / "adapters" / name if model == "demo" and name in DEMO_ADAPTERS else None


def draft_of(model: str, method: str | None) -> str | None:
    """Return the default draft model of a model and method: the shipped one, for "mtp" the model itself, or None."""
    if method == "mtp":
        return model
    return _DRAFTS.get(method or "") if model == "demo" else None


def no_model(model: str) -> str | None:
    """Return the reason why there can be no model of this name, judged by the name and this disk: it is neither
    shipped, nor a folder or GGUF file, nor a hub id ``org/name``. None: there may be one."""
    path = pathlib.Path(model)
    if model in DEMO_FOLDERS or path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return None
    shown = repr(model if len(model) <= _LONGEST else model[:_LONGEST] + "...")
    if path.exists():
        return f"{shown} is a file: pass the folder that holds config.json and the weights, or a .gguf file"
    named = _HUB_ID.fullmatch(model) is not None
    return None if named else f"no folder {shown}, and it is not a hub id of the form org/name either"


def advice(name: str, known: Iterable[str], shown: Callable[[str], str] = str) -> str:
    """Suggest the setting that ``name``, which is not in ``known``, may mean; "" if none is similar.

    Args:
        shown: maps a known name to the form that the user would write.
    """
    names = list(known)
    if (ours := _ALIASED.get(name)) in names:
        return f"it is called {shown(ours)} here"
    if name in HINTS:
        return HINTS[name]
    near = _near(name, names)
    return f"did you mean {shown(near)}?" if near else ""


def _near(name: str, names: Sequence[str]) -> str | None:
    """Return a name similar to ``name``, or the shortest that contains all of its words; None if there is neither."""
    words = set(re.split(r"\W|_", name))
    whole = [known for known in names if len(words) > 1 and words <= set(re.split(r"\W|_", known))]
    alike = difflib.get_close_matches(name, names, n=1, cutoff=_SIMILAR)
    return min(whole, key=len) if whole else next(iter(alike), None)


_ALIASED = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
