"""Tests that compile for a GPU that need not be present."""

import pytest

from pallas_kernels.check.plugins import PluginsMissing, default_folder, require_plugins


def _have_plugins() -> bool:
    try:
        require_plugins(default_folder())
    except PluginsMissing:
        return False
    return True


needs_plugins = pytest.mark.skipif(
    not _have_plugins(), reason="needs JAX's CUDA plugin: make check-kernels installs it"
)
