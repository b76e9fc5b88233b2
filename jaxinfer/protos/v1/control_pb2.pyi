from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_KEEP: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_KEEP: PauseMode
PAUSE_MODE_ABORT: PauseMode

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "output_index", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    output_index: int
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., output_index: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stats(_message.Message):
    __slots__ = ("state", "running", "waiting", "kv_pages", "prompt_tokens", "generated_tokens", "finished", "preemptions", "prefix_queries", "prefix_hits", "draft_tokens", "draft_accepted", "steps", "compilations", "restarts", "drafts", "draft_accepted_at", "lora_usage", "weights", "devices", "hosts", "seconds")
    class WaitingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class KvPagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FinishedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PreemptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COMPILATIONS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTED_AT_FIELD_NUMBER: _ClassVar[int]
    LORA_USAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    state: str
    running: int
    waiting: _containers.ScalarMap[str, int]
    kv_pages: _containers.ScalarMap[str, int]
    prompt_tokens: int
    generated_tokens: int
    finished: _containers.ScalarMap[str, int]
    preemptions: _containers.ScalarMap[str, int]
    prefix_queries: int
    prefix_hits: int
    draft_tokens: int
    draft_accepted: int
    steps: int
    compilations: int
    restarts: int
    drafts: int
    draft_accepted_at: _containers.RepeatedScalarFieldContainer[int]
    lora_usage: LoraUsage
    weights: WeightStats
    devices: _containers.RepeatedCompositeFieldContainer[DeviceUsage]
    hosts: _containers.RepeatedCompositeFieldContainer[HostUsage]
    seconds: float
    def __init__(self, state: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[_Mapping[str, int]] = ..., kv_pages: _Optional[_Mapping[str, int]] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., finished: _Optional[_Mapping[str, int]] = ..., preemptions: _Optional[_Mapping[str, int]] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., draft_accepted: _Optional[int] = ..., steps: _Optional[int] = ..., compilations: _Optional[int] = ..., restarts: _Optional[int] = ..., drafts: _Optional[int] = ..., draft_accepted_at: _Optional[_Iterable[int]] = ..., lora_usage: _Optional[_Union[LoraUsage, _Mapping]] = ..., weights: _Optional[_Union[WeightStats, _Mapping]] = ..., devices: _Optional[_Iterable[_Union[DeviceUsage, _Mapping]]] = ..., hosts: _Optional[_Iterable[_Union[HostUsage, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class DeviceUsage(_message.Message):
    __slots__ = ("process", "device", "kind", "parts", "in_use", "peak", "limit", "busy_seconds", "driver")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    PEAK_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    process: int
    device: int
    kind: str
    parts: _containers.ScalarMap[str, int]
    in_use: int
    peak: int
    limit: int
    busy_seconds: float
    driver: DriverFigures
    def __init__(self, process: _Optional[int] = ..., device: _Optional[int] = ..., kind: _Optional[str] = ..., parts: _Optional[_Mapping[str, int]] = ..., in_use: _Optional[int] = ..., peak: _Optional[int] = ..., limit: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., driver: _Optional[_Union[DriverFigures, _Mapping]] = ...) -> None: ...

class DriverFigures(_message.Message):
    __slots__ = ("utilization", "memory_used", "memory_total", "watts", "celsius")
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_FIELD_NUMBER: _ClassVar[int]
    WATTS_FIELD_NUMBER: _ClassVar[int]
    CELSIUS_FIELD_NUMBER: _ClassVar[int]
    utilization: float
    memory_used: int
    memory_total: int
    watts: float
    celsius: float
    def __init__(self, utilization: _Optional[float] = ..., memory_used: _Optional[int] = ..., memory_total: _Optional[int] = ..., watts: _Optional[float] = ..., celsius: _Optional[float] = ...) -> None: ...

class HostUsage(_message.Message):
    __slots__ = ("process", "parts")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    process: int
    parts: _containers.ScalarMap[str, int]
    def __init__(self, process: _Optional[int] = ..., parts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class WeightStats(_message.Message):
    __slots__ = ("weight_version", "is_paused", "asleep", "updates", "update_seconds")
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    weight_version: int
    is_paused: bool
    asleep: _containers.RepeatedScalarFieldContainer[str]
    updates: int
    update_seconds: float
    def __init__(self, weight_version: _Optional[int] = ..., is_paused: bool = ..., asleep: _Optional[_Iterable[str]] = ..., updates: _Optional[int] = ..., update_seconds: _Optional[float] = ...) -> None: ...

class LoraUsage(_message.Message):
    __slots__ = ("loaded", "slots", "slots_used", "loads", "evictions", "running", "waiting")
    class RunningEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class WaitingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    LOADED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    loaded: int
    slots: int
    slots_used: int
    loads: int
    evictions: int
    running: _containers.ScalarMap[str, int]
    waiting: _containers.ScalarMap[str, int]
    def __init__(self, loaded: _Optional[int] = ..., slots: _Optional[int] = ..., slots_used: _Optional[int] = ..., loads: _Optional[int] = ..., evictions: _Optional[int] = ..., running: _Optional[_Mapping[str, int]] = ..., waiting: _Optional[_Mapping[str, int]] = ...) -> None: ...

class WatchStartupRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartupEvent(_message.Message):
    __slots__ = ("phase", "bytes_done", "bytes_total", "compilations_done", "compilations_total", "message")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[StartupEvent.Phase]
        STARTING: _ClassVar[StartupEvent.Phase]
        LOADING_WEIGHTS: _ClassVar[StartupEvent.Phase]
        COMPILING: _ClassVar[StartupEvent.Phase]
        CHECKING: _ClassVar[StartupEvent.Phase]
        READY: _ClassVar[StartupEvent.Phase]
        FAILED: _ClassVar[StartupEvent.Phase]
    PHASE_UNSPECIFIED: StartupEvent.Phase
    STARTING: StartupEvent.Phase
    LOADING_WEIGHTS: StartupEvent.Phase
    COMPILING: StartupEvent.Phase
    CHECKING: StartupEvent.Phase
    READY: StartupEvent.Phase
    FAILED: StartupEvent.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    COMPILATIONS_DONE_FIELD_NUMBER: _ClassVar[int]
    COMPILATIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    phase: StartupEvent.Phase
    bytes_done: int
    bytes_total: int
    compilations_done: int
    compilations_total: int
    message: str
    def __init__(self, phase: _Optional[_Union[StartupEvent.Phase, str]] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., compilations_done: _Optional[int] = ..., compilations_total: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout",)
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    def __init__(self, timeout: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    def __init__(self, steps: _Optional[int] = ...) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("folder",)
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    folder: str
    def __init__(self, folder: _Optional[str] = ...) -> None: ...

class LoadLoraRequest(_message.Message):
    __slots__ = ("lora_name", "lora_path", "load_inplace")
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_PATH_FIELD_NUMBER: _ClassVar[int]
    LOAD_INPLACE_FIELD_NUMBER: _ClassVar[int]
    lora_name: str
    lora_path: str
    load_inplace: bool
    def __init__(self, lora_name: _Optional[str] = ..., lora_path: _Optional[str] = ..., load_inplace: bool = ...) -> None: ...

class LoadLoraResponse(_message.Message):
    __slots__ = ("lora",)
    LORA_FIELD_NUMBER: _ClassVar[int]
    lora: Lora
    def __init__(self, lora: _Optional[_Union[Lora, _Mapping]] = ...) -> None: ...

class Lora(_message.Message):
    __slots__ = ("name", "path", "identity", "rank", "parent")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    identity: str
    rank: int
    parent: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., identity: _Optional[str] = ..., rank: _Optional[int] = ..., parent: _Optional[str] = ...) -> None: ...

class UnloadLoraRequest(_message.Message):
    __slots__ = ("lora_name",)
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    lora_name: str
    def __init__(self, lora_name: _Optional[str] = ...) -> None: ...

class UnloadLoraResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLorasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLorasResponse(_message.Message):
    __slots__ = ("loras",)
    LORAS_FIELD_NUMBER: _ClassVar[int]
    loras: _containers.RepeatedCompositeFieldContainer[Lora]
    def __init__(self, loras: _Optional[_Iterable[_Union[Lora, _Mapping]]] = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("weight_version", "is_paused", "asleep")
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    weight_version: int
    is_paused: bool
    asleep: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, weight_version: _Optional[int] = ..., is_paused: bool = ..., asleep: _Optional[_Iterable[str]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: PauseMode
    def __init__(self, mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortAllRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortAllResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("level", "tags", "mode")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    level: int
    tags: _containers.RepeatedScalarFieldContainer[str]
    mode: PauseMode
    def __init__(self, level: _Optional[int] = ..., tags: _Optional[_Iterable[str]] = ..., mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class WakeUpRequest(_message.Message):
    __slots__ = ("tags",)
    TAGS_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tags: _Optional[_Iterable[str]] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("path", "weight_version", "mode", "parts")
    PATH_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    path: str
    weight_version: int
    mode: PauseMode
    parts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, path: _Optional[str] = ..., weight_version: _Optional[int] = ..., mode: _Optional[_Union[PauseMode, str]] = ..., parts: _Optional[_Iterable[str]] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("state", "bytes", "seconds")
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    state: EngineState
    bytes: int
    seconds: float
    def __init__(self, state: _Optional[_Union[EngineState, _Mapping]] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class WeightInfoRequest(_message.Message):
    __slots__ = ("checksums",)
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    checksums: bool
    def __init__(self, checksums: bool = ...) -> None: ...

class WeightInfoResponse(_message.Message):
    __slots__ = ("state", "checksums")
    class ChecksumsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    state: EngineState
    checksums: _containers.ScalarMap[str, str]
    def __init__(self, state: _Optional[_Union[EngineState, _Mapping]] = ..., checksums: _Optional[_Mapping[str, str]] = ...) -> None: ...
