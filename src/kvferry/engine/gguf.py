"""Read a llama-like GGUF file into the tensors and the configuration of transformers' Llama.

llama.cpp stores the rotary dimensions of q and k interleaved (pairs next to each other) where transformers
expects them in halves; the rows of those two projections are put back here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

from kvferry.protocol.errors import ConfigError

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """transformers' name of a tensor that GGUF calls `name`. Raises KeyError for one that Llama does not have."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    block, layer, part, kind = name.split(".")
    if block != "blk":
        raise KeyError(name)
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a q or k projection [heads * D, in] from rotary pairs to rotary halves."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


class LlamaGguf:
    """One open GGUF file of architecture "llama". Raises ConfigError for any other architecture."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise ConfigError(f"{path} general.architecture", architecture, "llama")

    def _field(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def config(self) -> dict[str, Any]:
        """The keyword arguments of `transformers.LlamaConfig`."""
        heads = self._field("llama.attention.head_count")
        hidden = self._field("llama.embedding_length")
        names = {tensor.name for tensor in self._reader.tensors}
        return {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": hidden,
            "intermediate_size": self._field("llama.feed_forward_length"),
            "num_hidden_layers": self._field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._field("llama.attention.head_count_kv", heads),
            "head_dim": self._field("llama.rope.dimension_count", hidden // heads),
            "max_position_embeddings": self._field("llama.context_length"),
            "rms_norm_eps": self._field("llama.attention.layer_norm_rms_epsilon"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self._field("llama.rope.freq_base", 10000.0),
            },
            "vocab_size": self._field("llama.vocab_size", len(self._field("tokenizer.ggml.tokens", ()))),
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._field("tokenizer.ggml.padding_token_id"),
            "tie_word_embeddings": "output.weight" not in names,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """All weights by transformers' names, float32, contiguous."""
        config = self.config()
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        result = {}
        for tensor in self._reader.tensors:
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            part = tensor.name.split(".")[-2]
            if part in heads:
                weight = unpermute(weight, heads[part])
            result[hf_name(tensor.name)] = torch.from_numpy(np.array(weight, order="C", copy=True))
        return result
