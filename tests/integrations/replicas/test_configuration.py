"""Test of jaxinfer's settings in configs/ray/serve.yaml, the configuration of Ray Serve."""

import importlib
import pathlib

import yaml

from jaxinfer.integrations.replicas.settings import deployment_options, parse
from jaxinfer.serve.settings import is_loopback


def test_the_configuration_is_one_that_can_be_served(repo: pathlib.Path) -> None:
    config = yaml.safe_load((repo / "configs/ray/serve.yaml").read_text())
    (application,) = config["applications"]
    module, _, name = application["import_path"].partition(":")
    assert f"\ndef {name}(" in (repo / f"{module.replace('.', '/')}.py").read_text()
    options = deployment_options(*parse(application["args"]))
    assert options["autoscaling_config"]["max_replicas"] == application["args"]["max_replicas"]
    assert is_loopback(config["http_options"]["host"])
    for path in config["grpc_options"]["grpc_servicer_functions"]:
        module, _, name = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))
