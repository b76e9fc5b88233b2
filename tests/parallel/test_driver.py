"""Tests of the driver's figures, with a fake pynvml: where it lacks a figure, or is absent, there is none."""

import types

import pytest

from jaxinfer.parallel import driver
from jaxinfer.parallel.driver import DriverFigures


class NVMLError(Exception):
    pass


class FakeNvml:
    """NVML with one GPU; ``missing``: names of functions that it does not support."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 7

    def __init__(self, *missing):
        self.missing, self.addresses = missing, []

    def __getattribute__(self, name):
        if name.startswith("nvml") and name in object.__getattribute__(self, "missing"):
            return self.refuse
        return object.__getattribute__(self, name)

    def refuse(self, *_):
        raise NVMLError

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetHandleByPciBusId(self, address):  # noqa: N802
        self.addresses.append(address)
        return "handle"

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        assert handle == "handle"
        return types.SimpleNamespace(used=11, total=19)

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        return types.SimpleNamespace(gpu=85, memory=20)

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        return 312_500

    def nvmlDeviceGetTemperature(self, handle, sensor):  # noqa: N802
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61


def gpu(ordinal=1, platform="gpu"):
    return types.SimpleNamespace(platform=platform, local_hardware_id=ordinal)


@pytest.fixture
def use(monkeypatch):
    """Return a function that installs a fake driver."""

    def install(nvml, address=b"00000000:17:00.0"):
        monkeypatch.setattr(driver, "pynvml", nvml)
        monkeypatch.setattr(driver, "_bus_id", lambda ordinal: address)
        driver._handle.cache_clear()

    yield install
    driver._handle.cache_clear()


def test_figures_of_a_gpu_by_its_pci_address(use):
    nvml = FakeNvml()
    use(nvml)
    whole = DriverFigures(utilization=0.85, memory_used=11, memory_total=19, watts=312.5, celsius=61.0)
    assert [driver.driver_figures(gpu()) for _ in range(2)] == [whole, whole]
    assert nvml.addresses == [b"00000000:17:00.0"]


def test_a_figure_that_the_gpu_lacks_is_absent(use):
    use(FakeNvml("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"))
    found = driver.driver_figures(gpu())
    assert found == DriverFigures(memory_used=11, memory_total=19, celsius=61.0)


@pytest.mark.parametrize(
    ("nvml", "address", "platform"),
    [
        (None, b"x", "gpu"),  # the package is not installed
        (FakeNvml(), None, "gpu"),  # no CUDA
        (FakeNvml("nvmlInit"), b"x", "gpu"),  # no driver
        (FakeNvml("nvmlDeviceGetHandleByPciBusId"), b"x", "gpu"),
        (FakeNvml(), b"x", "cpu"),
    ],
)
def test_without_a_driver_there_are_no_figures(use, nvml, address, platform):
    use(nvml, address)
    assert driver.driver_figures(gpu(platform=platform)) is None


class FakeCuda:
    def __init__(self, code=0):
        self.code = code

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        device._obj.value = ordinal + 40
        return self.code

    def cuDeviceGetPCIBusId(self, text, size, device):  # noqa: N802
        text.value = f"0000:{device.value}:00.0".encode()
        return 0


def test_the_address_is_cudas():
    assert driver._bus_id(2, lambda name: FakeCuda()) == b"0000:42:00.0"
    assert driver._bus_id(2, lambda name: FakeCuda(code=100)) is None
    assert driver._bus_id(2, lambda name: object()) is None

    def absent(name):
        raise OSError(name)

    assert driver._bus_id(0, absent) is None
