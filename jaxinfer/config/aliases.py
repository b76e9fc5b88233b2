"""Names of settings: suggestions for misspelled names, and names and settings of other engines. No jax."""

from __future__ import annotations

import difflib
import json
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

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
        "otlp_endpoint": ("otlp_traces_endpoint",),
        "profile_dir": ("profile",),
        "step_timeout": ("watchdog_timeout",),
        "coordinator_address": ("dist_init_addr",),
        "num_processes": ("nnodes",),
        "process_id": ("node_rank",),
        "max_model_len": ("context_length", "ctx_size", "max_seq_len", "c"),
        "memory_utilization": ("gpu_memory_utilization", "mem_fraction_static", "kv_cache_free_gpu_memory_fraction"),
        "kv_cache_bytes": ("kv_cache_memory_bytes",),
        "quantization": ("q",),
        "num_pages": ("num_gpu_blocks_override",),
        "page_size": ("block_size", "tokens_per_block"),
        "swap_space_gib": ("swap_space",),
        "weight_offload_gib": ("cpu_offload_gb",),
        "max_num_seqs": ("max_running_requests", "max_batch_size", "parallel", "np"),
        "max_num_batched_tokens": ("max_num_tokens",),
        "multi_step": ("num_scheduler_steps",),
        "scheduling_policy": ("schedule_policy",),
        "seed": ("random_seed",),
        "tensor_parallel_size": ("tp_size", "tp"),
        "pipeline_parallel_size": ("pp_size", "pp"),
        "data_parallel_size": ("dp_size", "dp"),
        "expert_parallel_size": ("ep_size", "ep"),
        "max_loras": ("max_loras_per_batch",),
        "lora_modules": ("lora_paths",),
        "max_tokens": ("max_new_tokens", "n_predict", "predict"),
        "temperature": ("temp",),
        "repetition_penalty": ("repeat_penalty",),
        "top_n_sigma": ("top_nsigma",),
        "prompt": ("p",),
        "prompt_file": ("file", "f"),
        "speculative": ("speculative_algorithm",),
        "speculative_model": ("speculative_draft_model_path", "model_draft", "md"),
        "num_speculative_tokens": ("speculative_num_steps", "draft_max"),
        "typical_threshold": ("typical_acceptance_sampler_posterior_threshold", "posterior_threshold"),
        "typical_alpha": ("typical_acceptance_sampler_posterior_alpha", "posterior_alpha"),
        "target": ("base_url", "url"),
        "num_requests": ("num_prompts", "num_prompt"),
        "concurrency": ("max_concurrency",),
        "dataset": ("dataset_name",),
        "input_len": ("random_input_len", "random_input", "sonnet_input_len"),
        "output_len": ("random_output_len", "random_output", "sonnet_output_len", "sharegpt_output_len"),
        "prefix_len": ("random_prefix_len", "sonnet_prefix_len"),
        "warmup": ("num_warmups", "warmup_requests", "num_iters_warmup"),
        "iterations": ("num_iters",),
        "transformers_batch_size": ("hf_max_batch_size",),
        "out": ("result_filename", "output_file", "output_json"),
    }
)
"""Names of settings in vLLM, SGLang, llama.cpp and TensorRT-LLM by ours, those of `jaxinfer bench` last; accepted
wherever ours are."""

SWITCHES: Mapping[str, tuple[str, bool | str]] = MappingProxyType(
    {
        "disable_log_requests": ("log_requests", False),
        "disable_uvicorn_access_log": ("log_requests", False),
        "enable_log_requests": ("log_requests", True),
        "disable_radix_cache": ("enable_prefix_caching", False),
        "no_cache_prompt": ("enable_prefix_caching", False),
        "cache_prompt": ("enable_prefix_caching", True),
        "disable_overlap_schedule": ("async_scheduling", False),
        "load_in_4bit": ("quantization", "nf4"),
        "load_in_8bit": ("quantization", "int8"),
    }
)
"""Switches of other engines: our setting, and its value if the switch is on."""


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "latency": {"max_num_seqs": 8, "max_num_batched_tokens": 1024, "speculative": "ngram"},
        "throughput": {
            "max_num_seqs": 512,
            "max_num_batched_tokens": 8192,
            "memory_utilization": 0.93,
            "swap_space_gib": 16.0,
        },
        "long-context": {"max_num_seqs": 8, "kv_cache_dtype": "int8", "swap_space_gib": 32.0},
        "small-gpu": {
            "max_num_seqs": 16,
            "max_num_batched_tokens": 1024,
            "kv_cache_dtype": "int8",
            "memory_utilization": 0.93,
        },
    }
)
"""Settings by the name of a purpose, for GPUs; reasons are in docs/performance.md."""


