"""The torch twin against attention worked out densely in float64, and the Triton kernel against the twin."""

import pytest
import torch

from kvferry.kernels.paged_attention import causal_mask, paged_decode, paged_prefill, write_kv


def dense(q, k, v, scale):
    """q [T, Hq, D] are the last T of the L positions of k, v [L, Hkv, D]; one head and one query at a time."""
    out = torch.empty_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for row in range(q.shape[0]):
        reads = k.shape[0] - q.shape[0] + row + 1
        for head in range(q.shape[1]):
            keys, values = k[:reads, head // group].double(), v[:reads, head // group].double()
            out[row, head] = torch.softmax(keys @ q[row, head].double() * scale, 0) @ values
    return out.float()


def pages_of(k, v, table, pages=13, page_size=4):
    """A pool full of garbage in which `table` holds k and v."""
    pools = [torch.full((pages, page_size, *k.shape[1:]), 1e4) for _ in "kv"]
    positions = torch.arange(len(k))
    slots = torch.tensor(table)[positions // page_size] * page_size + positions % page_size
    write_kv(pools[0], pools[1], k, v, slots)
    return pools


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("tokens", "length"), [(1, 1), (4, 4), (5, 5), (3, 11), (1, 8), (8, 9), (2, 16)])
def test_a_chunk_reads_all_positions_up_to_its_own(q_heads, kv_heads, tokens, length):
    q, k, v = torch.randn(tokens, q_heads, 8), torch.randn(length, kv_heads, 8), torch.randn(length, kv_heads, 8)
    table = [7, 2, 11, 4][: -(-length // 4)]
    k_pages, v_pages = pages_of(k, v, table)
    mask = causal_mask(length - tokens, tokens, q.device)
    out = paged_prefill(q, k_pages, v_pages, torch.tensor(table), mask, 0.3)
    torch.testing.assert_close(out, dense(q, k, v, 0.3), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_decode_reads_each_sequences_own_pages_and_length(q_heads, kv_heads):
    lengths, tables = [1, 4, 5, 12], [[3, 0, 0], [5, 0, 0], [9, 1, 0], [12, 2, 7]]
    k_pages, v_pages = torch.full((2, 13, 4, kv_heads, 8), 1e4)
    q = torch.randn(4, q_heads, 8)
    expected = []
    for row, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        k, v = torch.randn(2, length, kv_heads, 8)
        positions = torch.arange(length)
        write_kv(k_pages, v_pages, k, v, torch.tensor(table)[positions // 4] * 4 + positions % 4)
        expected.append(dense(q[row : row + 1], k, v, 0.3))
    out = paged_decode(q, k_pages, v_pages, torch.tensor(tables), torch.tensor(lengths), 0.3)
    torch.testing.assert_close(out, torch.cat(expected), atol=2e-6, rtol=1e-5)


def test_write_kv_touches_its_slots_only():
    k_pages, v_pages = torch.zeros(2, 3, 4, 2, 8)
    write_kv(k_pages, v_pages, torch.ones(2, 2, 8), 2 * torch.ones(2, 2, 8), torch.tensor([5, 11]))
    assert k_pages.view(12, -1).sum(1).tolist() == [0] * 5 + [16] + [0] * 5 + [16]
    assert v_pages.view(12, -1).sum(1).tolist() == [0] * 5 + [32] + [0] * 5 + [32]


def test_the_triton_kernel_interpreted_equals_the_twin(printed_by):
    printed = printed_by("triton_interpreted.py", 200, TRITON_INTERPRET="1")
    assert printed.split() == ["float32", "float16", "bfloat16"]
