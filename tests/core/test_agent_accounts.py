"""Whom a job may become on a machine that also holds the hub's parts."""

from __future__ import annotations

import pytest

from intertie.agent import accounts
from intertie.embedded import nats, postgres


@pytest.mark.parametrize("account", sorted({*postgres.ACCOUNTS, *nats.ACCOUNTS, "root"}))
def test_no_job_becomes_an_account_that_a_part_of_the_hub_may_take(account: str) -> None:
    assert account in accounts.FORBIDDEN


@pytest.mark.parametrize("account", [name for name in accounts.FORBIDDEN if accounts.by_name(name) is not None])
def test_a_forbidden_account_of_this_machine_is_refused_with_the_reason(account: str) -> None:
    assert "belongs to the system" in accounts.why_not(account)


def test_an_account_that_no_part_takes_may_run_jobs() -> None:
    guest = next(name for name in ("nobody", "games", "mail") if accounts.by_name(name) is not None)
    assert accounts.why_not(guest) == ""
