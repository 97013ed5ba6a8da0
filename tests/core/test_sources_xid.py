"""NVIDIA's error codes: whose fault, and what the kernel's lines say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intertie.agent.core.xid import XidLine, XidMeans, meaning, parse, pci_of, suspects

CODES = [
    *((code, XidMeans.JOB) for code in (13, 31, 43, 45, 68)),
    (94, XidMeans.RESTART),
    *((code, XidMeans.DRAIN) for code in (48, 79, 95, 109)),
    (999, XidMeans.ALERT),
    (145, XidMeans.ALERT),
]


@pytest.mark.parametrize(("code", "means"), CODES)
def test_a_code_is_the_job_s_fault_or_the_card_s_and_an_unknown_one_drains_nothing(code: int, means: XidMeans) -> None:
    """BR-099."""
    assert meaning(code) is means


def test_the_owner_s_list_of_codes_that_drain_is_the_one_that_counts() -> None:
    """BR-099: the policy is the site's."""
    assert (meaning(145, [145]), meaning(48, [145]), meaning(13, [13])) == (XidMeans.DRAIN, XidMeans.ALERT, XidMeans.DRAIN)


def test_the_same_fault_on_three_cards_of_a_job_is_its_program_s_and_in_three_jobs_on_a_card_the_card_s() -> None:
    """BR-099."""
    assert suspects([(13, f"GPU-{n}", "job-1") for n in range(3)]) == {"job-1": "program: the same fault on 3 cards"}
    assert suspects([(13, "GPU-1", f"job-{n}") for n in range(3)]) == {"GPU-1": "hardware: the same fault in 3 jobs"}
    assert suspects([(79, "GPU-1", f"job-{n}") for n in range(3)] + [(13, "GPU-1", "job-1")] * 9) == {}


LINES = [
    (
        "NVRM: Xid (PCI:0000:a1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        XidLine("a1:00", 79),
    ),
    (
        "[123.4] NVRM: Xid (PCI:0000:3b:00): 31, pid=41233, name=python3, Ch 00000010, intr 00000000. MMU Fault",
        XidLine("3b:00", 31, 41_233, "python3"),
    ),
    ("NVRM: GPU 0000:a1:00.0: GPU has fallen off the bus.", XidLine("a1:00", None)),
    ("NVRM: Xid (0000:03:00): 13, Graphics Exception", XidLine("03:00", 13)),
    ("NVRM: loading NVIDIA UNIX x86_64 Kernel Module", None),
    ("usb 1-1: new device", None),
]


@pytest.mark.parametrize(("line", "said"), LINES, ids=[str(row[1]) for row in LINES])
def test_a_line_of_the_kernel_names_the_card_the_code_and_the_process(line: str, said: XidLine | None) -> None:
    """BR-100."""
    assert parse(line) == said


@pytest.mark.parametrize("written", ["00000000:A1:00.0", "0000:a1:00", "a1:00.0", "0000:A1:00.0"])
def test_a_card_s_place_is_one_however_it_is_written(written: str) -> None:
    """BR-100."""
    assert pci_of(written) == "a1:00"


@given(st.text(max_size=200) | st.text(max_size=60).map(lambda s: f"NVRM: Xid (PCI:0000:a1:00): 31, pid={s}, name={s}"))
def test_no_line_breaks_the_parser(line: str) -> None:
    found = parse(line)
    assert found is None or (found.pid is None or found.pid >= 0)
