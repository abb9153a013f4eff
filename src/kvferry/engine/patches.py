"""Faster modules for a CPU, put in place of transformers' own. Each can be left out; none changes a result by more
than the last bits of a float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's blocked order (float32, CPU).

    MKL's matrix product is slow for 2 to 32 rows; oneDNN's takes half of its time there, and no more elsewhere.
    Keeps only the packed weight.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return result


class FusedRMSNorm(nn.Module):
    """torch's own RMS norm in one call instead of six."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self._weight, self._eps = weight.detach(), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, self._weight.shape, self._weight, self._eps)


def _is_plain_rms_norm(module: nn.Module) -> bool:
    """Whether `module` computes x / rms(x) * weight: tried, not read off its name (some families add 1 to the
    weight).
    """
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or eps is None:
        return False
    x = torch.linspace(-2.0, 3.0, weight.shape[0], dtype=weight.dtype)[None]
    return torch.allclose(module(x), nn.functional.rms_norm(x, weight.shape, weight, eps), rtol=1e-5, atol=1e-6)


def pack_linears(model: Any) -> int:
    """Replace every float32 CPU linear; returns how many. Does nothing where torch has no oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    return _replace(model, _packed)


def _packed(module: nn.Module) -> nn.Module | None:
    if type(module) is not nn.Linear or module.weight.dtype != torch.float32 or module.weight.device.type != "cpu":
        return None
    return PackedLinear(module)


def fuse_rms_norms(model: Any) -> int:
    """Replace every plain RMS norm; returns how many."""
    return _replace(model, _fused)


def _fused(module: nn.Module) -> nn.Module | None:
    if not _is_plain_rms_norm(module):
        return None
    weight, eps = module.weight, module.variance_epsilon
    assert isinstance(weight, torch.Tensor) and isinstance(eps, float)
    return FusedRMSNorm(weight, eps)


def _replace(model: Any, substitute: Callable[[nn.Module], nn.Module | None]) -> int:
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            better = substitute(child)
            if better is not None:
                setattr(parent, name, better)
                replaced += 1
    return replaced


def apply_cpu_patches(model: Any) -> None:
    """All of them, in place."""
    with torch.inference_mode():
        pack_linears(model)
        fuse_rms_norms(model)
