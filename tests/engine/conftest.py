"""The real model, loaded once for all tests of the engine."""

import asyncio
import time

import pytest

from kvferry.engine.loader import load
from kvferry.engine.text import TokenizerTexts
from kvferry.engine.tokenizer import ChatTokenizer
from kvferry.engine.torch_engine import TorchEngine


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
