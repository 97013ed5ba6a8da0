"""Sites' NATS accounts: signed with the operator's key, pushed to the server, and kept in its preload file.

The server gets an account by `$SYS.REQ.CLAIMS.UPDATE`, without restart or reload. On each connection and beat the accounts of the database are
compared with those of the server (`CLAIMS.LIST`), and what lacks is pushed: a server with an empty folder has every site again within a beat.
Before any push the server is asked what it holds (`core.accounts` says what follows). The preload file lets the server start with every account
while identity is away, and is the memory of last resort when both the server's folder and a newer database are lost.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from intertie.bus.port import Bus
from intertie.clock import Clock
from intertie.contracts.incident import ReportIncident, Severity
from intertie.errors import Refused, Unavailable
from intertie.identity.core import accounts
from intertie.identity.core.accounts import Held, Verdict
from intertie.identity.core.sites import SiteAccount
from intertie.identity.store import IdentityStore
from intertie.ids import SiteName
from intertie.observe import log
from intertie.runtime import Beat
from intertie.trust import nats_jwt
from intertie.trust.keys import Key

LOG = log.get("identity.accounts")

T = TypeVar("T")

UPDATE = "$SYS.REQ.CLAIMS.UPDATE"
LIST = "$SYS.REQ.CLAIMS.LIST"
# Longer than a server needs to write one file, shorter than a person waits for a join.
REQUEST_S = 2.0
# A wiped server is whole again within this; it costs one small request.
BEAT_S = 5.0


def lookup_subject(account: str) -> str:
    return f"$SYS.REQ.ACCOUNT.{account}.CLAIMS.LOOKUP"


class Signer:
    """Signs sites' accounts; the operator's key stays inside."""

    def __init__(self, operator: Key, hub: str, clock: Clock) -> None:
        self._operator, self._hub, self._clock = operator, hub, clock

    def __call__(self, site: SiteAccount) -> SiteAccount:
        """The site with a form of its account that is newer than the one before."""
        iat = accounts.next_iat(int(self._clock.now().timestamp()), site.iat)
        jwt = nats_jwt.site_account(
            self._operator,
            site.site,
            site.account,
            self._hub,
            [] if site.revoked else [site.signing_key],
            datetime.fromtimestamp(iat, UTC),
            site.revoked_keys,
        )
        return msgspec.structs.replace(site, jwt=jwt, iat=iat)


class _Listed(msgspec.Struct):
    """The server's answer to LIST; `data` is null while it has none."""

    data: list[str] | None = None


class _Updated(msgspec.Struct):
    """The server's answer to UPDATE: one of the two."""

    data: dict[str, object] | None = None
    error: dict[str, object] | None = None


