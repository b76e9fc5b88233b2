"""Tests of the settings that the supervisor passes to a core."""

import json

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.serve.core.settings import CoreSettings
from jaxinfer.serve.settings import ServeConfig, ServeConfigError


def test_settings_reach_the_core():
    engine = EngineConfig(max_num_seqs=3, prefill_sizes=(16, 64), seed=2**63 + 1)
    config = ServeConfig(model="demo", dtype="float32", profile_dir="/p", engine=engine)
    told = CoreSettings.of(config, "/s")
    assert CoreSettings.from_json(told.to_json()) == told
    assert (told.socket, told.engine, told.profile_dir) == ("/s", engine, "/p")


def test_a_server_that_reads_weights_announces_updates(tmp_path):
    told = CoreSettings.of(ServeConfig(model="demo", weights_root=str(tmp_path)), "/s")
    assert (told.weights_root, told.engine.enable_weight_updates) == (str(tmp_path), True)
    assert not CoreSettings.of(ServeConfig(model="demo"), "/s").engine.enable_weight_updates


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no JSON"),
        ("[]", "JSON object"),
        ('{"model": "m", "socket": "s", "modle": 1}', "modle"),
        ('{"model": "m", "socket": "s", "engine": {"pages": 1}}', "pages"),
        ('{"model": "m", "socket": "s", "engine": 3}', "JSON object"),
        ('{"model": "m"}', "socket"),
    ],
)
def test_settings_that_are_not_known_are_refused(text, reason):
    with pytest.raises(ServeConfigError, match=reason):
        CoreSettings.from_json(text)


def test_settings_are_one_line():
    told = CoreSettings(socket="/s", model="a\nb")
    assert "\n" not in told.to_json()
    assert json.loads(told.to_json())["model"] == "a\nb"
