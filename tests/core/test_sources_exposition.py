"""An exporter's text by its mapping: real shapes of dcgm-exporter and npu-exporter, blanks, units, slices, doubles, age; garbage says nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intertie.agent.sources import mapping as maps
from intertie.agent.sources.exposition import parse, reading
from intertie.agent.sources.reading import CardReading, Reading
from intertie.agent.sources.settings import TelemetrySource, check
from intertie.errors import Refused

NOW_S = 1_723_621_900.0
DCGM, ASCEND = maps.shipped("dcgm"), maps.shipped("ascend")

WHOLE = 'gpu="0",UUID="GPU-34319582-d595-d1c7-d1d2-179bcfa61660",pci_bus_id="00000000:65:00.0",device="nvidia0",modelName="NVIDIA A100-SXM4-40GB",Hostname="n1"'
SLICE = WHOLE + ',GPU_I_PROFILE="1g.5gb",GPU_I_ID="13"'
DIE = "185011D4-21104518-A0C4ED94-14CC040A-56102003"
CHIP = f'container_name="",id="0",model_name="910B3-Ascend-V1",namespace="",pcie_bus_info="0000:61:00.0",pod_name="",vdie_id="{DIE}"'
AT = 1_723_621_883_587


def read(text: str, mapping: maps.Mapping = DCGM, *, now_s: float = NOW_S) -> Reading:
    return reading(parse(text, mapping.names()), mapping, now_s=now_s, max_age_s=30)


def one(text: str, mapping: maps.Mapping = DCGM) -> CardReading:
    (card,) = read(text, mapping).cards
    return card


DCGM_SAID = f"""\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{{{WHOLE}}} 87
DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{WHOLE}}} 0.995630
DCGM_FI_DEV_FB_USED{{{WHOLE}}} 4845
DCGM_FI_DEV_FB_FREE{{{WHOLE}}} 35690
DCGM_FI_DEV_FB_RESERVED{{{WHOLE}}} 425
DCGM_FI_DEV_GPU_TEMP{{{WHOLE}}} 71
DCGM_FI_DEV_POWER_USAGE{{{WHOLE}}} 409.692000
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{WHOLE}}} 319159391
DCGM_FI_DEV_XID_ERRORS{{{WHOLE}}} 0
go_goroutines 12 this line is of another and reads like none
"""


def test_what_dcgm_says_of_a_card_is_read_in_our_units() -> None:
    card = one(DCGM_SAID)
    assert (card.uuid, card.name, card.index) == ("GPU-34319582-d595-d1c7-d1d2-179bcfa61660", "NVIDIA A100-SXM4-40GB", 0)
    assert (card.memory_used_mib, card.memory_total_mib) == (4845, 40960)
    assert (card.utilisation_percent, card.milli, card.temperature_c, card.power_w) == (87, 870, 71, 409.692)
    assert (card.energy_mj, card.in_use, card.lost, card.errors) == (319_159_391, True, False, {})


ASCEND_SAID = f"""\
machine_npu_nums 1
npu_chip_info_name{{id="0",name="910B3-Ascend-V1",vdie_id="{DIE}"}} 1
npu_chip_info_utilization{{{CHIP}}} 36 {AT}
npu_chip_info_temperature{{{CHIP}}} 62 {AT}
npu_chip_info_power{{{CHIP}}} 188.5 {AT}
npu_chip_info_hbm_total_memory{{{CHIP}}} 65536 {AT}
npu_chip_info_hbm_used_memory{{{CHIP}}} 8192 {AT}
npu_chip_info_used_memory{{{CHIP}}} 0 {AT}
npu_chip_info_total_memory{{{CHIP}}} 0 {AT}
npu_chip_info_health_status{{{CHIP}}} 1 {AT}
npu_chip_info_process_info_num{{{CHIP}}} 2 {AT}
"""


def test_what_an_npu_exporter_says_of_a_chip_is_read_like_a_card() -> None:
    card = one(ASCEND_SAID, ASCEND)
    assert (card.uuid, card.name, card.index) == (f"npu-0-{DIE}", "Ascend-910B3", 0)
    assert (card.memory_used_mib, card.memory_total_mib, card.milli, card.power_w) == (8192, 65536, 360, 188.5)
    assert (card.processes, card.in_use, card.lost) == (2, True, False)


def test_an_old_npu_exporter_names_a_chip_by_its_number() -> None:
    card = one(f'npu_chip_info_utilization{{id="3"}} 0 {AT}\nnpu_chip_info_hbm_used_memory{{id="3"}} 2500 {AT}\n', ASCEND)
    assert (card.uuid, card.index, card.name, card.in_use) == ("npu-3", 3, None, False)


def test_a_chip_that_is_not_well_is_lost() -> None:
    card = one(f"npu_chip_info_health_status{{{CHIP}}} 0 {AT}\n", ASCEND)
    assert card.lost and "not well" in card.errors["healthy"]


BLANKS = [
    ("2147483632", "blank"),
    ("2147483633", "not found"),
    ("2147483634", "not supported"),
    ("2147483635", "no permission"),
    ("9223372036854775792", "blank"),
    ("9223372036854775793", "not found"),
    ("9223372036854775794", "not supported"),
    ("9223372036854775795", "no permission"),
    ("9.223372036854775807e+18", "blank"),
    ("140737488355328.0", "blank"),
    ("140737488355329.000000", "not found"),
    ("1.4073748835533e+14", "not supported"),
    ("140737488355331.0", "no permission"),
    ("NaN", "no number: nan"),
    ("+Inf", "no number: inf"),
]


@pytest.mark.parametrize(("said", "why"), BLANKS, ids=[row[0] for row in BLANKS])
@pytest.mark.parametrize("metric", ["DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_DEV_POWER_USAGE"])
def test_a_blank_value_is_unknown_with_its_cause_and_the_other_fields_stay(metric: str, said: str, why: str) -> None:
    """BR-104."""
    card = one(f"{metric}{{{WHOLE}}} {said}\nDCGM_FI_DEV_GPU_TEMP{{{WHOLE}}} 50\n")
    assert (card.memory_used_mib, card.energy_mj, card.power_w, card.temperature_c) == (None, None, None, 50)
    assert list(card.errors.values()) == [why]


IMPOSSIBLE = [
    ("DCGM_FI_DEV_GPU_UTIL", "4294967295"),
    ("DCGM_FI_DEV_GPU_UTIL", "1532"),
    ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "1.001"),
    ("DCGM_FI_DEV_POWER_USAGE", "-1"),
    ("DCGM_FI_DEV_GPU_TEMP", "300"),
    ("DCGM_FI_DEV_FB_TOTAL", "0"),
]


@pytest.mark.parametrize(("metric", "said"), IMPOSSIBLE)
def test_an_impossible_reading_is_dropped_and_never_clipped(metric: str, said: str) -> None:
    card = one(f"{metric}{{{WHOLE}}} {said}\n")
    assert (card.milli, card.power_w, card.temperature_c, card.memory_total_mib) == (None, None, None, None)
    assert "impossible" in next(iter(card.errors.values()))


UNITS = [
    ("memory_used", "B", "1610612736", 1536),
    ("memory_used", "kB", "1048576", 1000),
    ("memory_used", "KiB", "1048576", 1024),
    ("memory_used", "MB", "1048.576", 1000),
    ("memory_used", "MiB", "1536", 1536),
    ("memory_used", "GB", "80", 76294),
    ("memory_used", "GiB", "1.5", 1536),
    ("utilisation", "%", "99.5", 995),
    ("utilisation", "ratio", "0.0004", 0),
    ("power", "W", "61.3", 61300),
    ("power", "mW", "61300", 61300),
    ("energy", "J", "680", 680_000),
    ("energy", "mJ", "680000", 680_000),
    ("energy", "Wh", "1", 3_600_000),
    ("temperature", "C", "-5", -5),
]


@pytest.mark.parametrize(("what", "unit", "said", "ours"), UNITS)
def test_a_unit_is_what_the_mapping_declares(what: str, unit: str, said: str, ours: int) -> None:
    mapping = maps.read(f'[device]\nids = ["X-{{id}}"]\n[[metric]]\nis = "{what}"\nname = "m"\nunit = "{unit}"\n'.encode(), "m.toml")
    card = one(f'm{{id="1"}} {said}\n', mapping)
    found = {
        "memory_used": card.memory_used_mib,
        "utilisation": card.milli,
        "power": None if card.power_w is None else round(card.power_w * 1000),
        "energy": card.energy_mj,
        "temperature": card.temperature_c,
    }
    assert found[what] == ours


def test_a_slice_is_a_device_of_its_own_and_its_card_is_none_beside_it() -> None:
    """BR-088: four series with the card's power are one power, the card's; a slice's own share of time is the slice's."""
    text = "".join(
        f'DCGM_FI_DEV_POWER_USAGE{{gpu="0",UUID="GPU-a1",modelName="A100-SXM4-40GB",GPU_I_ID="{n}",GPU_I_PROFILE="1g.5gb",pod="dcgm-exporter-x"}} 61.3\n'
        f'DCGM_FI_PROF_GR_ENGINE_ACTIVE{{gpu="0",UUID="GPU-a1",modelName="A100-SXM4-40GB",GPU_I_ID="{n}",GPU_I_PROFILE="1g.5gb"}} 0.{n}\n'
        f'DCGM_FI_DEV_FB_USED{{gpu="0",UUID="GPU-a1",modelName="A100-SXM4-40GB",GPU_I_ID="{n}",GPU_I_PROFILE="1g.5gb"}} {n}00\n'
        for n in range(3, 7)
    )
    cards = {card.uuid: card for card in read(text).cards}
    assert sorted(name for name in cards if name) == ["GPU-a1", "MIG-GPU-a1/3/0", "MIG-GPU-a1/4/0", "MIG-GPU-a1/5/0", "MIG-GPU-a1/6/0"]
    whole, part = cards["GPU-a1"], cards["MIG-GPU-a1/3/0"]
    assert (whole.sliced, whole.power_w, whole.milli, whole.memory_used_mib, whole.name) == (True, 61.3, None, None, "A100-SXM4-40GB")
    assert (part.parent, part.name, part.milli, part.memory_used_mib) == ("GPU-a1", "A100-SXM4-40GB MIG 1g.5gb", 300, 300)
    assert part.power_w is None and part.errors["power"] == "of the whole board"
    assert sum(card.power_w or 0 for card in cards.values()) == 61.3


def test_a_value_that_is_said_in_two_ways_is_none_and_one_said_twice_is_itself() -> None:
    said = f"DCGM_FI_DEV_GPU_UTIL{{{WHOLE}}} 5\nDCGM_FI_DEV_GPU_UTIL{{{WHOLE}}} 5\nDCGM_FI_DEV_GPU_TEMP{{{WHOLE}}} 40\nDCGM_FI_DEV_GPU_TEMP{{{WHOLE}}} 50\n"
    card = one(said)
    assert (card.milli, card.temperature_c, card.errors) == (50, None, {"temperature": "said in 2 ways: 40, 50"})


def test_a_series_that_carries_an_old_time_is_stale_and_one_of_the_future_is_not_believed() -> None:
    old = f"npu_chip_info_utilization{{{CHIP}}} 36 {AT - 600_000}\nnpu_chip_info_power{{{CHIP}}} 80 {AT + 600_000}\n"
    card = one(old, ASCEND)
    assert (card.milli, card.power_w, card.in_use) == (None, None, None)
    assert card.errors["utilisation"].startswith("stale: said 61") and "ahead" in card.errors["power"]


def test_an_error_after_which_a_card_must_be_reset_takes_it_out_and_a_program_s_own_does_not() -> None:
    """BR-099: 79 fell off the bus; 31 is the job's own fault."""
    for code, lost in (
        (0, False),
        (13, False),
        (31, False),
        (43, False),
        (94, False),
        (48, True),
        (79, True),
        (95, True),
        (109, True),
        (999, False),
    ):
        card = one(f"DCGM_FI_DEV_XID_ERRORS{{{WHOLE}}} {code}\n")
        assert card.lost is lost and ("xid" in card.errors) is (code > 0)


