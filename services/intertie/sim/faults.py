"""What each kind of fault does to a world when it begins and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from intertie.sim import foreign, restores
from intertie.sim.bus import Link
from intertie.sim.scenario import Fault

if TYPE_CHECKING:
    from intertie.sim.native import NativeScheduler
    from intertie.sim.world import World

# A doom strikes one of so many commits from its beginning on: most of them are beats, the interesting ones come in short rows.
DOOM_COMMITS = 8

Do = Callable[["World", Fault], None]


def _cut(world: World, fault: Fault) -> None:
    world.link(fault.who).cut(1)
    _only_scheduler(world, fault, 1)


def _heal(world: World, fault: Fault) -> None:
    world.link(fault.who).cut(-1)
    _only_scheduler(world, fault, -1)


def _only_scheduler(world: World, fault: Fault, by: int) -> None:
    """What strikes the only copy leaves nobody who hears."""
    if fault.who.startswith("scheduler") and world.scenario.schedulers == 1:
        world.cannot_hear(by)


def _deaf(direction: str) -> tuple[Do, Do]:
    def begin(world: World, fault: Fault) -> None:
        world.link(fault.who).deaf.append(direction)
        if direction == "in":
            _only_scheduler(world, fault, 1)

    def end(world: World, fault: Fault) -> None:
        world.link(fault.who).deaf.remove(direction)
        if direction == "in":
            _only_scheduler(world, fault, -1)

    return begin, end


def _worse(change: Callable[[Link, float], None]) -> tuple[Do, Do]:
    """A link that gets worse by `size`, and is as good as new afterwards."""

    def begin(world: World, fault: Fault) -> None:
        change(world.link(fault.who), fault.size)

    def end(world: World, fault: Fault) -> None:
        change(world.link(fault.who), 0.0)

    return begin, end


def _lossy(link: Link, size: float) -> None:
    link.lost = size * 0.6


def _slow(link: Link, size: float) -> None:
    link.late_s = size * 3.0


def _doubled(link: Link, size: float) -> None:
    link.doubled = size


def _reordered(link: Link, size: float) -> None:
    link.reordered = size > 0
    link.late_s = size


def _hold(world: World, fault: Fault) -> None:
    world.link(fault.who).held_until = world.loop.time() + fault.lasts


def _crash(world: World, fault: Fault) -> None:
    world.kill(fault.who, back_in=fault.lasts)


def _doom(when: str) -> tuple[Do, Do]:
    def begin(world: World, fault: Fault) -> None:
        world.doom(fault.who, when, at=1 + int(fault.size * DOOM_COMMITS), back_in=fault.lasts)

    def end(world: World, fault: Fault) -> None:
        world.doom(fault.who, "")

    return begin, end


def _pause(world: World, fault: Fault) -> None:
    world.pause(fault.who)


def _resume(world: World, fault: Fault) -> None:
    world.resume(fault.who)


def _power(world: World, fault: Fault) -> None:
    world.lose_power(fault.who, back_in=fault.lasts)


def _wrong_rtc(world: World, fault: Fault) -> None:
    """It comes back with another time of day; BOOTTIME begins anew as after any boot. More than a day is what a person must look at."""
    world.lose_power(fault.who, back_in=fault.lasts, rtc_s=(fault.size - 0.5) * 40 * 3_600)


def _suspend(by: int) -> Do:
    def do(world: World, fault: Fault) -> None:
        world.hosts[fault.who].clock.suspend(by)
        if by > 0:
            world.freeze(fault.who, clocks_too=False)
        else:
            world.thaw(fault.who)

    return do


def _vm_pause(by: int) -> Do:
    def do(world: World, fault: Fault) -> None:
        world.hosts[fault.who].clock.stop(by)
        if by > 0:
            world.freeze(fault.who, clocks_too=True)
        else:
            world.thaw(fault.who)

    return do


def _supervisor(world: World, fault: Fault) -> None:
    if found := world.one_live(fault.who, fault.size):
        machine, process = found
        machine.lose_supervisor(process)


def _job(world: World, fault: Fault) -> None:
    if found := world.one_live(fault.who, fault.size):
        machine, process = found
        machine.kill_job(process)


def _full(full: bool) -> Do:
    def do(world: World, fault: Fault) -> None:
        world.hosts[fault.who].disk_full = full

    return do


def _step(world: World, fault: Fault) -> None:
    world.clock_of(fault.who).step(fault.size)


def _database(away: bool) -> Do:
    def do(world: World, fault: Fault) -> None:
        world.disk_of(fault.who).refuse(away)

    return do


def _gateway(away: bool) -> Do:
    def do(world: World, fault: Fault) -> None:
        world.gateway_away = away

    return do


def _bus(by: int) -> Do:
    def do(world: World, fault: Fault) -> None:
        for link in world.links.values():
            link.cut(by)
        world.cannot_hear(by)

    return do


def _wipe(world: World, fault: Fault) -> None:
    world.broker.wipe()


def _purged(world: World, fault: Fault) -> None:
    """Somebody empties the stream, or its limits do: its birthday and its head stay as they were."""
    world.broker.streams.purge()


def _hollow(by: int) -> Do:
    """The server's folder is removed while it runs; at the end it is started again, and everything is gone."""

    def do(world: World, fault: Fault) -> None:
        world.broker.streams.hollow += by
        if by < 0:
            world.broker.wipe()

    return do


