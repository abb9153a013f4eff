"""`transfer.ib_device` in all its forms, on hosts that are made up."""

import json

import pytest

from kvferry.cluster.config import load
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.offer import Nic
from kvferry.transfer.nics import check_form, devices_for, net_devices, rdma_ports


@pytest.fixture
def sysfs(tmp_path):
    """A host with eth0 and eth1, mlx5_0 (two ports, the second one down), mlx5_1 (RoCE) and mlx5_2 (down)."""
    for name in ("eth0", "eth1"):
        (tmp_path / "net" / name).mkdir(parents=True)
    for name, number, link, state in (
        ("mlx5_0", 1, "InfiniBand", "4: ACTIVE"), ("mlx5_0", 2, "InfiniBand", "1: DOWN"),
        ("mlx5_1", 1, "Ethernet", "4: ACTIVE"), ("mlx5_2", 1, "InfiniBand", "2: INIT"),
    ):  # fmt: skip
        port = tmp_path / "infiniband" / name / "ports" / str(number)
        port.mkdir(parents=True)
        (port / "link_layer").write_text(f"{link}\n")
        (port / "state").write_text(f"{state}\n")
    return tmp_path


def test_the_ports_are_those_that_the_kernel_lists(sysfs, tmp_path):
    assert net_devices(sysfs) == ("eth0", "eth1")
    assert [tuple(port) for port in rdma_ports(sysfs)] == [
        ("mlx5_0:1", "InfiniBand", "ACTIVE"), ("mlx5_0:2", "InfiniBand", "DOWN"), ("mlx5_1:1", "Ethernet", "ACTIVE"),
        ("mlx5_2:1", "InfiniBand", "INIT"),
    ]  # fmt: skip
    assert rdma_ports(tmp_path / "none") == () and net_devices(tmp_path / "none") == ()
    (sysfs / "infiniband" / "mlx5_1" / "ports" / "1" / "state").unlink()  # taken out while we look
    assert rdma_ports(sysfs)[2].is_active is False


@pytest.mark.parametrize(
    ("value", "device", "over_tcp", "over_rdma"),
    [
        (None, 0, "", "mlx5_0:1,mlx5_1:1"),  # all that are active: UCX takes the nearest
        ("mlx5_0", 3, "", "mlx5_0:1"),
        ("mlx5_1:1", 0, "", "mlx5_1:1"),
        ("eth0", 0, "eth0", ""),
        ("mlx5_0, mlx5_1", 0, "", "mlx5_0:1,mlx5_1:1"),
        (["mlx5_1", "eth0"], 0, "eth0", "mlx5_1:1"),
        (["mlx5_0", "mlx5_0:2"], 0, "", "mlx5_0:1"),  # of those that are named, the active ones
        ({"0": "mlx5_0", "1": ["mlx5_1", "eth0"]}, 1, "eth0", "mlx5_1:1"),
        ('{"0": "mlx5_0,mlx5_1", "1": "eth0"}', 0, "", "mlx5_0:1,mlx5_1:1"),
    ],
)
def test_each_form_names_the_devices_of_a_rank(sysfs, value, device, over_tcp, over_rdma):
    found = devices_for(value, device, "auto", sysfs)
    assert (found.over("tcp"), found.over("rdma")) == (over_tcp, over_rdma)
    assert value is None or check_form(value) == ""


def test_without_a_name_only_rdma_looks_for_devices(sysfs, tmp_path):
    assert devices_for(None, 0, "rdma", sysfs).nics == (Nic("mlx5_0:1", "InfiniBand"), Nic("mlx5_1:1", "Ethernet"))
    for transports in ("host", "tcp", "rc,ud"):
        assert devices_for(None, 0, transports, sysfs).over(transports) == ""
    assert devices_for(["mlx5_2", "eth1"], 0, "ib,tcp", sysfs).over("ib,tcp") == "eth1"
    none = devices_for(None, 0, "auto", tmp_path / "none")
    assert none.nics == () and none.lacking == "no active RDMA port on this host; there are none"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("mlx5_2", "transfer.ib_device names no active RDMA port, but mlx5_2:1 (InfiniBand, INIT)"),
        ("eth0", "transfer.ib_device names no RDMA device"),
    ],
)
def test_why_there_is_no_rdma_is_said(sysfs, value, words):
    found = devices_for(value, 0, "auto", sysfs)
    assert found.nics == () and found.lacking == words


