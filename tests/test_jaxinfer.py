"""The public names of the package."""

import jaxinfer


def test_the_package_shows_its_names_alone() -> None:
    shown = [name for name in dir(jaxinfer) if not name.startswith("__")]
    assert shown == sorted(jaxinfer.__all__)
    assert all(getattr(jaxinfer, name) is not None for name in shown)
