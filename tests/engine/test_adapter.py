"""Whole models through our attention: logits against one full forward without any cache."""

import pytest
import torch

from kvferry.engine.adapter import Adapter
from kvferry.engine.batch import build
from kvferry.engine.contract import Sequence, StepPlan
from kvferry.engine.patches import FusedRMSNorm, PackedLinear, fuse_rms_norms, pack_linears
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.request import Sampling

FAMILIES = ["Llama", "Qwen2", "Qwen3", "Olmo2", "Phi3"]
EXTRA = {"Phi3": {"pad_token_id": 0}}
TABLES = ((9, 2, 17, 5, 11, 14, 18), (0, 3, 8, 1, 6, 19, 16), (4, 7, 10, 12, 13, 15))
LENGTHS = (21, 8, 1)  # tokens of the three sequences before decoding; pages of 4
CHUNKS = ((9, 4, 8), (8,), (1,))
WANT = Sampling(max_tokens=1)


@torch.inference_mode()
def full_logits(loaded, sequences):
    return [loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences]


def paged_logits(adapter, sequences):
    """Logits of every position that we ask for: chunks packed across sequences, then decoding together."""
    pool = adapter.pool(pages=20, page_size=4, metadata_rows=1)
    fed, got = [0, 0, 0], [{}, {}, {}]
    for turn in range(3 + 5):
        parts = []
        for key, ids in enumerate(sequences):
            if turn < 3:
                count = CHUNKS[key][turn] if turn < len(CHUNKS[key]) else 0
            else:
                count = 1
            if count:
                part = ids[fed[key] : fed[key] + count]
                parts.append(Sequence(key, tuple(part), fed[key], TABLES[key], WANT))
                fed[key] += count
        tensors = build(StepPlan(turn, tuple(parts)), 4)
        for row, wanted in zip(adapter.forward(tensors, pool), tensors.wanted, strict=True):
            got[parts[wanted].key][fed[parts[wanted].key] - 1] = row
    return got


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_chunks_and_paged_decode_give_the_logits_of_a_full_forward(tiny, family, patched):
    loaded = tiny(family, **EXTRA.get(family, {}))
    random = torch.Generator().manual_seed(1)
    sequences = [torch.randint(97, (length + 5,), generator=random).tolist() for length in LENGTHS]
    expected = full_logits(loaded, sequences)
    assert expected[0].std() > 0.5  # or the comparison would prove nothing
    if patched:
        assert pack_linears(loaded.model) > 0
        fuse_rms_norms(loaded.model)
    got = paged_logits(Adapter(loaded), sequences)
    assert [len(rows) for rows in got] == [3 + 5, 1 + 5, 1 + 5]
    for key, rows in enumerate(got):
        for position, row in rows.items():
            torch.testing.assert_close(row, expected[key][position], atol=5e-4, rtol=0)


def test_patches_replace_what_they_claim_and_keep_the_logits(tiny):
    loaded, ids = tiny("Llama"), list(range(40))
    (plain,) = full_logits(loaded, [ids])
    assert fuse_rms_norms(loaded.model) == 2 * 3 + 1
    (fused,) = full_logits(loaded, [ids])
    assert pack_linears(loaded.model) == 7 * 3 + 1
    (packed,) = full_logits(loaded, [ids])
    torch.testing.assert_close(fused, plain, atol=5e-5, rtol=0)
    torch.testing.assert_close(packed, plain, atol=5e-5, rtol=0)
    kinds = {type(module) for module in loaded.model.modules()}
    assert {PackedLinear, FusedRMSNorm} <= kinds and torch.nn.Linear not in kinds


def test_norms_that_are_not_plain_and_weights_that_are_not_float32_stay(tiny):
    gemma = tiny("Gemma")
    assert fuse_rms_norms(gemma.model) == 0
    assert pack_linears(tiny("Llama").model.bfloat16()) == 0


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("Mistral", {"sliding_window": 8}, "sliding_attention"),
        ("Gemma3", {"config_name": "Gemma3Text"}, "sliding_attention"),
        ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "conv"),
        ("DeepseekV3", {"kv_lora_rank": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}, "MLA"),
        ("Gemma2", {"layer_types": ["full_attention"] * 3}, "softcap"),
    ],
)
def test_models_with_other_layers_are_refused_by_their_layer_types(tiny, family, changes, named):
    with pytest.raises(ConfigError, match=named) as caught:
        Adapter(tiny(family, **changes))
    assert "full_attention" in caught.value.allowed
