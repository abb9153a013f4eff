"""The only file that touches transformers' internals: our attention inside its modules.

`AttentionInterface` lets a model call a function of ours in every attention layer. No mask function is registered
under our name, so transformers builds no mask at all; and no cache object is passed, since the function keeps K
and V in our pages itself. The extra keyword arguments of the model's call reach the function unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from kvferry.engine.attention import attend
from kvferry.engine.batch import StepTensors, build
from kvferry.engine.contract import RanksLost, Sequence, StepPlan
from kvferry.engine.group import HIDDEN, RESULT, Group
from kvferry.engine.kv_pool import KVPool
from kvferry.engine.loader import DTYPES, Loaded
from kvferry.engine.sharding import SummedLinear, keep_columns, keep_rows
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.rank import LEADER, Layout, Slice, share, slice_of, whole

_NAME = "kvferry"
_UNSUPPORTED_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "position_bias")
_FULL = "full_attention"
_SUPPORTED = "a causal model whose layers are all full_attention with K and V per token (Llama, Qwen2, Qwen3 …)"


@dataclass(frozen=True)
class Shard:
    """What a rank has of a model, and who has the rest."""

    part: Slice
    group: Group


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
        kvferry_pool.k[layer - kvferry_pool.first_layer],
        kvferry_pool.v[layer - kvferry_pool.first_layer],
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


def _kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def layout_of(loaded: Loaded, page_size: int) -> Layout:
    """Of the whole model, whatever a rank has of it."""
    config = loaded.config
    q_heads = int(config.num_attention_heads)
    return Layout(
        model=loaded.name,
        revision=loaded.revision,
        dtype=loaded.dtype,
        page_size=page_size,
        layers=len(layer_types(config)),
        kv_heads=_kv_heads(config),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // q_heads),
    )


class Adapter:
    """A loaded model, or a rank's part of one, with our attention in it.

    With `shard`, what `cut` has made of the model, all ranks of its group must do together whatever runs a forward, the
    making of the adapter included, and RanksLost may be raised. Raises ConfigError, naming the layer types found, for a
    model that this engine can't serve yet.
    """

    def __init__(self, loaded: Loaded, shard: Shard | None = None) -> None:
        config = loaded.config
        types = layer_types(config)
        if getattr(config, "kv_lora_rank", None) or set(types) != {_FULL}:
            raise ConfigError("model.model", f"{loaded.name} with layers {sorted(set(types))}", _SUPPORTED)
        self.vocab_size = int(config.vocab_size)
        self.hidden_size = int(config.hidden_size)
        self.dtype = DTYPES[loaded.dtype]
        layout = layout_of(loaded, page_size=1)
        self._head_dim = layout.head_dim
        self._part = whole(layout) if shard is None else shard.part
        self._group = None if shard is None else shard.group
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
        except RanksLost:
            raise
        except (_Unsupported, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError("model.model", f"{name} ({error})", _SUPPORTED) from error
        silent = [at for at, pair in enumerate(zip(pool.k, pool.v, strict=True)) if any(p.isnan().any() for p in pair)]
        if silent:
            raise ConfigError("model.model", f"{name}: layers {silent} keep no K and V", _SUPPORTED)

    def pool(self, *, pages: int, page_size: int, metadata_rows: int, shared: bool = False) -> KVPool:
        return KVPool(
            part=self._part,
            pages=pages,
            page_size=page_size,
            head_dim=self._head_dim,
            dtype=self.dtype,
            metadata_rows=metadata_rows,
            shared=shared,
        )

    @torch.inference_mode()
    def forward(self, step: StepTensors, pool: KVPool) -> torch.Tensor | None:
        """Run one step; K and V land in the pool. Returns the logits [R, vocab] float32 of `step.logits_rows`; of an
        instance's ranks, its leader has them, and the others None.
        """
        arguments = {"position_ids": step.positions, "use_cache": False, "kvferry_step": step, "kvferry_pool": pool}
        if self._group is not None:
            rows = self._stage(self._group, step, arguments)
            return None if rows is None else self._model.get_output_embeddings()(rows).float()
        output = self._model(input_ids=step.input_ids, logits_to_keep=step.logits_rows, **arguments)
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _stage(self, group: Group, step: StepTensors, arguments: dict[str, Any]) -> torch.Tensor | None:
        """This rank's part of a forward. At the leader: the hidden states [R, hidden] that the logits are made of.

        All ranks of a stage have the same hidden states, so each hands them to its like in the next one.
        """
        place = group.place
        if place.is_first_stage:
            arguments["input_ids"] = step.input_ids
        else:
            all_rows = (1, step.input_ids.shape[1], self.hidden_size)
            arguments["inputs_embeds"] = group.receive(all_rows, self.dtype, place.rank - place.tp_size, HIDDEN)
        hidden: torch.Tensor = self._model.get_decoder()(**arguments).last_hidden_state
        if not place.is_last_stage:
            group.send(hidden, place.rank + place.tp_size, HIDDEN)
            if place.rank != LEADER:
                return None
            wanted, last = (len(step.logits_rows), self.hidden_size), place.ranks - place.tp_size
            return group.receive(wanted, self.dtype, last, RESULT)
        rows = hidden[0, step.logits_rows]
        if place.pp_size > 1 and place.tp_rank == 0:
            group.send(rows, LEADER, RESULT)
        return rows if place.rank == LEADER else None


#: Families whose modules `cut` knows: separate q, k, v, gate and up projections, and norms that span no heads.
SHARDED = ("llama", "mistral", "qwen2", "qwen3")


def check_split(config: Any, tp: int, pp: int, stages: tuple[int, ...] = (), where: str = "") -> None:
    """Raises ConfigError for `tp`, `pp` or `stages` that the model can't be cut into; `where` stands before the key."""
    layers = len(layer_types(config))
    if stages and (len(stages) != pp or min(stages) < 1 or sum(stages) != layers):
        allowed = f"none, or {pp} of at least 1 layer each, which make the model's {layers} layers"
        raise ConfigError(f"{where}stages", list(stages), allowed)
    if tp * pp == 1:
        return
    key, value = ("tp", tp) if tp > 1 else ("pp", pp)
    if config.model_type not in SHARDED:
        raise ConfigError(
            where + key, value, f"1 for a model of type {config.model_type}; more for {', '.join(SHARDED)}"
        )
    q_heads, kv_heads = config.num_attention_heads, _kv_heads(config)
    if q_heads % tp or (kv_heads % tp and tp % kv_heads):
        allowed = (
            f"what divides the {q_heads} query heads, and divides the {kv_heads} KV heads or is a multiple of them"
        )
        raise ConfigError(f"{where}tp", tp, allowed)
    if pp > layers:
        raise ConfigError(f"{where}pp", pp, f"at most the model's {layers} layers")


