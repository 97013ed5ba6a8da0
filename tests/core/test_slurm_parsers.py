"""What Slurm prints is read as what it says, or refused by name; nothing legal comes out of garbage."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import PurePath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from intertie.agent.adapters.port import NativeOutcome, NativePhase
from intertie.agent.core.rights import SLOTS
from intertie.agent.slurm.cluster import native_nodes
from intertie.agent.slurm.core import judge, rest
from intertie.agent.slurm.core.amounts import cards, memory_option, parse_gres, parse_memory, parse_tres
from intertie.agent.slurm.core.names import ExitCode, JobRef, from_wait_status, parse_exit, parse_hosts, parse_ref, parse_submitted
from intertie.agent.slurm.core.records import (
    END,
    FIELD,
    SACCT,
    Booked,
    Queued,
    parse_codes,
    parse_job,
    parse_nodes,
    parse_partitions,
    parse_sacct,
    parse_squeue,
)
from intertie.agent.slurm.core.states import HELD, JOB_STATES, Wait, parse_node_state, parse_reason, parse_state
from intertie.agent.slurm.core.tags import Tag, read_tag, tag_of_folder, write_tag
from intertie.agent.slurm.core.times import Limit, parse_elapsed, parse_instant, parse_limit, wall_minutes
from intertie.agent.slurm.core.words import Truncated, Unreadable
from intertie.ids import AttemptId

S = 1_000_000

# --- times -------------------------------------------------------------------------------------------------------------------------------

BR_033 = (
    ("90", 5_400 * S),
    ("4:00", 240 * S),
    ("1:00:00", 3_600 * S),
    ("2-12", 216_000 * S),
    ("2-12:30", 217_800 * S),
    ("1-02:03:04", 93_784 * S),
    ("UNLIMITED", Limit.UNLIMITED),
    ("INFINITE", Limit.UNLIMITED),
    ("infinite", Limit.UNLIMITED),
    ("Partition_Limit", Limit.PARTITION),
    ("NOT_SET", None),
    ("", None),
)


@pytest.mark.parametrize(("text", "limit"), BR_033)
def test_a_time_limit_is_what_slurm_means_by_it(text: str, limit: int | Limit | None) -> None:
    assert parse_limit(text) == limit


@pytest.mark.parametrize("text", ["INVALID", "1:2:3:4", "-5", "1e9", "٣", "4:000", "2-", "1-2-3", "4: 00"])
def test_br_033_what_is_no_time_limit_is_never_unlimited(text: str) -> None:
    with pytest.raises(Unreadable):
        parse_limit(text)


@pytest.mark.parametrize(
    ("text", "us"), [("35:45.828", 2_145_828_000), ("00:00.018", 18_000), ("1-00:00:01", 86_401 * S), ("61", 61 * S), ("Unknown", None)]
)
def test_br_033_an_elapsed_time_keeps_its_fraction(text: str, us: int | None) -> None:
    assert parse_elapsed(text) == us


def test_br_034_unlimited_is_not_zero_and_a_partition_says_its_own_default() -> None:
    (row,) = parse_partitions(b"PartitionName=gpu AllowAccounts=ALL DefaultTime=1-00:00:00 MaxTime=infinite Nodes=n[1-2] State=UP\n").rows
    assert (row.most_us, row.default_us, row.nodes, row.up) == (Limit.UNLIMITED, 86_400 * S, ("n1", "n2"), True)
    # A job without a wall time is none of ours: its specification has one, and it is asked for in whole minutes, never as unlimited.
    assert [wall_minutes(s) for s in (1, 60, 61, 3_600)] == [1, 1, 2, 60]


@pytest.mark.parametrize("text", ["0", "-1", "0001-01-01T00:00:00Z", "Unknown", "None", "N/A", "(null)", ""])
def test_br_039_zero_minus_one_and_year_one_are_no_time(text: str) -> None:
    assert parse_instant(text) is None


def test_a_moment_is_read_with_its_zone_or_refused() -> None:
    assert parse_instant("1780009198") == datetime.fromtimestamp(1780009198, UTC)
    shanghai = timezone(timedelta(hours=8))
    assert parse_instant("2026-05-04T17:00:00", shanghai) == datetime(2026, 5, 4, 9, tzinfo=UTC)
    for text in ("2026-05-04T17:00:00", "99999999999", "1969-01-01T00:00:00Z", "tomorrow"):
        with pytest.raises(Unreadable):
            parse_instant(text)


# --- amounts -----------------------------------------------------------------------------------------------------------------------------

BR_026: tuple[tuple[str, int, dict[str, int], bool], ...] = (
    ("billing=64,cpu=16,gres/gpu:a100=4,gres/gpu=4,mem=128G,node=2", 4, {"a100": 4}, False),
    ("cpu=4,gres/gpu=1", 1, {}, False),
    ("cpu=4,gres/gpu:nvidia_h100=2", 2, {"nvidia_h100": 2}, False),
    ("gres/gpu=5,gres/gpu:a100=2,gres/gpu:v100=3", 5, {"a100": 2, "v100": 3}, False),
    ("gres/gpu=5,gres/gpu:a100=2", 5, {"a100": 2}, True),
    ("gres/gpu:1g.10gb=2", 2, {"1g.10gb": 2}, False),
)


@pytest.mark.parametrize(("text", "gpus", "models", "contradicts"), BR_026)
def test_typed_and_untyped_entries_name_the_same_cards(text: str, gpus: int, models: dict[str, int], contradicts: bool) -> None:
    found = parse_tres(text)
    assert (found.gpus, dict(found.models), found.contradicts) == (gpus, models, contradicts)


def test_br_026_no_entry_for_cards_is_no_zero_and_a_fraction_bills() -> None:
    found = parse_tres("billing=12.5,cpu=8,node=1")
    assert (found.gpus, found.billing, found.cpus, found.nodes) == (None, Decimal("12.5"), 8, 1)


@pytest.mark.parametrize("text", ["cpu=2,mem=512M,node=", "cpu=2,mem=512M,gres/gpu=4+", "cpu=2,"])
def test_br_007_a_tres_that_was_cut_off_is_no_count(text: str) -> None:
    with pytest.raises(Truncated):
        parse_tres(text)


GRES: tuple[tuple[str, dict[str, int]], ...] = (
    ("gpu:a100:8(S:0-1)", {"a100": 8}),
    ("gpu:8", {"": 8}),
    ("gpu", {"": 1}),
    ("gpu:h200:3(IDX:0-2)", {"h200": 3}),
    ("gpu:a100:4(IDX:0-1,3,5),gpu:v100:2(S:1)", {"a100": 4, "v100": 2}),
    ("gpu:nvidia_a100_3g.20gb:2(S:0)", {"nvidia_a100_3g.20gb": 2}),
    ("gpu:tesla:no_consume:4", {"tesla": 4}),
    ("gres:gpu:a100:2", {"a100": 2}),
    ("gres/gpu:a100:2", {"a100": 2}),
    ("gpu:a100:0(IDX:N/A)", {"a100": 0}),
    ("shard:8,gpu:1", {"": 1}),
    ("(null)", {}),
)


@pytest.mark.parametrize(("text", "models"), GRES)
def test_gres_is_read_in_every_spelling(text: str, models: dict[str, int]) -> None:
    assert dict(cards(parse_gres(text))) == models


@pytest.mark.parametrize("text", ["gpu:a100:", "gpu:a100:4(IDX:3-1)", "gpu:a100:9999999999", "gpu a100", "gpu:a100:4(", "gpu:1,"])
def test_gres_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Unreadable):
        parse_gres(text)


def test_memory_has_its_unit_in_both_directions() -> None:
    def size(text: str) -> int:
        found = parse_memory(text)
        assert found is not None
        return found.size

    assert [size(text) for text in ("500M", "500", "1.5G", "512K", "1T")] == [500 << 20, 500 << 20, 3 << 29, 512 << 10, 1 << 40]
    assert (parse_memory("4000Mn"), parse_memory("4Gc")) != (parse_memory("4000M"), parse_memory("4G"))
    # BR-032: with its unit, rounded up, never zero, which would mean everything.
    assert [memory_option(size) for size in (4 << 30, 512 << 10, 0, (4 << 30) + 1)] == ["4096M", "1M", "1M", "4097M"]


# --- names -------------------------------------------------------------------------------------------------------------------------------

BR_016 = (
    ("4411_[20-49,51-54,57-59%5]", JobRef(4411, tasks=37)),
    ("4411_[1-10:3]", JobRef(4411, tasks=4)),
    ("4411_1", JobRef(4411, task=1)),
    ("4411+1", JobRef(4411, component=1)),
    ("4411", JobRef(4411)),
    ("900.batch", JobRef(900, step="batch")),
    ("900_3.0", JobRef(900, task=3, step="0")),
)


@pytest.mark.parametrize(("text", "ref"), BR_016)
def test_arrays_components_and_steps_are_told_apart(text: str, ref: JobRef) -> None:
    assert parse_ref(text) == ref


BR_018 = (
    ("Submitted batch job 3969 on cluster nimbus", (3969, "nimbus")),
    ("3969;nimbus", (3969, "nimbus")),
    ("3969\n", (3969, "")),
    ("sbatch: a word of the site's plugin\nSubmitted batch job 555\n", (555, "")),
)


@pytest.mark.parametrize(("text", "answer"), BR_018)
def test_the_answer_of_a_submit_is_an_id_and_a_cluster(text: str, answer: tuple[int, str]) -> None:
    assert parse_submitted(text) == answer


@pytest.mark.parametrize("text", ["", "0", "nimbus", "Submitted batch job", "job 12 is busy"])
def test_br_047_a_submit_without_an_id_has_none(text: str) -> None:
    with pytest.raises(Unreadable):
        parse_submitted(text)


def test_exit_codes_signals_and_the_mark_of_memory_are_told_apart() -> None:
    assert parse_exit("7:0") == ExitCode(7, 0) == from_wait_status(1792)
    assert parse_exit("0:9") == ExitCode(0, 9) == from_wait_status(9)
    assert parse_exit("0:125") == ExitCode(0, 125)
    assert ExitCode(0, 125).out_of_memory
    assert parse_exit("137:0") == ExitCode(137, 0)
    assert parse_exit("") is None
    for text in ("7", "7:", "256:0", "0:128", "-1:0"):
        with pytest.raises(Unreadable):
            parse_exit(text)


HOSTS = [
    ("n[1-3,7],x01", ("n1", "n2", "n3", "n7", "x01")),
    ("n1", ("n1",)),
    ("n[08-10]", ("n08", "n09", "n10")),
    ("n[8-10]", ("n8", "n9", "n10")),
    ("n[001]", ("n001",)),
    ("rack[1-2]n[0-1]", ("rack1n0", "rack1n1", "rack2n0", "rack2n1")),
    ("a[1]b,c", ("a1b", "c")),
    ("x-1.y[2-3]-ib", ("x-1.y2-ib", "x-1.y3-ib")),
    ("a,b,a", ("a", "b")),
    ("n[1-3,2-4]", ("n1", "n2", "n3", "n4")),
    ("n[0-65535]", tuple(f"n{number}" for number in range(65_536))),
    ("None assigned", ()),
    ("(null)", ()),
]
NO_HOSTS = [
    *(
        "n[1-",
        "n]",
        "n[",
        "n[]",
        "a b",
        "n[1 -2]",
        "n[a-b]",
        "n[3-1]",
        "n[1,,2]",
        "n[1-2-3]",
        "n[[1]]",
        "n[-1]",
        "n[\uff11]",
        ",",
        "a,",
        ",a",
        "a,,b",
    ),
    # More than a Slurm can have, however few words it takes to say so.
    *("n[1-99999999]", "n[0-65536]", "a[1-300]b[1-300]", "n[1-40000],m[1-40000]", "[0-9]" * 40),
]


@pytest.mark.parametrize(("text", "names"), HOSTS, ids=[row[0] for row in HOSTS])
def test_host_lists_are_spelt_out(text: str, names: tuple[str, ...]) -> None:
    assert parse_hosts(text) == names


@pytest.mark.parametrize("text", NO_HOSTS)
def test_what_is_no_host_list_is_none(text: str) -> None:
    with pytest.raises(Unreadable):
        parse_hosts(text)


# --- states ------------------------------------------------------------------------------------------------------------------------------

BR_002 = {
    # CONFIGURING has its nodes: the port has a word of its own for that, between queued and running.
    NativePhase.QUEUED: "PD RF RQ RH SE RD",
    NativePhase.STARTING: "CF",
    NativePhase.RUNNING: "R RS SI",
    NativePhase.FINISHING: "CG SO",
    NativePhase.SUSPENDED: "S ST",
    NativePhase.ENDED: "CD CA F TO NF OOM BF DL PR LF",
    # It moved to another cluster of a federation: how it ends is said there.
    NativePhase.UNKNOWN: "RV",
}


def test_every_state_of_slurm_has_one_phase_in_either_spelling() -> None:
    found = {code: phase for phase, codes in BR_002.items() for code in codes.split()}
    long = {row[1]: row[0] for row in JOB_STATES}
    for code, phase in found.items():
        assert parse_state(code).phase is phase, code
        assert parse_state(long[code]) == parse_state(code)
    assert {parse_state(code).word for code in ("RH", "SE", "RD")} == HELD
    assert (parse_state("TO").outcome, parse_state("OOM").outcome) == (NativeOutcome.WALL_LIMIT, NativeOutcome.OUT_OF_MEMORY)


def test_br_002_a_state_of_the_future_is_unknown_with_a_warning() -> None:
    found = parse_state("FUTURE_STATE")
    assert (found.phase, found.outcome, found.word) == (NativePhase.UNKNOWN, None, "FUTURE_STATE")
    assert "FUTURE_STATE" in found.warning


def test_br_001_completing_is_neither_queued_nor_over() -> None:
    for text in ("COMPLETING", "CG"):
        found = parse_state(text)
        assert (found.phase, found.outcome) == (NativePhase.FINISHING, None)
    # Newer versions say it beside the base state.
    assert parse_state(["COMPLETED", "COMPLETING"]).phase is NativePhase.FINISHING


def test_br_003_who_cancelled_is_kept() -> None:
    found = parse_state("CANCELLED by 10042")
    assert (found.word, found.phase, found.by_uid) == ("CANCELLED", NativePhase.ENDED, 10042)
    row = booked(f"48211|48211|lab|iso|a|gpu|CANCELLED by 10042|0:0|{T0}|None|{T0 + 4}|0|00:00:00|||n|/w|")
    end = judge.ended_as(row.state, row.exit, ran=bool(row.nodes))
    assert (end.outcome, end.code, row.started, row.elapsed_us) == (NativeOutcome.NEVER_STARTED, None, None, 0)
    assert "10042" in end.text


@pytest.mark.parametrize("text", ["RUNNING", "R", "  running ", "r"])
def test_br_006_case_and_padding_change_no_state(text: str) -> None:
    assert parse_state(text).phase is NativePhase.RUNNING


@pytest.mark.parametrize("text", ["COMPLETININVALID", "CANCELLED+"])
def test_br_007_a_state_that_was_cut_off_is_asked_for_again(text: str) -> None:
    with pytest.raises(Truncated):
        parse_state(text)


REASON_KINDS = (
    ("Resources", Wait.TURN),
    ("(Priority)", Wait.TURN),
    ("QOSMaxGRESPerUser", Wait.LIMIT),
    ("AssocGrpGRES", Wait.LIMIT),
    ("launch failed requeued held", Wait.HELD),
    ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", Wait.SITE),
    ("DependencyNeverSatisfied", Wait.NEVER),
    ("PartitionTimeLimit", Wait.NEVER),
    ("NonZeroExitCode", Wait.ENDED),
    ("SomethingNew", Wait.UNKNOWN),
)


@pytest.mark.parametrize(("text", "kind"), REASON_KINDS)
def test_every_reason_has_a_kind_and_an_unknown_one_is_said_to_be(text: str, kind: Wait) -> None:
    found = parse_reason(text)
    assert found.kind is kind
    assert bool(found.warning) == (kind is Wait.UNKNOWN)


def test_br_073_a_maintenance_window_is_told_with_what_helps() -> None:
    found = parse_reason("ReqNodeNotAvail, Reserved for maintenance")
    assert found.kind is Wait.LATER
    assert "maintenance window" in found.text and "shorter" in found.text


BR_042: tuple[tuple[str, tuple[str, ...], bool, bool], ...] = (
    ("idle", (), True, False),
    ("idle*", (), False, False),
    ("idle~", (), False, True),
    ("idle#", (), False, False),
    ("mixed", (), True, False),
    ("drng@", (), False, False),
    ("down*", (), False, False),
    ("idle", ("DRAIN",), False, False),
    ("IDLE+CLOUD+POWERED_DOWN", (), False, True),
    ("maint", (), False, False),
    ("resv", (), False, False),
    ("allocated", (), True, False),
    ("completing", (), True, False),
    ("frobnicated", (), False, False),
    ("IDLE+FROBNICATED", (), False, False),
)


@pytest.mark.parametrize(("text", "flags", "usable", "sleeps"), BR_042)
def test_what_a_node_state_offers(text: str, flags: tuple[str, ...], usable: bool, sleeps: bool) -> None:
    found = parse_node_state(text, flags)
    assert (found.usable, found.sleeps) == (usable, sleeps)
    assert bool(found.warning) == ("FROB" in text.upper())


# --- records -----------------------------------------------------------------------------------------------------------------------------

T0 = 1_780_000_000


def line(text: str) -> str:
    return FIELD.join(text.split("|"))


def booked(text: str) -> Booked:
    read = parse_sacct(line(text).encode() + b"\n")
    assert not read.bad, read.bad
    (row,) = read.rows
    return row


def queued(*records: str) -> bytes:
    return "".join(line(one) + END + "\n" for one in records).encode()


ROW = f"7|7|iso|acct|gpu|normal|RUNNING|None|{T0}|{T0 + 5}|{T0 + 900}|1:00:00|1|gres:gpu:a100:2|n1|/w/att-1/work|intertie/1/att-1/2/3|job-1"


def test_a_line_of_the_queue_is_read_whole() -> None:
    (row,) = parse_squeue(queued(ROW)).rows
    assert (row.number, row.user, row.state.phase, row.nodes, row.limit_us) == (7, "iso", NativePhase.RUNNING, ("n1",), 3_600 * S)
    assert read_tag(row.comment) == Tag(AttemptId("att-1"), 2, 3)
    assert dict(cards(row.gres)) == {"a100": 2}


def test_br_036_what_a_user_writes_splits_no_record() -> None:
    named = queued(ROW).replace(b"job-1", b"run|final\nand , more").replace(b"/w/att-1/work", b"/d/a|b")
    (row,) = parse_squeue(named).rows
    assert (row.name, row.folder, row.state.word) == ("run|final\nand , more", "/d/a|b", "RUNNING")
    runs = line(f"9|9|lab|iso|a|foo,bar|COMPLETED|0:0|{T0}|{T0}|{T0 + 9}|9|00:00:00|cpu=1|n1|two\nlines|/d/a|why\nnot").encode() + b"\n"
    (run,) = parse_sacct(runs + b"\n").rows
    assert (run.name, run.partition, run.folder) == ("two\nlines", "foo,bar", "/d/a")


def test_br_036_a_record_with_too_few_fields_is_told_by_its_id() -> None:
    read = parse_squeue(queued(ROW, "4712|4712|iso", ROW))
    assert len(read.rows) == 2
    (bad,) = read.bad
    assert bad.about == "4712" and "fields" in bad.why
    short = parse_sacct(
        line("77|77|lab|iso").encode() + b"\n" + line(f"9|9|lab|i|a|p|COMPLETED|0:0|{T0}|{T0}|{T0}|0|0|cpu=1|n|n|/w|").encode()
    )
    assert [row.number for row in short.rows] == [9]
    assert [one.about for one in short.bad] == ["77"]


def test_br_037_bytes_that_are_no_text_hide_no_other_line() -> None:
    read = parse_squeue(queued(ROW).replace(b"job-1", b"m\xfcller_7") + queued(ROW).replace(b"job-1", "训练-七号".encode()))
    assert [row.name for row in read.rows] == ["m\ufffdller_7", "训练-七号"]
    assert not read.bad


def test_br_018_two_clusters_have_two_jobs_of_one_number() -> None:
    read = parse_squeue(b"CLUSTER: nimbus\n" + queued(ROW) + b"CLUSTER: cirrus\n" + queued(ROW))
    assert [(row.cluster, row.number) for row in read.rows] == [("nimbus", 7), ("cirrus", 7)]


def test_br_077_steps_are_no_jobs() -> None:
    rows = "\n".join(
        line(f"{ref}|{ref}|lab|{user}|a|p|COMPLETED|0:0|{T0}|{T0}|{T0 + 3600}|3600|00:00:00|gres/gpu=8|n|n|/w|")
        for ref, user in (("900", "iso"), ("900.batch", ""), ("900.extern", ""), ("900.0", ""), ("900.interactive", ""))
    )
    (run,) = parse_sacct(rows.encode()).rows
    assert run.tres.gpus is not None and run.elapsed_us is not None
    assert Decimal(run.tres.gpus * run.elapsed_us) / (3_600 * S) == 8


def test_br_029_totals_of_a_job_are_not_per_node() -> None:
    run = booked(f"5|5|lab|iso|a|p|COMPLETED|0:0|{T0}|{T0}|{T0 + 1800}|1800|00:00:00|node=4,gres/gpu=16|n[1-4]|n|/w|")
    assert run.tres.gpus is not None and run.elapsed_us is not None
    assert Decimal(run.tres.gpus * run.elapsed_us) / (3_600 * S) == 8


NODE = (
    "NodeName=n1 CPUAlloc=40 CPUTot=128 Gres={gres} NodeHostName=n1 Version=22.05.8 OS=Linux 6.1 #1 SMP  RealMemory=1000000 "
    "Sockets=2 State={state} ThreadsPerCore=2 Partitions=gpu CfgTRES={cfg} AllocTRES={alloc} {used} Reason=disk State=IDLE [root@2026]"
)


def node(**values: str) -> bytes:
    return NODE.format_map(
        {"gres": "gpu:h200:8", "state": "MIXED", "cfg": "cpu=128,mem=1000G", "alloc": "cpu=40", "used": ""} | values
    ).encode()


def test_br_027_a_cluster_that_counts_no_cards_in_tres_has_no_eight_free() -> None:
    (said,) = parse_nodes(node(used="GresUsed=gpu:h200:3(IDX:0-2)")).rows
    assert (said.busy, said.busy_from) == (3, "gres_used")
    (full,) = parse_nodes(node(state="ALLOCATED")).rows
    assert (full.busy, full.busy_from) == (8, "state")
    (unknown,) = parse_nodes(node()).rows
    assert (unknown.busy, unknown.busy_from) == (None, "state")
    # What nobody knows to be free is not offered.
    assert [(one.model, one.devices - one.busy) for one in native_nodes(unknown, {})][0] == ("h200", 0)
    (tracked,) = parse_nodes(node(cfg="cpu=128,gres/gpu=8", alloc="cpu=40,gres/gpu=5")).rows
    assert (tracked.busy, tracked.busy_from) == (5, "tres")


def test_br_042_a_planned_node_is_usable_and_has_nothing_free() -> None:
    (planned,) = parse_nodes(node(state="MIXED+PLANNED", used="GresUsed=gpu:h200:3(IDX:0-2)")).rows
    gpus, slots = native_nodes(planned, {"h200": "H200"})
    assert (gpus.usable, gpus.devices, gpus.busy, gpus.model) == (True, 8, 8, "H200")
    assert (slots.devices, slots.busy, slots.model) == (128, 128, SLOTS)


def test_br_043_processors_are_told_from_cores() -> None:
    (found,) = parse_nodes(node()).rows
    assert (found.cpus, found.cores, found.cpus_busy) == (128, 64, 40)


def test_free_text_of_a_node_changes_none_of_its_figures() -> None:
    (found,) = parse_nodes(node(state="DOWN")).rows
    assert (found.state.usable, found.state.word, found.reason) == (False, "DOWN", "disk")


# --- whose, and what it is ---------------------------------------------------------------------------------------------------------------

OURS = judge.Ours(PurePath("/w"), frozenset({"iso-t7"}))


def test_br_013_an_old_job_of_another_user_with_this_id_is_not_ours() -> None:
    old = booked(f"128301|128301|lab|alice|a|p|COMPLETED|0:0|{T0 - 10**8}|{T0 - 10**8}|{T0 - 10**8 + 9}|9|0|cpu=1|n|x|/home/a|")
    new = booked(f"128301|128301|lab|iso-t7|a|p|RUNNING|0:0|{T0}|{T0 + 2}|Unknown|7|0|cpu=1|n|job-1|/w/att-1/work|intertie/1/att-1/0/1")
    found = judge.by_tag([old, new], OURS)
    assert list(found) == [AttemptId("att-1")]
    job = judge.of_books([run for run in found[AttemptId("att-1")] if isinstance(run, Booked)], Tag(AttemptId("att-1")), "lab")
    assert (job.phase, job.native_id) == (NativePhase.RUNNING, "128301")
    assert not judge.same_job(old, new)


def test_br_148_a_tag_in_somebody_else_s_comment_is_a_comment() -> None:
    forged = booked(f"5|5|lab|mallory|a|p|RUNNING|0:0|{T0}|{T0}|Unknown|7|0|cpu=1|n|job-1|/w/att-1/work|intertie/1/att-1/0/1")
    byhand = booked(f"6|6|lab|iso-t7|a|p|RUNNING|0:0|{T0}|{T0}|Unknown|7|0|gres/gpu=2|n|byhand|/home/iso|")
    assert judge.by_tag([forged, byhand], OURS) == {}
    start, end = datetime.fromtimestamp(T0 - 60, UTC), datetime.fromtimestamp(T0 + 60, UTC)
    assert [(run.tag, run.user, run.devices) for run in judge.accounted([byhand], OURS, start, end)] == [(None, "iso-t7", 2)]


def test_an_accounting_without_comments_is_read_by_the_job_s_folder() -> None:
    root = PurePath("/shared/intertie")
    assert tag_of_folder("/shared/intertie/att-1/work", root) == Tag(AttemptId("att-1"))
    for folder in ("/shared/intertie", "/shared/intertie/../x", "/shared/other/att-1", "att-1", "", "(null)"):
        assert tag_of_folder(folder, root) is None


ENDS = (
    ("COMPLETED", "0:0", NativeOutcome.EXITED, 0, None),
    ("FAILED", "7:0", NativeOutcome.EXITED, 7, None),
    ("FAILED", "137:0", NativeOutcome.EXITED, 137, None),
    ("FAILED", "0:9", NativeOutcome.SIGNALLED, None, 9),
    ("FAILED", "0:125", NativeOutcome.OUT_OF_MEMORY, None, None),
    ("FAILED", "0:0", NativeOutcome.UNKNOWN, None, None),
    ("FAILED", "", NativeOutcome.UNKNOWN, None, None),
    ("OUT_OF_MEMORY", "0:125", NativeOutcome.OUT_OF_MEMORY, None, None),
    ("TIMEOUT", "0:0", NativeOutcome.WALL_LIMIT, None, None),
    ("CANCELLED by 0", "0:15", NativeOutcome.CANCELLED, None, 15),
    ("PREEMPTED", "0:0", NativeOutcome.PREEMPTED, None, None),
    ("NODE_FAIL", "0:0", NativeOutcome.NODE_FAILED, None, None),
    ("BOOT_FAIL", "0:0", NativeOutcome.LAUNCH_FAILED, None, None),
)


@pytest.mark.parametrize(("state", "code", "outcome", "number", "signal"), ENDS)
def test_exit_137_a_kill_memory_and_wall_time_are_four_ends(
    state: str, code: str, outcome: NativeOutcome, number: int | None, signal: int | None
) -> None:
    end = judge.ended_as(parse_state(state), parse_exit(code), ran=True)
    assert (end.outcome, end.code, end.signal) == (outcome, number, signal)


def test_a_deadline_that_passed_in_the_queue_never_started() -> None:
    assert judge.ended_as(parse_state("DL"), None, ran=False).outcome is NativeOutcome.NEVER_STARTED
    assert judge.ended_as(parse_state("DL"), None, ran=True).outcome is NativeOutcome.WALL_LIMIT


def test_the_accounting_does_not_tell_9_from_137_and_the_queue_does() -> None:
    """Seen on 22.05: sacct prints `9:0` for either; squeue keeps wait(2)'s status."""
    run = booked(f"5|5|lab|iso|a|p|FAILED|9:0|{T0}|{T0}|{T0}|0|0|cpu=1|n1|x|/w|")
    end = judge.ended_as(run.state, run.exit, ran=True)
    assert (end.outcome, end.code) == (NativeOutcome.EXITED, None)
    assert "9 or 137" in end.text
    codes = parse_codes(b"       1       35072\n       2        2304\n  x y\n       3     9999999\n")
    assert codes == {1: ExitCode(137, 0), 2: ExitCode(9, 0)}
    assert judge.of_books([run], Tag(AttemptId("att-1")), "lab", codes[1]).end == judge.ended_as(run.state, codes[1], ran=True)


