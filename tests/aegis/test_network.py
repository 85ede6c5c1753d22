"""Links of fake sysfs trees: short outages are flaps, long ones losses, and no tree raises."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis.failure import Observation, Severity
from zaya_jax.aegis.network import NetworkWatch, Reading

DOWN = 30.0


class Tree:
    """A sysfs with one RoCE port, one physical Ethernet interface, and the loopback interface."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "devices/pci/net/enp1").mkdir(parents=True)
        (root / "devices/pci/net/enp1/device").mkdir()
        (root / "devices/virtual/net/lo").mkdir(parents=True)
        (root / "class/net").mkdir(parents=True)
        (root / "class/net/enp1").symlink_to("../../devices/pci/net/enp1")
        (root / "class/net/lo").symlink_to("../../devices/virtual/net/lo")
        self.port = root / "class/infiniband/ionic_0/ports/1"
        (self.port / "counters").mkdir(parents=True)
        self.interface("up")
        self.write("devices/virtual/net/lo/operstate", "unknown")
        self.rdma("4: ACTIVE")

    def write(self, file: str, text: str) -> None:
        (self.root / file).write_text(text + "\n")

    def interface(self, state: str, changes: int = 1) -> None:
        self.write("devices/pci/net/enp1/operstate", state)
        self.write("devices/pci/net/enp1/carrier_changes", str(changes))

    def rdma(self, state: str, downed: int = 0, errors: int = 0, physical: str = "5: LinkUp") -> None:
        for file, text in {"state": state, "phys_state": physical, "counters/link_downed": downed,
                           "counters/symbol_error": errors}.items():  # fmt: skip
            (self.port / file).write_text(f"{text}\n")


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path / "sys")


@pytest.fixture
def watch(tree):
    watch = NetworkWatch(tree.root, DOWN)
    assert watch.poll(0.0) == []
    return watch


def codes(seen: list[Observation]) -> list[tuple[str, Severity]]:
    return [(observation.code, observation.severity) for observation in seen]


def test_links_that_stay_up_are_silent(watch):
    assert [watch.poll(now) for now in range(1, 100, 10)] == [[]] * 10


def test_a_short_outage_is_a_warning_and_a_flap(tree, watch):
    tree.rdma("1: DOWN", downed=1)
    [down] = watch.poll(10)
    assert codes([down]) == [("link-down", Severity.WARNING)]
    assert "ionic_0/1" in down.text
    assert watch.poll(20) == []
    tree.rdma("4: ACTIVE", downed=1)
    [flap] = watch.poll(35)
    assert codes([flap]) == [("link-flap", Severity.INFO)]
    assert "25 s" in flap.text
    assert "once" in flap.text
    assert watch.poll(100) == []


def test_a_long_outage_is_lost_once_and_its_end_is_told(tree, watch):
    tree.interface("down", changes=2)
    assert codes(watch.poll(10)) == [("link-down", Severity.WARNING)]
    assert watch.poll(10 + DOWN - 0.1) == []
    assert codes(watch.poll(10 + DOWN)) == [("link-lost", Severity.ERROR)]
    assert watch.poll(500) == []
    tree.interface("up", changes=3)
    assert codes(watch.poll(600)) == [("link-up", Severity.INFO)]
    tree.interface("down", changes=4)
    assert codes(watch.poll(610) + watch.poll(640)) == [("link-down", Severity.WARNING), ("link-lost", Severity.ERROR)]


def test_flaps_between_two_polls_are_counted(tree, watch):
    tree.rdma("4: ACTIVE", downed=3)
    [flap] = watch.poll(1)
    assert codes([flap]) == [("link-flap", Severity.INFO)]
    assert "3 times" in flap.text
    tree.interface("up", changes=5)  # two more times down and up
    [flap] = watch.poll(2)
    assert "enp1" in flap.text
    assert "2 times" in flap.text


