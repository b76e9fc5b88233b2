"""Sections of a checkout and of an installed package."""

import importlib

import pytest

from jaxinfer.gpu_check import __main__ as gpu_check
from jaxinfer.gpu_check.sections import BENCHMARKS, CHECKS, ROOT, all_sections


def test_a_checkout_adds_the_benchmarks_to_the_checks():
    found = all_sections()
    assert [section for section in found if section in CHECKS] == list(CHECKS)
    others = {section.module.rpartition(".")[0] for section in found if section not in CHECKS}
    assert others == {"benchmarks.gpu"}
    assert len({section.name for section in found}) == len(found)


def test_every_section_has_a_function():
    for section in all_sections():
        module, _, function = section.module.partition(":")
        assert callable(getattr(importlib.import_module(module), function or "run")), section.name


def test_an_installed_package_has_the_checks_alone(tmp_path):
    assert all_sections(tmp_path) == CHECKS
    assert all(section.module.startswith("jaxinfer.") for section in CHECKS)


def test_the_modules_of_benchmarks_are_found_from_any_folder(monkeypatch):
    monkeypatch.setattr("sys.path", [])
    assert all_sections() == gpu_check.SECTIONS
    assert gpu_check.sys.path == [str(ROOT)]


@pytest.mark.parametrize("checkout", [True, False])
def test_an_unknown_section_is_named_and_where_the_others_are(monkeypatch, tmp_path, capsys, checkout):
    if not checkout:
        monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
        monkeypatch.setattr(gpu_check, "NAMES", tuple(section.name for section in CHECKS))
    with pytest.raises(SystemExit) as stop:
        gpu_check.parse(["--only", "parity,speed" if checkout else "parity,gemm"])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert ("speed" if checkout else "gemm") in said
    assert (BENCHMARKS in said) == (not checkout)