def test_a_job_whose_folder_cannot_be_used_could_not_be_launched() -> None:
    """Seen on 22.05: `0:53`, Slurm's error 4021 read as a wait status."""
    end = judge.ended_as(parse_state("FAILED"), parse_exit("0:53"), ran=True)
    assert end.outcome is NativeOutcome.LAUNCH_FAILED
    assert from_wait_status(4021).launch_failed


def test_a_job_that_was_put_back_is_one_job_with_restarts() -> None:
    tag = Tag(AttemptId("att-1"), 0, 1)
    runs = [
        booked(f"8|8|lab|iso-t7|a|p|{state}|0:0|{T0}|{T0 + at}|{T0 + at + 5}|5|0|gres/gpu=1|n|job-1|/w/att-1/work|{write_tag(tag)}")
        for state, at in (("NODE_FAIL", 1), ("COMPLETED", 20))
    ]
    job = judge.of_books(runs, tag, "lab")
    assert (job.restarts, job.end is not None and job.end.outcome) == (1, NativeOutcome.EXITED)
    start, end = datetime.fromtimestamp(T0, UTC), datetime.fromtimestamp(T0 + 60, UTC)
    assert [run.restarts for run in judge.accounted(runs, OURS, start, end)] == [0, 1]


def test_br_072_what_the_owner_changed_of_our_job_is_told() -> None:
    (row,) = parse_squeue(queued(ROW)).rows
    assert judge.drift(row, "gpu", 60) == ""
    (moved,) = parse_squeue(queued(ROW.replace("|gpu|", "|all|").replace("|1:00:00|", "|UNLIMITED|"))).rows
    assert (
        judge.drift(moved, "gpu", 60)
        == "job 7 was changed at the site: partition all instead of gpu, time limit unlimited instead of 60 min"
    )