def test_a_file_has_the_map(sysfs, tmp_path):
    path = tmp_path / "devices.json"
    path.write_text(json.dumps({"0": "eth0", "1": "mlx5_1"}))
    assert devices_for(str(path), 1, "auto", sysfs).over("rdma") == "mlx5_1:1" and check_form(str(path)) == ""
    for text, words in (("[]", "a map from device numbers"), ("{", "a JSON map"), ('{"x": "eth0"}', "the number of a")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            devices_for(str(path), 1, "auto", sysfs)
    with pytest.raises(ConfigError, match="readable JSON file"):
        devices_for(str(tmp_path / "none.json"), 1, "auto", sysfs)


PORTS = r"RDMA ports of this host: mlx5_0:1 \(InfiniBand, ACTIVE\), .*mlx5_2:1 \(InfiniBand, INIT\)"


@pytest.mark.parametrize(
    ("value", "transports", "words"),
    [
        ("mlx5_7", "auto", f"'mlx5_7'.*network devices of this host: eth0, eth1; {PORTS}"),
        ("mlx5_0:3", "rdma", f"'mlx5_0:3'.*{PORTS}, as transfer.transports is rdma"),
        ("eth0", "rdma", f"'eth0'.*{PORTS}, as transfer.transports is rdma"),
        ("mlx5_0", "tcp", r"'mlx5_0'.*network devices of this host: eth0, eth1, as transfer\.transports is tcp"),
        ("eth9", "rc,ud", f"'eth9'.*eth0, eth1; {PORTS}"),
        ({"1": "eth0"}, "auto", "a map with device 0 in it; it has 1"),
    ],
)
def test_what_this_host_does_not_have_is_refused_with_what_it_has(sysfs, value, transports, words):
    assert check_form(value) == ""
    with pytest.raises(ConfigError, match=words):
        devices_for(value, 0, transports, sysfs)


@pytest.mark.parametrize(
    "value",
    ["", "a b", [], ["eth0", "eth0"], ["eth0", ""], {}, {"-1": "eth0"}, {"0": []}, '{"0": 7}', "eth0,,eth1", "a:0"],
)
def test_what_has_no_form_is_refused_by_the_configuration(value):
    with pytest.raises(ConfigError, match=r"transfer\.ib_device"):
        load(None, {"transfer.ib_device": value, "transfer.transports": "tcp"})


def test_the_configuration_takes_it_only_where_there_is_a_wire():
    assert load(None, {"transfer.ib_device": "lo", "transfer.transports": "tcp"}).transfer.ib_device == "lo"
    with pytest.raises(ConfigError, match=r"transfer\.ib_device.*null, where transfer\.transports is host"):
        load(None, {"transfer.ib_device": "lo"})
    ucxx = {"transfer.backend": "ucxx", "transfer.transports": "tcp"}
    with pytest.raises(ConfigError, match=r"transfer\.ib_device.*null, where transfer\.backend is ucxx"):
        load(None, ucxx | {"transfer.ib_device": "lo"})
    assert load(None, ucxx).transfer.one_host is False
    assert load(None, ucxx | {"transfer.transports": "host"}).transfer.one_host is True, "its loopback device"
    with pytest.raises(
        ConfigError, match=r"transfer\.transports: 'rc_x'.*host or tcp, where transfer\.backend is ucxx"
    ):
        load(None, ucxx | {"transfer.transports": "rc_x"})


def test_the_loopback_device_is_one_of_this_hosts():
    assert "lo" in net_devices()
