"""`transfer.ib_device` in all its forms."""

import json

import pytest

from kvferry.cluster.config import load
from kvferry.protocol.errors import ConfigError
from kvferry.transfer.nics import check_form, host_devices, ucx_devices

KNOWN = {"mlx5_0": True, "mlx5_1": True, "eth0": False}


@pytest.mark.parametrize(
    ("value", "device", "expected"),
    [
        (None, 0, ""),
        ("mlx5_0", 3, "mlx5_0:1"),
        ("mlx5_0:2", 0, "mlx5_0:2"),
        ("eth0", 0, "eth0"),
        ("mlx5_0, mlx5_1", 0, "mlx5_0:1,mlx5_1:1"),
        (["mlx5_1", "eth0"], 0, "mlx5_1:1,eth0"),
        ({"0": "mlx5_0", "1": ["mlx5_1", "eth0"]}, 1, "mlx5_1:1,eth0"),
        ('{"0": "mlx5_0,mlx5_1", "1": "eth0"}', 0, "mlx5_0:1,mlx5_1:1"),
    ],
)
def test_each_form_names_the_devices_of_a_rank(value, device, expected):
    assert ucx_devices(value, device, KNOWN) == expected
    assert value is None or check_form(value) == ""


def test_a_file_has_the_map(tmp_path):
    path = tmp_path / "devices.json"
    path.write_text(json.dumps({"0": "eth0", "1": "mlx5_1"}))
    assert ucx_devices(str(path), 1, KNOWN) == "mlx5_1:1" and check_form(str(path)) == ""
    for text, words in (("[]", "a map from device numbers"), ("{", "a JSON map"), ('{"x": "eth0"}', "the number of a")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            ucx_devices(str(path), 1, KNOWN)
    with pytest.raises(ConfigError, match="readable JSON file"):
        ucx_devices(str(tmp_path / "none.json"), 1, KNOWN)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("mlx5_7", "mlx5_7.*network devices of this host: eth0, mlx5_0, mlx5_1"),
        ({"1": "eth0"}, "a map with device 0 in it; it has 1"),
    ],
)
def test_what_this_host_does_not_have_is_refused_here(value, words):
    assert check_form(value) == ""
    with pytest.raises(ConfigError, match=words):
        ucx_devices(value, 0, KNOWN)


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
    assert host_devices()["lo"] is False
