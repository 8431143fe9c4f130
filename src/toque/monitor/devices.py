"""GPUs of this machine on `/metrics`, as NVML knows them. The one file that imports pynvml (extra ``[cuda]``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

log = logging.getLogger("toque.devices")


def nvml() -> Any | None:
    """NVIDIA's management library, initialised; None where there is no library, no driver or no GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        log.info("no GPU is measured: %s", error)
        return None
    return pynvml if count else None


class DeviceCollector(Collector):
    """Asks NVML when somebody scrapes. A device that does not tell something, or is gone, has no such sample."""

    def __init__(self, library: ModuleType | Any) -> None:
        """``library``: what `nvml` gave."""
        self._nvml = library

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        labels = ("device", "name")
        busy = GaugeMetricFamily(
            "toque_device_utilisation_ratio", "Time in which a GPU computed.", labels=labels
        )
        memory = GaugeMetricFamily("toque_device_memory_bytes", "A GPU's memory.", labels=(*labels, "kind"))
        heat = GaugeMetricFamily("toque_device_temperature_celsius", "A GPU's temperature.", labels=labels)
        power = GaugeMetricFamily("toque_device_power_watts", "What a GPU draws.", labels=labels)
        energy = CounterMetricFamily("toque_device_energy_joules", "What a GPU has drawn.", labels=labels)
        library = self._nvml
        for index in range(self._asked(library.nvmlDeviceGetCount) or 0):
            device = self._asked(library.nvmlDeviceGetHandleByIndex, index)
            if device is None:
                continue
            named = (str(index), _text(self._asked(library.nvmlDeviceGetName, device) or ""))
            if (rates := self._asked(library.nvmlDeviceGetUtilizationRates, device)) is not None:
                busy.add_metric(named, rates.gpu / 100)
            if (held := self._asked(library.nvmlDeviceGetMemoryInfo, device)) is not None:
                memory.add_metric((*named, "used"), held.used)
                memory.add_metric((*named, "total"), held.total)
            if (degrees := self._asked(library.nvmlDeviceGetTemperature, device, 0)) is not None:
                heat.add_metric(named, degrees)
            if (milliwatts := self._asked(library.nvmlDeviceGetPowerUsage, device)) is not None:
                power.add_metric(named, milliwatts / 1e3)
            if (millijoules := self._asked(library.nvmlDeviceGetTotalEnergyConsumption, device)) is not None:
                energy.add_metric(named, millijoules / 1e3)
        yield from (busy, memory, heat, power, energy)

    def _asked(self, question: Callable[..., Any], *about: object) -> Any | None:
        try:
            return question(*about)
        except self._nvml.NVMLError:
            return None


def _text(name: str | bytes) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else name
