"""Public names of jaxinfer as a user sees them: endpoints, gRPC methods, their fields, flags, metrics, exports.

Each name is one line. ``python -m tests.interface FILE`` records those of the checkout; `tests.test_interface` requires
every recorded name of an earlier release.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

_SECONDS = 180
_FOREIGN = ("grpc.", "google.")


def names(http: str, grpc_address: str) -> set[str]:
    """Return all names of a checkout and of its running server, with HTTP at ``http`` and gRPC at ``grpc_address``."""
    return {*flags(), *exports(), *endpoints(http), *metrics(http), *methods(grpc_address)}


def flags() -> Iterator[str]:
    """Yield ``flag serve --port`` for each flag of each subcommand, from its help."""
    for command in re.findall(r"^  ([a-z-]+) {2,}", _output("--help"), re.MULTILINE):
        for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", _output(command, "--help-all")):
            yield f"flag {command} {flag}"


def _output(*words: str) -> str:
    code = "import sys; from jaxinfer.cli.app import main; sys.exit(main())"
    environment = {**os.environ, "COLUMNS": "200"}
    run = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment, check=True
    )
    return run.stdout


def exports() -> Iterator[str]:
    """Yield ``export NAME`` for each public name of the package and of its client."""
    code = "import jaxinfer, jaxinfer.client as c; print(*jaxinfer.__all__, *('client.' + name for name in c.__all__))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return (f"export {name}" for name in run.stdout.split())


def endpoints(url: str) -> Iterator[str]:
    """Yield ``http POST /path`` and ``http POST /path request field.field`` from the OpenAPI document."""
    document = json.loads(_get(f"{url}/openapi.json"))
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            place = f"http {method.upper()} {path}"
            yield place
            yield from (f"{place} parameter {each['name']}" for each in operation.get("parameters", ()))
            bodies = {"request": operation.get("requestBody", {}), **operation["responses"]}
            for name, body in bodies.items():
                for content in body.get("content", {}).values():
                    yield from (f"{place} {name} {field}" for field in _fields(document, content.get("schema", {}), ()))


def _fields(document: Mapping[str, Any], schema: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[str]:
    """Yield the dotted names of a schema's fields; a schema within itself is left out."""
    if reference := schema.get("$ref"):
        if reference in above:
            return
        above, schema = (*above, reference), document["components"]["schemas"][reference.rsplit("/", 1)[1]]
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _fields(document, part, above)
    if isinstance(schema.get("items"), Mapping):
        yield from _fields(document, schema["items"], above)
    for name, field in schema.get("properties", {}).items():
        yield name
        yield from (f"{name}.{inner}" for inner in _fields(document, field, above))


def metrics(url: str) -> Iterator[str]:
    """Yield ``metric NAME TYPE`` for each metric of a server that has served a request over HTTP."""
    body = json.dumps({"model": "demo", "prompt": "ROMEO:", "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=_SECONDS).read()
    return (f"metric {found}" for found in re.findall(r"^# TYPE (\S+ \w+)$", _get(f"{url}/metrics"), re.MULTILINE))


def methods(address: str) -> Iterator[str]:
    """Yield ``grpc /service/Method`` and ``grpc message field number type`` from the server's reflection."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool, seen = DescriptorPool(database), set[str]()
        for name in database.get_services():
            if not name.startswith(_FOREIGN):
                for method in pool.FindServiceByName(name).methods:
                    yield f"grpc /{name}/{method.name}"
                    yield from _messages(method.input_type, seen)
                    yield from _messages(method.output_type, seen)


def _messages(message: Descriptor, seen: set[str]) -> Iterator[str]:
    if message.full_name in seen or message.full_name.startswith(_FOREIGN):
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield f"grpc {message.full_name} {field.name} {field.number} {field.type}"
        if field.message_type:
            yield from _messages(field.message_type, seen)
        for value in field.enum_type.values if field.enum_type else ():
            yield f"grpc {field.enum_type.full_name} {value.name} {value.number}"


def _get(url: str) -> str:
    text: str = urllib.request.urlopen(url, timeout=_SECONDS).read().decode()
    return text


@contextlib.contextmanager
def served() -> Iterator[tuple[str, str]]:
    """Serve the demo model with the checkout's own command; yield its HTTP URL and its gRPC address."""
    ports = [str(_free_port()) for _ in range(2)]
    code = "import sys; from jaxinfer.cli.app import main; sys.exit(main())"
    words = ["serve", "demo", "--http-port", ports[0], "--grpc-port", ports[1], "--enable-lora"]
    with subprocess.Popen([sys.executable, "-c", code, *words]) as server:
        url, until = f"http://127.0.0.1:{ports[0]}", time.monotonic() + _SECONDS
        try:
            while True:
                with contextlib.suppress(OSError):
                    _get(f"{url}/ready")
                    break
                assert server.poll() is None, "the server has ended"
                assert time.monotonic() < until, "the server does not start"
                time.sleep(0.2)
            yield url, f"127.0.0.1:{ports[1]}"
        finally:
            server.terminate()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


if __name__ == "__main__":
    with served() as addresses, open(sys.argv[1], "w") as record:
        record.write("\n".join(sorted(names(*addresses))) + "\n")
