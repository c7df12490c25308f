"""Devices by name, from files, and in machines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.errors import DeviceError
from shardwise.estimation.devices import Device, Rate, devices_of, machines, read_devices, write_devices
from shardwise.estimation.devices.table import TABLE


def names(text: object) -> list[str]:
    """The names of devices."""
    return [device.name for device in devices_of(text)]


def test_a_rate_is_a_straight_line() -> None:
    """It cannot be anything that gives no time."""
    assert Rate(10.0, 0.5).seconds(20) == 2.5
    for wrong in ((0.0, 0.0), (-1.0, 0.0), (1.0, -1.0), (float("nan"), 0.0), (float("inf"), 0.0)):
        with pytest.raises(DeviceError, match="no rate"):
            Rate(*wrong)


def test_devices_are_named_in_a_text_or_a_sequence() -> None:
    """With numbers before them, in any case, with spaces."""
    assert names("4xH100-80GB,2xRTX4090") == ["H100-80GB"] * 4 + ["RTX4090"] * 2
    assert names(" 2 x h100-80gb , t4") == ["H100-80GB", "H100-80GB", "T4"]
    assert names(["T4", "2xA10", TABLE["L4"]]) == ["T4", "A10", "A10", "L4"]
    assert names(TABLE["T4"]) == ["T4"]


def test_a_job_may_use_less_memory_than_a_device_has() -> None:
    """Everything else is as in the table."""
    less, *others = devices_of("2xH100-80GB@60GiB")
    assert less == others[0] == replace(TABLE["H100-80GB"], memory=60 * 2**30)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("H100-80", "there is no device 'H100-80': did you mean 'H100-80GB'.* There are V100-16GB.*, CPU"),
        ("abacus", "there is no device 'abacus': there are V100-16GB"),
        ("H100-80GB@much", "'H100-80GB@much': 'much' is no number of bytes"),
        ("0xT4", "'0xT4' is no device at all"),
        ("T4,,T4", "'' is no device"),
        ([], "no devices"),
        ("nowhere.json", "there is no file 'nowhere.json': `shardwise doctor --measure nowhere.json` writes one"),
    ],
)
def test_errors_say_what_was_meant_or_what_there_is(text: object, said: str) -> None:
    """Each is a `ValueError`, too."""
    with pytest.raises(DeviceError, match=said):
        devices_of(text)


def test_machines_follow_the_items() -> None:
    """An item with more devices than a machine has is several machines; single devices that repeat are one item."""
    assert machines(devices_of("4xH100-80GB,2xRTX4090")) == [0, 0, 0, 0, 1, 1]
    assert machines(devices_of("2xT4,2xT4")) == [0, 0, 1, 1]
    assert machines(devices_of("T4,T4,A10")) == [0, 0, 1]
    assert machines(devices_of(["T4", "T4"])) == [0, 0]
    assert machines(devices_of("10xA100-80GB")) == [0] * 8 + [1] * 2
    assert machines([]) == []


def test_every_device_of_the_table_survives_json() -> None:
    """As text, too; and it has what every device needs."""
    for name, device in TABLE.items():
        assert device.name == name
        assert Device.from_json(json.loads(json.dumps(device.as_json()))) == device
        assert hash(device) == hash(replace(device))
        assert {"float32"} <= set(device.products)
        assert set(device.attention) <= set(device.products)


def test_a_file_gives_the_devices_that_were_written(tmp_path: Path) -> None:
    """One file is one machine, though its devices differ; a number before it means so many machines."""
    path = tmp_path / "devices.json"
    one, other = (replace(TABLE[name], per_machine=3) for name in ("T4", "L4"))
    write_devices(path, [one, one, other], ranks=3)
    assert read_devices(path) == [one, one, other]
    assert devices_of(path) == devices_of(str(path)) == (one, one, other)
    twice = devices_of(f"2 x {path}@8GiB, T4")
    assert [device.memory for device in twice[:6]] == [8 * 2**30] * 6
    assert machines(twice) == [0, 0, 0, 1, 1, 1, 2]
    assert json.loads(path.read_text())["about"] == {"ranks": 3}
    assert [file.name for file in tmp_path.iterdir()] == ["devices.json"]


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    """And nothing beside it."""
    path = tmp_path / "devices.json"
    path.write_text("before")
    with pytest.raises(TypeError):
        write_devices(path, [TABLE["T4"]], about_what=object())
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(OSError, match=r"folder\.json"):
        write_devices(tmp_path / "folder.json", [TABLE["T4"]])
    assert path.read_text() == "before"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["devices.json", "folder.json"]


def test_a_file_says_what_it_lacks(tmp_path: Path) -> None:
    """With its path, the device and the field."""
    path = tmp_path / "devices.json"
    whole = TABLE["T4"].as_json()

    def said(described: object) -> str:
        path.write_text(described if isinstance(described, str) else json.dumps(described))
        with pytest.raises(DeviceError) as raised:
            read_devices(path)
        assert str(path) in str(raised.value)
        return str(raised.value)

    def with_device(**changes: object) -> str:
        device = {key: value for key, value in {**whole, **changes}.items() if value is not None}
        return said({"version": 1, "devices": [device]})

    assert "is no JSON" in said("{")
    assert "missing version and devices" in said([1])
    assert "its version is 7, and this shardwise reads 1" in said({"version": 7, "devices": [whole]})
    assert "no list" in said({"version": 1, "devices": []})
    assert "JSON object" in said({"version": 1, "devices": ["T4"]})
    assert "device T4: missing memory, links" in with_device(memory=None, links=None)
    assert "device T4: unknown colour; there are name, kind" in with_device(colour="green")
    assert "device T4, copies: missing per_second" in with_device(copies={"start": 1})
    assert "device T4, products float32: unknown slope" in with_device(
        products={"float32": {"per_second": 1, "slope": 1}}
    )
    assert "device T4, memory: a whole number is needed, not 1.5" in with_device(memory=1.5)
    assert "device T4, call: a number is needed, not 'fast'" in with_device(call="fast")
    assert "device T4 has no rate for the links network" in with_device(links={"machine": {"per_second": 1}})
    assert "of the kind 'tpu'" in with_device(kind="tpu")
    assert "count is 0" in with_device(count=0)


def test_a_link_has_rates_for_what_is_sent_where_they_are_known() -> None:
    """Else the one of the link."""
    gather = Rate(5.0)
    device = replace(TABLE["T4"], links={**TABLE["T4"].links, "machine gather": gather})
    assert device.link("machine", "gather") == gather
    assert device.link("machine", "sum") == device.link("machine") == TABLE["T4"].links["machine"]
    assert device.link("network", "gather") == TABLE["T4"].links["network"]