class Always(NamedTuple):
    """A setting of other engines with one value here: what it may be set to (a regular expression of lower-case text;
    "true" is a switch that is on), and why."""

    values: str
    why: str


_CHUNKS = "prompts are always computed in chunks: prefill_sizes are their sizes"
_COMPILED = "every program is compiled before the first request"
_NO_CODE = "no code of a checkpoint is ever run"
_ON_DEVICE = "all layers are on the devices: tensor_parallel_size spreads them over several"
_PARSED = "tool calls are parsed where a request has tools, by tool_call_parser"
_RECOGNISED = "it is recognised from the files"
_KERNELS = "attention_backend chooses kernels"
_GRAMMARS = "all kinds of grammars are built in"
_PROCESSES = "one process has all local devices: num_processes counts those of several hosts"
ALWAYS: Mapping[str, Always] = MappingProxyType(
    {
        "enable_chunked_prefill": Always("true", _CHUNKS),
        "enable_mixed_chunk": Always("true", _CHUNKS),
        "use_v2_block_manager": Always("true|false", "there is one KV cache manager"),
        "disable_log_stats": Always("true|false", "statistics are metrics, at /metrics, and not log lines"),
        "enable_metrics": Always("true", "metrics are at /metrics"),
        "metrics": Always("true", "metrics are at /metrics"),
        "enforce_eager": Always("true|false", _COMPILED),
        "disable_cuda_graph": Always("true|false", _COMPILED),
        "enable_torch_compile": Always("true|false", _COMPILED),
        "cuda_graph_max_bs": Always(r"\d+", _COMPILED),
        "max_seq_len_to_capture": Always(r"\d+", _COMPILED),
        "skip_server_warmup": Always("true", _COMPILED),
        "trust_remote_code": Always("true|false", _NO_CODE),
        "cont_batching": Always("true", "batching is continuous: batching=static is for comparisons"),
        "cb": Always("true", "batching is continuous: batching=static is for comparisons"),
        "flash_attn": Always("true|on|auto|1", _KERNELS),
        "fa": Always("true|on|auto|1", _KERNELS),
        "n_gpu_layers": Always(r"\d+|all|auto", _ON_DEVICE),
        "ngl": Always(r"\d+|all|auto", _ON_DEVICE),
        "gpu_layers": Always(r"\d+|all|auto", _ON_DEVICE),
        "device_map": Always("auto|cuda|cpu|balanced|none", _ON_DEVICE),
        "device": Always("auto|cuda|cpu|gpu", "jax chooses the devices: JAX_PLATFORMS=cpu hides a GPU"),
        "mlock": Always("true", "weights are in device memory"),
        "no_mmap": Always("true", "weights are in device memory"),
        "jinja": Always("true", "the chat template of the model is used: chat_template replaces it"),
        "enable_auto_tool_choice": Always("true", _PARSED),
        "enable_reasoning": Always("true", "reasoning is parsed by reasoning_parser"),
        "chat_template_content_format": Always("auto|string|openai", "it is found in the template"),
        "guided_decoding_backend": Always("auto|xgrammar|guidance|outlines|lm-format-enforcer", _GRAMMARS),
        "structured_outputs_backend": Always("auto|xgrammar|guidance|outlines|lm-format-enforcer", _GRAMMARS),
        "grammar_backend": Always("auto|xgrammar|llguidance|outlines", _GRAMMARS),
        "sampling_backend": Always("flashinfer|pytorch|auto", "sampling is a part of the decode program"),
        "load_format": Always("auto|safetensors|gguf", _RECOGNISED),
        "tokenizer_mode": Always("auto|hf|slow", _RECOGNISED),
        "config_format": Always("auto|hf", _RECOGNISED),
        "skip_tokenizer_init": Always("false", "requests with token ids need no tokenizer"),
        "generation_config": Always("auto", "the checkpoint's generation_config.json recommends sampling parameters"),
        "task": Always("generate|auto", "models generate text: embeddings are not served"),
        "runner": Always("generate|auto", "models generate text: embeddings are not served"),
        "preemption_mode": Always("recompute|swap", "sequences are swapped or recomputed, by what is faster"),
        "distributed_executor_backend": Always("mp|uni|ray|external_launcher", _PROCESSES),
        "max_parallel_loading_workers": Always(r"\d+", "weights are read in parallel"),
        "disable_custom_all_reduce": Always("true|false", "XLA and NCCL reduce"),
        "disable_frontend_multiprocessing": Always("true|false", "the API server and the engine are two processes"),
        "enable_sleep_mode": Always("true", "`sleep` and `wake_up` need no setting"),
        "enable_prompt_tokens_details": Always("true", "usage has cached tokens"),
        "enable_request_id_headers": Always("true", "responses have x-request-id"),
        "enable_server_load_tracking": Always("true", "the load is a metric, and of Control.GetStats"),
        "max_beam_width": Always("1", "there is no beam search: n and best_of sample"),
        "workers": Always(r"\d+", "XLA compiles with all cores"),
    }
)
"""Settings of other engines that are always so here, or need no setting; accepted wherever settings are."""

