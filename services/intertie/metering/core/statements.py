"""A period's statement of one tenant, summed attempt by attempt: job → attempts → charges, what others pay, what is disputed, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal

from intertie.contracts.base import encode
from intertie.contracts.job import AttemptRecord
from intertie.contracts.usage import AttemptBook, LostEntries, SitePeriod, Statement, StatementLine, WhoPays
from intertie.ids import JobId, SiteName, StatementId, TenantName
from intertie.metering.core.books import ended, lost
from intertie.metering.core.grants import Use, beyond, uses
from intertie.metering.core.ledger import add
from intertie.metering.core.periods import bounds
from intertie.metering.core.reckon import Reckoning, book_of, part_of

# Half of the bus's largest message: the other half is room for headers and for the last line.
LINES_BYTES = 512 * 1024

# A statement that lacks more than this lacks a site; the count says so.
INCOMPLETE = 200


class Sum:
    """Adds up one statement. Feed it every attempt that may have used anything in the period, in order of attempt id, once."""

    def __init__(self, tenant: TenantName, period: str, time_zone: str, currency: str, after: str = "") -> None:
        self.tenant, self.period, self.time_zone, self.currency = tenant, period, time_zone, currency
        self.start, self.end = bounds(period, time_zone)
        self._after = after
        self._amounts: dict[WhoPays, Decimal] = {}
        self._usage = 0
        self._in_suspense = 0
        self._incomplete: list[str] = []
        self._jobs: dict[JobId, list[tuple[AttemptBook, Decimal, int]]] = {}
        self._uses: list[Use] = []
        self._sites: set[SiteName] = set()

    def add(self, reckoning: Reckoning) -> None:
        """Take an attempt's part of the period."""
        record = reckoning.evidence.record
        if not reckoning.received and not _may_have_run(record):
            return
        rated, used = part_of(reckoning, self.start, self.end)
        book = book_of(reckoning, rated.charges if rated else [])
        if not book.complete:
            self._incomplete.append(f"{book.attempt}: {book.missing}")
        self._in_suspense += book.in_suspense
        self._uses += uses(reckoning.received, self.start, self.end)
        self._sites.add(book.site)
        if record is None:
            return
        amount = Decimal(0)
        if rated is not None and reckoning.spec is not None and rated.amount:
            if reckoning.spec.currency != self.currency:
                raise AssertionError(f"{book.attempt} is priced in {reckoning.spec.currency} on a statement in {self.currency}")
            self._amounts[rated.payer] = add([self._amounts.get(rated.payer, Decimal(0)), rated.amount])
            amount = rated.amount if rated.payer is WhoPays.TENANT else Decimal(0)
        usage = used.milli_us()
        self._usage += usage
        if record.job > self._after:
            self._jobs.setdefault(record.job, []).append((book, amount, usage))

    @property
    def jobs(self) -> list[JobId]:
        """Whose names a line needs."""
        return sorted(self._jobs)

    @property
    def sites(self) -> list[SiteName]:
        """Where something of the tenant ran."""
        return sorted(self._sites)

    def over(self, now: datetime) -> bool:
        """Whether the period has ended."""
        return now >= self.end

    def statement(
        self, names: Mapping[JobId, str], now: datetime, sites: Sequence[SitePeriod] = (), lost: Sequence[LostEntries] = ()
    ) -> Statement:
        """The statement as it stands; `provisional` while its period is open. Evidence lost before the period began is none of it."""
        lines, more = self._lines(names)
        hidden = len(self._incomplete) - INCOMPLETE
        return Statement(
            statement=StatementId(f"st-{self.tenant}-{self.period}"),
            tenant=self.tenant,
            period=self.period,
            start=self.start,
            end=self.end,
            time_zone=self.time_zone,
            currency=self.currency,
            provisional=not self.over(now),
            total=self._amounts.get(WhoPays.TENANT, Decimal(0)),
            usage_milli_us=self._usage,
            lines=lines,
            paid_by_others=add(self._amounts.get(payer, Decimal(0)) for payer in (WhoPays.SITE, WhoPays.PLATFORM)),
            disputed=self._amounts.get(WhoPays.NOBODY, Decimal(0)),
            incomplete=self._incomplete[:INCOMPLETE] + ([f"and {hidden} more"] if hidden > 0 else []),
            in_suspense=self._in_suspense,
            sites=list(sites),
            lost=[one for one in lost if one.said_at >= self.start],
            beyond=beyond(self._uses),
            more_after=more,
            at=now,
        )

    def _lines(self, names: Mapping[JobId, str]) -> tuple[list[StatementLine], str]:
        lines: list[StatementLine] = []
        size = 0
        for job in self.jobs:
            attempts = self._jobs[job]
            line = StatementLine(
                job=job,
                name=names.get(job, job),
                amount=add(amount for _, amount, _ in attempts),
                usage_milli_us=sum(usage for _, _, usage in attempts),
                attempts=[book for book, _, _ in attempts],
            )
            size += len(encode(line))
            if lines and size > LINES_BYTES:
                return lines, lines[-1].job
            lines.append(line)
        return lines, ""


def _may_have_run(record: AttemptRecord | None) -> bool:
    """Whether an attempt without a segment so far belongs on a statement: it started, or it ended at the site."""
    return record is not None and (record.started_at is not None or ended(record) or lost(record))
