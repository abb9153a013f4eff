"""What a run of bench/transfer.py leaves behind: transfer.md and transfer.png."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

CASES = ("scattered_16", "contiguous_16", "scattered_64", "contiguous_64")

_HEAD = """# The data plane, measured

Written by `make transfer` (`bench/transfer.py --report docs`): one request's KV, 128 MiB in 32 layers of K and V, from
one process's pool into another's on one machine; pages of 16 tokens (32 KiB) and of 64, scattered on both sides or one
run. All contenders take turns in each round, in a new order; GB/s are medians of {rounds} rounds, ratios are
medians of what the same round gave. {cores} cores; every byte is compared in a first round.

![rates](transfer.png)

"""

_TAIL = """
## Settings of the contenders

- NIXL prepared: descriptor lists prepared once, handles of 256 pages one by one, progress thread off; default: as its
  examples, all pages in one transfer, progress thread on. `tcp`: 8 handles of 32 pages posted, `UCX_TLS=tcp` on the
  loopback device. Its `num_threads` gained nothing.
- UCXX: tag messages of 2 MiB, gathered and scattered, four under way, driven without sleeping.
- Mooncake batches: 1,024 blocks a synchronous call. Tuned: neighbours merged, single transfers, 128 posted, 8
  connections, pieces of 1 MiB.
- Ray object store: one gathered array. Ray Direct Transport by NIXL, all memory registered once: a gathered tensor, and
  a list of tensors, one for each page, from their places into their places. Ray sets the progress thread on.
- Limits: one `memmove` a page within one process; `process_vm_writev`, 1,024 pages a call; a blocking TCP connection on
  the loopback device with `sendmsg` and `recvmsg` of 256 pages.

## What keeps tcp below the raw socket

UCX sends each span as a message with a header: a system call or more at each end for every page, where the raw socket
takes 256 pages a call, straight into their places. Where pages are neighbours, spans are merged, and most of the gap
closes (compare `ucx tcp` in the contiguous columns). Segments of 256 KiB and sending from where the pages lie gain
about a tenth, so the backend sets them (`TCP_TX_SEG_SIZE`, `TCP_RX_SEG_SIZE`, `ZCOPY_THRESH`); so do looking again at
once while bytes move, and 16 MiB under way in place of 8. The sender's core is at its limit, with copies into the
socket and the loopback's own work, so what is left is a second connection with a thread at both ends, a tenth more. No
gain: other socket buffers (1 MiB loses a tenth, 256 KiB two thirds), segments of 4 to 64 KiB, 32 MiB under way. `ucxx`
gathers and scatters instead, two copies that cost about what it saves in calls.
"""


def write_report(
    folder: Path,
    rates: Mapping[str, Mapping[str, float]],
    figures: Mapping[str, object],
    out: Mapping[str, str],
    rounds: int,
) -> None:
    """`rates`: GB/s by contender and case. `figures`: the ratios, and what else `--json` has. `out`: who failed."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["| GB/s | " + " | ".join(CASES) + " |", "|---|" + "---:|" * len(CASES)]
    for name, got in rates.items():
        lines.append(f"| {name} | " + " | ".join(f"{got[case]:.2f}" if case in got else "-" for case in CASES) + " |")
    lines += ["", "| figure | |", "|---|---:|"]
    lines += [f"| `{key}` | {value:.2f} |" for key, value in figures.items() if isinstance(value, float)]
    lines += ["", f"The best peer is {figures.get('best_peer')}; over tcp, {figures.get('best_tcp_peer')}."]
    lines += [f"{name} dropped out: {why}" for name, why in out.items()]
    text = _HEAD.format(rounds=rounds, cores=os.cpu_count()) + "\n".join(lines) + "\n" + _TAIL
    (folder / "transfer.md").write_text(text)
    _picture(folder / "transfer.png", rates)


def _picture(path: Path, rates: Mapping[str, Mapping[str, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted(rates, key=lambda name: rates[name].get(CASES[0], 0.0))
    figure, axes = pyplot.subplots(figsize=(8, 0.36 * len(names) + 1.2), layout="constrained")
    for shift, case, colour in ((0.2, CASES[0], "#1f6f8b"), (-0.2, CASES[1], "#b8c9d0")):
        at = [number + shift for number in range(len(names))]
        axes.barh(
            at, [rates[name].get(case, 0.0) for name in names], 0.38, label=case.replace("_", ", page "), color=colour
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("GB/s, 128 MiB between two processes")
    axes.legend(loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