def test_an_interface_that_flaps_slowly_counts_each_outage_once(tree, watch):
    for outage in range(1, 4):
        tree.interface("down", changes=2 * outage)
        watch.poll(100 * outage)
        tree.interface("up", changes=2 * outage + 1)
        [flap] = watch.poll(100 * outage + 10)
        assert ("once" if outage == 1 else f"{outage} times") in flap.text


def test_counters_that_were_reset_are_no_flap(tree):
    tree.rdma("4: ACTIVE", downed=9)
    watch = NetworkWatch(tree.root)
    watch.poll(0)
    tree.rdma("4: ACTIVE", downed=0)
    assert watch.poll(1) == []


def test_ports_without_a_cable_are_never_reported(tree):
    tree.rdma("1: DOWN", physical="3: Disabled")
    tree.interface("down")
    watch = NetworkWatch(tree.root, DOWN)
    assert [watch.poll(now) for now in (0.0, 50.0, 100.0)] == [[]] * 3


def test_virtual_interfaces_are_never_reported(tree):
    tree.write("devices/virtual/net/lo/operstate", "up")
    watch = NetworkWatch(tree.root)
    watch.poll(0)
    tree.write("devices/virtual/net/lo/operstate", "down")
    assert watch.poll(100) == []


def test_a_state_that_cannot_be_read_changes_nothing(tree, watch):
    (tree.port / "state").unlink()
    assert watch.poll(10) == []
    tree.rdma("4: ACTIVE")
    assert watch.poll(20) == []


def test_a_card_that_vanishes_is_a_lost_link(tree, watch):
    (tree.root / "class/infiniband").rename(tree.root / "gone")
    assert codes(watch.poll(1) + watch.poll(1 + DOWN)) == [
        ("link-down", Severity.WARNING), ("link-lost", Severity.ERROR)]  # fmt: skip


def test_transmission_errors_are_reported_at_most_once_a_minute(tree, watch):
    counts = []
    for second in range(1, 121):
        tree.rdma("4: ACTIVE", errors=second)
        counts += watch.poll(float(second))
    assert codes(counts) == [("link-errors", Severity.WARNING)] * 2
    assert "60 new" in counts[1].text


def test_a_machine_without_sysfs_has_no_links(tmp_path):
    assert NetworkWatch(tmp_path / "absent").poll(0) == []
    (tmp_path / "class").write_text("a file")
    assert NetworkWatch(tmp_path).poll(0) == []


def test_attributes_outside_of_sysfs_and_special_files_are_not_read(tmp_path, tree):
    secret = tmp_path / "secret"
    secret.write_text("4: ACTIVE")
    (tree.port / "state").unlink()
    (tree.port / "state").symlink_to(secret)
    (tree.root / "devices/pci/net/enp1/operstate").unlink()
    os.mkfifo(tree.root / "devices/pci/net/enp1/operstate")
    watch = NetworkWatch(tree.root)
    watch.poll(0)
    secret.write_text("1: DOWN")
    assert watch.poll(1) == []


def test_names_that_change_at_each_poll_take_bounded_memory(tmp_path, monkeypatch):
    watch = NetworkWatch(tmp_path)
    for poll in range(20):
        readings = [(f"p{poll}-{port}", Reading(None, 1)) for port in range(100)]
        monkeypatch.setattr(watch, "_read", lambda readings=readings: readings)
        assert watch.poll(float(poll)) == []
    assert len(watch._links) == 512


@given(st.lists(st.tuples(st.sampled_from(["up", "down", "unknown", "dormant", ""]), st.integers(0, 20)), max_size=12))
def test_any_sequence_of_states_reports_each_outage_once(tmp_path_factory, states):
    tree = Tree(tmp_path_factory.mktemp("links") / "sys")
    watch = NetworkWatch(tree.root, down_seconds=25)
    watch.poll(0)
    seen = []
    for index, (state, changes) in enumerate(states):
        tree.interface(state, changes)
        seen += watch.poll(10.0 * (index + 1))
    names = [observation.code for observation in seen]
    assert names.count("link-lost") <= names.count("link-down")
    assert names.count("link-up") <= names.count("link-lost")
