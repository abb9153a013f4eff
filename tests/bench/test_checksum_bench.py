"""What bench/checksum.py moves and reads."""

from types import SimpleNamespace

from checksum import CHUNK, PAGE, PAGES, chunks, pool_of_kv

from kvferry.transfer.spans import check_spans, total_bytes


def test_a_prompt_is_all_its_pages_of_the_model_in_chunks():
    """SmolLM2-135M: K and V of 30 layers, 3 heads of 64 values of 4 bytes; 1,000 tokens are 63 pages of 16."""
    site = SimpleNamespace(regions=pool_of_kv().regions())
    parts = chunks(site)
    page_bytes = 2 * 30 * 16 * 3 * 64 * 4
    assert [total_bytes(part) for part in parts] == [16 * page_bytes] * 3 + [15 * page_bytes]
    assert (CHUNK // PAGE, PAGES) == (16, 63)
    for part in parts:
        check_spans(part, site.regions, site.regions)
