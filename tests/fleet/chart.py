"""The Helm chart, rendered as helm does, and what Kubernetes and the definitions of others say of the result."""

from __future__ import annotations

import copy
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate import utils

REPO = pathlib.Path(__file__).resolve().parents[2]
CHART = REPO / "configs/kubernetes/jaxinfer"
VERSIONS = ("1.30", kubernetes_validate.latest_version().removesuffix("-strict"))
RELEASE, NAMESPACE = "prod", "llm"

Object = dict[str, Any]
Values = Mapping[str, Any]

_CUSTOM = yaml.safe_load((pathlib.Path(__file__).parent / "custom_resources.yaml").read_text(encoding="utf-8"))
utils.schema_contents = functools.cache(utils.schema_contents)  # it reads megabytes for each object


class Rendered:
    """The objects that a release with some values has."""

    def __init__(self, values: Values) -> None:
        """Raises helm_python.HelmError: helm refuses the values."""
        with helm_python.Chart.load(CHART) as chart:
            files = chart.render(copy.deepcopy(dict(values)), name=RELEASE, namespace=NAMESPACE)
        self.notes = files.pop("jaxinfer/templates/NOTES.txt")
        texts = [text for name, text in files.items() if not name.endswith(".tpl")]
        self.objects: list[Object] = [each for text in texts for each in yaml.safe_load_all(text) if each]

    def of_kind(self, kind: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> Object:
        (found,) = (each for each in self.of_kind(kind) if name in (None, each["metadata"]["name"]))
        return found

    @property
    def pods(self) -> dict[str, Object]:
        """The templates of pods: of a Deployment "server", of a group "leader" and "follower"."""
        if deployments := self.of_kind("Deployment"):
            return {"server": deployments[0]["spec"]["template"]}
        group = self.one("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
        return {"leader": group["leaderTemplate"], "follower": group["workerTemplate"]}

    @property
    def settings(self) -> str:
        """The file of the server's settings."""
        text: str = self.one("ConfigMap")["data"]["production.yaml"]
        return text


def container(pod: Object) -> Object:
    """Its only one."""
    (found,) = pod["spec"]["containers"]
    return found


def check(rendered: Rendered) -> None:
    """Raises jsonschema.ValidationError: an object is none of its kind, in one of `VERSIONS`."""
    for each in (*rendered.objects, *map(as_pod, rendered.pods.values())):
        _check_text(json.dumps(each))


def as_pod(template: Object) -> Object:
    """The pod that is made of a template."""
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
    """Values laid over one another, as helm does it."""
    found: Object = {}
    for layer in layers:
        for name, value in layer.items():
            before = found.get(name)
            both = isinstance(value, Mapping) and isinstance(before, Mapping)
            found[name] = merged(before, value) if both else copy.deepcopy(value)
    return found


def selected(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a selector finds what has these labels."""
    return selector.items() <= labels.items()


def leaves(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all names in nested mappings."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield (*path, str(name))
            yield from leaves(part, (*path, str(name)))
