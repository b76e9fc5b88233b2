from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_NOT_FINITE: _ClassVar[FinishReason]
    FINISH_REASON_UNAVAILABLE: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_DEADLINE: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_NOT_FINITE: FinishReason
FINISH_REASON_UNAVAILABLE: FinishReason

class ToCore(_message.Message):
    __slots__ = ("submit", "abort", "leave", "ask", "stop", "load_lora", "unload_lora", "release_lora")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOAD_LORA_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_LORA_FIELD_NUMBER: _ClassVar[int]
    RELEASE_LORA_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    abort: Abort
    leave: Leave
    ask: Ask
    stop: Stop
    load_lora: LoadLora
    unload_lora: str
    release_lora: Lora
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., load_lora: _Optional[_Union[LoadLora, _Mapping]] = ..., unload_lora: _Optional[str] = ..., release_lora: _Optional[_Union[Lora, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("number", "request")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    number: int
    request: Request
    def __init__(self, number: _Optional[int] = ..., request: _Optional[_Union[Request, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("number", "question")
    class Question(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        QUESTION_UNSPECIFIED: _ClassVar[Ask.Question]
        STATS: _ClassVar[Ask.Question]
        RESET_PREFIX_CACHE: _ClassVar[Ask.Question]
        START_PROFILE: _ClassVar[Ask.Question]
        STOP_PROFILE: _ClassVar[Ask.Question]
        CHECK: _ClassVar[Ask.Question]
    QUESTION_UNSPECIFIED: Ask.Question
    STATS: Ask.Question
    RESET_PREFIX_CACHE: Ask.Question
    START_PROFILE: Ask.Question
    STOP_PROFILE: Ask.Question
    CHECK: Ask.Question
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    number: int
    question: Ask.Question
    def __init__(self, number: _Optional[int] = ..., question: _Optional[_Union[Ask.Question, str]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadLora(_message.Message):
    __slots__ = ("number", "name", "path")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    number: int
    name: str
    path: str
    def __init__(self, number: _Optional[int] = ..., name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "params", "stop_token_ids", "bad_words_ids", "priority", "tenant", "cache_scope", "cache_salt", "seconds_left", "weight", "thinking", "lora")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    params: Sampling
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words_ids: _containers.RepeatedCompositeFieldContainer[TokenIds]
    priority: int
    tenant: str
    cache_scope: str
    cache_salt: str
    seconds_left: float
    weight: float
    thinking: Thinking
    lora: Lora
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., params: _Optional[_Union[Sampling, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., bad_words_ids: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., cache_scope: _Optional[str] = ..., cache_salt: _Optional[str] = ..., seconds_left: _Optional[float] = ..., weight: _Optional[float] = ..., thinking: _Optional[_Union[Thinking, _Mapping]] = ..., lora: _Optional[_Union[Lora, _Mapping]] = ...) -> None: ...

class Lora(_message.Message):
    __slots__ = ("name", "identity")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    identity: str
    def __init__(self, name: _Optional[str] = ..., identity: _Optional[str] = ...) -> None: ...

class Thinking(_message.Message):
    __slots__ = ("begin", "end", "is_open")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    is_open: bool
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ..., is_open: bool = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "seed", "large_seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "logprobs", "prompt_logprobs", "skip_special_tokens", "speculation", "structured_outputs", "thinking_token_budget", "top_n_sigma")
    N_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LARGE_SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    THINKING_TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    TOP_N_SIGMA_FIELD_NUMBER: _ClassVar[int]
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Bias
    allowed_token_ids: TokenIds
    bad_words: Strings
    seed: int
    large_seed: int
    max_tokens: int
    min_tokens: int
    stop: Strings
    stop_token_ids: TokenIds
    ignore_eos: bool
    include_stop_str_in_output: bool
    logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    speculation: Speculation
    structured_outputs: StructuredOutputs
    thinking_token_budget: int
    top_n_sigma: float
    def __init__(self, n: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Union[Bias, _Mapping]] = ..., allowed_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., bad_words: _Optional[_Union[Strings, _Mapping]] = ..., seed: _Optional[int] = ..., large_seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Union[Strings, _Mapping]] = ..., stop_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., ignore_eos: bool = ..., include_stop_str_in_output: bool = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., skip_special_tokens: bool = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., structured_outputs: _Optional[_Union[StructuredOutputs, _Mapping]] = ..., thinking_token_budget: _Optional[int] = ..., top_n_sigma: _Optional[float] = ...) -> None: ...

class StructuredOutputs(_message.Message):
    __slots__ = ("json", "json_object", "regex", "choice", "grammar", "structural_tag", "enable_in_reasoning")
    JSON_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    ENABLE_IN_REASONING_FIELD_NUMBER: _ClassVar[int]
    json: str
    json_object: bool
    regex: str
    choice: Strings
    grammar: str
    structural_tag: str
    enable_in_reasoning: bool
    def __init__(self, json: _Optional[str] = ..., json_object: bool = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Strings, _Mapping]] = ..., grammar: _Optional[str] = ..., structural_tag: _Optional[str] = ..., enable_in_reasoning: bool = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("enabled", "max_tokens", "acceptance")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    max_tokens: int
    acceptance: str
    def __init__(self, enabled: bool = ..., max_tokens: _Optional[int] = ..., acceptance: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Strings(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class Bias(_message.Message):
    __slots__ = ("token_ids", "values")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class FromCore(_message.Message):
    __slots__ = ("startup", "ready", "failed", "accepted", "refused", "deltas", "answer", "beat", "fault", "kv_events")
    STARTUP_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    startup: Startup
    ready: Ready
    failed: Failed
    accepted: Accepted
    refused: Refused
    deltas: Deltas
    answer: Answer
    beat: Beat
    fault: Fault
    kv_events: KvEvents
    def __init__(self, startup: _Optional[_Union[Startup, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., deltas: _Optional[_Union[Deltas, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ...) -> None: ...

class Startup(_message.Message):
    __slots__ = ("phase", "bytes_done", "bytes_total", "compilations_done", "compilations_total")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[Startup.Phase]
        STARTING: _ClassVar[Startup.Phase]
        LOADING_WEIGHTS: _ClassVar[Startup.Phase]
        COMPILING: _ClassVar[Startup.Phase]
        CHECKING: _ClassVar[Startup.Phase]
    PHASE_UNSPECIFIED: Startup.Phase
    STARTING: Startup.Phase
    LOADING_WEIGHTS: Startup.Phase
    COMPILING: Startup.Phase
    CHECKING: Startup.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    COMPILATIONS_DONE_FIELD_NUMBER: _ClassVar[int]
    COMPILATIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    phase: Startup.Phase
    bytes_done: int
    bytes_total: int
    compilations_done: int
    compilations_total: int
    def __init__(self, phase: _Optional[_Union[Startup.Phase, str]] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., compilations_done: _Optional[int] = ..., compilations_total: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("card", "folder")
    CARD_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    card: Card
    folder: str
    def __init__(self, card: _Optional[_Union[Card, _Mapping]] = ..., folder: _Optional[str] = ...) -> None: ...

class Card(_message.Message):
    __slots__ = ("name", "architecture", "dtype", "max_model_len", "vocab_size", "eos_token_ids", "defaults", "engine", "created")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    defaults: str
    engine: str
    created: int
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., defaults: _Optional[str] = ..., engine: _Optional[str] = ..., created: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("number", "seed", "large_seed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LARGE_SEED_FIELD_NUMBER: _ClassVar[int]
    number: int
    seed: int
    large_seed: int
    def __init__(self, number: _Optional[int] = ..., seed: _Optional[int] = ..., large_seed: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("number", "kind", "message", "place")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Refused.Kind]
        REQUEST: _ClassVar[Refused.Kind]
        QUEUE_FULL: _ClassVar[Refused.Kind]
        ENGINE: _ClassVar[Refused.Kind]
    KIND_UNSPECIFIED: Refused.Kind
    REQUEST: Refused.Kind
    QUEUE_FULL: Refused.Kind
    ENGINE: Refused.Kind
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    number: int
    kind: Refused.Kind
    message: str
    place: str
    def __init__(self, number: _Optional[int] = ..., kind: _Optional[_Union[Refused.Kind, str]] = ..., message: _Optional[str] = ..., place: _Optional[str] = ...) -> None: ...

class Deltas(_message.Message):
    __slots__ = ("streams", "indexes", "tokens", "others")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    streams: _containers.RepeatedScalarFieldContainer[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    others: _containers.RepeatedCompositeFieldContainer[Delta]
    def __init__(self, streams: _Optional[_Iterable[int]] = ..., indexes: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., others: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("stream", "index", "token_ids", "logprobs", "finish_reason", "stop_token_id", "stop_string", "prompt_logprobs", "cached_tokens", "continues", "draft_tokens", "draft_accepted")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    stream: int
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: Positions
    finish_reason: FinishReason
    stop_token_id: int
    stop_string: str
    prompt_logprobs: Positions
    cached_tokens: int
    continues: bool
    draft_tokens: int
    draft_accepted: int
    def __init__(self, stream: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[Positions, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., prompt_logprobs: _Optional[_Union[Positions, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., continues: bool = ..., draft_tokens: _Optional[int] = ..., draft_accepted: _Optional[int] = ...) -> None: ...

class Positions(_message.Message):
    __slots__ = ("tops", "token_ids", "logprobs", "ranks")
    TOPS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    tops: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tops: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("number", "stats", "pages", "folder", "done", "refusal", "lora")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    number: int
    stats: Stats
    pages: int
    folder: str
    done: bool
    refusal: str
    lora: LoadedLora
    def __init__(self, number: _Optional[int] = ..., stats: _Optional[_Union[Stats, _Mapping]] = ..., pages: _Optional[int] = ..., folder: _Optional[str] = ..., done: bool = ..., refusal: _Optional[str] = ..., lora: _Optional[_Union[LoadedLora, _Mapping]] = ...) -> None: ...

class LoadedLora(_message.Message):
    __slots__ = ("name", "path", "identity", "rank")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    identity: str
    rank: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., identity: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class Stats(_message.Message):
    __slots__ = ("running", "waiting", "kv", "compilations", "prompt_tokens", "generated_tokens", "finished", "preemptions", "prefix_queries", "prefix_hits", "draft_tokens", "draft_accepted", "replayed_tokens", "replay_mismatches", "steps", "time_to_first_token", "inter_token_latency", "e2e_latency", "queue_time", "step_time", "drafts", "draft_accepted_at", "loras", "lora_load_time")
    class WaitingEntry(_message.Message):
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
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    COMPILATIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_LATENCY_FIELD_NUMBER: _ClassVar[int]
    E2E_LATENCY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTED_AT_FIELD_NUMBER: _ClassVar[int]
    LORAS_FIELD_NUMBER: _ClassVar[int]
    LORA_LOAD_TIME_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: _containers.ScalarMap[str, int]
    kv: Usage
    compilations: int
    prompt_tokens: int
    generated_tokens: int
    finished: _containers.ScalarMap[str, int]
    preemptions: _containers.ScalarMap[str, int]
    prefix_queries: int
    prefix_hits: int
    draft_tokens: int
    draft_accepted: int
    replayed_tokens: int
    replay_mismatches: int
    steps: int
    time_to_first_token: Histogram
    inter_token_latency: Histogram
    e2e_latency: Histogram
    queue_time: Histogram
    step_time: Histogram
    drafts: int
    draft_accepted_at: _containers.RepeatedScalarFieldContainer[int]
    loras: LoraUsage
    lora_load_time: Histogram
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[_Mapping[str, int]] = ..., kv: _Optional[_Union[Usage, _Mapping]] = ..., compilations: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., finished: _Optional[_Mapping[str, int]] = ..., preemptions: _Optional[_Mapping[str, int]] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., draft_accepted: _Optional[int] = ..., replayed_tokens: _Optional[int] = ..., replay_mismatches: _Optional[int] = ..., steps: _Optional[int] = ..., time_to_first_token: _Optional[_Union[Histogram, _Mapping]] = ..., inter_token_latency: _Optional[_Union[Histogram, _Mapping]] = ..., e2e_latency: _Optional[_Union[Histogram, _Mapping]] = ..., queue_time: _Optional[_Union[Histogram, _Mapping]] = ..., step_time: _Optional[_Union[Histogram, _Mapping]] = ..., drafts: _Optional[int] = ..., draft_accepted_at: _Optional[_Iterable[int]] = ..., loras: _Optional[_Union[LoraUsage, _Mapping]] = ..., lora_load_time: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...

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

class Usage(_message.Message):
    __slots__ = ("total", "free", "cached", "held", "host_total", "host_used")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HOST_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HOST_USED_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    held: int
    host_total: int
    host_used: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., held: _Optional[int] = ..., host_total: _Optional[int] = ..., host_used: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("rank", "cleared", "stored", "removed")
    RANK_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    cleared: bool
    stored: _containers.RepeatedCompositeFieldContainer[KvStored]
    removed: _containers.RepeatedCompositeFieldContainer[KvRemoved]
    def __init__(self, rank: _Optional[int] = ..., cleared: bool = ..., stored: _Optional[_Iterable[_Union[KvStored, _Mapping]]] = ..., removed: _Optional[_Iterable[_Union[KvRemoved, _Mapping]]] = ...) -> None: ...

class KvStored(_message.Message):
    __slots__ = ("medium", "parent", "hashes", "tokens", "lora", "extra")
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    medium: str
    parent: bytes
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    tokens: bytes
    lora: Lora
    extra: str
    def __init__(self, medium: _Optional[str] = ..., parent: _Optional[bytes] = ..., hashes: _Optional[_Iterable[bytes]] = ..., tokens: _Optional[bytes] = ..., lora: _Optional[_Union[Lora, _Mapping]] = ..., extra: _Optional[str] = ...) -> None: ...

class KvRemoved(_message.Message):
    __slots__ = ("medium", "hashes")
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    medium: str
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, medium: _Optional[str] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("steps", "busy_seconds", "p99_step_seconds")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    P99_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    busy_seconds: float
    p99_step_seconds: float
    def __init__(self, steps: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., p99_step_seconds: _Optional[float] = ...) -> None: ...
