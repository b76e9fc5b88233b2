"""Engine configuration: the user's settings, and `resolve`, which fills in every default. No jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from jaxinfer.config.cache import CacheConfig
from jaxinfer.config.defaults import CPU, Defaults
from jaxinfer.config.images import ImageConfig, ImageNeeds
from jaxinfer.config.lora import LoRAConfig
from jaxinfer.config.parallel import ParallelConfig
from jaxinfer.config.quantization import QuantizationConfig
from jaxinfer.config.speculative import GRAMMAR, HEADS, SpeculativeConfig
from jaxinfer.types import KV_CACHE_DTYPES, CacheSpec

Backend = Literal["auto", "mosaic", "xla"]

_MOST_LIKELY = 20
# Default bound of the pool if the available memory was not measured.
_KV_CACHE_BYTES = 4 << 30


class EngineConfigError(ValueError):
    """An engine setting that cannot be served. The message names the setting and the value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """Lengths, numerics and kernels.

    Attributes:
        max_model_len: longest prompt plus output in tokens (default: the model's own limit).
        activation_dtype: dtype to which inputs of quantised weights are rounded before a matrix product: "auto": as the
            checkpoint declares; "none": no rounding; "int8": for int8 weights with a scale per channel; "fp8": for FP8
            weights. One scale per token.
        max_logprobs: maximum number of top logprobs that a request may ask for; -1: up to 20, or those of the whole
            vocabulary, which needs ``enable_training_outputs``.
        enable_training_outputs: requests may ask for ``logprobs_mode``, ``logprob_token_ids``, ``return_entropy``,
            ``return_sampling_mask`` and ``return_routed_experts``. Off: the programs have no such outputs.
        enable_weight_updates: the weights change while the engine runs: what quantises new ones is compiled at the
            start, and not by the first update. A server with ``weights_root`` sets it.
        exactness: "exact": batch-invariant: results are bitwise identical whatever else is served; "relaxed": cached
            pages computed by other programs are reused, too.
        structured_output_helpers: processes that compute grammar masks, started by the first request with
            ``structured_outputs``, plus one for new grammars and one for slow ones. 0: such requests are rejected.
        attention_backend: "auto": Mosaic kernels for attention and the KV cache on GPUs that support them, else XLA;
            "mosaic" and "xla" force one of them. Prompts of a model that attends in both directions within images are
            XLA's: "mosaic" is rejected.
        gemm_backend: backend of products with unquantised weights. "xla"; "mosaic": the kernel for Hopper GPUs, in
            which a row is bitwise independent of the number of rows, wherever it is supported; "auto": as "mosaic" in
            exact mode, unless a trial of it at the first start on a GPU finds a fault, or in relaxed mode where tiles
            tuned on this GPU show that it is faster (none do yet).
        kernel_trial: run every Mosaic kernel of the programs once and compare it with XLA on this GPU before READY, in
            a separate process; the result is kept with the compiled programs. "fallback": XLA replaces a kernel that
            hangs or is wrong, with a warning; "error": the engine does not start; "off": no trial.
        seed: source of seeds for requests without one (default: entropy of the system).
    """

    max_model_len: int | None = None
    activation_dtype: str = "auto"
    max_logprobs: int = 20
    enable_training_outputs: bool = False
    enable_weight_updates: bool = False
    exactness: str = "exact"
    structured_output_helpers: int = 2
    attention_backend: str = "auto"
    gemm_backend: str = "auto"
    kernel_trial: str = "fallback"
    seed: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Scheduling and batching.

    Attributes:
        max_num_seqs: most sequences decoded together (default: 8 on a CPU, 256 on a GPU of 48 GB and more).
        decode_sizes: rows of the decode programs, ascending; a step uses the smallest that fits its slots. The size for
            ``max_num_seqs`` always exists. In exact mode a size is used only if the probe at startup found it bitwise
            identical (default: only that size on a CPU, also 2, 8, 16, 32, 64 and 128 on a GPU).
        max_num_batched_tokens: prompt and decode tokens per step (default: 2048 on a CPU, 4096 on such a GPU, or a full
            chunk and all rows if more).
        prefill_sizes: chunk sizes in tokens, ascending powers of two; a chunk of the largest size runs at each multiple
            of it, and the tail of a prompt in the smallest size that holds it (default: up to 256 on a CPU, 2048 on
            such a GPU).
        max_prefill_rows: rows of the widest prefill programs, in which chunks of one size run together if the probe
            found that bitwise identical (default: by platform; 1: one chunk per program).
        scheduling_policy: "fcfs", "priority" (`Request.priority`, lower first) or "fair" (the tenant that has used
            least, by weight; see `jaxinfer.engine.scheduling.fair`).
        max_waiting_requests, max_waiting_sequences, max_waiting_tokens: a request is rejected if with it more requests,
            outputs or prompt tokens would wait (default: no limit, except for servers).
        async_scheduling: launch step N+1 before the results of step N are read. Off: for debugging.
        batching: "continuous", or "static": a batch runs until all its sequences have ended. For comparison.
        multi_step: maximum decode steps that run on the device without the host, while no request waits.
        trace_steps: file to which each step's plan and results are appended as lines of JSON. For debugging.
    """

    max_num_seqs: int | None = None
    decode_sizes: tuple[int, ...] | None = None
    max_num_batched_tokens: int | None = None
    prefill_sizes: tuple[int, ...] | None = None
    max_prefill_rows: int | None = None
    scheduling_policy: str = "fcfs"
    max_waiting_requests: int | None = None
    max_waiting_sequences: int | None = None
    max_waiting_tokens: int | None = None
    async_scheduling: bool = True
    batching: str = "continuous"
    multi_step: int = 1
    trace_steps: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(
    ImageConfig,
    LoRAConfig,
    ParallelConfig,
    SpeculativeConfig,
    CacheConfig,
    SchedulerConfig,
    QuantizationConfig,
    ExecutionConfig,
):
    """Settings of an engine, all groups in one; None: chosen by `resolve`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chosen(EngineConfig):
    """The settings with platform defaults filled in."""

    max_num_seqs: int
    decode_sizes: tuple[int, ...]
    max_num_batched_tokens: int
    prefill_sizes: tuple[int, ...]
    max_prefill_rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedEngine(_Chosen):
    """The settings with every default filled in, and every number that shapes the compiled programs and the pool.

    Attributes:
        rows: slots; each decode program has an equal share of them, one for each of ``microbatches`` (see `Scheduler`).
        decode_sizes: rows of one microbatch's decode programs; the last is its share of ``rows``.
        table_width: pages of one sequence.
        prefill_batch_sizes: chunks in the wide program of each of ``prefill_sizes`` (1: there is none).
        num_states: 0 for a model without states.
        host_pages: pages that fit into ``swap_space_gib``; 0 for a model with states, which are recomputed.
        images: properties of the vision tower; None: prompts have no images.
        encoder_sizes, encoder_cache_size: nothing without images.
        draft_tree: ranks of the tokens of each path of a draft, where draft heads have a static tree; else nothing.
    """

    max_model_len: int
    num_pages: int
    num_states: int
    attention_backend: Backend
    gemm_backend: Backend
    rows: int
    table_width: int
    prefill_batch_sizes: tuple[int, ...]
    host_pages: int
    images: ImageNeeds | None
    encoder_sizes: tuple[int, ...]
    encoder_cache_size: int
    draft_tree: tuple[tuple[int, ...], ...] = ()

    @property
    def microbatches(self) -> int:
        """Number of microbatches; the slots of one decode together. As many as pipeline stages: while one microbatch is
        in the last stage, another is in the first. Slot s is row ``s // microbatches`` of microbatch ``s %
        microbatches``."""
        return self.pipeline_parallel_size

    @property
    def state_places(self) -> int:
        """Capacity for states: those that are kept, and one after each row that may take a draft token."""
        return self.num_states + (self.rows if self.drafts_leave_states else 0)

    @property
    def drafts_leave_states(self) -> bool:
        """Whether rows of draft tokens leave states, one per draft token (`jaxinfer.kv.states.run_rows`)."""
        return self.num_states > 0 and self.speculative is not None

    @property
    def top_logprobs(self) -> int:
        """Width of the reported most likely tokens."""
        return _MOST_LIKELY if self.whole_vocabulary else self.max_logprobs

    @property
    def whole_vocabulary(self) -> bool:
        """Whether requests may ask for the log probabilities of the whole vocabulary."""
        return self.max_logprobs == -1

    @property
    def grammars(self) -> bool:
        """Whether grammars can constrain outputs; not with data-parallel attention, whose ranks run one program."""
        return self.structured_output_helpers > 0 and not self.enable_dp_attention

    @property
    def feature_window(self) -> int:
        """Number of last positions of a slot whose draft head features are kept: those of a step, and for a head with a
        cache enough to restart at the beginning of a page."""
        step = self.num_speculative_tokens + 1
        return step if self.drafts_from_one_state else max(2 * self.page_size, step)

    @property
    def branches(self) -> int:
        """Maximum number of additional draft paths in flight; each has at least two rows."""
        return min(self.rows // 2, self.max_num_seqs * (self.speculative_tree - 1)) if self.drafts_trees else 0

    @property
    def wide_prefills(self) -> list[tuple[int, int]]:
        """(size, chunks) of the prefill programs that take several chunks."""
        return [pair for pair in zip(self.prefill_sizes, self.prefill_batch_sizes, strict=True) if pair[1] > 1]


def resolve(
    config: EngineConfig,
    cache: CacheSpec,
    *,
    max_position: int,
    itemsize: int,
    defaults: Defaults = CPU,
    draft: CacheSpec | None = None,
    images: ImageNeeds | None = None,
) -> ResolvedEngine:
    """Fill in the settings that the user left open and reject invalid ones.

    Args:
        cache: the model's KV cache; ``itemsize`` is the bytes of one of its elements.
        max_position: the model's maximum context.
        defaults: defaults of the platform.
        draft: the draft model's KV cache, with elements of the same size.
        images: properties of the model's vision tower, if it has one.

    Raises:
        EngineConfigError: names the setting and the value.
    """
    check(config)
    length = _max_model_len(config.max_model_len, max_position)
    chosen = _choose(config, cache, length, itemsize, defaults)
    check(chosen)
    microbatches, width = config.pipeline_parallel_size, math.ceil(length / config.page_size)
    # At least one sequence has rows for its drafts; an additional path also has a row of the last known token.
    most_drafts = config.speculative_tree * (1 + config.num_speculative_tokens)
    least_rows = defaults.min_rows if config.speculative is None else max(defaults.min_rows, most_drafts)
    rows = microbatches * max(math.ceil(chosen.max_num_seqs / microbatches), least_rows)
    caches = [spec.stored_as(config.kv_cache_dtype) for spec in (cache, draft) if spec is not None]
    pages, states = _num_pages(chosen, caches, width, itemsize), _num_states(chosen, cache)
    batches = _prefill_batch_sizes(chosen, width, pages)
    share = rows // microbatches
    found = {
        "decode_sizes": (*(size for size in chosen.decode_sizes if defaults.min_rows <= size < share), share),
        "max_model_len": length,
        "num_pages": pages,
        "num_states": states,
        "rows": rows,
        "table_width": width,
        "prefill_batch_sizes": tuple(max(1, min(each, states // 2)) for each in batches) if states else batches,
        "host_pages": 0 if states else _host_pages(config, caches, itemsize),
        **_image_sizes(chosen, cache, images, length),
    }
    return ResolvedEngine(**vars(chosen) | found)


def _choose(config: EngineConfig, cache: CacheSpec, length: int, itemsize: int, defaults: Defaults) -> _Chosen:
    """Fill in platform defaults, within the bounds of the given settings."""
    states = 0 if config.num_states else _LEAST_STATES * cache.bytes_per_state(itemsize, config.devices)
    sequences, budget, sizes = config.max_num_seqs, config.max_num_batched_tokens, config.prefill_sizes
    if sequences is None:
        sequences = defaults.sequences(states)
        if budget is not None:
            sequences = max(1, min(sequences, budget // 2 if sizes is None else budget - sizes[-1]))
    if sizes is None:
        most = None if budget is None else budget - sequences
        devices = config.devices if config.sequence_parallel_norms else 1
        sizes = defaults.sizes(length, config.page_size, devices, most)
    found = {
        "max_num_seqs": sequences,
        "decode_sizes": defaults.decode_sizes if config.decode_sizes is None else config.decode_sizes,
        "prefill_sizes": sizes,
        "max_num_batched_tokens": budget or max(defaults.max_num_batched_tokens, sizes[-1] + sequences),
        "max_prefill_rows": config.max_prefill_rows or defaults.max_prefill_rows,
    }
    return _Chosen(**vars(config) | found)


def check(config: EngineConfig) -> None:
    """Reject settings that are invalid for every model.

    Raises:
        EngineConfigError: names the setting and the value.
    """
    _require_power_of_two("page_size", config.page_size)
    if config.prefill_sizes is not None:
        _require_prefill_sizes(config.prefill_sizes, config.page_size)
    sizes = config.decode_sizes or ()
    ascending = list(sizes) == sorted(set(sizes)) and min(sizes, default=1) >= 1
    _require(ascending, "decode_sizes", sizes, "must be ascending, and at least 1")
    _require_simple(config)
    _require_dp_attention(config)
    _require_even_tokens(config)
    for fault in config.faults():
        _require(False, *fault)
    length, rows, tokens = config.max_model_len, config.max_prefill_rows, config.max_num_batched_tokens
    _require(length is None or length >= 2, "max_model_len", length, "must be at least 2")
    _require(rows is None or rows >= 1, "max_prefill_rows", rows, "must be at least 1")
    # Open settings count with their minimum.
    least = (config.prefill_sizes or (config.page_size,))[-1] + (config.max_num_seqs or 1)
    enough = f"must hold a full chunk and all rows ({least})"
    _require(tokens is None or tokens >= least, "max_num_batched_tokens", tokens, enough)


_CHOICES: dict[str, tuple[str | None, ...]] = {
    "kv_cache_dtype": tuple(KV_CACHE_DTYPES),
    "activation_dtype": ("auto", "none", "int8", "fp8"),
    "scheduling_policy": ("fcfs", "priority", "fair"),
    "batching": ("continuous", "static"),
    "exactness": ("exact", "relaxed"),
    "attention_backend": ("auto", "mosaic", "xla"),
    "gemm_backend": ("auto", "mosaic", "xla"),
    "kernel_trial": ("fallback", "error", "off"),
}
_AT_LEAST_ONE = (
    "max_loras",
    "max_lora_rank",
    "multi_step",
    "num_speculative_tokens",
    "speculative_tree",
    "prompt_lookup_min",
    "suffix_cache_tokens",
    "expert_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
)


def _require_simple(config: EngineConfig) -> None:
    """Reject settings that are invalid alone, or in pairs."""
    for name, choices in _CHOICES.items():
        what = "must be one of " + ", ".join(str(choice) for choice in choices)
        _require(getattr(config, name) in choices, name, getattr(config, name), what)
    for name in _AT_LEAST_ONE:
        _require(getattr(config, name) >= 1, name, getattr(config, name), "must be at least 1")
    size = config.tensor_parallel_size
    _require(size >= 0, "tensor_parallel_size", size, "must be at least 1, or auto")
    for name in ("max_num_seqs", "max_waiting_requests", "max_waiting_sequences", "max_waiting_tokens"):
        limit = getattr(config, name)
        _require(limit is None or limit >= 1, name, limit, "must be at least 1")
    least = f"must be at least prompt_lookup_min ({config.prompt_lookup_min})"
    _require(config.prompt_lookup_max >= config.prompt_lookup_min, "prompt_lookup_max", config.prompt_lookup_max, least)
    both = f"and speculative = {config.speculative} exclude each other: drafts need the host at every step"
    _require(config.speculative is None or config.multi_step == 1, "multi_step", config.multi_step, both)
    both = f"and pipeline_parallel_size = {config.pipeline_parallel_size} exclude each other: steps pass through stages"
    _require(config.pipeline_parallel_size == 1 or config.multi_step == 1, "multi_step", config.multi_step, both)
    _require_draft_model(config)
    _require_grammars(config)
    bound, factor = config.typical_threshold, config.typical_alpha
    _require(0 <= bound <= 1, "typical_threshold", bound, "must be from 0 to 1")
    _require(0 <= factor < math.inf, "typical_alpha", factor, "must be finite and not negative")
    swap = config.swap_space_gib
    _require(0 <= swap < math.inf, "swap_space_gib", swap, "must be finite and not negative")
    offload, ranks = config.weight_offload_gib, config.enable_dp_attention
    _require(0 <= offload < math.inf, "weight_offload_gib", offload, "must be finite and not negative")
    both = "and enable_dp_attention = True exclude each other: ranks share the experts, and each has its own layers"
    _require(not (offload and ranks), "weight_offload_gib", offload, both)
    share = config.memory_utilization
    _require(0 < share <= 1, "memory_utilization", share, "must be above 0 and at most 1")
    held = config.max_cpu_loras
    _require(held is None or held >= config.max_loras, "max_cpu_loras", held, f"must be at least {config.max_loras}")
    modules = config.lora_target_modules
    _require(bool(modules) and all(modules), "lora_target_modules", modules, "must name modules, or all-linear")
    _mm_limits(config)
    helpers = config.structured_output_helpers
    _require(helpers >= 0, "structured_output_helpers", helpers, "must not be negative")
    most, trains = config.max_logprobs, config.enable_training_outputs
    _require(most >= -1, "max_logprobs", most, "must not be negative, but for -1, the whole vocabulary")
    _require(most >= 0 or trains, "max_logprobs", most, "needs enable_training_outputs")


def _require_grammars(config: EngineConfig) -> None:
    """Reject grammar-forced drafts without structured outputs, or as trees."""
    if config.speculative != GRAMMAR:
        return
    needs = "needs structured outputs: structured_output_helpers above 0, and enable_dp_attention = False"
    served = config.structured_output_helpers > 0 and not config.enable_dp_attention
    _require(served, "speculative", config.speculative, needs)
    both = "and speculative = grammar exclude each other: it leaves one way to go on"
    _require(config.speculative_tree == 1, "speculative_tree", config.speculative_tree, both)


def _require_draft_model(config: EngineConfig) -> None:
    """Reject settings that conflict with a draft model, or need one."""
    if not config.drafts_on_device:
        alone = f"is used with speculative = {', '.join(('draft_model', *HEADS[:-1]))} or {HEADS[-1]} alone"
        return _require(config.speculative_model is None, "speculative_model", config.speculative_model, alone)
    both = "and speculative = draft_model exclude each other: it says one token behind another, a chain"
    trees = config.speculative_tree == 1 or config.drafts_by_head
    _require(trees, "speculative_tree", config.speculative_tree, both)
    both = "and enable_dp_attention = True exclude each other: it has no experts to share"
    return _require(not config.enable_dp_attention, "speculative", config.speculative, both)


_NOT_WITH_DP_ATTENTION = {
    "tensor_parallel_size": "each device has attention whole",
    "pipeline_parallel_size": "all devices run each program together",
    "data_parallel_size": "a larger expert_parallel_size is what serves more requests",
    "multi_step": "the host plans each step of all devices together",
}


def _require_dp_attention(config: EngineConfig) -> None:
    """Reject settings that conflict with ``enable_dp_attention``."""
    if not config.enable_dp_attention:
        return
    many = "needs expert_parallel_size above 1: as many devices have sequences of their own"
    _require(config.expert_parallel_size > 1, "enable_dp_attention", True, many)
    for name, why in _NOT_WITH_DP_ATTENTION.items():
        both = f"and {name} = {getattr(config, name)} exclude each other: {why}"
        _require(getattr(config, name) == 1, "enable_dp_attention", True, both)


def _require_even_tokens(config: EngineConfig) -> None:
    """Reject settings that conflict with ``sequence_parallel_norms``, once the number of devices is known."""
    if not config.sequence_parallel_norms or not config.devices:
        return
    name, devices = "sequence_parallel_norms", config.devices
    both = "and enable_dp_attention = True exclude each other: each device has tokens of its own"
    _require(not config.enable_dp_attention, name, True, both)
    _require(devices > 1, name, True, "needs tensor_parallel_size or expert_parallel_size above 1: nothing is summed")
    for size in config.prefill_sizes or ():
        uneven = f"cannot be: {devices} devices do not divide a chunk of {size} tokens (prefill_sizes)"
        _require(size % devices == 0, name, True, uneven)


def _require(condition: bool, name: str, value: object, what: str) -> None:
    if not condition:
        raise EngineConfigError(f"{name} = {value} {what}")


def _require_power_of_two(name: str, value: int) -> None:
    _require(value >= 1 and value & (value - 1) == 0, name, value, "must be a power of two")


def _require_prefill_sizes(sizes: tuple[int, ...], page: int) -> None:
    _require(len(sizes) > 0 and list(sizes) == sorted(set(sizes)), "prefill_sizes", sizes, "must be ascending")
    _require(sizes[-1] % page == 0, "prefill_sizes", sizes, f"must end in a multiple of page_size ({page})")
    for size in sizes:
        _require_power_of_two("prefill_sizes", size)


def _prefill_batch_sizes(config: _Chosen, width: int, pages: int) -> tuple[int, ...]:
    """Return the chunks per wide program. Only the largest size can occur more than once in a prompt; the probe of a
    program needs separate pages for every chunk."""
    rows, sizes = config.max_prefill_rows, config.prefill_sizes
    counts = (rows // size if size == sizes[-1] else min(rows // size, config.max_num_seqs) for size in sizes)
    return tuple(max(1, min(count, pages // width)) for count in counts)


def _max_model_len(length: int | None, max_position: int) -> int:
    if length is None:
        return max_position
    _require(length <= max_position, "max_model_len", length, f"is beyond the model's context of {max_position} tokens")
    return length


def _num_pages(config: _Chosen, caches: Sequence[CacheSpec], width: int, itemsize: int) -> int:
    """Return the pool's pages: as set, or enough for all rows within ``kv_cache_bytes``, at least one full sequence."""
    if config.num_pages is not None:
        what = f"must hold one sequence of max_model_len ({width} pages)"
        _require(config.num_pages >= width, "num_pages", config.num_pages, what)
        return config.num_pages
    split = config.devices, config.pipeline_parallel_size
    page = sum(spec.bytes_per_page(config.page_size, itemsize, *split) for spec in caches)
    if config.kv_cache_bytes is not None:
        _require_sequence(config.kv_cache_bytes // page, width, page, config)
    bound = _KV_CACHE_BYTES if config.kv_cache_bytes is None else config.kv_cache_bytes
    return max(width, min(width * config.max_num_seqs, bound // page))


def _host_pages(config: EngineConfig, caches: Sequence[CacheSpec], itemsize: int) -> int:
    # On the host each device has its own heads of a page or, for latents, the whole page.
    page = sum(config.devices * spec.bytes_per_page(config.page_size, itemsize, config.devices) for spec in caches)
    return int(config.swap_space_gib * 2**30 / page)


_ENCODER_SIZES = tuple(256 << power for power in range(7))  # to 16384
_LEAST_CACHED = 4096  # image tokens


def _mm_limits(config: EngineConfig) -> Mapping[str, int]:
    try:
        return config.mm_limits
    except ValueError as error:
        raise EngineConfigError(f"limit_mm_per_prompt = {config.limit_mm_per_prompt} {error}") from error


def _image_sizes(config: _Chosen, cache: CacheSpec, images: ImageNeeds | None, length: int) -> dict[str, object]:
    """Return the settings of the encoder programs and their cache; none where images are not served."""
    if images is None or _mm_limits(config).get("image") == 0:
        for name in ("encoder_sizes", "encoder_cache_size"):
            given = getattr(config, name)
            _require(not given, name, given, "is of models with a vision tower: this has none, or is served without")
        return {"images": None, "encoder_sizes": (), "encoder_cache_size": 0}
    sizes, chunk = config.encoder_sizes or _encoder_sizes(images, length), config.prefill_sizes[-1]
    ascending = list(sizes) == sorted(set(sizes)) and all(size > 0 and size % images.merged == 0 for size in sizes)
    _require(ascending, "encoder_sizes", sizes, f"must be ascending multiples of {images.merged}, the rows of a token")
    _require(sizes[-1] >= images.least_rows, "encoder_sizes", sizes, f"must reach {images.least_rows}, a small image")
    largest = min(sizes[-1], images.most_rows) // images.merged
    if images.both_ways:
        _require_both_ways(config, cache, largest)
    least = chunk + 2 * largest
    cached = max(least, _LEAST_CACHED) if config.encoder_cache_size is None else config.encoder_cache_size
    _require(
        cached >= least, "encoder_cache_size", cached, f"must hold a chunk and two of the largest images ({least})"
    )
    return {"images": images, "encoder_sizes": tuple(sizes), "encoder_cache_size": cached}


def _require_both_ways(config: _Chosen, cache: CacheSpec, largest: int) -> None:
    """Reject what excludes attention in both directions within images of up to ``largest`` tokens."""
    why = "cannot be: no kernel attends in both directions, as this model does within an image"
    _require(config.attention_backend != "mosaic", "attention_backend", config.attention_backend, why)
    whole = f"must hold a whole image of this model ({largest} tokens), which no chunk may split"
    _require(config.prefill_sizes[-1] >= largest, "prefill_sizes", config.prefill_sizes, whole)
    causal = "must be image=0: the model attends in both directions within an image, but not to latents or with states"
    limit = config.limit_mm_per_prompt
    _require(not (cache.latent or cache.stateful), "limit_mm_per_prompt", limit, causal)


def _encoder_sizes(images: ImageNeeds, length: int) -> tuple[int, ...]:
    """Return default sizes: no smaller than the smallest image, and no larger than the largest that a prompt holds."""
    merged = images.merged
    most = max(images.least_rows, min(images.most_rows, length * merged, _ENCODER_SIZES[-1]))
    sizes = [size for size in _ENCODER_SIZES if images.least_rows < size < most]
    return tuple(-(-size // merged) * merged for size in (*sizes, most))


_LEAST_STATES = 4  # of a single sequence: the one that it continues from, and those of its next pages


def _num_states(config: _Chosen, cache: CacheSpec) -> int:
    """Return the number of states kept; EngineConfigError for settings that a model with states does not support."""
    if not cache.stateful:
        _require(config.num_states is None, "num_states", config.num_states, "is of models with states: this has none")
        return 0
    why = "cannot be with a model that has states (docs/states.md)"
    if config.speculative is not None:
        _require(config.speculative_tree == 1, "speculative_tree", config.speculative_tree, f"{why}: paths are forks")
        stages = f"{why} that drafts are verified of: the last stage alone knows which are accepted"
        _require(config.pipeline_parallel_size == 1, "pipeline_parallel_size", config.pipeline_parallel_size, stages)
    _require(not config.enable_dp_attention, "enable_dp_attention", config.enable_dp_attention, why)
    least = f"must be at most page_size ({config.page_size}) with a model that has states"
    _require(config.multi_step <= config.page_size, "multi_step", config.multi_step, least)
    states = _LEAST_STATES * config.max_num_seqs if config.num_states is None else config.num_states
    _require(states >= _LEAST_STATES, "num_states", states, f"must be at least {_LEAST_STATES}")
    return states


def _require_sequence(pages: int, width: int, page: int, config: EngineConfig) -> None:
    """Reject a bound that does not hold one sequence of the maximum length."""
    shorter = f", or set max_model_len = {pages * config.page_size}" if pages else ""
    what = f"holds {pages} of the {width} pages of one sequence of max_model_len: set {width * page}{shorter}"
    _require(pages >= width, "kv_cache_bytes", config.kv_cache_bytes, what)