def test_native_load_counts_what_is_not_ours_and_names_nobody() -> None:
    rows = parse_squeue(
        queued(
            ROW.replace("|iso|", "|iso-t7|"),
            f"8_[1-4]|8|u|a|gpu|q|PENDING|Priority|{T0}|N/A|N/A|1:00|1|N/A||/h|(null)|x",
            f"9|9|u|a|gpu|q|RUNNING|None|{T0}|{T0}|{T0}|1:00|1|gpu:2|n1|/h|(null)|x",
        )
    ).rows
    at = datetime.fromtimestamp(T0, UTC)
    load = judge.native_load(rows, OURS, busy=4, held=2, at=at)
    assert (load.running, load.waiting, load.devices_busy) == (1, 4, 2)


# --- slurmrestd says the same ------------------------------------------------------------------------------------------------------------


def test_the_json_of_slurmrestd_gives_the_rows_of_the_text() -> None:
    (text,) = parse_squeue(queued(ROW)).rows
    shapes: list[Callable[[int], object]] = [lambda n: n, lambda n: {"set": True, "infinite": False, "number": n}]
    for number in shapes:
        body = {
            "job_id": 7,
            "array_job_id": number(0),
            "user_name": "iso",
            "account": "acct",
            "partition": "gpu",
            "qos": "normal",
            "job_state": ["RUNNING"],
            "state_reason": "None",
            "submit_time": number(T0),
            "start_time": number(T0 + 5),
            "end_time": number(T0 + 900),
            "time_limit": number(60),
            "node_count": number(1),
            "nodes": "n1",
            "tres_per_node": "gres/gpu:a100:2",
            "current_working_directory": "/w/att-1/work",
            "comment": "intertie/1/att-1/2/3",
            "name": "job-1",
        }
        (row,) = rest.jobs({"jobs": [body]}).rows
        assert row == text


