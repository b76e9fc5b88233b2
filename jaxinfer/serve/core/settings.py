"""Settings of an engine core process: one line of JSON on its stdin. No jax."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxinfer.config import EngineConfig
from jaxinfer.serve.settings import ServeConfig, ServeConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """The fields of `ServeConfig` that concern the engine core, and its socket.

    Attributes:
        socket: path of the socket to listen on, in a folder that only this user can open.
    """

    socket: str
    model: str
    served_model_name: str | None = None
    dtype: str = "auto"
    family: str = "auto"
    chat_template: str | None = None
    log_format: str = "text"
    log_level: str = "info"
    profile_dir: str | None = None
    compilation_cache_dir: str | None = None
    check_finite: bool = False
    weights_root: str | None = None
    num_processes: int = 1
    process_id: int = 0
    coordinator_address: str | None = None
    group_key_file: str | None = None
    group_timeout: float = 10.0
    kv_events: bool = False
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)

    @classmethod
    def of(cls, config: ServeConfig, socket: str) -> CoreSettings:
        names = {field.name for field in dataclasses.fields(cls)} - {"socket"}
        fields = {name: getattr(config, name) for name in names}
        if config.weights_root is not None:
            fields["engine"] = dataclasses.replace(config.engine, enable_weight_updates=True)
        return cls(socket=socket, **fields)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CoreSettings:
        """Parse the settings. Raises `ServeConfigError` if the text is no JSON object, or a setting is unknown or
        missing."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ServeConfigError(f"the core's settings are no JSON: {error}") from error
        _require_known(fields, cls, "settings")
        engine = fields.pop("engine", {})
        _require_known(engine, EngineConfig, "engine")
        if missing := {"socket", "model"} - set(fields):
            raise ServeConfigError(f"the core's settings lack {', '.join(sorted(missing))}")
        return cls(**fields, engine=EngineConfig(**{name: _plain(value) for name, value in engine.items()}))


def _require_known(fields: object, kind: type, what: str) -> None:
    if not isinstance(fields, Mapping):
        raise ServeConfigError(f"the core's {what} must be a JSON object")
    if unknown := set(fields) - {field.name for field in dataclasses.fields(kind)}:
        raise ServeConfigError(f"the core does not know these {what}: {', '.join(sorted(unknown))}")


def _plain(value: Any) -> Any:
    """Convert lists to tuples: JSON has no tuples, and configurations no lists."""
    return tuple(value) if isinstance(value, list) else value
