"""benchmarks/kv_dtypes.py: the command on a tiny model."""

import pytest

from benchmarks import kv_dtypes
from tests.fakes import random_model


@pytest.mark.slow
def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kv_dtypes, "random_llama", random_model)
    monkeypatch.setattr(kv_dtypes, "KINDS", ("auto", "fp8"))
    assert kv_dtypes.main(["--rows", "1", "--contexts", "256", "--rounds", "1", "--dtype", "float32"]) == 0
    decode, prefill, others = capsys.readouterr().out.splitlines()
    for line, name in ((decode, "decode"), (prefill, "prefill 256")):
        assert line.startswith(f"{name}, 1 rows, 256 keys: auto ")
        assert "(1.00)  fp8 " in line
    assert others.startswith("other programs used ")