_KEYS = "hashed keys stand in the file that api_keys names (`jaxinfer keys new NAME` makes them)"
_ONE_FOLDER = "a model is one folder, with its tokenizer: copy the files of another tokenizer into it"
_CHECKPOINT = "it is a field of config.json in the model's folder"
_HUB = "the hub's cache decides: `hf download MODEL --revision REVISION`, and HF_HOME is its folder"
_OF_A_STEP = "prefill_sizes are the sizes of chunks, and max_num_batched_tokens bounds a step"
_KV = "kv_cache_dtype is the dtype of keys and values: auto, int8, fp8"
_EXPERTS = "expert_parallel_size is the number of groups of devices"
HINTS: Mapping[str, str] = MappingProxyType(
    {
        "api_key": _KEYS,
        "quantization_config": "quantization is the method, and quantization_group_size belongs to it",
        "enable_expert_parallel": _EXPERTS,
        "chunked_prefill_size": _OF_A_STEP,
        "long_prefill_token_threshold": _OF_A_STEP,
        "batch_size": "max_num_seqs is the number of sequences that decode together",
        "ubatch_size": _OF_A_STEP,
        "ub": _OF_A_STEP,
        "b": _OF_A_STEP,
        "max_input_len": "max_model_len is the longest prompt plus output: max_tokens of a request bounds its output",
        "max_total_tokens": "kv_cache_bytes, or num_pages times page_size, bounds the tokens of the KV cache",
        "tokenizer": _ONE_FOLDER,
        "tokenizer_path": _ONE_FOLDER,
        "tokenizer_revision": _ONE_FOLDER,
        "revision": _HUB,
        "download_dir": _HUB,
        "hf_token": "HF_TOKEN in the environment is that of the hub",
        "rope_scaling": _CHECKPOINT,
        "rope_theta": _CHECKPOINT,
        "hf_overrides": _CHECKPOINT,
        "cache_type_k": _KV,
        "cache_type_v": _KV,
        "ctk": _KV,
        "ctv": _KV,
        "override_generation_config": "each request has its sampling parameters",
        "kv_transfer_config": "there are no separate servers for prefill",
        "extra_llm_api_options": "config is a YAML file of settings",
        "speculative_eagle_topk": "speculative_tree is the number of paths of a draft",
        "speculative_num_draft_tokens": "num_speculative_tokens is the length of a draft, speculative_tree its paths",
        "max_cpu_loras_per_batch": "max_loras is the number in a batch, max_cpu_loras that in host memory",
        "response_role": "the role of answers is assistant",
        "root_path": "a reverse proxy rewrites paths",
        "threads": "XLA uses all cores: `taskset` limits them",
        "t": "XLA uses all cores: `taskset` limits them",
        "api_server_count": "one API server process serves all replicas",
        "embedding": "models generate text: embeddings are not served",
        "is_embedding": "models generate text: embeddings are not served",
        "gpus_per_node": _PROCESSES,
        "backend": "there is one backend",
        "compilation_config": _COMPILED,
        "timeout": "step_timeout is the time of a step, and each request may have a deadline",
    }
)
"""Hints by names of other engines' settings that have no counterpart here."""

_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "standalone": "draft_model",
        "nextn": "mtp",
        "deepseek_mtp": "mtp",
        "qwen3_next_mtp": "mtp",
        "ernie_mtp": "mtp",
        "glm4_moe_mtp": "mtp",
        "prompt_lookup": "ngram",
    }
)
"""Other engines' names of speculation methods."""

_SPECULATIVE: Mapping[str, str] = MappingProxyType(
    {
        "method": "speculative",
        "model": "speculative_model",
        "num_speculative_tokens": "num_speculative_tokens",
        "prompt_lookup_min": "prompt_lookup_min",
        "prompt_lookup_max": "prompt_lookup_max",
        "posterior_threshold": "typical_threshold",
        "posterior_alpha": "typical_alpha",
    }
)
"""Fields of vLLM's ``speculative_config``."""


