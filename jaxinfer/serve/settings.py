"""Server settings: the fields of the command-line flags and of configs/deployments/*.yaml. No jax."""

from __future__ import annotations

import dataclasses
import importlib.util
import ipaddress
import json
import pathlib
import re
import reprlib
import typing
from collections.abc import Collection, Mapping
from typing import Annotated, Any

import pydantic
import yaml

from jaxinfer.config import EngineConfig, EngineConfigError, check
from jaxinfer.config.aliases import DTYPES, SettingNameError, advice, known_dtype, our_settings
from jaxinfer.images.decode import MOST_PIXELS
from jaxinfer.parsers.registry import AUTO, REASONING_PARSERS, RESPONSE_TEMPLATE, TOOL_PARSERS
from jaxinfer.serve.api.kv_events import KvEventsConfig, refusal
from jaxinfer.serve.api.lora_modules import parse_modules
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.api.tenants import SHARING, TENANT
from jaxinfer.serve.runtime.fetch import DOMAIN
from jaxinfer.serve.runtime.logs import FORMATS, LEVELS

QUEUE: Mapping[str, Any] = {
    "max_waiting_requests": 2048,
    "max_waiting_sequences": 4096,
    "max_waiting_tokens": 1 << 21,
}
"""Default bounds of a server's queue. An engine that is used as a library has no bounds."""

_MAX_FILE_BYTES = 1 << 20
_MOST_SECONDS = 2_000_000  # 23 days: gRPC counts milliseconds in 31 bits
_MISSING = {"model": 'name one ("demo", a folder, a .gguf file, or a hub id): jaxinfer serve MODEL'}
_PORTS = ("grpc_port", "http_port", "metrics_port", "control_port")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#@\s]+")
OFF: tuple[str, bool] = ("off", False)  # YAML reads ``off`` as false
ROUTING_PACKAGE = "smg_grpc_proto"
"""Package with the messages of vLLM's gRPC service."""
REASONING_FIELDS: Mapping[str, tuple[str, ...]] = {
    "both": ("reasoning", "reasoning_content"),
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
}
"""Message fields of the reasoning: OpenAI's gpt-oss and vLLM use the first, DeepSeek and SGLang the second."""


class ServeConfigError(ValueError):
    """Error for a setting that cannot be served. The message names the setting and the value."""


def _unless_off(value: Any) -> Any:
    return None if isinstance(value, str | bool) and value in OFF else value


def _as_json(value: Any) -> Any:
    """Convert a YAML mapping to JSON, the format of the flag."""
    return json.dumps(value) if isinstance(value, Mapping) else value


