"""Every kernel, in every dtype and head size, compiles for the architectures that count, without a GPU."""

import json

import pytest

#: Shared memory that one block may have: on sm_80 163 KiB, on sm_90 and sm_100 227 KiB (CUDA C++ programming guide).
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_every_architecture_without_a_gpu(printed_by):
    """In a process of its own: half a minute with an empty cache (~/.triton), else a few seconds."""
    made = [json.loads(line) for line in printed_by("triton_compiled.py", 880).splitlines()]
    for kernel, variant, capability, named, shared_bytes in made:
        assert named and shared_bytes <= SHARED_BYTES[capability], (kernel, variant, capability, shared_bytes)
    variants = {}
    for kernel, variant, capability, *_ in made:
        variants.setdefault((kernel, variant), []).append(capability)
    assert all(capabilities == [80, 90, 100] for capabilities in variants.values())
    sizes, dtypes = (32, 64, 80, 96, 128, 256), ("fp32", "bf16", "fp16")
    decode = {variant for kernel, variant in variants if kernel == "paged_decode_kernel"}
    assert decode == {f"{dtype}, head size {size}" for dtype in dtypes for size in sizes}
    # One head's slice of fp8, 16 and 32 bit: rounded up to powers of two, from 32 bytes to 1 KiB; and odd widths.
    copies = {(8, words) for words in (4, 8, 16, 32, 64, 128)} | {(4, 16), (2, 16), (1, 16)}
    ways = {f"{way}, {words} words of {word}" for way in ("gather", "scatter") for word, words in copies}
    assert {variant for kernel, variant in variants if kernel == "strided_copy_kernel"} == ways
