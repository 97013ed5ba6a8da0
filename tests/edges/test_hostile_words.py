"""Every word that a site may say to a hub, with the most, the least and the strangest that its contract lets through: no keeper ends by any of them,
none is silent about others, and each of them still answers afterwards."""

from __future__ import annotations

import re
import typing
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from msgspec import inspect
from tests.conftest import PgServer
from tests.edges.conftest import RunningHub
from tests.edges.hostile_world import POOL, Hub, Member, own_database, running_hub
from tests.edges.identity_world import CLOCK, until
from tests.edges.test_hostile_site import running

from intertie.contracts import endpoints
from intertie.contracts.accounting import NativeDay, ReconciliationQuery
from intertie.contracts.base import Empty
from intertie.contracts.call_offerings import OfferingsQuery
from intertie.contracts.calls import CallRecord, CallsQuery
from intertie.contracts.endpoints import Endpoint
from intertie.contracts.link import EntryBase, Lane, LaneState, MeteringEntry, OfferBody, RegistryEntry, SchedulerEntry
from intertie.contracts.probe import ProbeReport, ProofsQuery
from intertie.contracts.site import SitesQuery
from intertie.contracts.usage import PeriodCount, Segment, SuspenseQuery
from intertie.ids import SiteName
from intertie.trust.seal import seal

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEALED = {"segment": Segment, "period_closed": PeriodCount, "call": CallRecord, "native_accounting": NativeDay, "probe": ProbeReport}
WORDS = ("main", "CNY", "x", "1", "0", "100", "2026-12-01", "2026-12", "succeeded", "ok", "queued", "0" * 32)
# What a lane is about stays itself: a journal opened anew and what was lost have tests of their own (`test_hostile_ways`).
OWN = frozenset({"journal_opened", "lost_range"})
LANES = {Lane.SCHEDULER: SchedulerEntry, Lane.REGISTRY: RegistryEntry, Lane.METERING: MeteringEntry}
KINDS = {lane: [kind for kind in typing.get_args(union) if kind.__struct_config__.tag not in OWN] for lane, union in LANES.items()}
FIGURES = {
    "most": (10**30, "9999-12-31T23:59:59-12:00", "\U0010ffff" * 64),
    "least": (-(10**30), "0001-01-01T00:00:00+14:00", "\x00\x1b]0;x\x07"),
}


def questions(site: SiteName) -> list[tuple[Endpoint[Any, Any], Any]]:
    """What services make of all that sites told them, put together."""
    return [
        (endpoints.RECONCILIATION, ReconciliationQuery()),
        (endpoints.SITES, SitesQuery()),
        (endpoints.CALL_OFFERINGS, OfferingsQuery()),
        (endpoints.PROOFS, ProofsQuery(site=site)),
        (endpoints.CALLS, CallsQuery(site=site)),
        (endpoints.SUSPENSE, SuspenseQuery()),
        (endpoints.LEDGER_CHECK, Empty()),
    ]


class Liar:
    """Values of contracts, as extreme as each allows. `fixed`: fields that must be true for anybody to look at the rest."""

    def __init__(self, extreme: str, fixed: dict[str, Any]) -> None:
        self.number, self.moment, self.text = FIGURES[extreme]
        self.extreme, self.fixed = extreme, fixed

    def of(self, kind: inspect.Type, name: str = "") -> Any:
        match kind:
            case inspect.Metadata():
                return self.of(kind.type, name)
            case inspect.StructType():
                told = {one.encode_name: self.fixed.get(one.name, self._field(one)) for one in kind.fields}
                return told | ({kind.tag_field: kind.tag} if kind.tag_field else {})
            case inspect.UnionType():
                first = next((one for one in kind.types if not isinstance(one, inspect.NoneType)), kind.types[0])
                return self.of(first, name)
            case inspect.IntType():
                return max(
                    kind.ge if kind.ge is not None else self.number, min(kind.le if kind.le is not None else self.number, self.number)
                )
            case inspect.FloatType():
                return 1e308 if self.extreme == "most" else max(kind.ge if kind.ge is not None else -1e308, -1e308)
            case inspect.DecimalType():
                return "9" * 30 if self.extreme == "most" else "0"
            case inspect.DateTimeType():
                return self.moment
            case inspect.BoolType():
                return self.extreme == "most"
            case inspect.EnumType():
                return list(kind.cls)[-1 if self.extreme == "most" else 0].value
            case inspect.LiteralType():
                return kind.values[0]
            case inspect.ListType() | inspect.VarTupleType():
                return [self.of(kind.item_type, name)] * (2 if self.extreme == "most" else 1)
            case inspect.DictType():
                return {self.of(kind.key_type, name): self.of(kind.value_type, name)}
            case inspect.StrType():
                return self._text(kind)
            case inspect.BytesType():
                return ""
        return None

    def _field(self, one: inspect.Field) -> Any:
        return self.of(one.type, one.name)

    def _text(self, kind: inspect.StrType) -> str:
        if kind.pattern:
            return next((word for word in WORDS if re.search(kind.pattern, word)), "x")
        return self.text[: kind.max_length or 4_000]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def hub(session_hub: RunningHub, postgres_server: PgServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hub]:
    with own_database(postgres_server) as pg:
        async with running_hub(session_hub.layout, pg, tmp_path_factory.mktemp("gateway")) as running:
            yield running


def lie(member: Member, body: OfferBody, lane: Lane, kind: type[EntryBase], extreme: str) -> bytes:
    fixed = {"seq": member[lane].next_seq, "at": CLOCK.now().isoformat(), "attempt": body.attempt, "job": body.job, "pool": POOL}
    fixed |= {"epoch": body.epoch, "generation": body.generation, "site": member.name, "part": 1, "parts": 1}
    liar = Liar(extreme, fixed)
    told = liar.of(inspect.type_info(kind))
    if (inner := SEALED.get(str(kind.__struct_config__.tag))) is not None:
        payload = msgspec.json.encode(liar.of(inspect.type_info(inner)))
        told["sealed"] = msgspec.to_builtins(seal(member.site.key, payload, member.site.key.public))
    return msgspec.json.encode(told)


@pytest.mark.parametrize("extreme", list(FIGURES))
@pytest.mark.parametrize("lane", list(Lane))
async def test_no_word_of_a_site_ends_a_keeper(hub: Hub, unique: str, lane: Lane, extreme: str) -> None:
    """Each is taken or set aside, and the next one follows."""
    evil, good = await hub.member(SiteName(f"evil-{unique}")), await hub.member(SiteName(f"good-{unique}"))
    body = await running(hub, evil)
    for kind in KINDS[lane]:
        evil[lane].raws.append(lie(evil, body, lane, kind, extreme))

        async def taken() -> bool:
            return (await evil[lane].speak()).ack_through >= len(evil[lane].raws)

        await until(taken, f"{kind.__name__} is on disk at its keeper")
        for one in Lane:
            assert (await good[one].speak()).state is LaneState.OK, kind.__name__
    assert (await hub.job(body.job)).job == body.job
    for asked, question in questions(evil.name):
        assert await hub.world.call(asked, question) is not None