def test_numbers_of_slurmrestd_that_are_none_are_none() -> None:
    assert rest.number({"set": False, "infinite": False, "number": 0}, "n") is None
    assert rest.number({"set": True, "infinite": True, "number": 0}, "n") is None
    assert rest.number(None, "n") is None
    for bad in (True, "x", 1.5, [1], {"set": True, "number": "y"}):
        with pytest.raises(Unreadable):
            rest.number(bad, "n")
    assert rest.exit_code({"status": "ERROR", "return_code": {"set": True, "number": 7}}) == ExitCode(7, 0)
    assert rest.exit_code({"status": "SIGNALED", "return_code": 0, "signal": {"signal_id": 9}}) == ExitCode(0, 9)
    assert rest.exit_code(1792) == ExitCode(7, 0)


def test_an_answer_with_errors_is_no_answer() -> None:
    with pytest.raises(rest.Errors, match="bad token"):
        rest.answer(b'{"jobs": [], "errors": [{"error": "bad token", "error_number": 1007}]}')
    for body in (b"", b"[]", b"{", b"\xff"):
        with pytest.raises(Unreadable):
            rest.answer(body)


def test_a_node_of_slurmrestd_with_drain_in_its_flags_is_drained() -> None:
    body = {"name": "n1", "state": "idle", "state_flags": ["DRAIN"], "gres": "gpu:a100:4", "gres_used": "gpu:a100:1(IDX:0)", "cpus": 8}
    (found,) = rest.nodes({"nodes": [body]}).rows
    assert (found.state.usable, found.busy, dict(found.cards)) == (False, 1, {"a100": 4})


