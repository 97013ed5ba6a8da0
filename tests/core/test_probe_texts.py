"""What people read of probes and drift, in both languages."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from intertie.cli.proofs import drift_line, proof_lines
from intertie.contracts.observed import Drift
from intertie.contracts.probe import PoolProof, ProbeOutcome, ProbeReport
from intertie.contracts.site import DeviceKind
from intertie.ids import DeviceId, PoolName, SiteName

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def proof(outcome: ProbeOutcome | None, *drift: Drift) -> PoolProof:
    last = None
    if outcome is not None:
        last = ProbeReport(
            probe="p",
            site=SiteName("site-a"),
            pool=PoolName("gpu"),
            kind=DeviceKind.GPU,
            device=DeviceId("GPU-1"),
            account="a",
            at=LONG_AGO,
            outcome=outcome,
            reason="" if outcome is ProbeOutcome.PASSED else "it sees 0",
            measures={"memory_mib": 81_559},
        )
    return PoolProof(site=SiteName("site-a"), pool=PoolName("gpu"), last=last, passed_at=LONG_AGO if last else None, drift=list(drift))


def test_a_pool_s_lines_say_what_was_proven_when_and_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERTIE_LANG", "en")
    assert proof_lines(None) == [] and proof_lines(proof(None)) == ["never probed"]
    (passed,) = proof_lines(proof(ProbeOutcome.PASSED))
    assert passed.startswith("probe passed ") and passed.endswith("ago on GPU-1  memory_mib 81559")
    failed, before, differs = proof_lines(proof(ProbeOutcome.FAILED, Drift(what="count", declared="2", observed="1", text="-")))
    assert "probe FAILED" in failed and "it sees 0" in failed and "the last that passed was" in before
    assert differs == "differs: devices: declared 2, observed 1"


def test_a_measure_that_drifts_is_named_as_the_job_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERTIE_LANG", "zh")
    assert (
        drift_line(Drift(what="device_copy_mib_s", declared="9", observed="5", text="-")) == "与声明不符：device_copy_mib_s：声明 9，实测 5"
    )
