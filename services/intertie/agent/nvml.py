"""The part of telemetry that touches the driver: a child process that answers one line of JSON per question, and may hang or die alone.

`python -m intertie.agent.nvml` reads a line from stdin for each sample and writes one to stdout. Each metric is caught by itself: a card that
cannot say its temperature still says its memory, and a lost card hides no other (BR-096). Slices of a card in MIG mode are devices of their own.
The binding is nvidia-ml-py (module `pynvml`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from intertie.agent.sources.reading import CELSIUS, MILLIWATT, PERCENT, CardReading, Reading, ranged

T = TypeVar("T")

# NvLinks of one card; the newest have eighteen.
MOST_LINKS = 18
# Slices of one card: seven, and what is to come.
MOST_SLICES = 32
# Keys of slices, above all that a driver counts.
SLICE_INDEX = 10_000


def _text(value: bytes | str) -> str:
    """Bindings differ in what they return (BR-101)."""
    return value.decode("utf-8") if isinstance(value, bytes) else value


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
        cards: list[CardReading] = []
        for index in range(count):
            cards += self._card(index)
        return Reading(cards=cards, driver=_Asked(nvml).ask("driver", lambda: _text(nvml.nvmlSystemGetDriverVersion())) or "")

    def _card(self, index: int) -> list[CardReading]:
        """The card, and its slices behind it if it is cut into some."""
        nvml, asked = self._nvml, _Asked(self._nvml)
        handle = asked.ask("handle", lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        if handle is None:
            return [CardReading(index=index, lost=asked.lost, errors=asked.errors)]
        slices = self._slices(index, handle)
        card = self._read(index, handle, asked)
        if slices is None:
            return [card]
        return [msgspec.structs.replace(card, sliced=True), *(msgspec.structs.replace(one, parent=card.uuid) for one in slices)]

    def _slices(self, index: int, handle: Any) -> list[CardReading] | None:
        """None: not in MIG mode, or a driver that knows none."""
        nvml, quiet = self._nvml, _Asked(self._nvml)
        mode = quiet.ask("mig", lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
        if mode != 1:
            return None
        found = []
        for place in range(min(quiet.ask("mig", lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0, MOST_SLICES)):
            one = quiet.ask("mig", lambda place=place: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))  # type: ignore[misc]
            if one is not None:
                found.append(self._read(SLICE_INDEX + index * MOST_SLICES + place, one, _Asked(nvml)))
        return found

    def _read(self, index: int, handle: Any, asked: _Asked) -> CardReading:
        nvml, ask, quiet = self._nvml, asked.ask, _Asked(self._nvml)
        memory = ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        total = memory.total // 1_048_576 if memory is not None and memory.total else None
        power = ask("power", lambda: ranged(nvml.nvmlDeviceGetPowerUsage(handle), MILLIWATT))
        return CardReading(
            index=index,
            uuid=ask("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
            name=ask("name", lambda: _text(nvml.nvmlDeviceGetName(handle))),
            memory_total_mib=total,
            memory_used_mib=memory.used // 1_048_576 if memory is not None and total is not None else None,
            utilisation_percent=ask("utilisation", lambda: ranged(nvml.nvmlDeviceGetUtilizationRates(handle).gpu, PERCENT)),
            temperature_c=ask("temperature", lambda: ranged(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU), CELSIUS)),
            power_w=power / 1_000 if power is not None else None,
            # What older cards do not know, and nobody misses, is no error of the reading.
            energy_mj=quiet.ask("energy", lambda: ranged(nvml.nvmlDeviceGetTotalEnergyConsumption(handle), (0, 2**62))),
            links=self._links(handle),
            pids=ask("processes", lambda: [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]),
            unified=asked.errors.get("memory") == "NotSupported",
            lost=asked.lost,
            errors=asked.errors,
        )

    def _links(self, handle: Any) -> int | None:
        """Active NvLinks; None where the driver cannot say."""
        active: list[int] = []
        for link in range(MOST_LINKS):
            state = _Asked(self._nvml).ask("links", lambda link=link: ranged(self._nvml.nvmlDeviceGetNvLinkState(handle, link), (0, 1)))  # type: ignore[misc]
            if state is None:
                break
            active.append(state)
        return sum(active) if active else None


class _Asked:
    """One card's questions, and why some had no answer."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self.errors: dict[str, str] = {}
        self.lost = False

    def ask(self, metric: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except self._nvml.NVMLError as err:
            # FunctionNotFound: the driver is older than the metric. NotSupported: the card does not know it.
            self.errors[metric] = type(err).__name__.removeprefix("NVMLError_") or str(err)
            self.lost = self.lost or getattr(err, "value", None) == self._nvml.NVML_ERROR_GPU_IS_LOST
        except (UnicodeDecodeError, ValueError) as err:
            self.errors[metric] = str(err)
        return None


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