def _or_off(value: Any) -> Any:
    return OFF[0] if value is False else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModelConfig:
    """Model and weight loading.

    Attributes:
        model: "demo", a folder, a .gguf file, or a hub id.
        served_model_name: model name for clients (default: the folder's name).
        dtype: dtype of the weights: "auto", "float32", "bfloat16" or "float16".
        family: package that implements the model (docs/add_a_model.md): "auto": jaxinfer or, for architectures that it
            lacks, an installed package; "jaxinfer": jaxinfer only; or module:NAME, which is imported, so its code runs.
        chat_template: replacement of the model's own template: a file, or a template in one line (docs/text.md).
        compilation_cache_dir: folder that keeps compiled programs between runs; "" keeps none.
        check_finite: reject weights with NaN or infinity.
    """

    model: str
    served_model_name: str | None = None
    dtype: str = "auto"
    family: str = "auto"
    chat_template: str | None = None
    compilation_cache_dir: str | None = None
    check_finite: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListenConfig:
    """Addresses.

    Attributes:
        host: listen address. Anything but loopback needs api_keys or tls_client_ca, or insecure.
        grpc_port: port of Inference, health and reflection; 0 picks a free port.
        http_port: port of the OpenAI API and /metrics; 0 picks a free port; off: no HTTP.
        metrics_port: port of only /metrics, /health and /ready, for servers without HTTP or with a separate network
            (default: none); 0 picks a free port.
        metrics_host: listen address of metrics_port.
        control_port: port of Control (default: none); 0 picks a free port.
        control_host: listen address of control_port.
        vllm_grpc: serve vLLM's gRPC service on grpc_port, too, for routers (docs/routing.md); needs the extra routing.
    """

    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: Annotated[int | None, pydantic.BeforeValidator(_unless_off)] = 8000
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    control_port: int | None = None
    control_host: str = "127.0.0.1"
    vllm_grpc: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """Access and tenant isolation.

    Attributes:
        api_keys: file of hashed keys with their scopes (`jaxinfer keys new NAME` makes them).
        prefix_cache_sharing: clients that share cached prefixes: "tenant": those of one API key or of its cache_group;
            "all": all clients, which reveals to each what others have asked.
        insecure: allow an address beyond loopback without keys.
        tls_cert: PEM file of the certificate with its chain; reloaded when it changes, as tls_key and tls_client_ca.
        tls_key: PEM file of its private key.
        tls_client_ca: PEM file of the CA that must have signed client certificates; required from clients if set.
        allow_request_templates: allow chat templates in requests (they run in the sandbox).
        allowed_origins: web pages that may use the HTTP API, as https://chat.example.com; "*": all (default: none).
        allowed_media_domains: hosts from which images of requests are fetched, as images.example.com, *.example.com or
            HOST:PORT (default: none, images are data URLs); only public addresses are connected to (docs/images.md).
    """

    api_keys: str | None = None
    prefix_cache_sharing: str = TENANT
    insecure: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    allow_request_templates: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_media_domains: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """Tool and reasoning parsers.

    Attributes:
        tool_call_parser: tool parser: "auto": chosen by the model's chat template; "off"; or a name
            (docs/tool_calls.md).
        reasoning_parser: reasoning parser: "auto", "off", or a name.
        reasoning_field: message field of the reasoning: "reasoning", "reasoning_content", or "both".
    """

    tool_call_parser: Annotated[str, pydantic.BeforeValidator(_or_off)] = AUTO
    reasoning_parser: Annotated[str, pydantic.BeforeValidator(_or_off)] = AUTO
    reasoning_field: str = "both"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAModulesConfig:
    """LoRA adapters that clients may name; they need enable_lora.

    Attributes:
        lora_modules: adapters loaded at startup, each NAME=PATH or {"name": NAME, "path": PATH} (docs/lora.md).
        lora_root: folder below which operators may load adapters while the server runs (default: they may load none).
    """

    lora_modules: tuple[Annotated[str, pydantic.BeforeValidator(_as_json)], ...] = ()
    lora_root: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Weights that operators change while the server runs.

    Attributes:
        weights_root: folder below which operators may read new weights (default: they may read none); of several
            processes each has its own, with the same folders below it.
    """

    weights_root: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeoutConfig:
    """Timeouts and connection limits.

    Attributes:
        template_seconds: time limit of rendering a chat template.
        drain_delay: seconds after SIGTERM in which requests are still accepted, while readiness is withdrawn already,
            for a load balancer to notice (docs/deploying.md). Then drain_seconds begin.
        drain_seconds: seconds for running requests to finish after SIGTERM; a second SIGTERM aborts them.
        step_timeout: seconds without progress in a step after which the engine counts as hung (default: 10, or 20 times
            the 99th percentile of the steps so far, if that is more).
        startup_timeout: seconds without progress before READY after which the engine counts as hung.
        slow_reader_seconds: seconds after which a client that reads nothing is disconnected.
        keepalive_seconds: seconds between pings on idle connections.
        stream_ping_seconds: seconds after which a waiting HTTP stream (queued, in a long prefill) sends a keep-alive: a
            comment, or Anthropic's event ping.
        header_seconds: seconds for an HTTP client to send its request's head, and again its body; for a gRPC client to
            complete the handshake, and again to send a call's request.
        max_connections: HTTP connections at once, and again gRPC connections; at the limit, idle ones are closed.
        max_receive_bytes: bytes in flight of one gRPC client's messages; half of that for all clients without a key.
    """

    template_seconds: float = 1.0
    drain_delay: float = 0.0
    drain_seconds: float = 30.0
    step_timeout: float | None = None
    startup_timeout: float = 600.0
    slow_reader_seconds: float = 30.0
    keepalive_seconds: float = 30.0
    stream_ping_seconds: float = 5.0
    header_seconds: float = 10.0
    max_connections: int = 1024
    max_receive_bytes: int = 268435456


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Processes of one engine.

    Attributes:
        num_processes: number of processes of the engine; each is started separately (docs/multi_host.md).
        process_id: number of this process: 0 serves the APIs, the others follow it.
        coordinator_address: HOST:PORT on which process 0 waits for the others.
        group_key_file: file with a secret of at least 16 bytes, the same for all processes.
        group_timeout: seconds without a heartbeat of a process, or without progress in a step, after which all
            processes of the group end; with several processes it replaces step_timeout.
    """

    num_processes: int = 1
    process_id: int = 0
    coordinator_address: str | None = None
    group_key_file: str | None = None
    group_timeout: float = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Logs, traces and profiles.

    Attributes:
        log_format: "text" or "json".
        log_level: "debug", "info", "warning" or "error".
        log_requests: log a line for each ended request: id, key, tokens, times, finish reason; never its text.
        otlp_endpoint: collector of OpenTelemetry traces (default: no traces).
        profile_dir: folder for the profiles that operators start (default: profiling is rejected).
    """

    log_format: str = "text"
    log_level: str = "info"
    log_requests: bool = True
    otlp_endpoint: str | None = None
    profile_dir: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig(
    LogConfig,
    GroupConfig,
    TimeoutConfig,
    KvEventsConfig,
    WeightsConfig,
    LoRAModulesConfig,
    AnswerConfig,
    AccessConfig,
    ListenConfig,
    ServedModelConfig,
):
    """Settings of a server: one model over gRPC and HTTP."""

    limits: ServeLimits = dataclasses.field(default_factory=ServeLimits)
    engine: EngineConfig = dataclasses.field(default_factory=lambda: EngineConfig(**QUEUE))


TIMES = tuple(field.name for field in dataclasses.fields(ServeConfig) if field.name.endswith(("_seconds", "_timeout")))
"""Settings in seconds. Each of them must be finite."""

Settings = Mapping[str, Any]
LIMIT = "limit_"
"""Prefix of the flags of `ServeLimits`."""
_GROUPS: Mapping[str, list[str]] = {
    name: [field.name for field in dataclasses.fields(kind)]
    for name, kind in (("engine", EngineConfig), ("limits", ServeLimits))
}
PLACES: Mapping[str, str] = {
    **{name: f"engine.{name}" for name in _GROUPS["engine"]},
    **{LIMIT + name: f"limits.{name}" for name in _GROUPS["limits"]},
    **{field.name: field.name for field in dataclasses.fields(ServeConfig)},
}
"""Path of each setting by the name of its flag."""
_ONE_OF: Mapping[str, tuple[str, ...]] = {
    "tool_call_parser": (AUTO, OFF[0], *TOOL_PARSERS, RESPONSE_TEMPLATE),
    "reasoning_parser": (AUTO, OFF[0], *REASONING_PARSERS),
    "reasoning_field": tuple(REASONING_FIELDS),
}


def read_settings(path: pathlib.Path) -> dict[str, Any]:
    """Read settings from a YAML file: by name, those of ``limits`` and ``engine`` also below these names (`nested`).

    Raises:
        ServeConfigError: the file cannot be read, is larger than 1 MiB, or is not a mapping.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise ServeConfigError(f"--config {path} is larger than {_MAX_FILE_BYTES} bytes")
        settings = yaml.safe_load(data)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ServeConfigError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ServeConfigError(f"--config {path} must hold settings by name, not {reprlib.repr(settings)}")
    return settings


