"""Messages of grpc.health.v1, without its package."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxinfer.client.results import Health
from jaxinfer.protos.internal.standard_pb2 import HealthCheckRequest, HealthCheckResponse

# The service that is SERVING while requests are accepted.
READINESS = "jaxinfer.v1.Inference"


class Method(NamedTuple):
    path: str
    serializer: Callable[[HealthCheckRequest], bytes]
    deserializer: Callable[[bytes], HealthCheckResponse]


CHECK = Method("/grpc.health.v1.Health/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString)
WATCH = Method("/grpc.health.v1.Health/Watch", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString)


def health_request(service: str) -> HealthCheckRequest:
    return HealthCheckRequest(service=service)


def read_health(response: HealthCheckResponse) -> Health:
    return Health(response.status)
