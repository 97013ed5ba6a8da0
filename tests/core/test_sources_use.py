"""Device use of an attempt: means over what was read, gaps unseen, strangers' time nobody's, an energy counter that begins anew."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from intertie.agent.core import use
from intertie.agent.sources.nodes import cards_of
from intertie.agent.sources.reading import CardReading
from intertie.contracts.site import DeviceKind, DeviceState
from intertie.contracts.telemetry import DeviceSample, NodeSample
from intertie.ids import DeviceId, PoolName

G = DeviceId("GPU-1")
S = 1_000_000


def card(util: int | None = None, used: int | None = None, **fields: object) -> CardReading:
    return CardReading(index=0, uuid=G, name="A100", utilisation_percent=util, memory_used_mib=used, memory_total_mib=81_920, **fields)  # type: ignore[arg-type]


def looked(*looks: tuple[float, CardReading | None], shared: tuple[float, ...] = (), beat_s: float = 1.0) -> use.Use:
    found = use.Use()
    for at_s, said in looks:
        cards = {G: said} if said is not None else {}
        found = use.look(found, cards, frozenset({G} if at_s in shared else ()), [G], at_us=int(at_s * S), beat_us=int(beat_s * S))
    return found


def test_a_mean_is_over_the_time_in_which_it_was_read() -> None:
    (told,) = use.told(looked((1, card(50, 100)), (2, card(100, 300)), (3, card(0, 200))), [G], 3 * S)
    assert (told.mean_milli, told.max_milli, told.mean_memory_mib, told.max_memory_mib, told.samples) == (500, 1000, 200, 300, 3)
    assert (told.seen_us, told.unseen_us, told.shared_us, told.memory_total_mib) == (3 * S, 0, 0, 81_920)


def test_what_could_not_be_read_is_in_no_mean_and_no_zero() -> None:
    """BR-105: 0, 35, dropped, dropped, 40 has the mean 25."""
    looks = [(n + 1.0, card(util)) for n, util in enumerate((0, 35, None, None, 40))]
    (told,) = use.told(looked(*looks), [G], 5 * S)
    assert (told.mean_milli, told.seen_us, told.unseen_us, told.max_memory_mib, told.mean_memory_mib) == (250, 3 * S, 2 * S, None, None)


def test_a_gap_is_unseen() -> None:
    (told,) = use.told(looked((1, card(80)), (100, card(80))), [G], 100 * S)
    assert (told.mean_milli, told.seen_us, told.unseen_us) == (800, 2 * S, 98 * S)


def test_a_device_that_was_never_read_is_not_named() -> None:
    assert use.told(looked((1, None)), [G], S) == [] == use.told(None, [G], S)


def test_a_stranger_s_time_on_the_card_is_counted_for_nobody() -> None:
    (told,) = use.told(looked((1, card(10)), (2, card(99, energy_mj=900)), (3, card(30)), shared=(2,)), [G], 3 * S)
    assert (told.mean_milli, told.max_milli, told.shared_us, told.seen_us, told.energy_mj) == (200, 300, S, 2 * S, None)


def test_an_energy_counter_that_begins_anew_goes_on_from_there() -> None:
    """BR-106: 1000000, 1600000, [driver reload] 20000, 80000 mJ are 680 J; a card without a counter has none, and no zero."""
    looks = [(n + 1.0, card(1, energy_mj=mj)) for n, mj in enumerate((1_000_000, 1_600_000, 20_000, 80_000))]
    (told,) = use.told(looked(*looks), [G], 4 * S)
    assert told.energy_mj == 680_000
    (without,) = use.told(looked((1, card(1)), (2, card(1))), [G], 2 * S)
    assert without.energy_mj is None


def test_one_reading_of_a_slow_source_counts_once_for_its_own_interval() -> None:
    first, second = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=10)
    looks = [(float(n), card(20 if n < 15 else 60, read_at=first if n < 15 else second, every_s=10.0)) for n in range(5, 21)]
    (told,) = use.told(looked(*looks), [G], 15 * S)
    assert (told.samples, told.seen_us, told.mean_milli) == (2, 15 * S, 467)


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.none() | st.integers(0, 100), st.none() | st.integers(0, 81_920), st.booleans()), max_size=30
    ),
    st.integers(0, 2_000),
)
def test_seen_unseen_and_shared_are_the_run_whatever_was_read(steps: list[tuple[int, int | None, int | None, bool]], ran_s: int) -> None:
    found, at = use.Use(), 0
    for step, util, used, shared in steps:
        at += step
        found = use.look(found, {G: card(util, used)}, frozenset({G} if shared else ()), [G], at_us=at * S, beat_us=S)
    for told in use.told(found, [G], ran_s * S):
        assert told.seen_us + told.unseen_us + told.shared_us == ran_s * S and min(told.seen_us, told.unseen_us, told.shared_us) >= 0
        assert told.mean_milli is None or (told.max_milli is not None and told.mean_milli <= told.max_milli)


def test_a_node_s_sample_is_counted_once_and_not_at_all_where_it_could_not_read() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    seen = DeviceSample(id=G, pool=PoolName("gpu"), kind=DeviceKind.GPU, state=DeviceState.OURS, utilisation_percent=40, memory_used_mib=5)
    mute = DeviceSample(id=DeviceId("GPU-2"), pool=PoolName("gpu"), kind=DeviceKind.GPU, state=DeviceState.UNKNOWN)
    guest = DeviceSample(id=DeviceId("GPU-3"), pool=PoolName("gpu"), kind=DeviceKind.GPU, state=DeviceState.FOREIGN, foreign_processes=1)
    cards, shared = cards_of([NodeSample(node="n2", sampled=at, sequence=1, devices=[seen, mute, guest], every_s=1.0)])
    assert set(cards) == {G, DeviceId("GPU-3")} and set(shared) == {DeviceId("GPU-3")}
    found = use.Use()
    for at_s in (1, 2, 3):
        found = use.look(found, cards, shared, [G], at_us=at_s * S, beat_us=S)
    (told,) = use.told(found, [G], 3 * S)
    assert (told.samples, told.mean_milli, told.max_memory_mib, told.unseen_us) == (1, 400, 5, 2 * S)
