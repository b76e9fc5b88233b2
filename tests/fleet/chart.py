"""The Helm chart, rendered as by helm, with validation by the schemas of Kubernetes and of custom resources."""

from __future__ import annotations

import copy
import functools
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate import utils

from jaxinfer.serve.settings import ServeConfig, make_config

REPO = pathlib.Path(__file__).resolve().parents[2]
CHART = REPO / "configs/kubernetes/jaxinfer"
VERSIONS = ("1.30", kubernetes_validate.latest_version().removesuffix("-strict"))
RELEASE, NAMESPACE = "prod", "llm"

Object = dict[str, Any]
Values = Mapping[str, Any]

_CUSTOM = yaml.safe_load((pathlib.Path(__file__).parent / "custom_resources.yaml").read_text(encoding="utf-8"))
utils.schema_contents = functools.cache(utils.schema_contents)  # it reads megabytes for each object


class Rendered:
    """Objects of a release with given values."""

    def __init__(self, values: Values) -> None:
        """Raises helm_python.HelmError: helm rejects the values."""
        with helm_python.Chart.load(CHART) as chart:
            files = chart.render(copy.deepcopy(dict(values)), name=RELEASE, namespace=NAMESPACE)
        self.notes = files.pop("jaxinfer/templates/NOTES.txt")
        texts = [text for name, text in files.items() if not name.endswith(".tpl")]
        self.objects: list[Object] = [each for text in texts for each in yaml.safe_load_all(text) if each]

    def of_kind(self, kind: str, proxy: bool = False) -> list[Object]:
        """Return objects of a kind; ``proxy``: those of Envoy, else all others."""
        found = [each for each in self.objects if each["kind"] == kind]
        return [each for each in found if each["metadata"]["name"].endswith("-envoy") == proxy]

    def one(self, kind: str, proxy: bool = False) -> Object:
        """Return the only object of a kind."""
        (found,) = self.of_kind(kind, proxy)
        return found

    @property
    def pods(self) -> dict[str, Object]:
        """Templates of the engines' pods: "server" for a Deployment, "leader" and "follower" for a group."""
        if deployments := self.of_kind("Deployment"):
            return {"server": deployments[0]["spec"]["template"]}
        group = self.one("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
        return {"leader": group["leaderTemplate"], "follower": group["workerTemplate"]}

    @property
    def settings(self) -> str:
        """Settings file of the server."""
        text: str = self.one("ConfigMap")["data"]["production.yaml"]
        return text


def container(pod: Object) -> Object:
    """Return the only container of a pod."""
    (found,) = pod["spec"]["containers"]
    return found


def check(rendered: Rendered) -> None:
    """Raises jsonschema.ValidationError: an object violates its schema, in one of `VERSIONS`."""
    for each in (*rendered.objects, *map(_as_pod, rendered.pods.values())):
        _check_text(json.dumps(each))


def _as_pod(template: Object) -> Object:
    """Return the pod of a template."""
    return {"apiVersion": "v1", "kind": "Pod", **template}


@functools.cache
def _check_text(text: str) -> None:
    each = json.loads(text)
    kind = f"{each['apiVersion']} {each['kind']}"
    if kind in _CUSTOM:
        jsonschema.Draft202012Validator(_of_kind(kind)).validate(each)
        return
    for version in VERSIONS:
        kubernetes_validate.validate(each, version, strict=True)


@functools.cache
def _of_kind(kind: str) -> Object:
    properties = {"apiVersion": {}, "kind": {}, "metadata": {"$ref": "#/$defs/metadata"}, "spec": _CUSTOM[kind]}
    schema = {"type": "object", "additionalProperties": False, "required": ["metadata", "spec"]}
    return {**schema, "properties": properties, "$defs": _CUSTOM["$defs"]}


def merged(*layers: Values) -> Object:
    """Return values merged as helm does."""
    found: Object = {}
    for layer in layers:
        for name, value in layer.items():
            before = found.get(name)
            both = isinstance(value, Mapping) and isinstance(before, Mapping)
            found[name] = merged(before, value) if both else copy.deepcopy(value)
    return found


def expanded(arguments: list[str], environment: Mapping[str, str]) -> list[str]:
    """Return the arguments with variables expanded as by Kubernetes: unknown variables stay unchanged."""
    return [re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), each) for each in arguments]


def selected(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return whether a selector matches these labels."""
    return selector.items() <= labels.items()


def found_by(rendered: Rendered, selector: Mapping[str, str]) -> dict[str, bool]:
    """Return which of the engines' pods a selector matches."""
    return {name: selected(pod["metadata"]["labels"], selector) for name, pod in rendered.pods.items()}


def settings_of(rendered: Rendered) -> ServeConfig:
    """Return the server's configuration from its settings file."""
    return make_config(yaml.safe_load(rendered.settings))
