"""Values of the Helm chart: each variant with its own templates, and combinations."""

from __future__ import annotations

import functools
import itertools

from tests.fleet.chart import Rendered, Values, merged

KEY = {"name": "alice", "sha256": "0" * 64, "scopes": ["infer", "observe"], "weight": 2}
ENTRIES = {"apiKeys": {"secret": "", "entries": [KEY]}}
GROUP = {"mode": "LeaderWorkerSet", "leaderWorkerSet": {"size": 4, "groupKey": {"secret": "group"}}}
ROUTE = {"gateway": {"enabled": True, "parents": [{"name": "inference", "namespace": "gateways"}], "grpc": True}}
PICKER = merged(ROUTE, {"gateway": {"endpointPicker": {"name": "picker"}, "hostnames": ["llm.example.com"]}})
ENVOY = {"envoy": {"enabled": True}}
TLS = {"tls": {"secret": "certificate"}}
SEEN = {"podMonitor": {"enabled": True, "keySecret": "prometheus", "labels": {"release": "prometheus"}}}
EVENTS = {
    "kvEvents": {"enabled": True},
    "networkPolicy": {"routers": [{"podSelector": {"matchLabels": {"app": "smg"}}}]},
}
SEEN_BY_TLS = merged(SEEN, TLS, {"podMonitor": {"ca": "certificate", "serverName": "llm.example.com"}})

AXES: dict[str, dict[str, Values]] = {
    "mode": {"deployment": {}, "group": GROUP},
    "scaling": {kind: {"autoscaling": {"kind": kind}} for kind in ("none", "hpa", "keda")},
    "door": {"service": {}, "route": ROUTE, "picker": PICKER, "envoy": ENVOY, "tls": SEEN_BY_TLS},
}
OTHERS: dict[str, Values] = {
    **{f"{kind}, busy": {"autoscaling": {"kind": kind, "busy": 95}} for kind in ("hpa", "keda")},
    "seen": SEEN,
    "keys": ENTRIES,
    "insecure": {"apiKeys": {"secret": ""}, "config": {"insecure": True}},
    "no http": {"config": {"http_port": "off"}, "replicas": 0},
    "a short drain": merged(GROUP, {"config": {"drain_delay": 0, "drain_seconds": 0.5}}),
    "demo on a CPU": {
        "models": {"claim": ""},
        "config": {"model": "demo"},
        "resources": {"limits": {"nvidia.com/gpu": None}},
    },
    "open": {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
    "claims": {
        "programs": {"claim": "programs"},
        "models": {"readOnly": False},
        "image": {"pullSecrets": ["registry"]},
    },
    "a folder of the node": {
        "programs": {"hostPath": "/var/cache/jaxinfer"},
        "image": {"digest": "sha256:" + "0" * 64},
    },
    "a balancer": {"service": {"type": "LoadBalancer", "annotations": {"example.com/internal": "true"}}},
    "IPv6, names": {"listen": "::", "nameOverride": "llama", "fullnameOverride": "llama-8b"},
    "placed": merged(
        GROUP,
        {
            "leaderWorkerSet": {"exclusiveTopology": "example.com/rack"},
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "serving",
            "runtimeClassName": "nvidia",
            "podLabels": {"llm-d.ai/role": "decode"},
            "podAnnotations": {"example.com/a": "b"},
            "extraEnv": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        },
    ),
    "events": EVENTS,
    "events over IPv6": merged(GROUP, EVENTS, {"listen": "::", "kvEvents": {"port": 6557, "replayPort": 6558}}),
    "an open Envoy": merged(ENVOY, {"networkPolicy": {"enabled": False}, "envoy": {"serviceType": "LoadBalancer"}}),
    "egress": {"networkPolicy": {"egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"port": 443}]}]}},
    "large numbers": {"config": {"max_receive_bytes": 268435456, "engine": {"kv_cache_bytes": 10**12}}},
}


@functools.cache
def form(name: str) -> Rendered:
    """Return a rendered variant of `FORMS`; read-only."""
    return Rendered(FORMS[name])


def _forms() -> dict[str, Values]:
    combined = itertools.product(*(axis.items() for axis in AXES.values()))
    every = {", ".join(name for name, _ in each): merged(*(values for _, values in each)) for each in combined}
    return every | OTHERS


FORMS = _forms()
