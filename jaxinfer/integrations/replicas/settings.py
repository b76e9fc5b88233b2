"""Settings of an application of replicas: those of `jaxinfer serve` and of its orchestrator. No jax."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import reprlib
from collections.abc import Mapping
from typing import Any

import pydantic
import yaml

from jaxinfer.config.aliases import advice
from jaxinfer.serve.api.kv_events import KvEventsConfig
from jaxinfer.serve.settings import PLACES, ServeConfig, ServeConfigError, make_config, nested, read_settings

POLICY = "jaxinfer.integrations.replicas.scaling.QueueLength"
"""Import path of the autoscaling policy class."""

_FILE = "config"
_STOPPING_SECONDS = 10.0
"""Seconds for an engine to stop when no requests run."""
_LOOK_SECONDS = 2.0
"""Seconds between two checks for running requests, if `drain_delay` is not set."""

_CONNECTIONS = "connections are the proxy's: set it there"
_ROUTED = "which replica has a request is the proxy's to say: no router of others is there to listen"
_MEMBERS = "the processes of a replica are numbered, and told where process 0 is, by Ray"
_TLS = "is the proxy's: ssl_certfile, ssl_keyfile and ssl_ca_certs of http_options"
ELSEWHERE: Mapping[str, str] = {
    "host": "the doors are the proxy's: host of http_options",
    "http_port": "the doors are the proxy's: port of http_options",
    "grpc_port": "the doors are the proxy's: port of grpc_options",
    "control_port": "calls reach any replica, and Control is about one",
    "control_host": "calls reach any replica, and Control is about one",
    "lora_root": "a loading would reach one replica: name adapters by lora_modules, which all have",
    **dict.fromkeys(("tls_cert", "tls_key", "tls_client_ca"), _TLS),
    **dict.fromkeys(("max_connections", "max_receive_bytes", "header_seconds"), _CONNECTIONS),
    **dict.fromkeys(("keepalive_seconds", "slow_reader_seconds"), _CONNECTIONS),
    **dict.fromkeys(("vllm_grpc", *(field.name for field in dataclasses.fields(KvEventsConfig))), _ROUTED),
    **dict.fromkeys(("process_id", "coordinator_address"), _MEMBERS),
}
"""Settings of `jaxinfer serve` that do not apply here, and the reasons."""

_TOLD_LATER: Mapping[str, Any] = {"coordinator_address": "nowhere:1", "group_key_file": "nowhere"}
"""Placeholders for group settings that each replica creates itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """Number of replicas and their resources.

    Attributes:
        deployment_name: Ray's name of the deployment.
        num_replicas: number of replicas without autoscaling.
        max_replicas: maximum number of replicas with autoscaling; None: no autoscaling.
        min_replicas: minimum number of replicas with autoscaling.
        target_ongoing_requests: target of running and waiting sequences per replica.
        target_waiting_requests: target of sequences in the engine's queue per replica.
        upscale_delay_s: seconds for which there must be too few replicas before one is added.
        downscale_delay_s: seconds for which there must be too many replicas before one is removed.
        look_back_period_s: seconds over which the load is averaged.
        max_ongoing_requests: requests that a proxy sends to one replica at once; more wait in the proxy.
        num_cpus: processors of each process of a replica, as Ray counts them.
        num_gpus: GPUs of each process of a replica.
        placement_group_strategy: placement of a replica's processes: "PACK", "SPREAD", "STRICT_PACK" or
            "STRICT_SPREAD" (each on a different host).
        health_check_period_s: seconds between two health checks of a replica.
        health_check_timeout_s: timeout of a health check in seconds.
    """

    deployment_name: str = "jaxinfer"
    num_replicas: int = 1
    max_replicas: int | None = None
    min_replicas: int = 1
    target_ongoing_requests: float = 32.0
    target_waiting_requests: float = 8.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_period_s: float = 30.0
    max_ongoing_requests: int = 1024
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    placement_group_strategy: str = "PACK"
    health_check_period_s: float = 10.0
    health_check_timeout_s: float = 30.0


_OWN = {field.name for field in dataclasses.fields(ReplicaConfig)}
_SERVE = {field.name for field in dataclasses.fields(ServeConfig)}
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_AT_LEAST_ONE = ("num_replicas", "max_replicas", "min_replicas", "max_ongoing_requests")
_ABOVE_ZERO = (
    *("target_ongoing_requests", "target_waiting_requests", "look_back_period_s"),
    *("health_check_period_s", "health_check_timeout_s"),
)
_FROM_ZERO = ("upscale_delay_s", "downscale_delay_s", "num_cpus", "num_gpus")