def nested(settings: Settings) -> dict[str, Any]:
    """Return settings as they are nested in `ServeConfig`. Those of ``engine`` and ``limits`` (as ``limit_n``) may be
    given beside the others, as on the command line, and all under names of other engines. Unknown names stay.

    Raises:
        ServeConfigError: two names of a setting have different values, or a setting cannot have its value here.
    """
    found = dict[str, Any]()
    for name, value in _ours(settings, PLACES).items():
        group, _, own = PLACES.get(name, name).rpartition(".")
        if not group and not (name in _GROUPS and isinstance(value, Mapping)):
            found[name] = value
            continue
        inner = {own: value} if group else _ours(value, _GROUPS[name])
        others = found.setdefault(group or name, {})
        if not isinstance(others, dict):
            raise ServeConfigError(f"{group} = {reprlib.repr(others)} must hold settings by name")
        for each in inner.keys() & others.keys():
            if others[each] != inner[each]:
                raise ServeConfigError(f"{each} = {inner[each]!r} and {others[each]!r}: it has two values")
        others |= inner
    return found


def _ours(settings: Settings, known: Collection[str]) -> dict[str, Any]:
    try:
        return our_settings(settings, known)
    except SettingNameError as error:
        raise ServeConfigError(str(error)) from error


def make_config(*layers: Settings) -> ServeConfig:
    """Build a configuration from settings by name; later layers override earlier ones, field by field.

    Raises:
        ServeConfigError: a name is unknown, or a value has the wrong type or cannot be served.
    """
    merged = _merged(ServeConfig, ({"engine": QUEUE}, *map(nested, layers)), "")
    try:
        config = pydantic.TypeAdapter(ServeConfig).validate_python(merged)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name, value = ".".join(map(str, first["loc"])), reprlib.repr(first.get("input"))
        if first["type"] == "missing":
            raise ServeConfigError(f"{name} is not set: {_MISSING.get(name, 'it has no default')}") from error
        raise ServeConfigError(f"{name} = {value}: {first['msg']}") from error
    _check(config)
    return config


