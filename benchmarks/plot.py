# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""From results/h200-*.json, draw results/*.png and write README's tables and kernels.json."""

import hashlib
import importlib
import json
import math
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RUNS = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("h200-*.json"))]
OURS, REFERENCE = "this sample", "cudaMemcpyAsync"
SIZES = {"65536": "64 KiB", "1048576": "1 MiB", "16777216": "16 MiB", "1073741824": "1 GiB"}


def read(name: str, tag: str) -> dict[tuple[str, ...], float]:
    """Return the runs' median of what NVBench reports under a tag, by kernel and size."""
    states = [s for r in RUNS for b in r["benchmarks"] if b["name"] == name for s in b["states"]]
    values = {}
    for state in states:
        for summary in state["summaries"] or []:  # a skipped state has none
            if summary["tag"] == tag:
                key = tuple(axis["value"] for axis in state["axis_values"])
                values.setdefault(key, []).append(float(summary["data"][0]["value"]))
    return {key: statistics.median(of_runs) for key, of_runs in values.items()}


def copies() -> dict[str, dict[str, tuple[float, float]]]:
    """Return, by kernel and size, GB/s and the ratio to cudaMemcpyAsync."""
    rates, seconds = {}, read("copies", "nv/cold/time/gpu/median")
    for (name, size), time in seconds.items():
        rates.setdefault(name, {})[size] = 2e-9 * int(size) / time, seconds[REFERENCE, size] / time
    return rates


def recipes() -> list[tuple[str, str, dict[str, float]]]:
    """Return each recipe with its shape, its speed, and its ratio to each other kernel."""
    rows = []
    for recipe in ("stencil", "transpose", "gemm"):
        seconds = read(recipe, "nv/cold/time/gpu/median")
        for shape in dict.fromkeys(shape for _, shape in seconds):
            own = seconds[OURS, shape]
            ratios = {n: x / own for (n, s), x in seconds.items() if s == shape and n != OURS}
            rate = math.prod(map(int, shape.split("x"))) / own
            # A GEMM multiplies and adds. Of a float32 matrix, 4 bytes are read and 4 written.
            speed = f"{2e-12 * rate:.0f} TFLOP/s" if recipe == "gemm" else f"{8e-9 * rate:.0f} GB/s"
            rows.append((f"{recipe} {shape.replace('x', ' x ')}", speed, ratios))
    return rows


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def update(readme: str) -> str:
    """Return the README with the recorded tables between their markers."""
    rows = [[n, *("{:.0f} ({:.2f})".format(*x[s]) for s in SIZES)] for n, x in copies().items()]
    noise = read("copies", "nv/cold/time/gpu/stdev/relative")
    rows.append([f"noise of {OURS}", *(f"{100 * noise[OURS, size]:.1f} %" for size in SIZES)])
    parts = {"copies": table(["GB/s", *SIZES.values()], rows)}
    rows = [[*row, ", ".join(f"{n} {x:.2f}" for n, x in r.items())] for *row, r in recipes()]
    parts["recipes"] = table(["recipe", "speed", "ratio to"], rows)
    calls = read("host", "nv/cpu_only/time/cpu/median").items()  # of 100 calls each
    parts["host"] = table(["call", "µs"], [[f"`{n}`", f"{1e4 * x:.1f}"] for (n,), x in calls])
    for name, text in parts.items():
        begin, rest = readme.split(f"<!-- {name}:begin -->\n")
        _, end = rest.split(f"<!-- {name}:end -->")
        readme = f"{begin}<!-- {name}:begin -->\n{text}\n<!-- {name}:end -->{end}"
    return readme


def kernels() -> dict[str, str]:
    """Return the SHA-256 of each measured kernel's source and macros."""
    sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]
    modules = map(importlib.import_module, ("tmaTensorMap", "stencil", "transpose", "gemm"))
    sources = {module.__name__: json.dumps([module.KERNEL, module.MACROS]) for module in modules}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sources.items()}


def draw() -> None:
    from matplotlib import pyplot

    style = {"figure.dpi": 200, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3}
    pyplot.style.use(["petroff10", {**style, "figure.constrained_layout.use": True}])
    gpu, peak = (RUNS[0]["devices"][0][key] for key in ("name", "global_memory_bus_bandwidth"))
    figure, panels = pyplot.subplots(1, 2, figsize=(8, 4.6))
    for name, rates in copies().items():
        for axes, values in zip(panels, zip(*rates.values(), strict=True), strict=True):
            style = {"linewidth": 3, "zorder": 4} if name == OURS else {"linewidth": 1.2}
            axes.semilogx([*map(int, rates)], values, "o-", base=2, label=name, **style)
            axes.set_xticks([*map(int, SIZES)], SIZES.values())
    panels[0].axhline(peak / 1e9, color="black", linestyle=":", label="peak of the memory")
    panels[0].set(title="read and written, GB/s", ylim=0)
    panels[1].set(title=f"ratio to {REFERENCE}", ylim=(0.3, 1.1))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"Device-to-device copies over the array's size, {gpu}")
    figure.savefig(RESULTS / "copies.png")

    bars = {f"{row} / {name}": x for row, _, ratios in recipes() for name, x in ratios.items()}
    figure, axes = pyplot.subplots(figsize=(8, 0.26 * len(bars) + 0.9))
    axes.bar_label(axes.barh([*bars], [*bars.values()]), fmt="%.2f", label_type="center", color="w")
    axes.axvline(1, color="black")
    axes.set_ylim(len(bars) - 0.5, -0.5)
    figure.suptitle(f"Speed of each recipe as a ratio to other kernels, {gpu}")
    figure.savefig(RESULTS / "recipes.png")


if __name__ == "__main__":
    draw()
    (RESULTS / "kernels.json").write_text(json.dumps(kernels(), indent=2) + "\n")
    (ROOT / "README.md").write_text(update((ROOT / "README.md").read_text("utf-8")), "utf-8")