# --- garbage -----------------------------------------------------------------------------------------------------------------------------

TEXT = st.text(max_size=60) | st.text("0123456789-:.,=+_[]()%*~#/| \nabgpuresxNIDUTML", max_size=60)
PARSERS: tuple[Callable[[str], object], ...] = (
    parse_limit,
    parse_elapsed,
    parse_instant,
    parse_memory,
    parse_tres,
    parse_gres,
    parse_ref,
    parse_hosts,
    parse_exit,
    parse_submitted,
    parse_state,
    parse_reason,
    parse_node_state,
)


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: str(parser.__name__))
@given(text=TEXT)
@example(text="9" * 50)
@example(text="\ud800")
@example(text="١٢")
def test_no_parser_answers_garbage_with_anything_but_its_refusal(parser: Callable[[str], object], text: str) -> None:
    try:
        parser(text)
    except Unreadable as err:
        assert str(err) and err.what


@given(text=TEXT)
def test_no_state_made_of_garbage_is_an_end_or_a_run(text: str) -> None:
    known = {row[0] for row in JOB_STATES} | {row[1] for row in JOB_STATES if row[1]}
    try:
        found = parse_state(text)
    except Unreadable:
        return
    words = set(" ".join(text.split()).upper().replace(" BY ", "+").split("+"))
    assert found.phase is NativePhase.UNKNOWN or words & known


