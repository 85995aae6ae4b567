"""Throughput of the fused optimizer steps, compared with a plain copy of as many bytes on the same machine.

    python -m benchmarks.kernels                       one partition of 4 MiB, then one too large for any cache
    python -m benchmarks.kernels --elements 1048576 --dtype bfloat16 --optimizers adam ftrl

A rate counts each operand once: values, slots and gradient read, values and slots written.  The copy reads and writes
the same total number of bytes, because small arrays fit in a cache and large ones do not.  Steps and copies take turns;
each figure is the median of `--repeats` runs on one thread.  `of copy` is the step's rate divided by the copy's.
"""

import argparse
import json
import mmap
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numba
import numpy as np
from benchmarks.machine import about
from benchmarks.meters import medians_s
from benchmarks.tables import number, table

from paramserver import kernels
from paramserver.core.optimizer import SegmentStep, slot_count
from paramserver.core.optimizer_spec import OPTIMIZERS, OptimizerSpec
from paramserver.types import ITEMSIZE, AnyArray

DEFAULT_ELEMENTS = (1 << 20, 25_000_000)
DEFAULT_OPTIMIZERS = ("sgd", "momentum", "adam")


def gradient(elements: int, dtype: str) -> AnyArray:
    """Return normally distributed numbers in the element type; bfloat16 as uint16."""
    g = np.random.default_rng(1).standard_normal(elements, np.float32)
    return (g.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else g.astype(dtype)


def paged(values: AnyArray) -> AnyArray:
    """Return a page-aligned copy of the values, like all memory a shard computes with."""
    page = np.frombuffer(mmap.mmap(-1, max(values.nbytes, 1)), values.dtype)
    page[:] = values
    return page


def measure(elements: int, dtype: str, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Return one row of figures for each optimizer."""
    rows = []
    w, zeros = np.random.default_rng(0).standard_normal(elements, np.float32), np.zeros(elements, np.float32)
    w, g, out = paged(w), paged(gradient(elements, dtype)), paged(zeros)
    for name in names:
        o = OptimizerSpec(name, lr=1e-3, momentum=0.9 if name in ("momentum", "nesterov") else 0.0)
        slots = [paged(zeros + 1) for _ in range(slot_count(o))]
        new = [paged(zeros) for _ in slots]
        nontemporal = kernels.exceeds_cache(o, elements)
        steps = [SegmentStep(0, elements, 1e-3)]
        step = partial(kernels.apply, o, steps, w, slots, g, dtype, out, new, nontemporal=nontemporal)
        if not step():
            raise SystemExit(f"{name} gave a result that is not finite")
        moved = (8 * (1 + len(slots)) + ITEMSIZE[dtype]) * elements
        source, target = np.ones(moved // 2, np.uint8), np.ones(moved // 2, np.uint8)
        step_s, copy_s = medians_s([step, partial(np.copyto, target, source)], repeats)
        rows.append({
            "name": name,
            "elements": elements,
            "ms": round(step_s * 1e3, 3),
            "copy_ms": round(copy_s * 1e3, 3),
            "gb_per_s": round(moved / step_s / 1e9, 1),
            "of_copy": round(copy_s / step_s, 2),
        })  # fmt: skip
    return rows


def kernel_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        [
            f"{r['name']}, {r['elements']:,} elements",
            number(r["ms"]),
            number(r["copy_ms"]),
            number(r["gb_per_s"]),
            f"{r['of_copy']:.2f}",
        ]
        for r in rows
    ]
    return table(["W5 one step on one thread", "ms", "copy of as many bytes, ms", "GB/s", "of copy"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, nargs="+", default=DEFAULT_ELEMENTS, help="elements of the partition")
    parser.add_argument("--dtype", choices=tuple(ITEMSIZE), default="float32", help="element type of the gradient")
    parser.add_argument("--optimizers", nargs="+", choices=tuple(OPTIMIZERS), default=DEFAULT_OPTIMIZERS)
    parser.add_argument("--repeats", type=int, default=15, help="runs of which the median is taken")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    options = parser.parse_args()
    if min(options.elements) < 1 or options.repeats < 1:
        parser.error("--elements and --repeats must be at least 1")

    start = time.perf_counter()
    kernels.warm_up()
    warm_s = time.perf_counter() - start
    facts = about() | {"numba": numba.__version__, "warm_up_s": f"{warm_s:.2f}", "gradient": options.dtype}
    rows = [r for n in options.elements for r in measure(n, options.dtype, list(options.optimizers), options.repeats)]
    if options.json:
        json.dump({"about": facts, "rows": rows}, sys.stdout, indent=1)
        print()
        return
    print(" · ".join(f"{k} {v}" for k, v in facts.items()))
    print(f"\n{kernel_table(rows)}")


if __name__ == "__main__":
    main()
