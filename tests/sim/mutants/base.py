"""What a mutant is: the product with one fault, the row of the link's table that it stands for, and the storms to which it is narrowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec

from intertie.sim.scenario import Fault, LocalWork, Scenario, Work, draw
from intertie.sim.world import run

SCENARIOS = Path(__file__).parents[1] / "scenarios" / "mutants"


@contextmanager
def swapped(owner: object, name: str, value: object) -> Iterator[None]:
    """`owner.name` is `value` inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def together(*parts: AbstractContextManager[None]) -> Iterator[None]:
    """Several faults that are one: a thing is guarded twice, and both guards are gone."""
    if not parts:
        yield
        return
    with parts[0], together(*parts[1:]):
        yield


def as_drawn(scenario: Scenario) -> Scenario:
    return scenario


def all_rerun(scenario: Scenario) -> Scenario:
    """Every work runs for minutes, and asks to be run again elsewhere; nobody cancels."""
    work = [
        msgspec.structs.replace(one, rerun=True, runs_s=550.0 + min(90.0, one.runs_s), wall_s=3_000, cancel_at=None, slots=1)
        for one in scenario.work
    ]
    faults = [msgspec.structs.replace(fault, lasts=fault.lasts * 4 + 300.0) for fault in scenario.faults[:4]]
    return msgspec.structs.replace(
        scenario, work=work[:4], local=[], faults=faults, sites=[max(2, slots) for slots in [*scenario.sites, 2][:3]]
    )


def finished_in_silence(scenario: Scenario) -> Scenario:
    """Work of a minute or two ends within its lease at a site that is cut off for so long that it has run again elsewhere, to its end."""
    rng = Random(f"finished {scenario.seed}")
    work = [
        msgspec.structs.replace(
            one, rerun=True, runs_s=rng.uniform(60, 150), wall_s=3_000, cancel_at=None, slots=1, code=0, outputs=True, tenant="acme"
        )
        for one in scenario.work[:4]
    ]
    faults = [
        msgspec.structs.replace(
            fault, who=f"site-{n}", at=round(rng.choice(work).at + rng.uniform(5, 40), 3), lasts=round(rng.uniform(500, 1_100), 3)
        )
        for n, fault in enumerate(scenario.faults[:2])
    ]
    return msgspec.structs.replace(scenario, work=work, local=[], faults=faults, queues=[], sites=[4, 4])


def alone_with_one_slot_each(scenario: Scenario) -> Scenario:
    """Tenants may have one slot of a site that is alone, and ask for more, again and again."""
    rng = Random(f"alone {scenario.seed}")
    local = [
        LocalWork(at=round(fault.at + rng.uniform(1, 10), 3), site=fault.who, slots=1, runs_s=60.0, tenant=tenant)
        for fault in scenario.faults
        if fault.who.startswith("site-")
        for tenant in ("acme", "acme", "beta")
    ]
    faults = [msgspec.structs.replace(fault, lasts=max(fault.lasts, 40.0)) for fault in scenario.faults]
    sites = [4 for _ in scenario.sites]
    return msgspec.structs.replace(scenario, sites=sites, queues=[], grants={"acme": 1, "beta": 1}, local=local, faults=faults)


def struck_at_submit(scenario: Scenario) -> Scenario:
    """Each fault begins within the second in which a job is offered, claimed and started."""
    rng = Random(f"struck {scenario.seed}")
    faults = [
        msgspec.structs.replace(fault, at=round(rng.choice(scenario.work).at + rng.uniform(0.0, 0.7), 3), lasts=max(fault.lasts, 20.0))
        for fault in scenario.faults
    ]
    return msgspec.structs.replace(scenario, faults=faults)


def over_the_border(scenario: Scenario) -> Scenario:
    """Every work runs over the border of a month, and the faults strike just after it."""
    rng = Random(f"border {scenario.seed}")
    work = [
        msgspec.structs.replace(one, at=rng.uniform(80, 100), runs_s=70.0, wall_s=600, cancel_at=None, slots=1) for one in scenario.work
    ]
    faults = [
        msgspec.structs.replace(fault, at=rng.uniform(130, 145), who="site-0" if fault.who.startswith("site-") else fault.who)
        for fault in scenario.faults
    ]
    return msgspec.structs.replace(scenario, sites=[8], queues=[], work=work, local=[], faults=faults)


def many_end_in_a_cut(scenario: Scenario) -> Scenario:
    """A site is cut off, and all that ran there ends before it is heard again: it has much to tell."""
    rng = Random(f"many {scenario.seed}")
    work = [Work(at=round(rng.uniform(5, 12), 3), tenant="acme", slots=1, runs_s=rng.uniform(10, 40)) for _ in range(8)]
    faults = [Fault(at=rng.uniform(16, 20), what="cut", who="site-0", lasts=rng.uniform(60, 100))]
    return msgspec.structs.replace(scenario, sites=[8], queues=[], work=work, local=[], faults=faults)


def large_scripts(scenario: Scenario) -> Scenario:
    """More is offered to one site at once than one message can carry."""
    work = [Work(at=5.0 + n / 1000, tenant="acme", slots=1, runs_s=1.0, pad_kib=110) for n in range(14)]
    return msgspec.structs.replace(scenario, sites=[14], queues=[], work=work, local=[], faults=[])


def two_schedulers(scenario: Scenario) -> Scenario:
    return msgspec.structs.replace(scenario, schedulers=2)


def all_queues(scenario: Scenario) -> Scenario:
    return msgspec.structs.replace(scenario, queues=list(range(len(scenario.sites))))


@dataclass(frozen=True, slots=True)
class Mutant:
    """`row`: in the words of the link's table, or of the plain dozen. `breaks`: numbers of the invariants one of which must see it, with commas
    between; what else a faulty product runs into (an assertion of its own, a run that never settles) is no sight of it. `only`: kinds of fault to
    which the storms are narrowed in which it is looked for; none: all. What sees it is a scenario of its name."""

    make: Callable[[], AbstractContextManager[None]]
    row: str
    breaks: str
    only: Sequence[str] = ()
    shape: Callable[[Scenario], Scenario] = as_drawn

    @property
    def name(self) -> str:
        return self.make.__name__

    @property
    def file(self) -> Path:
        return SCENARIOS / f"{self.name}.json"

    @property
    def invariants(self) -> frozenset[str]:
        return frozenset(number.strip() for number in self.breaks.split(","))

    def scenario(self, seed: int) -> Scenario:
        return self.shape(draw(seed, self.only))

    def sight(self, scenario: Scenario) -> str:
        """The violation by which this scenario sees it, of an invariant that it breaks; empty if none does."""
        with self.make():
            outcome = run(scenario)
        return next((text for text in outcome.violations if invariant_of(text) in self.invariants), "")


def invariant_of(violation: str) -> str:
    """The number of the invariant that a violation names; empty if it names none."""
    head = violation.partition(":")[0]
    return head.removeprefix("invariant ") if head.startswith("invariant ") else ""
