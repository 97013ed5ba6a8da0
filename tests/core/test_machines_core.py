"""What a head decides of its nodes, and what an owner declares, without any machine."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.agents import attempt, pool

from intertie.agent.core import placed, reserved
from intertie.agent.core.attempts import Exit
from intertie.agent.core.containment import Hierarchies, Seen, command, groups, mounted, nested, seen
from intertie.agent.core.devices import Holds, choose, inventory
from intertie.agent.core.machines import (
    DataFolder,
    Limits,
    MachinesRules,
    NodeDevices,
    NodeWord,
    notes_of,
    own_slots,
    pools_of,
    states_of,
)
from intertie.agent.core.model import StartedRecord
from intertie.agent.core.placed import Work
from intertie.contracts.job import ResultRef
from intertie.contracts.link import Claimed, Ended, Go, NotStarted, Offer, Sealed, Settle, Started, Stop, StopAnswered, Withdraw
from intertie.contracts.machines import Reservation, Reservations
from intertie.contracts.site import Device, DeviceKind, DeviceState
from intertie.errors import Refused
from intertie.ids import DeviceId, Digest, InstructionId, JournalId, SiteName
from intertie.link.journal import InstructionMark

NOW = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)
JOURNAL = JournalId("jnl-1")
MARK = InstructionMark(0, 0)
SEALED = Sealed(payload="{}", signer="scheduler", signature="-")
ONE = attempt("exit 0\n", env={"SECRET": "x"})
ABOUT = {"at": NOW, "attempt": ONE.id, "job": ONE.job, "epoch": 1, "generation": 1}


def fresh() -> Work:
    return Work(attempt=ONE, node=SiteName("n1"))


@pytest.mark.parametrize("digest", ["/../../../etc/cron.d/x", "", "sha256:xyz"])
def test_what_a_node_calls_a_digest_and_is_none_names_no_file_at_its_head(digest: str) -> None:
    gone = placed.heard(fresh(), CLAIMED, JOURNAL, record, numbers())
    said = msgspec.structs.replace(ENDED, result=ResultRef(digest=Digest(digest), size=1, files=1))
    after = placed.heard(gone, said, JOURNAL, record, numbers())
    assert after.exit is not None and after.result is None


def numbers() -> placed.Number:
    given = count(1)
    return lambda: next(given)


def record(said: Started) -> StartedRecord:
    return StartedRecord(utc_ns=1, boot_ns=1, native_id=said.native_id)


CLAIMED = Claimed(seq=1, devices=[], **ABOUT)  # type: ignore[arg-type]  # the common fields
STARTED = Started(seq=2, started=NOW, devices=[], native_id="7", account="", **ABOUT)  # type: ignore[arg-type]
ENDED = Ended(
    seq=3,
    outcome="failed",
    cause=None,
    exit_code=7,
    signal=None,
    reason="",
    started=NOW,
    ended=NOW,
    ran_us=5,
    segments=0,
    quantity_milli_us=0,
    last_metering_seq=0,
    **ABOUT,  # type: ignore[arg-type]
)
NOT_STARTED = NotStarted(seq=2, code="go_too_late", text="late", **ABOUT)  # type: ignore[arg-type]
STOP_UNKNOWN = StopAnswered(seq=2, answer="unknown_attempt", instruction=InstructionId("ins-1"), **ABOUT)  # type: ignore[arg-type]


def test_work_is_offered_gone_and_stopped_by_one_open_instruction_at_a_time() -> None:
    number = numbers()
    work = fresh()
    assert placed.instruction(work, 1, MARK) is None
    work = placed.offered(work, SEALED, number)
    assert isinstance(placed.instruction(work, 1, MARK), Offer)
    work = placed.heard(work, CLAIMED, JOURNAL, record, number)
    go = placed.instruction(work, 1, MARK)
    assert isinstance(go, Go) and go.journal == JOURNAL
    assert work.attempt.env == {} and work.offer is None, "values live no longer than they are needed"
    work = placed.heard(work, STARTED, JOURNAL, record, number)
    assert placed.instruction(work, 1, MARK) is None and work.started is not None
    work = placed.stopping(work, 5, number)
    assert isinstance(placed.instruction(work, 1, MARK), Stop)
    work = placed.heard(work, ENDED, JOURNAL, record, number)
    assert placed.instruction(work, 1, MARK) is None and work.exit == Exit(certain=True, code=7, ran_us=5)
    work = placed.settled(work, number, forget=False)
    settle = placed.instruction(work, 1, MARK)
    assert isinstance(settle, Settle)
    assert placed.instruction(work, 1, InstructionMark(1, settle.number)) is None, "said until the node has it on disk"


def test_before_the_go_it_can_be_taken_back_and_after_it_cannot() -> None:
    number = numbers()
    offered = placed.offered(fresh(), SEALED, number)
    back = placed.fenced(offered, number)
    assert back.fenced and isinstance(placed.instruction(back, 1, MARK), Withdraw)
    late = placed.heard(back, CLAIMED, JOURNAL, record, number)
    assert late.go_number == 0, "a claim that crosses the withdrawal gets no go"
    gone = placed.heard(offered, CLAIMED, JOURNAL, record, number)
    assert not placed.fenced(gone, number).fenced


def test_silence_and_repeats_move_nothing_and_an_end_is_final() -> None:
    number = numbers()
    work = placed.heard(placed.offered(fresh(), SEALED, number), CLAIMED, JOURNAL, record, number)
    assert placed.heard(work, CLAIMED, JOURNAL, record, number).go_number == work.go_number
    never = placed.heard(work, NOT_STARTED, JOURNAL, record, number)
    assert placed.heard(never, STARTED, JOURNAL, record, number).refusal is not None
    assert placed.unstarted(never).refused_errno is not None
    assert placed.heard(work, STOP_UNKNOWN, JOURNAL, record, number).refusal is not None


@given(st.lists(st.sampled_from(["claimed", "started", "ended", "not_started", "fence", "stop", "removed", "settle"]), max_size=12))
def test_whatever_comes_in_whatever_order_no_go_follows_a_fence_and_an_end_stays(steps: list[str]) -> None:
    number, entries = numbers(), {"claimed": CLAIMED, "started": STARTED, "ended": ENDED, "not_started": NOT_STARTED}
    work = placed.offered(fresh(), SEALED, number)
    for step in steps:
        before = work
        match step:
            case "fence":
                work = placed.fenced(work, number)
            case "stop":
                work = placed.stopping(work, 1, number)
            case "removed":
                work = placed.removed(work, StartedRecord(utc_ns=1, boot_ns=1, native_id="?"))
            case "settle":
                work = placed.settled(work, number, forget=False)
            case _:
                work = placed.heard(work, entries[step], JOURNAL, record, number)
        assert not (work.fenced and work.go_number), "never both"
        assert before.exit is None or work.exit == before.exit
        assert before.refusal is None or work.refusal == before.refusal
        assert not (work.exit and work.refusal)
        placed.instruction(work, 1, MARK)


# --- devices of nodes ----------------------------------------------------------------------------------------------------------------------


def gpu(name: str, node: str) -> Device:
    return Device(id=DeviceId(name), kind=DeviceKind.GPU, model="NVIDIA A100-SXM4-80GB", node=node)


def test_a_pool_holds_all_nodes_devices_the_head_s_first_and_no_more_than_declared() -> None:
    profile = msgspec.structs.replace(pool(gpus=("x", "y", "z")).profile, count=3)
    own = NodeDevices("head", own_slots(1, "head"), [gpu("a", "head")])
    (made,) = pools_of([profile], own, [NodeDevices("n1", [], [gpu("b", "n1"), gpu("c", "n1")]), NodeDevices("n2", [], [gpu("d", "n2")])])
    assert [device.id for device in made.devices] == ["a", "b", "c"]


def test_devices_of_a_node_that_is_not_heard_are_unknown_whatever_it_said_last() -> None:
    devices = [gpu("a", "head"), gpu("b", "n1"), gpu("c", "n2"), gpu("d", "n3")]
    free = {DeviceId(name): DeviceState.FREE for name in "bcd"}
    words = {
        "n1": NodeWord("n1", reachable=True, cordoned=False, states=free),
        "n2": NodeWord("n2", reachable=False, cordoned=False, states=free, since=NOW),
        "n3": NodeWord("n3", reachable=True, cordoned=True, states=free, reason="fans"),
    }
    states = states_of(devices, words, "head")
    assert states == {"b": DeviceState.FREE, "c": DeviceState.UNKNOWN, "d": DeviceState.FOREIGN}
    notes = notes_of(devices, words)
    assert "is not heard since" in notes[DeviceId("c")] and "cordoned: fans" in notes[DeviceId("d")] and "b" not in notes


def test_local_work_lies_on_one_node() -> None:
    made = pool(gpus=("a", "b", "c", "d"))
    spread = type(made)(made.profile, [gpu(name, node) for name, node in zip("abcd", ("n1", "n2", "n2", "n1"), strict=True)])
    seen = {device.id: DeviceState.FREE for device in spread.devices}
    found = choose([spread], DeviceKind.GPU, 2, Holds(), seen)
    assert found is not None and found[1] == ["a", "d"]
    assert choose([spread], DeviceKind.GPU, 3, Holds(), seen) is None


# --- present holders -------------------------------------------------------------------------------------------------------------------------

CSV = "person,node,devices,until,reason\nli,n1,b c,2026-12-31T18:00+08:00,thesis\nwang,n2,,2026-12-02T00:00,\n"
TOML = '[[reservation]]\nperson = "li"\nnode = "n1"\ndevices = ["b", "c"]\nuntil = 2026-12-31T18:00:00+08:00\nreason = "thesis"\n'


def test_holders_are_read_from_csv_and_toml_alike() -> None:
    (li, wang), (same,) = (reserved.read_reservations(text, kind=kind, zone=NOW) for text, kind in ((CSV, "csv"), (TOML, "toml")))
    assert (
        li
        == same
        == Reservation(person="li", node="n1", devices=["b", "c"], until=datetime(2026, 12, 31, 10, 0, tzinfo=UTC), reason="thesis")
    )
    assert (wang.devices, wang.until) == ([], datetime(2026, 12, 2, tzinfo=UTC)), "a time without an offset is of the machine's zone"


@pytest.mark.parametrize(("text", "kind"), [("person,node,devices,until,reason\n", "csv"), ("reservation = []\n", "toml")])
def test_an_owner_can_end_all_reservations_by_saying_so(text: str, kind: str) -> None:
    assert reserved.read_reservations(text, kind=kind, zone=NOW) == []


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("# nothing\n", "toml", "no reservation"),
        ("person,node,devices,until\nli,n1,,tomorrow\n", "csv", "entry 1: until 'tomorrow'"),
        ("who,node\nli,n1\n", "csv", "unknown columns: who"),
        ("person,node,devices,until\n,n1,,2026-12-31\n", "csv", "entry 1"),
        ("", "csv", "no reservation"),
        ("[[reservation]\n", "toml", "no toml"),
        ('[[reservation]]\nperson = "li"\nnode = "n1"\n', "toml", "entry 1: until"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, kind: str, told: str) -> None:
    with pytest.raises(Refused) as error:
        reserved.read_reservations(text, kind=kind, zone=NOW)
    assert error.value.code == "machines.reservation" and told in error.value.text


def test_what_is_kept_for_somebody_is_theirs_alone_until_it_ends_by_itself() -> None:
    devices = [gpu("a", "n1"), gpu("b", "n1"), gpu("c", "n1")]
    observed = {DeviceId("a"): DeviceState.FREE, DeviceId("b"): DeviceState.FREE, DeviceId("c"): DeviceState.LOST}
    kept = [Reservation(person="li", node="n1", devices=["b", "c"], until=NOW + timedelta(hours=1))]
    held = reserved.in_force(kept, devices, observed, NOW)
    assert reserved.hidden(observed, held) == {"a": DeviceState.FREE, "b": DeviceState.FOREIGN, "c": DeviceState.LOST}
    assert reserved.seen_by("li", reserved.hidden(observed, held), held)[DeviceId("b")] is DeviceState.FREE
    assert reserved.seen_by("wang", reserved.hidden(observed, held), held)[DeviceId("b")] is DeviceState.FOREIGN
    assert reserved.in_force(kept, devices, observed, NOW + timedelta(hours=1)) == {}
    told, local = reserved.notes(held, named=False), reserved.notes(held, named=True)
    assert "li" not in told[DeviceId("b")].text and "li" in local[DeviceId("b")].text
    (shown,) = inventory(
        [type(pool())(pool(gpus=("a", "b", "c")).profile, devices)], {}, Holds(), reserved.hidden(observed, held), paused=False, notes=told
    )
    assert [(one.state, one.reserved_until) for one in shown.devices][1] == (DeviceState.FOREIGN, NOW + timedelta(hours=1))


def test_holders_of_what_is_not_here_are_refused() -> None:
    one = Reservation(person="li", node="n9", until=NOW)
    with pytest.raises(Refused) as error:
        reserved.checked(Reservations(reservations=[one]), ["n1"], [])
    assert "n9" in error.value.text and "n1" in error.value.text


# --- containment ---------------------------------------------------------------------------------------------------------------------------

MOUNTS = """tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0
"""


def test_hierarchies_are_read_from_the_mounts() -> None:
    assert mounted(MOUNTS) == ("/sys/fs/cgroup/unified", {"cpu": "/sys/fs/cgroup/cpu,cpuacct", "memory": "/sys/fs/cgroup/memory"})
    assert mounted("garbage\n\ncgroup2") == ("", {})


def test_limits_are_written_as_each_hierarchy_wants_them() -> None:
    limits = Limits(memory_mib=100, cpus=1.5, pids=64)
    two, missing = groups(Hierarchies(v2="/cg/intertie", v2_has=frozenset({"memory", "cpu", "pids"})), "att-1", limits, 2)
    assert missing == [] and len(two) == 1 and two[0].oom == "memory.events"
    assert dict(two[0].writes) == {
        "memory.max": str(200 * 1_048_576),
        "-memory.swap.max": "0",
        "cpu.max": "300000 100000",
        "pids.max": "64",
    }
    one, missing = groups(Hierarchies(v1={"memory": "/m/intertie"}), "att-1", limits, 2)
    assert missing == ["cpu", "pids"]
    assert one[0].folder == "/m/intertie/att-1" and one[0].oom == "memory.oom_control"
    assert dict(one[0].writes)["memory.limit_in_bytes"] == str(200 * 1_048_576)
    assert groups(Hierarchies(), "att-1", Limits(), 1) == ([], [])


def test_each_tenant_sees_the_folders_that_were_declared_for_it() -> None:
    folders = [
        DataFolder(path="/srv/all"),
        DataFolder(path="/srv/acme", tenants=["acme"], mode="rw"),
        DataFolder(path="/srv/two", tenants=["acme"]),
        DataFolder(path="/srv/two", tenants=["other"], mode="rw"),
    ]
    assert seen(folders, "acme") == [Seen("/srv/acme", "rw"), Seen("/srv/all", "ro"), Seen("/srv/two", "ro")]
    assert seen(folders, "other") == [Seen("/srv/acme", "hidden"), Seen("/srv/all", "ro"), Seen("/srv/two", "rw")]
    assert seen(folders, None) == [], "the owner's own work sees the machine as it is"
    assert nested(folders) is None and nested([*folders, DataFolder(path="/srv/acme/in")]) == ("/srv/acme", "/srv/acme/in")
    beside = [DataFolder(path=path) for path in ("/srv/acme", "/srv/acme-2", "/srv/acme/in")]
    assert nested(beside) == ("/srv/acme", "/srv/acme/in"), "one that only begins alike stands not between them"


def test_a_container_s_command_line_shows_it_what_is_its_own_and_no_more() -> None:
    line = command(
        "/srv/base.sif",
        "/usr/bin/apptainer",
        ["/jobs/a/script", "--x"],
        work="/jobs/a/work",
        shown=["/jobs/a"],
        folders=[Seen("/srv/all", "ro"), Seen("/srv/other", "hidden")],
        gpus=True,
    )
    assert line[:2] == ["/usr/bin/apptainer", "exec"] and "--nv" in line and "--contain" in line
    assert "/srv/all:/srv/all:ro" in line and not any("/srv/other" in word for word in line)
    assert line[-3:] == ["/srv/base.sif", "/jobs/a/script", "--x"]


@pytest.mark.parametrize(
    "text",
    [
        'listen = "x"\nlimit = 3\n',
        "slots = -1\n",
        '[container]\nruntime = "docker"\nimage = "/x"\n',
        '[container]\nruntime = "apptainer"\nimage = "relative.sif"\n',
    ],
)
def test_what_an_owner_misspells_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.toml.decode(text, type=MachinesRules)