@dataclass
class Wrong:
    about: str
    text: str
    said: str


OK = '[device]\nids = ["X-{id}"]\n[[metric]]\nis = "power"\nname = "p"\nunit = "W"\n'
WRONG = [
    Wrong("no TOML", "[device\n", "line 1"),
    Wrong("another field", OK + "colour = 1\n", "colour"),
    Wrong("a unit that is none", OK.replace('"W"', '"horses"'), "$.metric[0]"),
    Wrong("a unit of something else", OK.replace('"W"', '"MiB"'), "is of memory, power is of power"),
    Wrong("a meaning that is none", OK.replace('"power"', '"speed"'), "$.metric[0].is"),
    Wrong("no metric", '[device]\nids = ["{id}"]\nmetric = []\n', "$"),
    Wrong("an id without a label", OK.replace("X-{id}", "X"), "$.device.ids[0]"),
    Wrong("a brace without a name", OK.replace("X-{id}", "X-{id}{0}"), "brace"),
    Wrong("a metric that stands twice", OK + '[[metric]]\nis = "power"\nname = "p"\nunit = "W"\n', "$.metric[1]"),
    Wrong("a slice that is its card", OK + '[slice]\nid = "Y-{id}"\nmodel = "m"\n', "$.slice.id"),
    Wrong("no text", "\udcff", "m.toml"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.about)
def test_a_mapping_that_is_wrong_is_refused_with_its_place(case: Wrong) -> None:
    with pytest.raises(Refused) as refused:
        maps.read(case.text.encode("utf-8", "surrogateescape"), "m.toml")
    assert refused.value.code == "agent.mapping" and case.said in refused.value.text, refused.value.text


SOURCES = [
    ({"source": "dcgm"}, "no address"),
    ({"source": "dcgm", "url": "ftp://127.0.0.1/"}, "no address"),
    ({"source": "dcgm", "url": "http://127.0.0.1:99999/"}, "cannot be read"),
    ({"source": "dcgm", "url": "http://a:b@127.0.0.1/metrics"}, "a user or a password"),
    ({"source": "dcgm", "url": "http://node-7:9400/metrics"}, "not this machine"),
    ({"source": "dcgm", "url": "http://node-7:9400/metrics", "host": "node-8"}, "not this machine"),
    ({"source": "prometheus", "url": "http://127.0.0.1:9/metrics"}, "no mapping"),
    ({"source": "nvml", "url": "http://127.0.0.1:9/metrics"}, "nvml has no url"),
]


@pytest.mark.parametrize(("fields", "said"), SOURCES)
def test_a_source_that_cannot_be_one_is_refused_with_its_place(fields: dict[str, str], said: str) -> None:
    with pytest.raises(Refused) as refused:
        check(TelemetrySource(**fields), 2)  # type: ignore[arg-type]  # the table's own rows
    assert refused.value.code == "agent.telemetry" and "telemetry[2]" in refused.value.text and said in refused.value.text


@pytest.mark.parametrize("url", ["http://127.0.0.1:9400/metrics", "http://[::1]:9400/metrics", "http://localhost:9400/metrics"])
def test_a_loopback_address_needs_no_more_words(url: str) -> None:
    check(TelemetrySource(source="dcgm", url=url), 0)


def test_a_cut_answer_is_refused() -> None:
    with pytest.raises(Refused, match="cut short"):
        parse(f"DCGM_FI_DEV_FB_USED{{{WHOLE}}} 12", DCGM.names())


LABEL = st.sampled_from(["gpu", "UUID", "GPU_I_ID", "GPU_I_PROFILE", "modelName", "id", "vdie_id", "model_name"])
VALUE = st.text(max_size=12).map(lambda s: s.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
NUMBER = st.one_of(st.sampled_from([row[0] for row in BLANKS]), st.integers().map(str), st.floats().map(repr), st.text(max_size=6))
LINE = st.one_of(
    st.text(max_size=60),
    st.builds(
        lambda name, labels, number, at: name + "{" + ",".join(k + '="' + v + '"' for k, v in labels) + "} " + number + at,
        st.sampled_from(sorted(DCGM.names() | ASCEND.names())),
        st.lists(st.tuples(LABEL, VALUE), max_size=5),
        NUMBER,
        st.sampled_from(["", f" {AT}", " -1", " 99999999999999999999", " x"]),
    ),
)


@given(st.lists(LINE, max_size=8), st.sampled_from([DCGM, ASCEND]))
def test_garbage_is_refused_by_name_or_says_only_what_a_card_can_say(lines: list[str], mapping: maps.Mapping) -> None:
    try:
        found = read("\n".join(lines) + "\n", mapping)
    except Refused as refused:
        assert refused.code == "agent.exposition"
        return
    for card in found.cards:
        assert card.uuid and len(card.uuid) <= 128 and "," not in card.uuid
        assert card.milli is None or 0 <= card.milli <= 1000
        assert card.memory_total_mib is None or card.memory_total_mib > 0
        assert card.temperature_c is None or -40 <= card.temperature_c <= 150
        if card.in_use is False:
            assert (card.milli is not None and card.memory_used_mib is not None) or card.processes == 0, "nobody said that it is idle"


@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda s: s.encode("utf-8", "surrogatepass")))
def test_a_mapping_of_garbage_is_refused_by_name(text: bytes) -> None:
    with pytest.raises(Refused) as refused:
        maps.read(text, "m.toml")
    assert refused.value.code == "agent.mapping"
