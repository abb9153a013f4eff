"""Linear layers cut down to one rank's part (Megatron-LM: Shoeybi et al., 2019), whatever model they are in.

A layer cut by rows gives its rank's part of the outputs. One cut by columns takes such a part as its input and gives a
part of a sum, which `SummedLinear` adds up over the ranks; its bias is added once, after that.
"""

from __future__ import annotations

import torch
from torch import nn

from kvferry.engine.group import Group


def keep_rows(linear: nn.Linear, first: int, count: int) -> None:
    """Of the outputs, [first, first + count) only. The rest of the weight is given back."""
    linear.out_features = count
    linear.weight = _kept(linear.weight, 0, first, count)
    if linear.bias is not None:
        linear.bias = _kept(linear.bias, 0, first, count)


def keep_columns(linear: nn.Linear, first: int, count: int) -> None:
    """Of the inputs, [first, first + count) only."""
    linear.in_features = count
    linear.weight = _kept(linear.weight, 1, first, count)


def _kept(parameter: torch.Tensor, axis: int, first: int, count: int) -> nn.Parameter:
    return nn.Parameter(parameter.detach().narrow(axis, first, count).clone(), requires_grad=False)


class SummedLinear(nn.Module):
    """A linear layer cut by columns, whose outputs [..., out] are added up over the ranks of a stage."""

    def __init__(self, linear: nn.Linear, group: Group) -> None:
        super().__init__()
        self._bias = None if linear.bias is None else linear.bias.detach()
        linear.register_parameter("bias", None)
        self.part = linear
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self._group.sum(self.part(x))
        return whole if self._bias is None else whole + self._bias
