"""The real model, loaded once for all tests of the engine, and small random ones."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

from kvferry.engine.loader import Loaded, load
from kvferry.engine.text import TokenizerTexts
from kvferry.engine.tokenizer import ChatTokenizer
from kvferry.engine.torch_engine import TorchEngine

torch.set_num_threads(1)  # the machine's few cores are shared, and more threads only wait for each other


@pytest.fixture
def printed_by():
    """printed_by(script, limit_s, **environment): what a script beside this file prints in a process of its own."""

    def run(script: str, limit_s: float, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(script))],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def loaded():
    """The engine takes its weights over; the tokenizer and the rest are for everyone."""
    return load("smollm2-135m")


@pytest.fixture(scope="session")
def engine(loaded):
    made = TorchEngine(loaded, pages=320, page_size=16, metadata_rows=4, threads=1, now_s=time.perf_counter)
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="session")
def chat(loaded):
    return ChatTokenizer(loaded.tokenizer)


@pytest.fixture(scope="session")
def texts(loaded):
    return TokenizerTexts(loaded.tokenizer, loaded.eos_token_ids)


TINY = {
    "vocab_size": 97,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="session")
def tiny():
    """Makes small random models of a transformers family ("Llama", "Qwen2" …). Their weights are scaled up, so that
    attention matters; still their tokens repeat and prove nothing: compare logits.
    """

    def make(family: str, config_name: str = "", **changes) -> Loaded:
        torch.manual_seed(7)
        config = getattr(transformers, f"{config_name or family}Config")(**{**TINY, **changes})
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if "embed" in name:
                parameter.mul_(30.0)
            elif parameter.ndim == 2:
                parameter.mul_(4.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        return Loaded(model, None, config, f"tiny-{family}", "1", "float32", (), 128)

    return make
