"""Present holders of this site's devices, in `reservations.json` of the data folder: read at the start, replaced by the owner, over by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from intertie.agent.config import write_whole
from intertie.agent.core import reserved
from intertie.agent.core.devices import Pool
from intertie.agent.core.offers import Books
from intertie.agent.core.reserved import Note
from intertie.clock import Clock
from intertie.contracts.base import decode
from intertie.contracts.machines import ReservationFile, Reservations
from intertie.contracts.site import DeviceState
from intertie.ids import DeviceId


class Reserved:
    """Of one site."""

    def __init__(self, root: Path, clock: Clock) -> None:
        """`Refused` if the file cannot be read: devices that are kept for somebody must not be lent by a slip."""
        self._path, self._clock = root / "reservations.json", clock
        self.told = (
            decode(self._path.read_bytes(), Reservations, what=str(self._path)) if self._path.exists() else Reservations(reservations=[])
        )

    async def replace(self, file: ReservationFile, pools: Sequence[Pool]) -> None:
        """All of them, by an owner's file; `Refused('machines.reservation')` says what in it is wrong, and nothing is changed."""
        found = reserved.read_reservations(file.text, kind=file.kind, zone=self._clock.now().astimezone())
        asked = Reservations(reservations=found)
        devices = [device for pool in pools for device in pool.devices]
        nodes = sorted({device.node for device in devices})
        told = reserved.checked(asked, nodes, (device.id for device in devices))
        await asyncio.to_thread(write_whole, self._path, told)
        self.told = told

    def in_force(self) -> Reservations:
        now = self._clock.now()
        return Reservations(reservations=[one for one in self.told.reservations if one.until > now])

    def apply(
        self, books: Books, pools: Sequence[Pool], seen: Mapping[DeviceId, DeviceState], notes: Mapping[DeviceId, str]
    ) -> dict[DeviceId, DeviceState]:
        """What may be used by anybody; the books learn who holds what, and why else (`notes`) a device is not to be had."""
        devices = (device for pool in pools for device in pool.devices)
        books.reserved = reserved.in_force(self.told.reservations, devices, seen, self._clock.now())
        books.notes = {**reserved.notes(books.reserved, named=False), **{name: Note(text) for name, text in notes.items()}}
        return reserved.hidden(seen, books.reserved)