def _merged(kind: type, layers: tuple[Settings, ...], prefix: str) -> dict[str, Any]:
    """Merge layers into one mapping of the fields of a dataclass, including nested dataclasses."""
    kinds, merged = typing.get_type_hints(kind), dict[str, Any]()
    for name in dict.fromkeys(name for layer in layers for name in layer):
        if name not in kinds:
            raise ServeConfigError(f"{prefix}{name} is not a setting: {_meant(name)}")
        values = [layer[name] for layer in layers if name in layer]
        if dataclasses.is_dataclass(kinds[name]) and all(isinstance(value, Mapping) for value in values):
            merged[name] = _merged(kinds[name], tuple(values), f"{prefix}{name}.")
        else:
            merged[name] = values[-1]
    return merged


def _meant(name: str) -> str:
    """Suggest what a wrong name may have meant, among all settings of all levels."""
    nested: dict[str, type] = {"": ServeConfig, "engine.": EngineConfig, "limits.": ServeLimits}
    known = {field.name: prefix for prefix, kind in nested.items() for field in dataclasses.fields(kind)}
    if name in known:
        return f"did you mean {known[name]}{name}?"
    return advice(name, known, lambda each: known[each] + each) or "docs/serving.md and docs/settings.md list them"


def _check(config: ServeConfig) -> None:
    _require(known_dtype(config.dtype) is not None, "dtype", config.dtype, f"must be one of {', '.join(DTYPES)}")
    for name in _PORTS:
        port = getattr(config, name)
        _require(port is None or 0 <= port < 65536, name, port, "must be a port from 0 to 65535")
    _check_doors(config)
    for name in TIMES:
        seconds = getattr(config, name)
        what = f"must be a number of seconds above 0 and at most {_MOST_SECONDS}"
        _require(seconds is None or 0 < seconds <= _MOST_SECONDS, name, seconds, what)
    good = 0 <= config.drain_delay <= _MOST_SECONDS
    _require(good, "drain_delay", config.drain_delay, f"must be a number of seconds from 0 to {_MOST_SECONDS}")
    for origin in config.allowed_origins:
        good = _ORIGIN.fullmatch(origin) is not None
        _require(good, "allowed_origins", origin, "must be an origin, as https://chat.example.com, or *")
    _check_images(config)
    for name in ("max_connections", "max_receive_bytes"):
        _require(getattr(config, name) >= 1, name, getattr(config, name), "must be at least 1")
    for name, value in dataclasses.asdict(config.limits).items():
        _require(value >= 1, f"limits.{name}", value, "must be at least 1")
    _require(config.log_format in FORMATS, "log_format", config.log_format, f"must be one of {', '.join(FORMATS)}")
    _require(config.log_level in LEVELS, "log_level", config.log_level, f"must be one of {', '.join(LEVELS)}")
    sharing = config.prefix_cache_sharing
    _require(sharing in SHARING, "prefix_cache_sharing", sharing, f"must be one of {', '.join(SHARING)}")
    for name, known in _ONE_OF.items():
        _require(getattr(config, name) in known, name, getattr(config, name), f"must be one of {', '.join(known)}")
    both = (config.tls_cert is None) == (config.tls_key is None)
    _require(both, "tls_cert", config.tls_cert, f"and tls_key = {config.tls_key!r} belong together")
    has_ca = config.tls_client_ca is not None
    _require(not has_ca or config.tls_cert is not None, "tls_client_ca", config.tls_client_ca, "needs tls_cert")
    _check_group(config)
    _check_loras(config)
    _check_weights(config)
    if (refused := refusal(config, config.engine.enable_prefix_caching)) is not None:
        _require(False, *refused)
    _check_exposure(config, guarded=has_ca or config.api_keys is not None or config.insecure)
    try:
        check(config.engine)
    except EngineConfigError as error:
        raise ServeConfigError(f"engine.{error}") from error


