"""The only file that touches transformers' internals: our attention inside its modules.

`AttentionInterface` lets a model call a function of ours in every attention layer. No mask function is registered
under our name, so transformers builds no mask at all; and no cache object is passed, since the function keeps K
and V in our pages itself. The extra keyword arguments of the model's call reach the function unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from kvferry.engine.attention import attend
from kvferry.engine.batch import StepTensors, build
from kvferry.engine.contract import Sequence, StepPlan
from kvferry.engine.kv_pool import KVPool
from kvferry.engine.loader import DTYPES, Loaded
from kvferry.protocol.errors import ConfigError

_NAME = "kvferry"
_UNSUPPORTED_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "position_bias")
_FULL = "full_attention"
_SUPPORTED = "a causal model whose layers are all full_attention with K and V per token (Llama, Qwen2, Qwen3 …)"


class _Unsupported(Exception):
    """A layer asked for something that our attention does not do; the probe turns it into a ConfigError."""


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    kvferry_step: StepTensors,
    kvferry_pool: KVPool,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query [1, Hq, T, D], key and value [1, Hkv, T, D] to [1, T, Hq, D]."""
    unsupported = [name for name in _UNSUPPORTED_ARGUMENTS if arguments.get(name) is not None]
    if unsupported or attention_mask is not None:
        raise _Unsupported(f"layer {module.layer_idx} asks for {', '.join(unsupported) or 'a mask'}")
    layer = module.layer_idx
    out = attend(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        kvferry_pool.k[layer],
        kvferry_pool.v[layer],
        kvferry_step,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
    )
    return out[None], None


def layer_types(config: Any) -> tuple[str, ...]:
    """The kind of each layer, as the configuration tells it; a family that lists none is told by its fields."""
    listed = getattr(config, "layer_types", None)
    if listed:
        return tuple(listed)
    kind = _FULL
    if getattr(config, "kv_lora_rank", None):
        kind = "latent_attention (MLA)"
    elif getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        kind = "sliding_attention"
    return (kind,) * int(config.num_hidden_layers)


class Adapter:
    """A loaded model with our attention in it.

    Raises ConfigError, naming the layer types found, for a model that this engine can't serve yet.
    """

    def __init__(self, loaded: Loaded) -> None:
        config = loaded.config
        types = layer_types(config)
        if getattr(config, "kv_lora_rank", None) or set(types) != {_FULL}:
            raise ConfigError("model.model", f"{loaded.name} with layers {sorted(set(types))}", _SUPPORTED)
        self.layers = len(types)
        self.q_heads = int(config.num_attention_heads)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or self.q_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.q_heads)
        self.vocab_size = int(config.vocab_size)
        self.dtype = DTYPES[loaded.dtype]
        self._model = loaded.model
        transformers.AttentionInterface.register(_NAME, _attention)
        self._probe(loaded.name)

    def _probe(self, name: str) -> None:
        """Run two tokens through a pool of one page: each layer must write K and V of the shape we promise."""
        pool = self.pool(pages=1, page_size=2, metadata_rows=1)
        for pages in (*pool.k, *pool.v):
            pages.fill_(torch.nan)
        sequence = Sequence(key=0, token_ids=(0, 0), start=0, pages=(0,))
        try:
            self._model.set_attn_implementation(_NAME)
            self.forward(build(StepPlan(step=0, sequences=(sequence,)), 2), pool)
        except (_Unsupported, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError("model.model", f"{name} ({error})", _SUPPORTED) from error
        silent = [at for at, pair in enumerate(zip(pool.k, pool.v, strict=True)) if any(p.isnan().any() for p in pair)]
        if silent:
            raise ConfigError("model.model", f"{name}: layers {silent} keep no K and V", _SUPPORTED)

    def pool(self, *, pages: int, page_size: int, metadata_rows: int, shared: bool = False) -> KVPool:
        return KVPool(
            layers=self.layers,
            pages=pages,
            page_size=page_size,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            metadata_rows=metadata_rows,
            shared=shared,
        )

    @torch.inference_mode()
    def forward(self, step: StepTensors, pool: KVPool) -> torch.Tensor:
        """Run one step; K and V land in the pool. Returns the logits [R, vocab] float32 of `step.logits_rows`."""
        output = self._model(
            input_ids=step.input_ids,
            position_ids=step.positions,
            use_cache=False,
            logits_to_keep=step.logits_rows,
            kvferry_step=step,
            kvferry_pool=pool,
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits
