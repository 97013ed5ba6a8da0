"""What happens in one run: who is there, what is asked of them, and what goes wrong when. Drawn whole from a seed before the run begins, so that
a failure can be written down as a file, made shorter, and run again."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec

# Seconds in which work comes and things go wrong; then faults stop, and everything must settle.
STORM_S = 200.0
# Faults longer than this are a long absence: rare, because the virtual beats of a long silence are most of what a run costs.
LONG_S = 3_600.0
LONG = 0.06
# Longer than a run is given to settle.
ENDLESS_S = 20_000.0
MOST_FAULTS = 9
# Share of runs in which two copies of the scheduler live.
TWO_SCHEDULERS = 0.35
# Share of work that asks to be run again when its site is silent.
RERUN = 0.25
# Share of runs in which a disk is put back, copied or deleted, and the kinds of that.
RESTORED = 0.08
RESTORES = ("restore_store", "failover", "restore_disk", "clone", "gone")
LOST_AFTER_S = 600.0
# Share of runs in which tenants have islanded allowances, and the faults in which a site is alone.
GRANTS = 0.35
ALONE = ("cut", "bus_down", "deaf_in", "deaf_out")
# Share of sites whose work goes through a scheduler of their own.
QUEUES = 0.2


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's job."""

    at: float
    tenant: str
    slots: int
    runs_s: float
    code: int = 0
    outputs: bool = False
    wall_s: int = 600
    cancel_at: float | None = None
    rerun: bool = False
    """It asks to be run again elsewhere when its site is silent beyond its lease."""
    pad_kib: int = 0
    """Of comment in its script."""


class LocalWork(msgspec.Struct, frozen=True, kw_only=True):
    """The owner's own job on a site's machine; or, with `tenant`, that one's, given to a site that is alone."""

    at: float
    site: str
    slots: int
    runs_s: float
    tenant: str = ""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """`what` is a key of `intertie.sim.faults.FAULTS`; `who` a party or host."""

    at: float
    what: str
    who: str
    lasts: float = 0.0
    size: float = 0.0
    """How bad; of what puts a disk back: from how many seconds before."""
    same_boot: bool = False
    """Of a clone: a second container under the same kernel, not a second machine."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """`sites`: slots of each. `queues`: numbers of those that have a scheduler of their own. `schedulers`: copies of our service of that name."""

    seed: int
    sites: list[int]
    queues: list[int] = []
    schedulers: int = 1
    quotas: dict[str, int] = {}
    """Tenant → slots at once that it may have; set at `quotas_at`, whatever it uses by then."""
    quotas_at: float = 60.0
    grants: dict[str, int] = {}
    """Tenant → slots that it may use at each site while that is alone."""
    lease_s: int = 400
    """Of work that asks to be run again; real ones are long, so that no restart of a hub stops work. Longer than an idle lane keeps quiet, and than
    a site must be quiet to be called silent: both are beats, and scaled."""
    lost_after_s: float = 7 * 86_400.0
    """After this much more silence than a run could last, an attempt is closed as lost."""
    work: list[Work] = []
    local: list[LocalWork] = []
    faults: list[Fault] = []
    ways: list[str] = []
    """What must be gone through: a written scenario shows its named way out. `intertie.sim.ways` says what there is to ask for."""

    @property
    def calm_at(self) -> float:
        """From here on nothing goes wrong any more."""
        return max([STORM_S / 2, *(fault.at + fault.lasts for fault in self.faults), *(work.at for work in self.work)])


def draw(seed: int, only: Sequence[str] = ()) -> Scenario:
    """The scenario of a seed. `only`: faults of these kinds and no others, and the most that there may be."""
    rng = Random(f"scenario {seed}")
    sites = [rng.randint(1, 4) for _ in range(rng.choice((1, 2, 2, 3)))]
    names = [f"site-{n}" for n in range(len(sites))]
    queues = [n for n in range(len(sites)) if rng.random() < QUEUES or any(kind.startswith("queue_") for kind in only)]
    schedulers = 2 if rng.random() < TWO_SCHEDULERS else 1
    work = [_work(rng, max(sites)) for _ in range(rng.randint(3, 8))]
    local = [
        LocalWork(
            at=rng.uniform(5, STORM_S * 0.8),
            site=(site := rng.choice(names)),
            slots=rng.randint(1, sites[names.index(site)]),
            runs_s=rng.uniform(1, 90),
        )
        for _ in range(rng.choice((0, 1, 2, 3)))
    ]
    hub = ["metering", *(f"scheduler-{n}" for n in range(schedulers))]
    asked, only = only, [kind for kind in only if kind not in RESTORES]
    many = MOST_FAULTS if only else 0 if asked else rng.randint(0, MOST_FAULTS)
    queued = [names[n] for n in queues]
    faults = sorted((_fault(rng, names, queued, hub, only) for _ in range(many)), key=lambda fault: fault.at)
    drawn = Scenario(seed=seed, sites=sites, queues=queues, schedulers=schedulers, work=work, local=local, faults=faults)
    return _alone(_restored(drawn, names, asked), names, asked)


def _restored(scenario: Scenario, sites: list[str], asked: Sequence[str]) -> Scenario:
    """In a small share of runs disks are put back too. Drawn apart: it moves no other seed."""
    rng, kinds = Random(f"restores {scenario.seed}"), [kind for kind in asked if kind in RESTORES]
    if (asked and not kinds) or (not asked and rng.random() >= RESTORED):
        return scenario
    machines = [site for n, site in enumerate(sites) if n not in scenario.queues]
    faults = list(scenario.faults)
    for _ in range(rng.choice((1, 1, 2))):
        what = rng.choice(kinds or RESTORES)
        whom = ["scheduler-0", "metering", "hub"] if what in ("restore_store", "failover") else sites if what == "gone" else machines
        if not whom:
            continue
        at = rng.uniform(30, STORM_S * 0.8)
        ago_s = rng.uniform(0.2, 5) if what == "failover" else rng.choice((rng.uniform(1, 10), rng.uniform(1, at - 15)))
        lasts = rng.uniform(20, 120) if what == "clone" else rng.uniform(1, 20)
        faults.append(
            Fault(
                at=round(at, 3), what=what, who=rng.choice(whom), lasts=round(lasts, 3), size=round(ago_s, 3), same_boot=rng.random() < 0.5
            )
        )
    # Whoever knew of an attempt may be gone: then it ends at its promised date, which must be within the run.
    work = [msgspec.structs.replace(one, wall_s=min(one.wall_s, 600)) for one in scenario.work]
    faults.sort(key=lambda fault: fault.at)
    return msgspec.structs.replace(scenario, faults=faults, work=work, lost_after_s=LOST_AFTER_S)


def _alone(scenario: Scenario, sites: list[str], asked: Sequence[str]) -> Scenario:
    """In a share of runs tenants have islanded allowances, and a site is cut off and asked by them. Drawn apart, too."""
    rng = Random(f"alone {scenario.seed}")
    if asked or rng.random() >= GRANTS or any(fault.what in RESTORES for fault in scenario.faults):
        return scenario
    cut = Fault(at=round(rng.uniform(20, 150), 3), what="cut", who=rng.choice(sites), lasts=round(rng.uniform(20, 90), 3))
    faults = sorted([*scenario.faults, cut], key=lambda fault: fault.at)
    local = list(scenario.local)
    for fault in faults:
        if fault.what not in ALONE or fault.lasts < 5.0:
            continue
        for _ in range(rng.randint(1, 3)):
            site = fault.who if fault.who in sites else rng.choice(sites)
            slots = rng.randint(1, scenario.sites[sites.index(site)])
            at = round(fault.at + rng.uniform(0.1, min(fault.lasts, 60.0)), 3)
            local.append(LocalWork(at=at, site=site, slots=slots, runs_s=rng.uniform(1, 90), tenant=rng.choice(("acme", "beta"))))
    grants = {tenant: rng.randint(1, 3) for tenant in ("acme", "beta") if rng.random() < 0.8}
    return msgspec.structs.replace(scenario, grants=grants, local=local, faults=faults)


def _work(rng: Random, largest: int) -> Work:
    at = rng.uniform(2, STORM_S * 0.7)
    if rng.random() < 0.1:
        # It ends only if its cancel arrives.
        return Work(at=at, tenant="acme", slots=1, runs_s=ENDLESS_S, wall_s=int(ENDLESS_S), cancel_at=at + rng.uniform(1, 40))
    return Work(
        at=at,
        tenant=rng.choice(("acme", "acme", "beta")),
        slots=rng.randint(1, largest),
        runs_s=rng.choice((0.0, rng.uniform(0.1, 5), rng.uniform(5, 90), rng.uniform(5, 500))),
        code=rng.choice((0, 0, 0, 3)),
        outputs=rng.random() < 0.25,
        wall_s=rng.choice((600, 600, 600, 20)),
        rerun=rng.random() < RERUN,
        cancel_at=at + rng.choice((rng.uniform(0, 1), rng.uniform(0, 3), rng.uniform(0, 60))) if rng.random() < 0.4 else None,
    )


def _fault(rng: Random, sites: list[str], queues: list[str], hub: list[str], only: Sequence[str]) -> Fault:
    at = rng.uniform(2, STORM_S * 0.8)
    kinds = list(only) or [kind for kind, (_, whom) in _SHARES.items() if whom != "queue" or queues]
    what = rng.choices(kinds, weights=[_SHARES[kind][0] for kind in kinds])[0]
    whom = {
        "site": sites,
        "queue": queues or sites,
        "hub": hub,
        "any": [*sites, *sites, *hub],
        "all": ["all"],
        "clock": [*sites, *hub, "hub"],
    }
    who = rng.choice(whom[_SHARES[what][1]])
    lasts = rng.choice((rng.uniform(0.5, 5), rng.uniform(5, 60), rng.uniform(30, 120)))
    if what in ("cut", "crash", "pause", "deaf_out") and rng.random() < LONG:
        lasts = rng.uniform(450, 900) if rng.random() < 0.8 else rng.uniform(900, LONG_S)
    size = rng.random()
    if what == "step":
        size = rng.choice((-1, 1)) * (
            rng.uniform(0.1, 20) if who not in sites else rng.choice((rng.uniform(0.1, 5), rng.uniform(5, 7_200)))
        )
    return Fault(at=round(at, 3), what=what, who=who, lasts=round(lasts, 3), size=round(size, 3))


_SHARES: dict[str, tuple[int, str]] = {
    "cut": (4, "any"),
    "deaf_in": (3, "any"),
    "deaf_out": (3, "any"),
    "lossy": (4, "any"),
    "slow": (3, "any"),
    "doubled": (3, "any"),
    "reordered": (2, "any"),
    "held_in": (2, "any"),
    "crash": (6, "any"),
    "doom_before": (4, "any"),
    "doom_after": (4, "any"),
    "pause": (5, "any"),
    "suspend": (2, "site"),
    "vm_pause": (2, "site"),
    "power": (2, "site"),
    "wrong_rtc": (1, "site"),
    "job_killed": (1, "site"),
    "supervisor": (2, "site"),
    "disk_full": (2, "site"),
    "step": (3, "clock"),
    "database": (2, "hub"),
    "gateway": (1, "all"),
    "bus_down": (2, "all"),
    "wipe": (2, "all"),
    "purged": (1, "all"),
    "hollow": (2, "all"),
    "office": (2, "hub"),
    "hub_gone": (1, "all"),
    "poison": (1, "site"),
    "forged": (1, "site"),
    "queue_held": (3, "queue"),
    "queue_forgets": (3, "queue"),
    "queue_deaf": (3, "queue"),
    "queue_node": (3, "queue"),
    "queue_doubles": (3, "queue"),
}
"""How often each is drawn among a hundred or so, and whom it may strike."""