class SettingNameError(ValueError):
    """Error for a setting of another engine that cannot be taken over. The message names it and the value."""


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
    if name in HINTS or name in ALWAYS:
        return HINTS.get(name) or ALWAYS[name].why
    near = _near(name, names)
    return f"did you mean {shown(near)}?" if near else ""


def _near(name: str, names: Sequence[str]) -> str | None:
    """Return a name similar to ``name``, or the shortest that contains all of its words; None if there is neither."""
    words = set(re.split(r"\W|_", name))
    whole = [known for known in names if len(words) > 1 and words <= set(re.split(r"\W|_", known))]
    alike = difflib.get_close_matches(name, names, n=1, cutoff=_SIMILAR)
    return min(whole, key=len) if whole else next(iter(alike), None)


_ALIASED = {alias: name for name, aliases in ALIASES.items() for alias in aliases}


# ---- settings of other engines


def our_settings(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return settings under jaxinfer's names: `ALIASES`, `SWITCHES` and ``speculative_config`` are translated, settings
    that are always so (`ALWAYS`) are left out, and unknown names stay. Names may have dashes. ``preset`` stands for the
    settings of `PRESETS` that are not given.

    Args:
        known: names of our settings.

    Raises:
        SettingNameError: two names of one setting have different values, a setting has another value than always, or
            there is no such preset.
    """
    found, spelt = dict[str, Any](), dict[str, str]()
    for name, value in given.items():
        for ours, own in _translated(name.replace("-", "_"), value, known):
            if ours in found and found[ours] != own:
                raise SettingNameError(f"{spelt[ours]} and {name} are one setting, and their values differ")
            found[ours], spelt[ours] = own, name
    preset = None if "preset" in known else found.pop("preset", None)
    return found if preset is None else {**_preset(preset), **found}


def _preset(name: Any) -> Mapping[str, Any]:
    if name not in PRESETS:
        raise SettingNameError(f"preset = {name!r} must be one of {', '.join(PRESETS)}")
    return PRESETS[name]


def _translated(name: str, value: Any, known: Collection[str]) -> Iterator[tuple[str, Any]]:
    ours = name if name in known else _ALIASED.get(name, "")
    if ours == "speculative_model" and value == "[ngram]" and ours in known:
        yield "speculative", "ngram"
    elif ours in known:
        yield ours, _own_value(ours, value)
    elif (switch := SWITCHES.get(name)) is not None and switch[0] in known and isinstance(value, bool):
        yield from _switched(*switch, value)
    elif name == "speculative_config":
        yield from speculative_settings(value).items()
    elif name not in ALWAYS:
        yield name, value
    else:
        require_always(name, value)


def _switched(ours: str, value: bool | str, on: bool) -> Iterator[tuple[str, bool | str]]:
    """Yield our setting for a switch; one that stands for a name is off where there is none."""
    if isinstance(value, bool):
        yield ours, value is on
    elif on:
        yield ours, value


def _own_value(name: str, value: Any) -> Any:
    """Return the value of our setting ``name``, which may be written otherwise."""
    if name == "speculative":
        return method_of(value)
    return 0 if name == "tensor_parallel_size" and value == "auto" else value


def require_always(name: str, value: Any, always: Mapping[str, Always] = ALWAYS) -> None:
    """Raise SettingNameError unless a setting of ``always`` has a value that it has here."""
    values, why = always[name]
    if not re.fullmatch(values, str(value).lower()):
        raise SettingNameError(f"{name} = {value!r}: {why}")


def method_of(method: Any) -> Any:
    """Return our name of a speculation method, which another engine may call otherwise."""
    lower = method.lower() if isinstance(method, str) else method
    return _METHODS.get(lower, lower) if isinstance(lower, str) else method


def speculative_settings(given: Any) -> dict[str, Any]:
    """Return the settings of vLLM's ``speculative_config``, a mapping or JSON.

    Raises:
        SettingNameError: it is neither, or has a field without a counterpart.
    """
    if given is None:
        return {}
    try:
        fields = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        fields = None
    if not isinstance(fields, Mapping):
        raise SettingNameError(f"speculative_config = {given!r} must be a mapping, or JSON")
    for name in fields:
        if name not in _SPECULATIVE:
            raise SettingNameError(f"speculative_config.{name} = {fields[name]!r} has no counterpart here")
    found = {_SPECULATIVE[name]: value for name, value in fields.items()}
    return found | ({"speculative": method_of(found["speculative"])} if "speculative" in found else {})
