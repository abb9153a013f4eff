"""The configuration: what is read, and that each refusal names path, value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from ray.serve import schema

from kvferry.cluster.config import APPLICATION_KEYS, HTTP_KEYS, SERVE_KEYS, Config, from_args, load
from kvferry.cluster.config_rules import CHOICES, PATTERNS, RANGES
from kvferry.protocol.errors import ConfigError

ROOT = Path(__file__).parents[2]
ARGS = "applications[0].args"


def write(tmp_path: Path, args: Any, **top: Any) -> Path:
    application = {"name": "kvferry", "import_path": "kvferry.serve.deployment:build", "args": args}
    path = tmp_path / "c.yaml"
    path.write_bytes(msgspec.yaml.encode({"applications": [application], **top}))
    return path


def refused(path: Path | None, overrides: dict[str, object] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return caught.value


def test_the_committed_file_spells_out_the_defaults() -> None:
    assert load(ROOT / "serve.yaml") == load(None) == Config()
    tree = msgspec.yaml.decode((ROOT / "serve.yaml").read_bytes())
    spelt = {**tree["applications"][0]["args"], "http": tree["http_options"]}
    assert spelt == msgspec.to_builtins(Config())


def test_a_file_and_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, {"prefill": {"chunk_tokens": 64, "instances": 2}}, http_options={"port": 9000})
    config = load(path, {"prefill.instances": 3, "decode.instances": None, "model.model": "/some/dir"})
    assert (config.prefill.chunk_tokens, config.prefill.instances, config.decode.instances) == (64, 3, 1)
    assert (config.http.port, config.http.host, config.served_name()) == (9000, "127.0.0.1", "/some/dir")
    assert Config.from_bytes(config.to_bytes()) == config


def test_what_serve_hands_over(tmp_path: Path) -> None:
    assert from_args({"api": {"served_model_name": "tiny"}}).served_name() == "tiny"
    with pytest.raises(ConfigError) as caught:
        from_args({"decode": {"pool_pages": 0}})
    assert caught.value.path == f"{ARGS}.decode.pool_pages"


def test_other_applications_and_serves_own_keys_stand_beside_ours(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "proxy_location: HeadOnly\nhttp_options: {request_timeout_s: 9}\nlogging_config: {log_level: INFO}\n"
        "applications:\n- {name: other, import_path: 'a:b', args: {x: 1}}\n"
        "- {name: kvferry, import_path: 'kvferry.serve.deployment:build', args: {prefill: {chunk_tokens: 0}}}\n"
    )
    error = refused(path)
    assert error.path == "applications[1].args.prefill.chunk_tokens" and error.value == 0


def test_the_message_has_path_value_and_what_is_allowed(tmp_path: Path) -> None:
    error = refused(write(tmp_path, {"prefill": {"chunk_tokens": 0}}))
    assert str(error) == (
        "applications[0].args.prefill.chunk_tokens: 0 is not acceptable; allowed: at least 1 and at most 65536 tokens"
    )


@pytest.mark.parametrize(
    ("args", "path", "value", "words"),
    [
        ({"prefil": {}}, "prefil", {}, ["did you mean prefill?", "decode", "transfer"]),
        ({"http": {}}, "http", {}, ["no such key"]),
        ({"prefill": {"chunk_token": 1}}, "prefill.chunk_token", 1, ["did you mean chunk_tokens?", "batch_tokens"]),
        ({"transfer": {"faults": {"dely": 1}}}, "transfer.faults.dely", 1, ["delay_ms", "stall_after"]),
        ({"prefill": {"chunk_tokens": "256"}}, "prefill.chunk_tokens", "256", ["a whole number"]),
        ({"prefill": {"chunk_tokens": 25.5}}, "prefill.chunk_tokens", 25.5, ["a whole number"]),
        ({"prefill": {"tp": True}}, "prefill.tp", True, ["a whole number"]),
        ({"prefill": None}, None, None, []),
        ({"prefill": [1]}, "prefill", [1], ["a mapping"]),
        ({"clocks": {"no_progress_s": "1m"}}, "clocks.no_progress_s", "1m", ["a number"]),
        ({"transfer": {"faults": 3}}, "transfer.faults", 3, ["a mapping"]),
        ({"api": {"served_model_name": 3}}, "api.served_model_name", 3, ["a string, or null"]),
        ({"clocks": {"no_progress_s": float("nan")}}, "clocks.no_progress_s", None, ["above 0"]),
        ({"clocks": {"no_progress_s": 0}}, "clocks.no_progress_s", 0, ["above 0"]),
        ({"decode": {"tp": 0}}, "decode.tp", 0, ["at least 1 and at most 64"]),
        ({"prefill": {"pp": 65}}, "prefill.pp", 65, ["at least 1 and at most 64"]),
        ({"prefill": {"stages": [30, 1]}}, "prefill.stages", [30, 1], ["none, or 1 of them, since prefill.pp is 1"]),
        ({"decode": {"pp": 3, "stages": [16, 14]}}, "decode.stages", [16, 14], ["none, or 3 of them"]),
        ({"decode": {"pp": 2, "stages": [30, 0]}}, "decode.stages", [30, 0], ["each at least 1"]),
        ({"decode": {"pp": 2, "stages": [16, "14"]}}, "decode.stages[1]", "14", ["a whole number"]),
        ({"prefill": {"pp": 2, "stages": 15}}, "prefill.stages", 15, ["a list"]),
        ({"unified": {"stages": [30]}}, "unified.stages", [30], ["no such key"]),
        ({"prefill": {"tp": 3, "pp": 2}, "cluster": {"slots": 6}}, "cluster.slots", 6, ["0, or at least the 7 ranks"]),
        ({"transfer": {"backend": "mori"}}, "transfer.backend", "mori", ["mooncake (in this version)"]),
        ({"model": {"dtype": "int3"}}, "model.dtype", "int3", ["float32"]),
        ({"prefill": {"chunk_tokens": 250}}, "prefill.chunk_tokens", 250, ["a multiple of model.page_size (16)"]),
        ({"prefill": {"page_size": 24}}, "prefill.chunk_tokens", 256, ["a multiple of prefill.page_size (24)"]),
        ({"decode": {"page_size": 1025}}, "decode.page_size", 1025, ["at least 0", "1024 tokens (0: model.page_size)"]),
        (
            {"unified": {"page_size": 512, "chunk_tokens": 512}},
            "unified.max_running",
            32,
            ["at most unified.batch_tokens (512) - unified.page_size (512) + 1"],
        ),
        (
            {"prefill": {"page_size": 8, "pool_pages": 31}},
            "prefill.chunk_tokens",
            256,
            ["prefill.pool_pages * prefill.page_size (248)"],
        ),
        ({"prefill": {"batch_tokens": 128}}, "prefill.chunk_tokens", 256, ["at most prefill.batch_tokens (128)"]),
        ({"prefill": {"pool_pages": 15}}, "prefill.chunk_tokens", 256, ["(240)"]),
        ({"decode": {"max_running": 300}}, "decode.max_running", 300, ["at most decode.max_rooms (256)"]),
        (
            {"unified": {"batch_tokens": 32, "chunk_tokens": 32}},
            "unified.max_running",
            32,
            ["at most unified.batch_tokens (32)"],
        ),
        ({"decode": {"pool_pages": 31}}, "decode.max_running", 32, ["at most decode.pool_pages (31)"]),
        ({"links": {"silence_s": 2.0}}, "links.silence_s", 2.0, ["more than twice links.heartbeat_s (1)"]),
        ({"links": {"resend_s": 10.0}}, "links.resend_s", 10.0, ["less than links.silence_s (10)"]),
        ({"cluster": {"bind_host": "0.0.0.0"}}, "cluster.bind_host", "0.0.0.0", ["node", "one address"]),
        ({"cluster": {"bind_host": "::"}}, "cluster.bind_host", "::", ["node"]),
        ({"cluster": {"slots": 1}}, "cluster.slots", 1, ["0, or at least the 2 ranks"]),
        ({"cluster": {"drain_s": -1}}, "cluster.drain_s", -1, ["at least 0", "seconds"]),
        ({"transfer": {"poll_idle_ms": 0.5}}, "transfer.poll_idle_ms", 0.5, ["at least poll_busy_ms (1)"]),
    ],
)
def test_refused_values(tmp_path: Path, args: Any, path: str | None, value: Any, words: list[str]) -> None:
    file = write(tmp_path, args)
    if path is None:  # an empty section is no error
        assert load(file) == Config()
        return
    error = refused(file)
    assert error.path == f"{ARGS}.{path}"
    assert error.value == value or value is None
    for word in words:
        assert word in error.allowed


def test_frames_by_ray_calls_leave_places_for_attempts(tmp_path: Path) -> None:
    fits = {"links": {"carrier": "ray"}, "router": {"max_requests": 2048}}
    assert load(write(tmp_path, fits)).links.carrier == "ray"
    error = refused(write(tmp_path, {**fits, "router": {"max_requests": 2049}}))
    assert error.path == f"{ARGS}.router.max_requests" and "links.carrier is ray" in error.allowed
    assert refused(None, {"links.carrier": "grpc"}).allowed.startswith("zmq, ray")
    assert load(None, {"router.max_requests": 4096}).links.carrier == "zmq"


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("http_option: {}", "http_option", "did you mean http_options?"),
        ("http_options: {prt: 1}\napplications: []", "http_options.prt", "did you mean port?"),
        ("http_options: {port: 70000}\napplications:\n- {import_path: 'kvferry.serve.deployment:build'}",
         "http_options.port", "at most 65535"),
        ("http_options: 5", "http_options", "a mapping"),
        ("http_options: {}", "applications", "import_path is kvferry.serve.deployment:build"),
        ("applications: []", "applications", "exactly one"),
        ("applications:\n- {import_path: 'kvferry.serve.deployment:build', arg: {}}", "applications[0].arg", "args"),
        ("applications:\n- {import_path: 'kvferry.serve.deployment:build', args: [1]}", ARGS, "a mapping"),
        ("applications:\n- {import_path: 'kvferry.serve.deployment:build', args: []}", ARGS, "a mapping"),
        ("http_options: false\napplications: []", "http_options", "a mapping"),
    ],
)  # fmt: skip
def test_refused_at_serves_levels(tmp_path: Path, text: str, path: str, words: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    error = refused(file)
    assert error.path == path and words in error.allowed


@pytest.mark.parametrize("text", ["[]", "false", "0"])
def test_a_file_whose_root_is_no_mapping(tmp_path: Path, text: str) -> None:
    """Empty is not nothing: only an empty file stands for all defaults."""
    (file := tmp_path / "c.yaml").write_text(text)
    assert "a mapping" in refused(file).allowed


def test_files_that_are_not_there_or_not_yaml(tmp_path: Path) -> None:
    assert "readable" in refused(tmp_path / "none.yaml").allowed
    (tmp_path / "bad.yaml").write_text("a: [1, 2")
    assert refused(tmp_path / "bad.yaml").path.endswith("bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    assert "a mapping" in refused(tmp_path / "list.yaml").allowed
    (tmp_path / "twice.yaml").write_text("applications: []\nhttp_options: {port: 1}\nhttp_options: {port: 2}")
    assert "http_options" in str(refused(tmp_path / "twice.yaml"))


def test_overrides_are_checked_like_the_file(tmp_path: Path) -> None:
    assert refused(None, {"prefill.instances": 0}).path == f"{ARGS}.prefill.instances"
    assert refused(None, {"http.port": -1}).path == "http_options.port"


def test_every_number_has_a_range_and_every_rule_a_key() -> None:
    def leaves(value: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix[:-1]: value}
        found: dict[str, Any] = {}
        for name, below in value.items():
            found |= leaves(below, f"{prefix}{name}.")
        return found

    values = leaves(msgspec.to_builtins(Config()))
    ruled = RANGES.keys() | CHOICES.keys() | PATTERNS.keys()
    assert ruled <= values.keys()
    assert values.keys() - ruled == {
        "api.served_model_name", "api.keys", "api.keys_file", "cluster.secret_file", "cluster.insecure",
        "links.encrypted", "transfer.checksum", "transfer.ib_device", "prefill.stages", "decode.stages",
    }  # fmt: skip


def test_haproxy_and_an_ipv6_wildcard_contradict_each_other(tmp_path: Path) -> None:
    host = {"host": "::"}
    assert load(write(tmp_path, {}, http_options=host)).http.host == "::"
    error = refused(write(tmp_path, {"cluster": {"ingress": "haproxy"}}, http_options=host))
    assert error.path == f"{ARGS}.cluster.ingress" and "IPv4 only" in error.allowed
    assert refused(write(tmp_path, {"cluster": {"ingress": "nginx"}})).allowed.startswith("serve, haproxy")


def test_api_keys_are_never_shown(tmp_path: Path) -> None:
    """Wherever the mistake is: the message says the path and what is allowed, not the key."""
    for args, path in (
        ({"api": {"keys": ["good", "s3cret key"]}}, "api.keys[1]"),
        ({"api": {"keys": ["s3cret-\u00e9"]}}, "api.keys[0]"),
        ({"api": {"keys": "s3cret"}}, "api.keys"),
        ({"api": {"keys": [["s3cret"]]}}, "api.keys[0]"),
        ({"api": {"key": "s3cret"}}, "api.key"),
        ({"api_keys": ["s3cret"]}, "api_keys"),
    ):
        error = refused(write(tmp_path, args))
        assert error.path == f"{ARGS}.{path}" and "s3cret" not in str(error)
    config = load(write(tmp_path, {"api": {"keys": ["s3cret", "other"]}}))
    assert config.api.keys == ["s3cret", "other"]
    assert config.without_keys().api.keys == [] and config.without_keys("x").api.keys == ["x", "x"]
    assert config.without_keys(None).prefill == config.prefill


def test_serves_own_schema_takes_the_committed_file() -> None:
    tree = msgspec.yaml.decode((ROOT / "serve.yaml").read_bytes())
    deploy = schema.ServeDeploySchema.model_validate(tree)
    assert (deploy.http_options.host, deploy.http_options.port) == ("127.0.0.1", 8000)
    assert from_args(deploy.applications[0].args) == Config()
    known = {
        schema.ServeDeploySchema: SERVE_KEYS,
        schema.HTTPOptionsSchema: HTTP_KEYS,
        schema.ServeApplicationSchema: APPLICATION_KEYS,
    }
    for model, keys in known.items():
        assert set(model.model_fields) == set(keys)