def parse(arguments: Mapping[str, Any]) -> tuple[ServeConfig, ReplicaConfig]:
    """Parse the settings from an application's arguments.

    Args:
        arguments: fields of `ReplicaConfig`; settings of `jaxinfer serve` by flag name (``max_num_seqs``, ``limit_n``)
            or as in its files (``engine: {max_num_seqs: 16}``); ``config``: path of such a file, which they override.
            Values may be strings, as on a command line: lists and mappings as YAML in brackets.

    Raises:
        ServeConfigError: an unknown name, a value of the wrong type or one that cannot be served, or a setting that
            does not apply here. The message names the setting and the value.
    """
    given = {name: _read(name, value) for name, value in arguments.items()}
    path = given.pop(_FILE, None)
    file = {} if path is None else nested(read_settings(pathlib.Path(str(path))))
    own = {name: given.pop(name) for name in _OWN & given.keys()}
    flags = nested(given)
    for name in flags.keys() - _SERVE:
        meant = advice(name, sorted(_OWN | PLACES.keys()))
        raise ServeConfigError(f"{name} is not a setting: {meant or 'docs/ray.md says where they are listed'}")
    for name, value in {**file, **flags}.items():
        if name in ELSEWHERE:
            raise ServeConfigError(f"{name} = {reprlib.repr(value)}: {ELSEWHERE[name]}")
    config = make_config(_TOLD_LATER, file, flags)
    key = flags.get("group_key_file", file.get("group_key_file"))
    return dataclasses.replace(config, http_port=None, coordinator_address=None, group_key_file=key), _own(own)


def deployment_options(config: ServeConfig, replicas: ReplicaConfig) -> dict[str, Any]:
    """Return the options of the Ray Serve deployment.

    A replica of several processes has a placement group bundle for each and runs in the first. Running requests have
    `drain_delay` plus `drain_seconds` to finish.
    """
    options: dict[str, Any] = {
        "name": replicas.deployment_name,
        "max_ongoing_requests": replicas.max_ongoing_requests,
        "ray_actor_options": {"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus},
        "graceful_shutdown_wait_loop_s": config.drain_delay or _LOOK_SECONDS,
        "graceful_shutdown_timeout_s": config.drain_delay + config.drain_seconds + _STOPPING_SECONDS,
        "health_check_period_s": replicas.health_check_period_s,
        "health_check_timeout_s": replicas.health_check_timeout_s,
    }
    if config.num_processes > 1:
        options["placement_group_bundles"] = [_bundle(replicas)] * config.num_processes
        options["placement_group_strategy"] = replicas.placement_group_strategy
    if replicas.max_replicas is None:
        return options | {"num_replicas": replicas.num_replicas}
    return options | {"autoscaling_config": _autoscaling(replicas, replicas.max_replicas)}


def _bundle(replicas: ReplicaConfig) -> dict[str, float]:
    wanted = {"CPU": replicas.num_cpus, "GPU": replicas.num_gpus}
    return {name: count for name, count in wanted.items() if count}


def _autoscaling(replicas: ReplicaConfig, most: int) -> dict[str, Any]:
    targets = ("target_ongoing_requests", "target_waiting_requests")
    return {
        "min_replicas": replicas.min_replicas,
        "max_replicas": most,
        "target_ongoing_requests": replicas.target_ongoing_requests,
        "upscale_delay_s": replicas.upscale_delay_s,
        "downscale_delay_s": replicas.downscale_delay_s,
        "look_back_period_s": replicas.look_back_period_s,
        "policy": {
            "policy_function": POLICY,
            "policy_kwargs": {name: getattr(replicas, name) for name in targets},
        },
    }


def _read(name: str, value: Any) -> Any:
    """Parse a list or mapping that is given as text."""
    if not isinstance(value, str) or not value.startswith(("[", "{")):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ServeConfigError(f"{name} = {reprlib.repr(value)} is no YAML: {' '.join(str(error).split())}") from error


def _own(given: Mapping[str, Any]) -> ReplicaConfig:
    try:
        replicas = pydantic.TypeAdapter(ReplicaConfig).validate_python(dict(given))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name, value = ".".join(map(str, first["loc"])), reprlib.repr(first.get("input"))
        raise ServeConfigError(f"{name} = {value}: {first['msg']}") from error
    _check(replicas)
    return replicas


def _check(replicas: ReplicaConfig) -> None:
    found = dataclasses.asdict(replicas)
    for name in _AT_LEAST_ONE:
        _require(found[name] is None or found[name] >= 1, name, found[name], "must be at least 1")
    for name in _ABOVE_ZERO:
        _require(0 < found[name] < math.inf, name, found[name], "must be a number above 0")
    for name in _FROM_ZERO:
        _require(0 <= found[name] < math.inf, name, found[name], "must be a number from 0")
    _require(bool(_bundle(replicas)), "num_cpus", replicas.num_cpus, "and num_gpus must not both be 0")
    most, least = replicas.max_replicas, replicas.min_replicas
    _require(most is None or least <= most, "min_replicas", least, f"is more than max_replicas = {most}")
    strategy = replicas.placement_group_strategy
    known = f"must be one of {', '.join(_STRATEGIES)}"
    _require(strategy in _STRATEGIES, "placement_group_strategy", strategy, known)
    name = replicas.deployment_name
    good = 0 < len(name) <= 64 and name.isprintable() and "#" not in name
    _require(good, "deployment_name", name, "must be 1 to 64 printable characters without #")


def _require(condition: bool, name: str, value: object, what: str) -> None:
    if not condition:
        raise ServeConfigError(f"{name} = {reprlib.repr(value)} {what}")
