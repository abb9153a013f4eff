"""The registry's table: who may register, and when the service is ready."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from kvferry.actors.bootstrap.ranks import RankTable, group_size, place_of
from kvferry.protocol.address import Address
from kvferry.protocol.rank import Layout, RankInfo

LAYOUT = Layout("llama", "rev-a", "float32", 16, layers=30, kv_heads=6, head_dim=64, policy="early")
WANTED = {"prefill": 1, "decode": 1}


def rank(instance: str = "prefill-0", incarnation: int = 1, **fields: object) -> RankInfo:
    role = instance.split("-")[0]
    address = Address(instance, f"sim://{instance}", incarnation, "host", 10)
    return msgspec.structs.replace(RankInfo(instance, role, address, LAYOUT), **fields)


def register(table: RankTable, info: RankInfo) -> None:
    assert table.refuse(info) is None
    table.ranks[place_of(info)] = info


def ranks_of(instance: str, dp: int, cp: int, tp: int, pp: int) -> list[RankInfo]:
    """Every rank of one instance, each a process of its own."""
    sizes = {"dp_size": dp, "cp_size": cp, "tp_size": tp, "pp_size": pp}
    return [
        rank(instance, 1000 + number, dp_rank=d, cp_rank=c, tp_rank=t, pp_rank=p, **sizes)
        for number, (d, c, t, p) in enumerate(product(range(dp), range(cp), range(tp), range(pp)))
    ]


@pytest.mark.parametrize(
    ("sizes", "count"), [((1, 1, 1, 1), 1), ((2, 1, 1, 1), 2), ((1, 2, 3, 1), 6), ((2, 2, 2, 2), 16)]
)
def test_an_instance_is_complete_with_its_last_unique_rank(sizes: tuple[int, int, int, int], count: int) -> None:
    table = RankTable()
    members = ranks_of("prefill-0", *sizes)
    assert len(members) == count == group_size(members[0])
    for member in members[:-1]:
        register(table, member)
        register(table, member)  # again: it does not count twice
        assert table.missing({"prefill": 1}) == ("prefill: 0 of 1 instances are complete",)
    register(table, members[-1])
    assert table.missing({"prefill": 1}) == () and len(table.ranks) == count


def test_each_role_needs_its_number_of_complete_instances() -> None:
    table = RankTable()
    assert table.missing(WANTED) == (
        "prefill: 0 of 1 instances are complete", "decode: 0 of 1 instances are complete",
    )  # fmt: skip
    register(table, rank("prefill-0", 1))
    register(table, rank("prefill-1", 2))
    assert table.missing(WANTED) == ("decode: 0 of 1 instances are complete",)
    register(table, rank("decode-0", 3))
    assert table.missing(WANTED) == ()
    assert table.missing({"prefill": 3, "decode": 1}) == ("prefill: 2 of 3 instances are complete",)


def test_half_of_two_instances_is_no_instance() -> None:
    table = RankTable()
    register(table, rank("prefill-0", 1, tp_size=2))
    register(table, rank("prefill-1", 2, tp_size=2))
    assert table.missing({"prefill": 1}) == ("prefill: 0 of 1 instances are complete",)


@pytest.mark.parametrize(
    ("field", "ours"),
    [("model", "smollm2"), ("revision", "rev-b"), ("dtype", "bfloat16"), ("layers", 31),
     ("kv_heads", 9), ("head_dim", 128), ("policy", "prefill_complete")],
)  # fmt: skip
def test_a_rank_that_does_not_match_is_refused_with_both_values(field: str, ours: object) -> None:
    """Case 44: another dtype, other layers or heads than those that are there."""
    table = RankTable()
    register(table, rank("prefill-0", 1))
    other = rank("decode-0", 2, layout=msgspec.structs.replace(LAYOUT, **{field: ours}))
    refused = table.refuse(other)
    assert refused is not None and not refused.retry, "it can't mend itself"
    assert refused.reason == (
        f"{field} of decode-0 is {ours!r}, but prefill-0 registered with {getattr(LAYOUT, field)!r}"
    )
    assert list(table.ranks) == [("prefill-0", 0, 0, 0, 0)]


def test_another_page_size_is_refused_within_an_instance_and_nowhere_else() -> None:
    """Case 44, but for the page size: what is written is planned by tokens, whatever the pages of the two sides."""
    table = RankTable()
    register(table, rank("prefill-0", 1, tp_size=2))
    for number, name in enumerate(("decode-0", "prefill-1", "unified-0"), 2):
        register(table, rank(name, number, layout=msgspec.structs.replace(LAYOUT, page_size=8 * number)))
    mate = rank("prefill-0", 9, tp_rank=1, tp_size=2, layout=msgspec.structs.replace(LAYOUT, page_size=24))
    refused = table.refuse(mate)
    assert refused is not None and not refused.retry
    assert refused.reason == f"page_size of prefill-0 is 24, but prefill-0 registered with {LAYOUT.page_size}"


def test_the_layout_table_names_every_field_of_the_layout() -> None:
    """A field that is added to `Layout` is checked; this reminds its author of the table above."""
    assert set(Layout.__struct_fields__) == {
        "model", "revision", "dtype", "page_size", "layers", "kv_heads", "head_dim", "policy",
    }  # fmt: skip


@pytest.mark.parametrize("field", ["dp_size", "cp_size", "tp_size", "pp_size"])
def test_ranks_of_one_instance_agree_on_its_sizes(field: str) -> None:
    table = RankTable()
    register(table, rank("prefill-0", 1, **{field: 2}))
    refused = table.refuse(rank("prefill-0", 2, **{field: 3, field.replace("size", "rank"): 1}))
    assert refused is not None and refused.reason.startswith(f"{field} of prefill-0 is 3, but another rank")
    assert "with 2" in refused.reason and not refused.retry


def test_ranks_of_one_instance_agree_on_its_stages() -> None:
    table = RankTable()
    register(table, rank("prefill-0", 1, pp_size=2, stages=(14, 16)))
    refused = table.refuse(rank("prefill-0", 2, pp_size=2, pp_rank=1))
    assert refused is not None and not refused.retry
    assert refused.reason == "stages of prefill-0 is (), but another rank of it registered with (14, 16)"
    register(table, rank("prefill-0", 2, pp_size=2, pp_rank=1, stages=(14, 16)))


def test_a_second_writer_for_a_live_rank_is_refused_until_the_first_is_gone() -> None:
    table = RankTable()
    first, second = rank("decode-0", 0xAAAA), rank("decode-0", 0xBBBB)
    register(table, first)
    refused = table.refuse(second)
    assert refused is not None and refused.retry and f"{0xAAAA:016x}" in refused.reason
    assert table.ranks[place_of(first)] is first
    del table.ranks[place_of(first)]  # its link is lost
    register(table, second)


@pytest.mark.parametrize("name", ["dp", "cp", "tp", "pp"])
@pytest.mark.parametrize(("number", "size", "allowed"), [(2, 2, "0 to 1"), (-1, 2, "0 to 1"), (0, 0, "0 to -1")])
def test_a_coordinate_outside_its_size_is_refused(name: str, number: int, size: int, allowed: str) -> None:
    refused = RankTable().refuse(rank(**{f"{name}_rank": number, f"{name}_size": size}))
    assert refused is not None and not refused.retry
    assert refused.reason == f"{name}_rank is {number}; allowed: {allowed}"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp_size": 4}, "tp is 4; allowed: what divides the model's 6 KV heads, or is a multiple of them"),
        ({"pp_size": 31}, "pp is 31; allowed: at most the model's 30 layers"),
        ({"pp_size": 2, "stages": (15, 14)}, "stages are (15, 14); wanted 2 of at least 1 layer, 30 layers in all"),
    ],
)
def test_what_its_model_cannot_be_sliced_into_is_refused(fields: dict[str, object], words: str) -> None:
    refused = RankTable().refuse(rank(**fields))
    assert refused is not None and not refused.retry and refused.reason == f"prefill-0: {words}"
    assert RankTable().refuse(rank(tp_size=12, pp_size=2, stages=(1, 29))) is None


def test_one_process_holds_one_place() -> None:
    table = RankTable()
    register(table, rank("prefill-0", 5, tp_size=2))
    refused = table.refuse(rank("prefill-0", 5, tp_size=2, tp_rank=1))
    assert refused is not None and not refused.retry and "prefill-0" in refused.reason


def test_ranks_that_share_memory_are_on_one_host() -> None:
    table, far = RankTable(one_host=True), Address("decode-0", "tcp://10.0.0.2:7000", 2, "other", 10)
    register(table, rank("prefill-0", 1))
    register(table, rank("decode-1", 3))
    refusal = table.refuse(rank("decode-0", 2, address=far))
    assert refusal is not None and not refusal.retry
    assert refusal.reason == (
        "transfer.transports is host, which works within one host, but decode-0 is at tcp://10.0.0.2:7000, "
        "prefill-0 at sim://prefill-0; set it to auto or tcp"
    )
    assert table.refuse(rank("unified-0", 4, address=msgspec.structs.replace(far, incarnation=4))) is None
    anywhere = RankTable()
    register(anywhere, rank("prefill-0", 1))
    register(anywhere, rank("decode-0", 2, address=far))