def _check_images(config: ServeConfig) -> None:
    for domain in config.allowed_media_domains:
        good = DOMAIN.fullmatch(domain.lower()) is not None
        _require(
            good, "allowed_media_domains", domain, "must be a host, as images.example.com, *.example.com or HOST:PORT"
        )
    pixels = config.limits.image_pixels
    _require(pixels <= MOST_PIXELS, "limits.image_pixels", pixels, f"must be at most {MOST_PIXELS}")


def _check_doors(config: ServeConfig) -> None:
    hosts = {"metrics_port": config.metrics_host, "control_port": config.control_host}
    taken = dict[tuple[str, int], str]()
    for name in _PORTS:
        if port := getattr(config, name):
            other = taken.setdefault((hosts.get(name, config.host), port), name)
            _require(other == name, name, port, f"is {other} already: each door has a port of its own")
    there = not config.vllm_grpc or importlib.util.find_spec(ROUTING_PACKAGE) is not None
    _require(there, "vllm_grpc", True, f"needs {ROUTING_PACKAGE}: pip install 'jaxinfer[routing]'")


def _check_group(config: ServeConfig) -> None:
    count, address = config.num_processes, config.coordinator_address
    _require(count >= 1, "num_processes", count, "must be at least 1")
    _require(0 <= config.process_id < count, "process_id", config.process_id, f"must be from 0 to {count - 1}")
    host, _, port = (address or "").rpartition(":")
    good = address is None or (bool(host) and port.isdecimal() and 0 < int(port) < 65536)
    _require(good, "coordinator_address", address, "must be HOST:PORT")
    for name in ("coordinator_address", "group_key_file"):
        value = getattr(config, name)
        _require(count == 1 or value is not None, name, value, f"must be set with num_processes = {count}")
    both = f"and num_processes = {count} exclude each other"
    _require(count == 1 or not config.engine.enable_dp_attention, "engine.enable_dp_attention", True, both)


def _check_loras(config: ServeConfig) -> None:
    for name in ("lora_modules", "lora_root"):
        value = getattr(config, name)
        _require(config.engine.enable_lora or not value, name, value, "needs enable_lora")
    root = config.lora_root
    _require(root is None or pathlib.Path(root).is_dir(), "lora_root", root, "must be a folder")
    try:
        parse_modules(config.lora_modules, config.served_model_name)
    except ValueError as error:
        raise ServeConfigError(f"lora_modules: {error}") from error


def _check_weights(config: ServeConfig) -> None:
    root = config.weights_root
    _require(root is None or pathlib.Path(root).is_dir(), "weights_root", root, "must be a folder")


def _check_exposure(config: ServeConfig, guarded: bool) -> None:
    for name in ("host", "metrics_host", "control_host"):
        host = getattr(config, name)
        what = "is not loopback: set api_keys or tls_client_ca, or insecure where the network is trusted"
        _require(guarded or is_loopback(host), name, host, what)


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _require(condition: bool, name: str, value: object, what: str) -> None:
    if not condition:
        raise ServeConfigError(f"{name} = {reprlib.repr(value)} {what}")
