"""GPUs on /metrics: what NVML tells, what it does not, and nothing where there is none."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from toque.monitor.devices import DeviceCollector, nvml


class NVMLError(Exception):
    pass


class Library:
    """NVML with two devices; the second is old and tells little."""

    NVMLError = NVMLError

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, device: int) -> str | bytes:
        return b"Old Card" if device else "NVIDIA H200"

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:
        return self._new(device, SimpleNamespace(gpu=37, memory=12))

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        return SimpleNamespace(total=1000 + device, used=250, free=750)

    def nvmlDeviceGetTemperature(self, device: int, sensor: int) -> int:
        assert sensor == 0
        return self._new(device, 61)

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        return self._new(device, 412_500)

    def nvmlDeviceGetTotalEnergyConsumption(self, device: int) -> int:
        return self._new(device, 9_000)

    def _new(self, device: int, value: Any) -> Any:
        if device:
            raise NVMLError("Not Supported")
        return value


def exposition(library: Any) -> str:
    registry = CollectorRegistry()
    registry.register(DeviceCollector(library))
    return generate_latest(registry).decode()


def test_each_device_is_measured_as_far_as_it_tells() -> None:
    text = exposition(Library())
    for line in (
        'toque_device_utilisation_ratio{device="0",name="NVIDIA H200"} 0.37',
        'toque_device_memory_bytes{device="0",kind="used",name="NVIDIA H200"} 250.0',
        'toque_device_memory_bytes{device="1",kind="total",name="Old Card"} 1001.0',
        'toque_device_temperature_celsius{device="0",name="NVIDIA H200"} 61.0',
        'toque_device_power_watts{device="0",name="NVIDIA H200"} 412.5',
        'toque_device_energy_joules_total{device="0",name="NVIDIA H200"} 9.0',
    ):
        assert line in text
    assert 'toque_device_power_watts{device="1"' not in text


def test_a_driver_that_is_gone_is_no_failed_scrape() -> None:
    class Gone(Library):
        def nvmlDeviceGetCount(self) -> int:
            raise NVMLError("Driver Not Loaded")

    assert "toque_device_memory_bytes{" not in exposition(Gone())


@pytest.mark.parametrize("count", [0, None])
def test_a_machine_without_gpus_is_not_measured(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    def counted() -> int:
        if count is None:
            raise NVMLError("unknown")
        return count

    library = SimpleNamespace(NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetCount=counted)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert nvml() is None


def test_without_the_library_there_is_none() -> None:
    code = "import sys; sys.modules['pynvml'] = None; from toque.monitor.devices import nvml; assert nvml() is None"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
