"""One step's plan as tensors: what the model and the attention backends read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvferry.engine.contract import Sequence, StepPlan
from kvferry.kernels.paged_attention import causal_mask


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences that feed one token each, at rows [first, first + B) of the step.

    block_tables [B, N] int64 (unused entries 0), lengths [B] int64.
    """

    first: int
    block_tables: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class PrefillChunk:
    """One sequence's tokens at rows [first, first + T). block_table [N] int64; mask as `causal_mask` makes it."""

    first: int
    tokens: int
    block_table: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class StepTensors:
    """All rows of one step, packed: decoding sequences first, then the chunks.

    input_ids, positions [1, T] int64; slots [T] int64 (page * page_size + offset); logits_rows [R] int64, at least
    one; `wanted` are the plan's sequence indices that those rows belong to (empty when nothing is sampled).
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[PrefillChunk, ...]
    logits_rows: torch.Tensor
    wanted: tuple[int, ...]


def _grouped(plan: StepPlan, page_size: int) -> list[list[int]]:
    """Indices of the one-token sequences, those of similar length together.

    A group is padded to its longest member, so one long sequence must not widen all the short ones; with lengths
    grouped by powers of two, less than half of what is gathered is padding.
    """
    groups: dict[int, list[int]] = {}
    for index, sequence in enumerate(plan.sequences):
        if len(sequence.token_ids) == 1:
            groups.setdefault((sequence.start // page_size + 1).bit_length(), []).append(index)
    return [groups[key] for key in sorted(groups)]


def _decode_group(first: int, members: list[Sequence], page_size: int) -> DecodeGroup:
    lengths = [member.start + 1 for member in members]
    width = -(-max(lengths) // page_size)
    tables = np.zeros((len(members), width), dtype=np.int64)
    for row, member in enumerate(members):
        used = -(-lengths[row] // page_size)
        tables[row, :used] = member.pages[:used]
    return DecodeGroup(first, torch.from_numpy(tables), torch.tensor(lengths))


def _chunk(first: int, sequence: Sequence, page_size: int) -> PrefillChunk:
    tokens = len(sequence.token_ids)
    used = -(-(sequence.start + tokens) // page_size)
    mask = causal_mask(sequence.start, tokens, torch.device("cpu"))
    return PrefillChunk(first, tokens, torch.tensor(sequence.pages[:used]), mask)


def build(plan: StepPlan, page_size: int) -> StepTensors:
    """The tensors of a checked plan, on the CPU."""
    sequences = plan.sequences
    groups = _grouped(plan, page_size)
    chunked = [index for index, sequence in enumerate(sequences) if len(sequence.token_ids) > 1]
    decodes, chunks, order, row = [], [], [], 0
    for group in groups:
        decodes.append(_decode_group(row, [sequences[index] for index in group], page_size))
        order += group
        row += len(group)
    for index in chunked:
        chunks.append(_chunk(row, sequences[index], page_size))
        order.append(index)
        row += len(sequences[index].token_ids)

    ids, positions, slots, logits_rows, wanted = [], [], [], [], []
    for index in order:
        sequence = sequences[index]
        at = np.arange(sequence.start, sequence.start + len(sequence.token_ids))
        ids.append(np.asarray(sequence.token_ids, dtype=np.int64))
        positions.append(at)
        slots.append(np.asarray(sequence.pages, dtype=np.int64)[at // page_size] * page_size + at % page_size)
        if sequence.sampling is not None:
            logits_rows.append(sum(map(len, ids)) - 1)
            wanted.append(index)
    return StepTensors(
        input_ids=torch.from_numpy(np.concatenate(ids))[None],
        positions=torch.from_numpy(np.concatenate(positions))[None],
        slots=torch.from_numpy(np.concatenate(slots)),
        decodes=tuple(decodes),
        chunks=tuple(chunks),
        logits_rows=torch.tensor(logits_rows or [0]),
        wanted=tuple(wanted),
    )
