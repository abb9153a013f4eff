"""The registry and the routers start without what only a model needs."""

from __future__ import annotations

import subprocess
import sys


def test_no_role_imports_torch_before_it_loads_a_model() -> None:
    code = "import sys, kvferry.cluster.roles; print({'torch', 'transformers', 'nixl_cu12'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
