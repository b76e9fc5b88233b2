"""Python client: text, token ids or chat in, typed deltas out. It depends only on grpcio and protobuf.

```
from jaxinfer.client import Client

with Client("localhost:50051") as client:
    print(client.generate("Once upon a time", max_tokens=32).text)
    with client.stream(messages=[{"role": "user", "content": "Hello!"}], temperature=0.7) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
```

`AsyncClient` has the same methods for asyncio, `Control` is for operators. docs/client.md describes retries and errors.
"""

from jaxinfer.client.aio import AsyncClient, AsyncStream
from jaxinfer.client.connect import TLS, RetryPolicy
from jaxinfer.client.control import AsyncControl, Control, EngineState, Lora, WeightInfo, WeightUpdate
from jaxinfer.client.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Incompatible,
    InternalError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    QueueFull,
    ResourceExhausted,
    ServerError,
    Truncated,
    Unauthenticated,
    Unavailable,
)
from jaxinfer.client.messages import ChatMessage, ToolCall
from jaxinfer.client.requests import GenerateOptions, Prompt, ScoreOptions, TokenizeOptions
from jaxinfer.client.results import (
    BatchItem,
    Completion,
    Delta,
    Health,
    ModelInfo,
    Output,
    PositionLogprobs,
    Scored,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from jaxinfer.client.sync import Client, Stream

__all__ = [
    "TLS",
    "AlreadyExists",
    "AsyncClient",
    "AsyncControl",
    "AsyncStream",
    "BatchItem",
    "Cancelled",
    "ChatMessage",
    "Client",
    "Completion",
    "Control",
    "DeadlineExceeded",
    "Delta",
    "EngineState",
    "FailedPrecondition",
    "GenerateOptions",
    "Health",
    "Incompatible",
    "InternalError",
    "InvalidRequest",
    "Lora",
    "ModelInfo",
    "NotFound",
    "Output",
    "PermissionDenied",
    "PositionLogprobs",
    "Prompt",
    "QueueFull",
    "ResourceExhausted",
    "RetryPolicy",
    "ScoreOptions",
    "Scored",
    "ServerError",
    "Stream",
    "TokenLogprob",
    "TokenizeOptions",
    "ToolCall",
    "ToolCallDelta",
    "Truncated",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "WeightInfo",
    "WeightUpdate",
]
