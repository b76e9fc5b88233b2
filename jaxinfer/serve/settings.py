"""What a user may say about a server. Flags and configs/deployments/*.yaml are made of these fields. No jax."""

from __future__ import annotations

import dataclasses

from jaxinfer.config import EngineConfig
from jaxinfer.serve.calls import ServeLimits


class ServeConfigError(ValueError):
    """A setting that cannot be served. The message names the setting and the value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """A server: one model behind gRPC and, if asked for, HTTP.

    Attributes:
        model: "demo", a folder, or a hub id.
        served_model_name: what clients call it (default: the folder's name).
        dtype: of the weights: "auto", "float32", "bfloat16" or "float16".
        host: address to listen on. Anything but loopback needs api_keys or tls_client_ca, or insecure.
        grpc_port: of Inference, health and reflection; 0: any free one.
        http_port: of the OpenAI API and /metrics (default: no HTTP).
        control_port: of Control (default: none); 0: any free one.
        control_host: address of Control.
        api_keys: file of hashed keys with their scopes (python -m jaxinfer.serve.keys makes them).
        insecure: allow an address beyond loopback without keys.
        tls_cert, tls_key: PEM files; read again when they change.
        tls_client_ca: PEM file; clients must show a certificate that it signed.
        allow_request_templates: requests may bring chat templates of their own (they run in the sandbox).
        template_seconds: a chat template that runs longer is stopped.
        drain_seconds: what SIGTERM leaves running requests; a second one aborts them.
        step_timeout: seconds without progress in a step after which the engine counts as hung.
        startup_timeout: seconds without progress until READY after which it does.
        slow_reader_seconds: a client that reads nothing for so long is cut off.
        stream_buffer: messages that wait for a slow client, at most; what comes beyond is merged.
        keepalive_seconds: between pings on idle connections.
        max_connections: of HTTP clients at once.
        header_seconds: for an HTTP client to send its request's head, and again its body.
        log_format: "text" or "json".
        log_level: "debug", "info", "warning" or "error".
        otlp_endpoint: where OpenTelemetry traces go (default: nowhere).
        profile_dir: where StartProfile writes (default: profiling is refused).
        compilation_cache_dir: where compiled programs are kept between runs; "" keeps none.
        check_finite: refuse weights with NaN or infinity.
    """

    model: str
    served_model_name: str | None = None
    dtype: str = "auto"
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int | None = None
    control_port: int | None = None
    control_host: str = "127.0.0.1"
    api_keys: str | None = None
    insecure: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    allow_request_templates: bool = False
    template_seconds: float = 1.0
    drain_seconds: float = 30.0
    step_timeout: float = 60.0
    startup_timeout: float = 600.0
    slow_reader_seconds: float = 30.0
    stream_buffer: int = 64
    keepalive_seconds: float = 30.0
    max_connections: int = 1024
    header_seconds: float = 10.0
    log_format: str = "text"
    log_level: str = "info"
    otlp_endpoint: str | None = None
    profile_dir: str | None = None
    compilation_cache_dir: str | None = None
    check_finite: bool = False
    limits: ServeLimits = dataclasses.field(default_factory=ServeLimits)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