@given(text=TEXT)
def test_no_node_made_of_garbage_is_offered(text: str) -> None:
    try:
        found = parse_node_state(text)
    except Unreadable:
        return
    bases = ("IDLE", "MIX", "ALLOC", "COMP", "PLANNED", "PLND")
    assert not found.usable or "".join(text.split()).upper().startswith(bases)


@given(
    data=st.binary(max_size=200) | st.lists(TEXT, max_size=len(SACCT) + 2).map(lambda parts: FIELD.join(parts).encode("utf-8", "replace"))
)
def test_no_listing_made_of_garbage_breaks_or_hides_what_is_good(data: bytes) -> None:
    queue = parse_squeue(data.replace(END.encode(), b"") + END.encode() + queued(ROW))
    assert any(row.number == 7 for row in queue.rows)
    for parse in (parse_squeue, parse_sacct, parse_nodes, parse_partitions, parse_job):
        parse(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["set", "infinite", "number", "job_id", "time", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = (
    "job_id",
    "job_state",
    "state",
    "exit_code",
    "submit_time",
    "time",
    "tres",
    "nodes",
    "gres",
    "comment",
    "name",
    "state_flags",
    "cpus",
)


@given(entry=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8) | JSON)
def test_no_json_made_of_garbage_breaks_anything(entry: object) -> None:
    for read, key in ((rest.jobs, "jobs"), (rest.runs, "jobs"), (rest.nodes, "nodes")):
        assert isinstance(read, Callable)  # type: ignore[arg-type]
        found = read({key: [entry]})
        assert len(found.rows) + len(found.bad) == 1
        assert not any(isinstance(row, Queued | Booked) and row.number < 1 for row in found.rows)