class AccountPusher:
    """Keeps the server's accounts as the database says. `run` it in the service's task group; `push` is for what cannot wait for a beat."""

    def __init__(
        self, system: Bus, store: IdentityStore, signer: Signer, clock: Clock, *, accounts_file: Path | None = None, beat_scale: float = 1.0
    ) -> None:
        self._system, self._store, self._signer, self._clock = system, store, signer, clock
        self._file = accounts_file
        self.beat = Beat("identity-accounts", BEAT_S, scale=beat_scale)
        self._held: dict[str, str] = {}
        self._reported: set[tuple[SiteName, str]] = set()
        self._lock = asyncio.Lock()
        self.rounds = 0

    async def run(self) -> None:
        self._system.on_state(self._linked)
        await self.beat.run(self.compare)

    def _linked(self, up: bool) -> None:
        """Another connection may be another server: nothing is known of it."""
        self._held.clear()
        if up:
            self.beat.hint()

    async def compare(self) -> None:
        """Push what the server lacks or holds otherwise; once per connection each account is looked up."""
        async with self._lock:
            known = await self._store.sites()
            kept = await self._keep(known)
            listed = set((await self._ask(LIST, b"", _Listed)).data or [])
            for site in known:
                if site.account in listed and self._held.get(site.account) == site.jwt:
                    continue
                try:
                    await self._bring(site, kept.get(site.account))
                except Refused as err:
                    # One account that the server does not take must not keep the others from it.
                    await self._report_once(
                        site.site, "identity.account_refused", f"nats-server does not take {site.site}'s account", err.text
                    )
            self.rounds += 1

    async def push(self, site: SiteAccount) -> None:
        """Bring one account to the server and into the file now. `Unavailable` if the server does not answer: the next beat does it then."""
        async with self._lock:
            kept = await self._keep([site])
            await self._bring(site, kept.get(site.account))

    async def _bring(self, site: SiteAccount, kept: Held | None) -> None:
        """`kept` is what the file holds, if it is not ours: with an empty server it is the better memory."""
        held = await self._look_up(site.account)
        verdict = accounts.compare(site.jwt, site.iat, site.revoked_keys, held or kept)
        if verdict is Verdict.MERGE or verdict is Verdict.NEWER_THERE:
            theirs = held or kept
            assert theirs is not None, "only what is held can be newer or know more"
            site = await self._adopt(site, theirs)
            if verdict is Verdict.NEWER_THERE:
                await self._report_newer(site, theirs)
                if held is None:
                    await self._update(site.account, theirs.jwt)
                # Not ours, and it stays: the next beat need not look again.
                self._held[site.account] = site.jwt
                return
        if verdict is not Verdict.SAME:
            await self._update(site.account, site.jwt)
            LOG.info("account pushed", site=site.site, account=site.account, revoked=site.revoked)
        self._held[site.account] = site.jwt

    async def _adopt(self, site: SiteAccount, theirs: Held) -> SiteAccount:
        """Revocations that we did not know are ours from now on."""
        if not set(theirs.revoked_keys) - set(site.revoked_keys):
            return site
        LOG.warning("the server knew of keys taken away that the database does not hold: it was restored?", site=site.site)
        return await self._store.adopt(site.site, theirs.revoked_keys, sign=self._signer) or site

    async def _report_newer(self, site: SiteAccount, theirs: Held) -> None:
        at, ours = (datetime.fromtimestamp(iat, UTC).isoformat() for iat in (theirs.iat, site.iat))
        text = f"It was signed at {at}, ours at {ours}: identity was restored from a backup. Nothing was replaced. Invite the site again, or revoke it."
        await self._report_once(
            site.site, "identity.account_newer", f"The bus holds a newer account of site {site.site} than identity", text
        )

    async def _report_once(self, site: SiteName, kind: str, title: str, text: str) -> None:
        """Report a fault; not again with each beat while this process lives and the text is the same."""
        if (site, text) in self._reported:
            return
        LOG.error(title, site=site, text=text)
        report = ReportIncident(key=f"{kind}/{site}", kind=kind, severity=Severity.CRITICAL, title=title, text=text, site=site)
        await self._store.report(report)
        self._reported.add((site, text))

    async def _look_up(self, account: str) -> Held | None:
        answer = await self._system.request(lookup_subject(account), b"", timeout_s=REQUEST_S)
        return _held(account, answer.body.decode("ascii", errors="replace"))

    async def _update(self, account: str, jwt: str) -> None:
        said = await self._ask(UPDATE, jwt.encode("ascii"), _Updated)
        if said.error is not None or said.data is None:
            raise Refused("identity.account_refused", f"nats-server refused account {account}: {said.error}", next_step="see its log")

    async def _ask(self, subject: str, body: bytes, kind: type[T]) -> T:
        answer = await self._system.request(subject, body, timeout_s=REQUEST_S)
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except msgspec.MsgspecError as err:
            raise Unavailable("identity.bus_answer", f"the answer of {subject} cannot be read: {err}", retry_after_s=5.0) from err

    async def _keep(self, known: Sequence[SiteAccount]) -> Mapping[str, Held]:
        """The file brought up to date; what it holds that is not ours. A file that cannot be written stops nothing but is reported."""
        try:
            return await asyncio.to_thread(self._write_file, known)
        except OSError as err:
            for site in known:
                await self._report_once(
                    site.site, "identity.accounts_file", "The bus' preload file cannot be written", f"{self._file}: {err.strerror}"
                )
            return {}

    def _write_file(self, known: Sequence[SiteAccount]) -> Mapping[str, Held]:
        """Put accounts into the preload file, whole or not at all, and never an older form over a newer one. What it holds that is not ours."""
        if self._file is None:
            return {}
        text = self._file.read_text(encoding="ascii") if self._file.exists() else ""
        lines = accounts.read_preload(text)
        kept: dict[str, Held] = {}
        ours: list[tuple[str, str]] = []
        for site in known:
            held = _held(site.account, lines.get(site.account, ""))
            if accounts.compare(site.jwt, site.iat, site.revoked_keys, held) in (Verdict.SAME, Verdict.PUSH):
                ours.append((site.account, site.jwt))
            elif held is not None:
                kept[site.account] = held
        after = accounts.write_preload(lines, ours)
        if after != text:
            replace_file(self._file, after)
        return kept


def _held(account: str, jwt: str) -> Held | None:
    """An account's form, parsed; None for nothing, and for what is not this account's claims."""
    if not jwt:
        return None
    try:
        issued = nats_jwt.read(jwt)
    except Refused:
        LOG.warning("what is held for an account is no JWT", account=account)
        return None
    return Held(jwt, issued.at, nats_jwt.revoked_keys(issued)) if issued.subject == account else None


def replace_file(path: Path, text: str) -> None:
    """Replace a file's text in one step, 0600, with the owner that it had: nats-server may run as another account than identity."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        if path.exists() and os.geteuid() == 0:
            was = path.stat()
            os.fchown(file.fileno(), was.st_uid, was.st_gid)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def hub_account(operator_dir: Path) -> str:
    """The hub account's public key, from its seed beside the operator's."""
    return Key.read(operator_dir / "hub.nk").public
