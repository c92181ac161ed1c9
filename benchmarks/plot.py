# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""From results/h200.json, draw results/*.png and write the README's tables and kernels.json.

python benchmarks/plot.py
"""

import hashlib
import importlib
import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SECONDS = "nv/cold/time/gpu/median"
SAMPLE, RECIPE, REFERENCE = "this sample", "this recipe", "cudaMemcpyAsync"
SIZES = {"64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24, "1 GiB": 2**30}
# Okabe and Ito's colors, which color-blind readers can tell apart.
COLORS = ["#D55E00", "#000000", "#56B4E9", "#009E73", "#777777", "#CC79A7", "#E69F00"]
COLORS += ["#F0E442", "#0072B2"]


def read(results: Path, benchmark: str, tag: str) -> dict[tuple, float]:
    """Return what NVBench reports under a tag, by kernel and size."""
    recorded = json.loads((results / "h200.json").read_text(encoding="utf-8"))["benchmarks"]
    (states,) = (found["states"] for found in recorded if found["name"] == benchmark)
    values = {}
    for state in (state for state in states if not state.get("is_skipped")):
        point = {axis["name"]: axis["value"] for axis in state["axis_values"]}
        kernel = point.get("Copy") or point.get("Kernel") or point["Call"]
        (data,) = (summary["data"] for summary in state["summaries"] if summary["tag"] == tag)
        (value,) = (float(field["value"]) for field in data if field["name"] == "value")
        size = int(point["Bytes"]) if "Bytes" in point else point.get("Shape")
        values[kernel, size] = value
    return values


def copy_rates(results: Path) -> dict[tuple, float]:
    """Return bytes read and written per second, by kernel and size."""
    seconds = read(results, "copies", SECONDS)
    return {(kernel, size): 2 * size / x for (kernel, size), x in seconds.items()}


def recipes(results: Path) -> list[tuple[str, str, dict[str, float]]]:
    """Return each recipe with its shape, its speed, and its ratio to each other kernel."""
    rows = []
    for recipe in ("stencil", "transpose", "gemm"):
        gemm = recipe == "gemm"
        seconds = read(results, recipe, SECONDS)
        # Floating-point operations, or bytes of a float32 matrix that is read and written once.
        factor = 2 if gemm else 8
        work = {s: factor * math.prod(map(int, s.split("x"))) for _, s in seconds}
        speeds = {(kernel, s): work[s] / x for (kernel, s), x in seconds.items()}
        for shape in dict.fromkeys(shape for _, shape in speeds):
            own = speeds[RECIPE, shape]
            others = {k: own / x for (k, s), x in speeds.items() if s == shape and k != RECIPE}
            speed = f"{own / 1e12:.0f} TFLOP/s" if gemm else f"{own / 1e9:.0f} GB/s"
            rows.append((f"{recipe} {shape.replace('x', ' x ')}", speed, others))
    return rows


def tables(results: Path) -> dict[str, str]:
    """Return the README's tables by the names in its markers."""
    rates = copy_rates(results)
    rows = [["GB/s", *SIZES]]
    for name in dict.fromkeys(name for name, _ in rates):
        pairs = [(rates.get((name, size)), rates[REFERENCE, size]) for size in SIZES.values()]
        rows.append([name, *(f"{x / 1e9:.0f} ({x / y:.2f})" if x else "" for x, y in pairs)])
    noise = read(results, "copies", "nv/cold/time/gpu/stdev/relative")
    percents = [f"{100 * noise[SAMPLE, size]:.1f} %" for size in SIZES.values()]
    rows.append([f"noise of {SAMPLE}", *percents])
    compared = [["recipe", "speed", "ratio to"]]
    for name, speed, others in recipes(results):
        compared.append([name, speed, ", ".join(f"{k} {x:.2f}" for k, x in others.items())])
    per_second = read(results, "host", "nv/cpu_only/bw/item_rate")
    calls = [[f"`{call}`", f"{1e6 / rate:.1f}"] for (call, _), rate in per_second.items()]
    parts = {"copies": rows, "recipes": compared, "host": [["call", "µs"], *calls]}
    for part in parts.values():
        part.insert(1, ["---"] * len(part[0]))
    return {n: "\n".join(f"| {' | '.join(row)} |" for row in part) for n, part in parts.items()}


def update(readme: str, parts: dict[str, str]) -> str:
    """Return the README with each table between its markers."""
    for name, text in parts.items():
        begin, rest = readme.split(f"<!-- {name}:begin -->\n")
        _, end = rest.split(f"<!-- {name}:end -->")
        readme = f"{begin}<!-- {name}:begin -->\n{text}\n<!-- {name}:end -->{end}"
    return readme


def kernels() -> dict[str, str]:
    """Return the SHA-256 of each measured kernel's source and macros."""
    sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]
    names = ("tmaTensorMap", "stencil", "transpose", "gemm")
    modules = {name: importlib.import_module(name) for name in names}
    sources = {name: json.dumps([m.KERNEL, m.MACROS]) for name, m in modules.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sources.items()}


def draw(results: Path) -> None:
    from matplotlib import pyplot

    style = {"figure.dpi": 200, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}
    pyplot.rcParams.update({**style, "figure.constrained_layout.use": True})
    gpu = json.loads((results / "h200.json").read_text(encoding="utf-8"))["devices"][0]
    rates = copy_rates(results)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 4.6))
    for name, color in zip(dict.fromkeys(name for name, _ in rates), COLORS, strict=False):
        sizes = sorted(size for other, size in rates if other == name)
        front = {"linewidth": 3, "zorder": 4} if name == SAMPLE else {"linewidth": 1.2}
        style = {"color": color, "marker": "o", "markersize": front["linewidth"] + 2, **front}
        left.plot(sizes, [rates[name, size] / 1e9 for size in sizes], **style, label=name)
        right.plot(sizes, [rates[name, n] / rates[REFERENCE, n] for n in sizes], **style)
    peak = float(gpu["global_memory_bus_bandwidth"]) / 1e9
    left.axhline(peak, color="#555555", linestyle=":", label=f"memory peak, {peak:.0f} GB/s")
    left.set(title="read and written, GB/s", ylim=(0, peak * 1.05))
    right.set(title=f"ratio to {REFERENCE}", ylim=(0.3, 1.1))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(SIZES.values()), list(SIZES))
    figure.suptitle(f"Device-to-device copies over the array's size, {gpu['name']}")
    figure.legend(loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(results / "copies.png")

    bars = [(f"{n} / {k}", x) for n, _, others in recipes(results) for k, x in others.items()]
    figure, axes = pyplot.subplots(figsize=(8, 0.26 * len(bars) + 0.9))
    labels, ratios = zip(*bars, strict=True)
    colors = {"stencil": COLORS[8], "transpose": COLORS[3], "gemm": COLORS[0]}
    drawn = axes.barh(labels, ratios, color=[colors[label.split()[0]] for label in labels])
    axes.axvline(1, color="black", linewidth=1)
    axes.bar_label(drawn, fmt="%.2f", label_type="center", color="white", fontsize=9)
    axes.margins(x=0.1, y=0.01)
    axes.invert_yaxis()
    figure.suptitle(f"Speed of each recipe as a ratio to other kernels, {gpu['name']}")
    figure.savefig(results / "recipes.png")


if __name__ == "__main__":
    draw(RESULTS)
    (RESULTS / "kernels.json").write_text(json.dumps(kernels(), indent=2) + "\n")
    readme = ROOT / "README.md"
    readme.write_text(update(readme.read_text("utf-8"), tables(RESULTS)), "utf-8")
