"""The part of telemetry that touches the driver: a child process that answers one line of JSON per question, and may hang or die alone.

`python -m intertie.agent.nvml` reads a line from stdin for each sample and writes one to stdout. Each metric is caught by itself: a card that
cannot say its temperature still says its memory, and a lost card hides no other (BR-096). The binding is nvidia-ml-py (module `pynvml`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

# Readings outside these are the driver's mistakes, not measurements (BR-105); they are dropped, never clipped.
PERCENT = (0, 100)
CELSIUS = (-40, 150)
MILLIWATT = (0, 5_000_000)


class CardReading(msgspec.Struct, frozen=True, kw_only=True):
    """One card. None: could not be read; `errors` says why, by metric."""

    index: int
    uuid: str | None = None
    name: str | None = None
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    utilisation_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    pids: list[int] | None = None
    lost: bool = False
    errors: dict[str, str] = {}


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """All cards of this machine; `none` says why there are no cards (no library, no driver), which is an answer, not a fault."""

    cards: list[CardReading] = []
    none: str = ""
    error: str = ""


def _text(value: bytes | str) -> str:
    """Bindings differ in what they return (BR-101)."""
    return value.decode("utf-8") if isinstance(value, bytes) else value


def _ranged(value: int, bounds: tuple[int, int]) -> int:
    low, high = bounds
    if not low <= value <= high:
        raise ValueError(f"impossible reading {value}")
    return value


class Driver:
    """NVML as long as it works; begun again when it was lost as a whole."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._up = False

    def read(self) -> Reading:
        nvml = self._nvml
        try:
            if not self._up:
                nvml.nvmlInit()
                self._up = True
            count = nvml.nvmlDeviceGetCount()
        except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded) as err:
            return Reading(none=str(err))
        except nvml.NVMLError as err:
            self._up = False
            return Reading(error=str(err))
        return Reading(cards=[self._card(index) for index in range(count)])

    def _card(self, index: int) -> CardReading:
        nvml = self._nvml
        errors: dict[str, str] = {}
        lost = False

        def ask(metric: str, call: Callable[[], T]) -> T | None:
            nonlocal lost
            try:
                return call()
            except nvml.NVMLError as err:
                # FunctionNotFound: the driver is older than the metric. NotSupported: the card does not know it.
                errors[metric] = type(err).__name__.removeprefix("NVMLError_") or str(err)
                lost = lost or getattr(err, "value", None) == nvml.NVML_ERROR_GPU_IS_LOST
            except (UnicodeDecodeError, ValueError) as err:
                errors[metric] = str(err)
            return None

        handle = ask("handle", lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        if handle is None:
            return CardReading(index=index, lost=lost, errors=errors)
        memory = ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        total = memory.total // 1_048_576 if memory is not None and memory.total else None
        power = ask("power", lambda: _ranged(nvml.nvmlDeviceGetPowerUsage(handle), MILLIWATT))
        return CardReading(
            index=index,
            uuid=ask("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
            name=ask("name", lambda: _text(nvml.nvmlDeviceGetName(handle))),
            memory_total_mib=total,
            memory_used_mib=memory.used // 1_048_576 if memory is not None and total is not None else None,
            utilisation_percent=ask("utilisation", lambda: _ranged(nvml.nvmlDeviceGetUtilizationRates(handle).gpu, PERCENT)),
            temperature_c=ask("temperature", lambda: _ranged(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU), CELSIUS)),
            power_w=power / 1_000 if power is not None else None,
            pids=ask("processes", lambda: [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]),
            lost=lost,
            errors=errors,
        )


def main() -> int:
    """Until stdin ends."""
    try:
        import pynvml
    except ImportError as err:
        absent = Reading(none=f"nvidia-ml-py is not installed: {err}")

        def reading() -> Reading:
            return absent
    else:
        reading = Driver(pynvml).read
    for _ in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(reading()) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
