"""Run by `test_triton_compiles.py`: compiles every kernel for each architecture without a GPU, and prints one JSON list
a line: [kernel, variant, architecture, whether the PTX names it, shared memory in bytes].
"""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvferry.kernels.paged_decode_triton import paged_decode_kernel
from kvferry.kernels.strided_copy_triton import block_of, strided_copy_kernel

CAPABILITIES = (80, 90, 100)
HEAD_SIZES = (32, 64, 80, 96, 128, 256)


def compiled(kernel, variant, signature, constants):
    signature = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    for capability in CAPABILITIES:
        source = ASTSource(kernel, signature, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        named = f"sm_{capability}" in made.asm["ptx"] and len(made.asm["cubin"]) > 0
        print(json.dumps([kernel.__name__, variant, capability, named, made.metadata.shared]), flush=True)


def paged_decode(dtype, head_dim):
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    signature = pointers | {
        "tables_ptr": "*i64", "lengths_ptr": "*i64", "table_width": "i32", "kv_heads": "i32", "scale": "fp32",
    }  # fmt: skip
    constants = {"GROUP": 3, "ROWS": 16, "PAGE": 16, "D": head_dim, "UPCAST": False}
    constants["DIMS"] = triton.next_power_of_2(head_dim)
    compiled(paged_decode_kernel, f"{dtype}, head size {head_dim}", signature, constants)


def strided_copy(word, words, entries):
    tables = ("first_ptr", "stride_ptr", "width_ptr", "packed_first_ptr", "entries_ptr")
    signature = dict.fromkeys(tables, "*i64") | {"packed_ptr": f"*i{8 * word}", "entries": "i32"}
    for gather in (True, False):
        constants = {"GATHER": gather, "ENTRIES": entries, "WORDS": words}
        compiled(
            strided_copy_kernel, f"{'gather' if gather else 'scatter'}, {words} words of {word}", signature, constants
        )


#: What a slice of one head is for values of 1 (fp8), 2 and 4 bytes: always whole words of 8 bytes; others by name.
widths = {(8, size * item // 8) for item in (1, 2, 4) for size in HEAD_SIZES} | {(4, 9), (2, 9), (1, 9)}
for word, words, entries in sorted({(word, *block_of(width, word, 4096)) for word, width in widths}):
    strided_copy(word, words, entries)
for dtype in ("fp32", "bf16", "fp16"):
    for head_dim in HEAD_SIZES:
        paged_decode(dtype, head_dim)
