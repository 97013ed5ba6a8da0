"""Tenants' work that this site takes by itself while it is alone: within the sealed islanded allowance, by the tenant's own local account.

It becomes an attempt like the hub's own: the same entries, segments with the grant's seal as attribution, and stopped or reclaimed like any
other. `agent.core.grants` says whether the allowance holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from intertie.agent import accounts
from intertie.agent.accounts import LocalAccount
from intertie.agent.books import put_setting, save, see, together
from intertie.agent.core import grants as rules
from intertie.agent.core.devices import Chosen, Pool, choose
from intertie.agent.core.grants import Held, Stand, Wish
from intertie.agent.core.model import OPEN, Attempt, State
from intertie.agent.core.offers import Terms, owner_waits
from intertie.contracts.base import encode
from intertie.contracts.job import JobSpec
from intertie.contracts.link import EntryBase, IslandedGrant, IslandedSubmit, Lane
from intertie.contracts.site import AccessMode, DeviceKind
from intertie.errors import Denied, Refused
from intertie.ids import AttemptId, JobId, TenantName, mint
from intertie.link.journal import NextSeq
from intertie.observe import log
from intertie.trust.seal import open_seal

if TYPE_CHECKING:
    from intertie.agent.site import Site

LOG = log.get("agent.grants")

NEXT: Mapping[str, str] = {
    "grant.not_islanded": "submit at the hub: intertie submit",
    "grant.none": "wait for the hub, or ask its operator for an islanded allowance for the next time",
    "grant.expired": "wait for the hub: only it can give a new one",
    "grant.devices": "wait until your own work here has ended",
    "grant.used_up": "ask for a shorter --wall, or wait for the hub",
}


class TakenBy(msgspec.Struct, frozen=True, kw_only=True):
    """Who asked for an attempt that was taken here, and in which absence."""

    uid: int
    user: str
    submitted: datetime
    absence: datetime


class Grants:
    """One site's islanded allowances."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.local: Callable[[str], LocalAccount | None] = accounts.by_name
        """Local accounts by their names: this machine's, but where a machine is in memory."""
        self.taken: dict[AttemptId, TakenBy] = {}
        self.refused = 0
        """Since this was last written down."""

    async def recover(self) -> None:
        rows = await self._site.journal.read(
            lambda cursor: cursor.execute("SELECT key, value FROM setting WHERE key LIKE 'taken/%'").fetchall()
        )
        found = {AttemptId(key.removeprefix("taken/")): msgspec.json.decode(value, type=TakenBy) for key, value in rows}
        self.taken = {name: by for name, by in found.items() if name in self._site.books.attempts}
        if gone := [(f"taken/{name}",) for name in found if name not in self.taken]:
            await self._site.journal.write(lambda cursor: cursor.executemany("DELETE FROM setting WHERE key = ?", gone))

    def held(self) -> list[Held]:
        """Those whose seal is the scheduler's and that are for this site."""
        found = []
        for sealed in self._site.settings.grants:
            try:
                grant = open_seal(sealed, self._site.joined.service_keys.get("scheduler", ""), IslandedGrant)
            except (Refused, ValueError):
                LOG.error("an islanded allowance in the settings is not the scheduler's", signer=sealed.signer)
                continue
            if grant.site == self._site.joined.site:
                found.append(Held(grant, sealed))
        return found

    async def submit(self, *, tenant: TenantName, spec: JobSpec, env: Mapping[str, str], uid: int) -> Attempt:
        """Take it, or `Refused` with the rung that broke; `Denied('grant.account')` for whoever is not the tenant's account here."""
        account = self._account(tenant, uid)
        # Asked before the rest: between judging and reserving nothing may be waited for.
        epoch = max(self._site.joined.epoch, (await self._site.journal.instruction_mark()).epoch)
        wish = Wish(tenant, spec.resources, spec.wall_s)
        try:
            held = rules.of_tenant(self.held(), wish, self._site.joined.site)
            if broken := rules.judge(held, wish, self._stand()):
                raise Refused(broken.code, broken.text, next_step=NEXT[broken.code])
            assert held is not None, "an allowance that is not there holds nothing"
            pool, devices = self._devices(spec)
        except Refused:
            self.refused += self._site.islanded_since() is not None
            raise
        attempt = self._attempt(tenant, spec, env, account, pool)
        await self._take(msgspec.structs.replace(attempt, devices=devices, attribution=held.sealed, epoch=epoch), held, uid)
        return self._site.books.attempts[attempt.id]

    def _account(self, tenant: TenantName, uid: int) -> str:
        """The local account that this tenant is here. A single-user site knows its owner's own tenant alone."""
        site = self._site
        if site.adapter.single_user:
            if tenant != site.joined.owner_tenant:
                raise Denied("grant.account", f"this is a single-user site: only {site.joined.owner_tenant}'s work is taken here")
            return ""
        account = next((one.account for one in site.settings.mappings if one.tenant == tenant), None)
        if account is None:
            raise Denied("grant.account", f"{tenant} is no local account here", next_step="intertie local status shows who is")
        known = self.local(account)
        if known is None or known.uid != uid:
            raise Denied(
                "grant.account", f"{tenant}'s work is taken from its local account {account} alone", next_step=f"call it as {account}"
            )
        if why := site.adapter.may_run_as(account):
            raise Denied("grant.account", why)
        return account

    def _stand(self) -> Stand:
        site, since = self._site, self._site.islanded_since()
        mine = frozenset(name for name, by in self.taken.items() if since is not None and by.absence == since)
        return Stand(site.joined.site, site.clock.now(), since, list(site.books.attempts.values()), mine)

    def _devices(self, spec: JobSpec) -> Chosen:
        """Free, well and lendable devices; the owner's own work first, the owner's button above all."""
        site, wanted = self._site, spec.resources
        terms = site.terms()
        if terms.paused:
            raise Refused("paused", "the site's owner has paused lending", next_step="ask the owner, or wait for the hub")
        if terms.closed is not None:
            raise Refused(terms.closed.code, terms.closed.text)
        pools = [pool for pool in site.pools.values() if self._lends(pool, wanted.kind, wanted.count, terms)]
        found = choose(pools, wanted.kind, wanted.count, site.books.holds, site.books.observed)
        if found is None:
            raise Refused(
                "device_busy",
                f"{wanted.count} × {wanted.kind} are not free, or not lent, here now",
                next_step="try again when work here has ended: intertie local status",
            )
        return found

    def _lends(self, pool: Pool, kind: DeviceKind, count: int, terms: Terms) -> bool:
        site = self._site
        if pool.kind is not kind or pool.name in site.settings.cordoned_pools or (terms.owner_first and owner_waits(pool, site.books)):
            return False
        if pool.profile.mode is AccessMode.SERVICE:
            return False  # The owner decides there, and was not asked.
        lent = sum(len(a.devices) for a in site.books.attempts.values() if a.local is None and a.pool == pool.name and a.state in OPEN)
        return lent + count <= pool.profile.lendable.devices

    def _attempt(self, tenant: TenantName, spec: JobSpec, env: Mapping[str, str], account: str, pool: Pool) -> Attempt:
        site, now = self._site, self._site.moment()
        name = site.joined.site
        return Attempt(
            id=AttemptId(mint(f"att-{name}")),
            job=JobId(mint(f"job-{name}")),
            state=State.STAGING,
            pool=pool.name,
            kind=pool.kind,
            model="" if pool.kind is DeviceKind.SLOT else pool.profile.accelerator,
            share_milli=pool.profile.share_milli,
            devices=[],
            spec=spec,
            account=account,
            env=dict(env),
            tenant=tenant,
            generation=1,
            kernel_boot=now.kernel_boot,
            go_boot_s=now.boot_s,
            claim_journal=site.journal.id,
        )

    async def _take(self, attempt: Attempt, held: Held, uid: int) -> None:
        site = self._site
        known = accounts.by_uid(uid)
        since = site.islanded_since()
        assert since is not None and attempt.tenant is not None
        by = TakenBy(uid=uid, user=known.name if known else str(uid), submitted=site.clock.now(), absence=since)

        def entries(following: NextSeq) -> Mapping[Lane, Sequence[EntryBase]]:
            assert attempt.tenant is not None
            entry = IslandedSubmit(
                **site.entry_of(attempt, following[Lane.SCHEDULER]),
                tenant=attempt.tenant,
                pool=attempt.pool,
                devices=list(attempt.devices),
                account=attempt.account,
                spec=attempt.spec,
                submitted_by=by.user,
                grant=held.sealed,
            )
            return {Lane.SCHEDULER: [entry]}

        site.listed.add(attempt.id)
        site.put(attempt)
        self.taken[attempt.id] = by
        try:
            row = put_setting(f"taken/{attempt.id}", encode(by).decode())
            await site.append(entries, together(save(attempt), see(attempt.job, attempt.epoch, attempt.generation), row))
        except BaseException:
            site.books.holds.release(attempt)
            site.books.attempts.pop(attempt.id, None)
            site.listed.discard(attempt.id)
            self.taken.pop(attempt.id, None)
            raise
        site.books.seen[attempt.job] = (attempt.epoch, attempt.generation)
        site.set_out(attempt.id)
        LOG.info("a tenant's work is taken by its islanded allowance", attempt=attempt.id, tenant=attempt.tenant, grant=held.grant.grant)