def _office(world: World, fault: Fault) -> None:
    world.disk_of(fault.who).lose_offices()


def _poison(world: World, fault: Fault) -> None:
    """An agent some versions newer says what no hub here can read."""
    world.say(fault.who, foreign.poison)


def _forged(world: World, fault: Fault) -> None:
    """A site signs usage of an attempt that nobody offered it."""
    world.say(fault.who, foreign.forged)


def _hub_gone(world: World, fault: Fault) -> None:
    for name in world.services:
        world.kill(name, back_in=fault.lasts)


def _queue(do: Callable[[NativeScheduler, Fault], None]) -> Do:
    """To a site's own scheduler, if it has one."""

    def strike(world: World, fault: Fault) -> None:
        if (queue := world.hosts[fault.who].native) is not None:
            do(queue, fault)

    return strike


def _held(by: int) -> Do:
    def do(queue: NativeScheduler, fault: Fault) -> None:
        queue.held += by

    return _queue(do)


def _unheard(by: int) -> Do:
    def do(queue: NativeScheduler, fault: Fault) -> None:
        queue.deaf += by

    return _queue(do)


def _doubled_start(queue: NativeScheduler, fault: Fault) -> None:
    live = [one for one in queue.machine.live() if queue.find(one.run.attempt.id)]
    if live:
        queue.start_twice(live[int(fault.size * len(live))].run.attempt.id)


def _remembers(queue: NativeScheduler, fault: Fault) -> None:
    """Half of the controllers that lost their state get it back."""
    if fault.size < 0.5:
        queue.remember()


def _nothing(world: World, fault: Fault) -> None:
    """It ends by itself, or what began it has planned its end."""


FAULTS: Mapping[str, tuple[Do, Do]] = {
    "cut": (_cut, _heal),
    "deaf_in": _deaf("in"),
    "deaf_out": _deaf("out"),
    "lossy": _worse(_lossy),
    "slow": _worse(_slow),
    "doubled": _worse(_doubled),
    "reordered": _worse(_reordered),
    "held_in": (_hold, lambda world, fault: None),
    "crash": (_crash, _nothing),
    "doom_before": _doom("before"),
    "doom_after": _doom("after"),
    "pause": (_pause, _resume),
    "suspend": (_suspend(1), _suspend(-1)),
    "vm_pause": (_vm_pause(1), _vm_pause(-1)),
    "power": (_power, _nothing),
    "wrong_rtc": (_wrong_rtc, _nothing),
    "job_killed": (_job, _nothing),
    "supervisor": (_supervisor, _nothing),
    "disk_full": (_full(True), _full(False)),
    "step": (_step, _nothing),
    "database": (_database(True), _database(False)),
    "gateway": (_gateway(True), _gateway(False)),
    "bus_down": (_bus(1), _bus(-1)),
    "wipe": (_wipe, _nothing),
    "purged": (_purged, _nothing),
    "hollow": (_hollow(1), _hollow(-1)),
    "office": (_office, _nothing),
    "hub_gone": (_hub_gone, _nothing),
    "poison": (_poison, _nothing),
    "forged": (_forged, _nothing),
    "queue_held": (_held(1), _held(-1)),
    "queue_deaf": (_unheard(1), _unheard(-1)),
    "queue_forgets": (_queue(lambda queue, _: queue.forget()), _queue(_remembers)),
    "queue_node": (_queue(lambda queue, fault: queue.fail_node(fault.size)), _nothing),
    "queue_doubles": (_queue(_doubled_start), _nothing),
    "restore_store": (restores.restore_store, _nothing),
    "failover": (restores.failover, _nothing),
    "restore_disk": (restores.restore_disk, _nothing),
    "gone": (restores.gone, _nothing),
    "clone": (restores.clone, restores.end_clone),
}


def strikes(faults: Sequence[Fault]) -> str:
    """One line for each, for a story."""
    return "\n".join(f"{f.at:9.3f}  {f.what} of {f.who}, {f.lasts:g} s, size {f.size:g}" for f in faults)