def cut(loaded: Loaded, group: Group) -> Shard:
    """Cut a model down, in place, to what its rank computes.

    Layers by stage; within one, heads and the inner rows of the MLP by rank. The first stage has the embedding, the
    last one the final norm, and the leader the output embedding. Raises ConfigError (`check_split`).
    """
    place, layout = group.place, layout_of(loaded, page_size=1)
    check_split(loaded.config, place.tp_size, place.pp_size, place.stages)
    part = slice_of(layout, place.tp_rank, place.tp_size, place.pp_rank, place.pp_size, stages=place.stages)
    decoder = loaded.model.get_decoder()
    decoder.layers = torch.nn.ModuleList(decoder.layers[part.first_layer : part.first_layer + part.layers])
    if place.tp_size > 1:
        for layer in decoder.layers:
            _cut_layer(layer, loaded.config, layout.head_dim, part, group)
    if not place.is_first_stage:
        decoder.embed_tokens = torch.nn.Identity()
    if not place.is_last_stage:
        decoder.norm = torch.nn.Identity()
    if place.rank != LEADER:
        loaded.model.lm_head = torch.nn.Identity()
    return Shard(part, group)


def _cut_layer(layer: Any, config: Any, width: int, part: Slice, group: Group) -> None:
    """`width` of a head."""
    place = group.place
    q_heads = config.num_attention_heads // place.tp_size
    attention, mlp = layer.self_attn, layer.mlp
    queries = (place.tp_rank * q_heads * width, q_heads * width)
    inner = share(config.intermediate_size, place.tp_rank, place.tp_size)
    keep_rows(attention.q_proj, *queries)
    for projection in (attention.k_proj, attention.v_proj):
        keep_rows(projection, part.first_head * width, part.heads * width)
    for projection in (mlp.gate_proj, mlp.up_proj):
        keep_rows(projection, *inner)
    keep_columns(attention.o_proj, *queries)
    keep_columns(mlp.down_proj, *inner)
    attention.o_proj = SummedLinear(attention.o_proj, group)
    mlp.down_proj = SummedLinear(mlp.down_proj, group)
