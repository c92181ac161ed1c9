# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Measure the sample: its kernel against other copies, its descriptor, and its first seconds.

    python benchmarks/copyBandwidth.py [--quick] [--json FILE] [--plot FILE] [--device N]

All copies run in one process, on the same buffers, in an order shuffled anew in every round, and
are checked bit for bit before they are timed. GB/s counts the bytes read and the bytes written.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
try:
    import tmaTensorMap as sample

    utils = sample.utils
except (ImportError, AttributeError):  # not there, or another
    utils = None  # main() says so

if TYPE_CHECKING:
    import cupy
    from cuda.core import Device, Kernel, Stream

    Copy = Callable[[], object]  # starts one copy on the stream
    Bind = Callable[[cupy.ndarray, cupy.ndarray], Copy]  # (source, target), both 1-D float32

KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES = [64 * KIB * 4**step for step in range(9)]  # bytes of one array: 64 KiB to 4 GiB
QUICK_SIZES = [MIB, 64 * MIB, GIB]
ROUNDS, QUICK_ROUNDS = 40, 10
WARM_UP_ROUNDS = 3
PROCESS_RUNS = 9  # of the whole script, cold and warm each
GROWTH_RUNS = 3  # of the whole script, at each size
GROWTH_ELEMENTS = [2**10, 2**20, 2**26, 2**30, 2**32]
GRAPH_UP_TO = 256 * MIB  # larger copies are timed one by one on the stream
REFERENCE = "cudaMemcpyAsync"
SHIPPED = "this sample"
TEXTBOOK = "textbook TMA"
PLAIN = "plain loads"

TEXTBOOK_SOURCE = r"""
#include <cuda/barrier>
#include <cuda/ptx>

struct alignas(128) TensorMap { unsigned char bytes[128]; };
using Barrier = cuda::barrier<cuda::thread_scope_block>;
#pragma nv_diag_suppress static_var_with_dynamic_init

// One tile a block, a thread an element, and every thread arrives: 512 bytes in flight a block.
extern "C" __global__ void textbook_copy(const __grid_constant__ TensorMap tensor_map,
                                         float* output)
{
    __shared__ alignas(128) float tile[TILE_ELEMENTS];
    __shared__ Barrier barrier;
    if (threadIdx.x == 0) {
        init(&barrier, blockDim.x);
        cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
    }
    __syncthreads();
    Barrier::arrival_token token;
    if (threadIdx.x == 0) {
        const int coordinates[1] = {static_cast<int>(blockIdx.x) * TILE_ELEMENTS};
        cuda::ptx::cp_async_bulk_tensor(cuda::ptx::space_shared, cuda::ptx::space_global, tile,
                                        &tensor_map, coordinates,
                                        cuda::device::barrier_native_handle(barrier));
        token = cuda::device::barrier_arrive_tx(barrier, 1, sizeof(tile));
    } else {
        token = barrier.arrive();
    }
    barrier.wait(cuda::std::move(token));
    output[size_t{blockIdx.x} * TILE_ELEMENTS + threadIdx.x] = tile[threadIdx.x];
}
"""

PLAIN_SOURCE = r"""
// As many threads as the sample's kernel has, and as many bytes for each, but no TMA.
extern "C" __global__ void plain_copy(const float4* input, float4* output, unsigned int count)
{
    const unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        output[i] = input[i];
    }
}
"""


def parse_arguments(
    argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    description = "Measure the sample: its kernel, its descriptor, and its first seconds."
    parser = argparse.ArgumentParser(prog=Path(__file__).name, description=description)
    parser.add_argument(
        "--quick", action="store_true", help="three sizes, fewer rounds, no whole processes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a .png, .svg or .pdf")
    parser.add_argument(
        "--device", type=int, default=0, metavar="N", help="id of the GPU (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    if arguments.device < 0:
        parser.error(f"argument --device: {arguments.device} is negative, and ids start at 0")
    # Judged now, not when the measurements are done and would be lost.
    if arguments.plot and arguments.plot.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"argument --plot: {arguments.plot} must end in .png, .svg or .pdf")
    for option, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path is not None and not can_be_written(path):
            parser.error(f"argument {option}: {path} cannot be written")
    if arguments.plot and arguments.json and arguments.plot.resolve() == arguments.json.resolve():
        parser.error(f"argument --plot: {arguments.plot} is what --json names too")
    return arguments, parser


# --- The contenders: each binds one copy to its buffers and returns what starts it.


def bind_sample(stream: Stream, kernel: Kernel) -> Bind:
    def bind(source: cupy.ndarray, target: cupy.ndarray) -> Copy:
        tensor_map = sample.build_tensor_map(source)
        return lambda: sample.launch_copy(stream, kernel, tensor_map, target)

    return bind


def compile_source(source: str, name: str, arch: str) -> Kernel:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=arch,
        std="c++17",
        include_path=sample.include_directories(),
        define_macro=[("TILE_ELEMENTS", str(sample.TILE_ELEMENTS))],
    )
    with utils.compiler_errors():
        return Program(source, "c++", options).compile("cubin").get_kernel(name)


def bind_plain(stream: Stream, arch: str) -> Bind:
    import numpy
    from cuda.core import LaunchConfig, launch

    kernel = compile_source(PLAIN_SOURCE, "plain_copy", arch)

    def bind(source: cupy.ndarray, target: cupy.ndarray) -> Copy:
        count = source.size // 4
        threads = sample.BLOCK_THREADS
        config = LaunchConfig(grid=-(-count // threads), block=threads)
        arguments = (source.data.ptr, target.data.ptr, numpy.uint32(count))
        return lambda: launch(stream, config, kernel, *arguments)

    return bind


def bind_textbook(stream: Stream, arch: str) -> Bind:
    from cuda.core import LaunchConfig, launch
    from cuda.core.utils import StridedMemoryView

    kernel = compile_source(TEXTBOOK_SOURCE, "textbook_copy", arch)

    def bind(source: cupy.ndarray, target: cupy.ndarray) -> Copy:
        view = StridedMemoryView.from_any_interface(source, stream_ptr=-1)
        tensor_map = view.as_tensor_map(box_dim=(sample.TILE_ELEMENTS,))
        config = LaunchConfig(grid=source.size // sample.TILE_ELEMENTS, block=sample.TILE_ELEMENTS)
        return lambda: launch(stream, config, kernel, tensor_map, target.data.ptr)

    return bind


def bind_memcpy(stream: Stream) -> Bind:
    from cupy.cuda import runtime

    def bind(source: cupy.ndarray, target: cupy.ndarray) -> Copy:
        to, at, size = target.data.ptr, source.data.ptr, source.nbytes
        kind, handle = runtime.memcpyDeviceToDevice, int(stream.handle)
        return lambda: runtime.memcpyAsync(to, at, size, kind, handle)

    return bind


def bind_cupy() -> Bind:
    import cupy

    return lambda source, target: lambda: cupy.copyto(target, source)


def use_stream_in_torch(stream: Stream) -> None:
    """Make torch, and Triton which follows it, work on the stream that is timed."""
    import torch

    if not torch.cuda.is_available():
        raise ImportError("this torch has no CUDA")
    torch.cuda.set_stream(torch.cuda.ExternalStream(int(stream.handle)))


def bind_torch(stream: Stream) -> Bind:
    import torch

    use_stream_in_torch(stream)

    def bind(source: cupy.ndarray, target: cupy.ndarray) -> Copy:
        to, at = torch.from_dlpack(target), torch.from_dlpack(source)
        return lambda: to.copy_(at, non_blocking=True)

    return bind


def bind_triton(stream: Stream, rows: int) -> Bind:
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import triton_copies

    use_stream_in_torch(stream)

    def bind(source: cupy.ndarray, target: cupy.ndarray) -> Copy:
        shape = (-1, sample.TILE_ELEMENTS)
        block = [rows, sample.TILE_ELEMENTS]
        tensors = [torch.from_dlpack(array).view(shape) for array in (source, target)]
        descriptors = [TensorDescriptor.from_tensor(tensor, block) for tensor in tensors]
        grid = (-(-tensors[0].shape[0] // rows),)
        return lambda: triton_copies.triton_copy[grid](*descriptors, *block)

    return bind


def bind_gluon(stream: Stream, elements: int) -> Bind:
    import torch
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    import triton_copies

    use_stream_in_torch(stream)

    def bind(source: cupy.ndarray, target: cupy.ndarray) -> Copy:
        layout = gl.NVMMASharedLayout.get_default_for([elements], gl.float32)
        descriptors = [
            TensorDescriptor.from_tensor(torch.from_dlpack(array), [elements], layout)
            for array in (source, target)
        ]
        grid = (-(-source.size // elements),)
        return lambda: triton_copies.gluon_copy[grid](*descriptors, elements)

    return bind


def bind_contenders(stream: Stream, device: Device) -> tuple[dict[str, Bind], list[str]]:
    """Return the contenders by name, and a line for each that cannot run here.

    A name with " / " is one variant of several, of which the tables show the best at each size.
    """
    arch = f"sm_{device.arch}"
    contenders = {
        SHIPPED: bind_sample(stream, sample.compile_kernel(arch).get_kernel("tma_copy")),
        REFERENCE: bind_memcpy(stream),
        TEXTBOOK: bind_textbook(stream, arch),
        PLAIN: bind_plain(stream, arch),
        "CuPy copyto": bind_cupy(),
    }
    optional = {"torch copy_": partial(bind_torch, stream)}
    for rows in (2, 4, 8, 32):
        optional[f"Triton TMA / {rows} rows"] = partial(bind_triton, stream, rows)
    for block in (256, 512, 1024, 4096):
        optional[f"Gluon 1-D TMA / {block} elements"] = partial(bind_gluon, stream, block)
    left_out = {}
    for name, make in optional.items():
        try:
            contenders[name] = make()
        except ImportError as error:
            left_out[name.partition(" / ")[0]] = " ".join(str(error).split())
    return contenders, [f"{name} is left out: {why}" for name, why in left_out.items()]


# --- Bandwidth by size


class Buffers:
    """Pairs of source and target arrays, one behind the other in two large allocations."""

    def __init__(self, elements: int) -> None:
        import cupy

        self.source = cupy.empty(elements, cupy.float32)
        self.guarded_target = cupy.empty(elements + 2 * sample.GUARD_ELEMENTS, cupy.float32)
        sample.fill(self.source, sample.FIRST_PATTERN)

    def pairs(self, elements: int, count: int) -> list[tuple[cupy.ndarray, cupy.ndarray]]:
        target = self.guarded_target[sample.GUARD_ELEMENTS :]
        starts = [i * elements for i in range(count)]
        return [(self.source[s : s + elements], target[s : s + elements]) for s in starts]

    def check(self, name: str, elements: int, copy_all: Callable[[], None]) -> None:
        """Run copies that fill `elements` of the target, and compare them bit for bit."""
        guarded = self.guarded_target[: elements + 2 * sample.GUARD_ELEMENTS]
        sample.fill(guarded, sample.POISON_PATTERN)
        copy_all()
        sample.check_copy(name, guarded, sample.FIRST_PATTERN)


def start_all(copies: Sequence[Copy]) -> None:
    for copy in copies:
        copy()


def bandwidth(
    contenders: dict[str, Bind], size: int, buffers: Buffers, l2_bytes: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Return the GB/s of each contender for arrays of `size` bytes.

    Up to GRAPH_UP_TO each round times many copies in a CUDA graph, over rotating buffers that
    together exceed the L2 cache four times: the device alone, not the host and not the cache.
    Above, single copies on the stream, since cudaMemcpyAsync is slow in a graph there.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    elements = size // 4
    in_graph = size <= GRAPH_UP_TO
    pairs = buffers.pairs(elements, max(2, -(-2 * l2_bytes // size)) if in_graph else 1)
    repeats = max(1, 8 // len(pairs)) if in_graph else 1
    starts: dict[str, Copy] = {}
    for name, bind in contenders.items():
        copies = [bind(*pair) for pair in pairs]
        buffers.check(name, elements * len(pairs), lambda copies=copies: start_all(copies))
        if in_graph:
            stream.begin_capture()
            start_all(copies * repeats)
            starts[name] = stream.end_capture().launch
            buffers.check(name, elements * len(pairs), starts[name])
        else:
            starts[name] = copies[0]
    measured: dict[str, list[float]] = {name: [] for name in contenders}
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    bytes_moved = 2 * size * len(pairs) * repeats
    for number in range(-WARM_UP_ROUNDS, rounds):
        for name in random.sample(list(starts), len(starts)):
            starts[name]()  # not timed: keeps the GPU busy while the host queues what is timed
            begin.record()
            starts[name]()
            end.record()
            end.synchronize()
            if number >= 0:
                milliseconds = cupy.cuda.get_elapsed_time(begin, end)
                measured[name].append(bytes_moved / milliseconds / 1e6)
    return best_variants(measured)


def spread(values: Sequence[float], digits: int = 1) -> dict[str, float]:
    """Return the median, and the 10th and the 90th percentile."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    summary = {"median": statistics.median(values), "p10": deciles[0], "p90": deciles[-1]}
    return {name: round(value, digits) for name, value in summary.items()}


def best_variants(measured: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Summarise each contender, of variants the one with the highest median."""
    best: dict[str, dict[str, Any]] = {}
    reference = statistics.median(measured[REFERENCE])
    for variant, values in measured.items():
        name = variant.partition(" / ")[0]
        row = spread(values) | {"variant": variant.partition(" / ")[2]}
        row["ratio"] = round(statistics.median(values) / reference, 3)
        if name not in best or row["median"] > best[name]["median"]:
            best[name] = row
    return best


# --- What a descriptor costs on the host


def microseconds(call: Callable[[], object], stream: Stream, calls: int = 3000) -> dict[str, float]:
    values = []
    for i in range(calls):
        begin = time.perf_counter_ns()
        call()
        values.append((time.perf_counter_ns() - begin) / 1000)
        if i % 100 == 0:
            stream.sync()  # a full launch queue would make the launch wait
    return spread(values[calls // 10 :], 2)


def host_costs(stream: Stream, kernel: Kernel) -> dict[str, dict[str, float]]:
    import cupy
    from cuda.core.utils import StridedMemoryView

    first, second, output = (cupy.empty(1024, cupy.float32) for _ in range(3))
    tensor_map = sample.build_tensor_map(first)
    view = StridedMemoryView.from_any_interface(second, stream_ptr=-1)
    return {
        name: microseconds(call, stream)
        for name, call in {
            "build_tensor_map": lambda: sample.build_tensor_map(first),
            "replace_address(array)": lambda: tensor_map.replace_address(second),
            "replace_address(view)": lambda: tensor_map.replace_address(view),
            "launch_copy": lambda: sample.launch_copy(stream, kernel, tensor_map, output),
        }.items()
    }


# --- Processes: the first seconds, and how cost grows

PRELUDE = f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); import tmaTensorMap as sample\n"

# The same steps with the comparison that one would write first.
ARRAY_EQUAL = (
    PRELUDE
    + """
import cupy
def check_copy(step, guarded_output, pattern):
    output = guarded_output[sample.GUARD_ELEMENTS : -sample.GUARD_ELEMENTS]
    expected = cupy.empty_like(output)
    sample.fill(expected, pattern)
    if not cupy.array_equal(output.view(cupy.uint32), expected.view(cupy.uint32)):
        raise sample.utils.SampleError(step)
sample.check_copy = check_copy
sys.exit(sample.main(sys.argv[1:]))
"""
)

# Prints the seconds of each stage. A stage ends where a function is called or returns.
STAGES = (
    "import json, time; begin = time.perf_counter()\n"
    + PRELUDE
    + """
ends = {}
def watch(owner, name, called, returned):
    function = getattr(owner, name)
    def watched(*arguments):
        ends.setdefault(called, time.perf_counter())
        result = function(*arguments)
        ends.setdefault(returned, time.perf_counter())
        return result
    setattr(owner, name, watched)
watch(sample.utils, "require_packages", "script", "imports")
watch(sample, "compile_kernel", "device", "compilation")
watch(sample, "build_tensor_map", "data", "tensor map")
status = sample.main(sys.argv[1:])
ends["copy and check"] = time.perf_counter()
starts = [begin, *ends.values()]
print(json.dumps({stage: end - start for (stage, end), start in zip(ends.items(), starts)}))
sys.exit(status)
"""
)

# Prints what the arrays take, and what the whole process has in use, both at their peak: CuPy's
# pool gives nothing back before the process ends. The free memory before it is its first argument.
GROWTH = (
    PRELUDE
    + """
import json
status = sample.main(sys.argv[2:])
import cupy
used = int(sys.argv[1]) - cupy.cuda.runtime.memGetInfo()[0]
arrays = cupy.get_default_memory_pool().total_bytes()
print(json.dumps({"array_bytes": arrays, "process_bytes": used}))
sys.exit(status)
"""
)


def run_python(cache: str, *command: object) -> tuple[float, str]:
    """Run a Python process, and return its seconds and the last line that it printed."""
    begin = time.perf_counter()
    process = subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | {"CUPY_CACHE_DIR": cache},
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - begin
    if process.returncode != 0:
        raise utils.SampleError(f"a run of the sample failed: {process.stderr.strip()}")
    return seconds, process.stdout.splitlines()[-1]


def first_seconds(device_id: int, runs: int, advance: Callable[[], object]) -> dict[str, Any]:
    """Return the seconds of whole processes, and of the stages of a cold one."""
    option = ("--device", device_id)
    script = str(ROOT / "tmaTensorMap.py")
    commands = {
        "cold": [script],
        "warm": [script],
        "cold, cupy.array_equal": ["-c", ARRAY_EQUAL],
        "stages": ["-c", STAGES],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands if name != "stages"}
    stages: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as filled:
        run_python(filled, script, *option)
        for _ in range(runs):
            for name in random.sample(list(commands), len(commands)):
                with tempfile.TemporaryDirectory() as empty:
                    cache = filled if name == "warm" else empty
                    taken, line = run_python(cache, *commands[name], *option)
                if name == "stages":
                    for stage, value in json.loads(line).items():
                        stages.setdefault(stage, []).append(value)
                else:
                    seconds[name].append(taken)
                advance()
    return {
        "runs": runs,
        "seconds": {name: spread(values, 2) for name, values in seconds.items()},
        "stages": {name: spread(values, 3) for name, values in stages.items()},
    }


def growth(
    device_id: int, counts: Sequence[int], runs: int, advance: Callable[[], object]
) -> list[dict[str, Any]]:
    """Return the seconds of whole processes at each number of elements, and their memory."""
    import cupy

    free = cupy.cuda.runtime.memGetInfo()[0]
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    memory: dict[int, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as cache:
        command = ("-c", GROWTH, free, "--device", device_id, "--elements")
        run_python(cache, *command, counts[0])  # fills the cache
        for _ in range(runs):
            for count in random.sample(counts, len(counts)):
                taken, line = run_python(cache, *command, count)
                seconds[count].append(taken)
                memory[count] = json.loads(line)
                advance()
    return [{"elements": n, "seconds": spread(seconds[n], 2), **memory[n]} for n in counts]


# --- Report


def machine(device: Device) -> dict[str, Any]:
    """Return what the figures were measured on, and the hash of the kernel measured."""
    from cuda.bindings import nvrtc
    from cupy.cuda import runtime

    packages = ["cuda-bindings", "cuda-core", "cuda-pathfinder", "cupy-cuda13x", "numpy"]
    packages += ["torch", "triton"]
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    attributes = runtime.deviceGetAttribute
    clock = attributes(runtime.cudaDevAttrMemoryClockRate, device.device_id)  # kHz
    width = attributes(runtime.cudaDevAttrGlobalMemoryBusWidth, device.device_id)  # bits
    driver = runtime.driverGetVersion()
    return {
        "gpu": device.name,
        "multiprocessors": attributes(runtime.cudaDevAttrMultiProcessorCount, device.device_id),
        "l2_bytes": attributes(runtime.cudaDevAttrL2CacheSize, device.device_id),
        "memory_peak_gb_s": round(2 * clock * 1e3 * width / 8 / 1e9),  # double data rate
        "driver": driver_version(),
        "driver_cuda": f"{driver // 1000}.{driver % 1000 // 10}",
        "nvrtc": ".".join(map(str, nvrtc.nvrtcVersion()[1:])),
        "python": sys.version.split()[0],
        "packages": versions,
        "date": datetime.date.today().isoformat(),
        "kernel_sha256": hashlib.sha256(sample.KERNEL_SOURCE.encode()).hexdigest(),
        "tile_elements": sample.TILE_ELEMENTS,
        "tiles_per_box": sample.TILES_PER_BOX,
    }


def driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split()[0]
    except (OSError, IndexError):
        return None


def size_name(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size // KIB} KiB"


def print_bandwidth(size: int, rows: dict[str, dict[str, Any]]) -> None:
    how = "device time in a CUDA graph" if size <= GRAPH_UP_TO else "single copies on the stream"
    print(f"\n{size_name(size)}, {how}")
    print(f"  {'':30}  GB/s   10th to 90th   of {REFERENCE}")
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["median"]):
        label = f"{name} ({row['variant']})" if row["variant"] else name
        band = f"{row['p10']:.0f} to {row['p90']:.0f}"
        print(f"  {label:30} {row['median']:5.0f}   {band:>12}   {row['ratio']:.2f}")


def print_spreads(title: str, unit: str, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}")
    for name, row in rows.items():
        band = f"{row['p10']} to {row['p90']}"
        print(f"  {name:24} {row['median']:8} {unit}   (10th to 90th: {band})")


def plot_bandwidth(results: dict[str, Any], path: Path) -> None:
    """Draw the bandwidth over the size, for a README that shows it 800 pixels wide."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Okabe and Ito's palette, which colour-blind readers can tell apart.
    styles = {
        SHIPPED: ("#D55E00", "o"),
        REFERENCE: ("#000000", None),
        TEXTBOOK: ("#0072B2", "s"),
        "CuPy copyto": ("#56B4E9", "v"),
        "torch copy_": ("#009E73", "^"),
        "Triton TMA": ("#CC79A7", "D"),
        "Gluon 1-D TMA": ("#E69F00", "P"),
        PLAIN: ("#777777", "x"),
    }
    sizes = [entry["bytes"] for entry in results["bandwidth"]]
    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=200, layout="constrained")
    for name, (colour, marker) in styles.items():
        rows = [entry["contenders"].get(name) for entry in results["bandwidth"]]
        if None in rows:
            continue
        front = {"zorder": 4, "linewidth": 2.5} if name == SHIPPED else {"linewidth": 1.5}
        if name == REFERENCE:  # drawn last, or it could not be seen among those level with it
            front = {"zorder": 5, "linewidth": 1.2}
        dashes = "--" if name == REFERENCE else "-"
        medians, low, high = ([row[key] for row in rows] for key in ("median", "p10", "p90"))
        axes.plot(sizes, medians, dashes, color=colour, marker=marker, label=name, **front)
        axes.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
    peak = results["machine"]["memory_peak_gb_s"]
    axes.axhline(peak, color="#555555", linestyle=":", label=f"memory peak, {peak} GB/s")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_name(size) for size in sizes])
    axes.set_ylim(0, peak * 1.08)
    axes.set_xlabel("size of the array copied")
    axes.set_ylabel("bandwidth, read and written (GB/s)")
    axes.set_title(f"Device-to-device copies on an {results['machine']['gpu']}")
    axes.grid(alpha=0.3)
    axes.legend(loc=(0.02, 0.42), fontsize=10)
    pyplot.close(figure)
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:])
    write_whole(path, image.getvalue())


def unfinished(path: Path) -> Path:
    """Return the name of a file while it is written. A link is followed first."""
    return path.resolve().with_name(f".{path.resolve().name}.unfinished")


def can_be_written(path: Path) -> bool:
    """Return whether path is a file, or can become one. The folder is tried out."""
    try:
        left = unfinished(path).exists()  # by an earlier run
        unfinished(path).touch()
        if not left:
            unfinished(path).unlink()
    except (OSError, ValueError, RuntimeError):  # a path without a name, links in a circle
        return False
    # From Python 3.13 on, links in a circle resolve to a link.
    return path.is_file() or not (path.exists() or path.resolve().is_symlink())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name first, so that no half of it is left in its place.

    Raises utils.SampleError where it cannot be written.
    """
    try:
        unfinished(path).write_bytes(content)
        unfinished(path).replace(path.resolve())
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished(path).unlink()
        raise utils.SampleError(f"{path} cannot be written: {error.strerror}") from error


def measure(device: Device, quick: bool) -> dict[str, Any]:
    """Take all measurements, and print each as it is done."""
    import cupy
    from cuda.core import Stream
    from tqdm import tqdm

    rounds = QUICK_ROUNDS if quick else ROUNDS
    free = cupy.cuda.runtime.memGetInfo()[0]
    sizes = [size for size in (QUICK_SIZES if quick else SIZES) if size < free // 3]
    runs = 0 if quick else PROCESS_RUNS
    counts = [] if quick else [count for count in GROWTH_ELEMENTS if 14 * count < free]
    results = {"machine": machine(device), "rounds": rounds, "bandwidth": []}
    total = len(sizes) + 1 + 4 * runs + GROWTH_RUNS * len(counts)
    with (
        cupy.cuda.Stream(non_blocking=True) as cupy_stream,
        tqdm(total=total, disable=not sys.stdout.isatty()) as progress,
    ):
        utils.print_gpu_info(device)
        stream = Stream.from_handle(cupy_stream.ptr)
        contenders, left_out = bind_contenders(stream, device)
        print(*left_out, sep="\n")
        l2_bytes = results["machine"]["l2_bytes"]
        buffers = Buffers(max(*sizes, 2 * GRAPH_UP_TO, 4 * l2_bytes) // 4)
        for size in sizes:
            rows = bandwidth(contenders, size, buffers, l2_bytes, rounds)
            results["bandwidth"].append({"bytes": size, "contenders": rows})
            print_bandwidth(size, rows)
            progress.update()
        del buffers
        cupy.get_default_memory_pool().free_all_blocks()  # the processes below need it

        kernel = sample.compile_kernel(f"sm_{device.arch}").get_kernel("tma_copy")
        results["host"] = host_costs(stream, kernel)
        print_spreads("Host cost of a call", "µs", results["host"])
        progress.update()
        if runs:
            results["process"] = first_seconds(device.device_id, runs, progress.update)
            print_spreads("Whole process at the default size", "s", results["process"]["seconds"])
            print_spreads("Stages of a cold one", "s", results["process"]["stages"])
        if counts:
            results["growth"] = growth(device.device_id, counts, GROWTH_RUNS, progress.update)
    if counts:
        print("\nThe sample by size")
        for row in results["growth"]:
            arrays, used = (row[key] / MIB for key in ("array_bytes", "process_bytes"))
            print(
                f"  {row['elements']:>10} elements  {row['seconds']['median']:6.2f} s"
                f"  {arrays:>9,.0f} MiB in arrays  {used:>9,.0f} MiB with the CUDA context"
            )
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables, and write what --json and --plot name. Returns 0, or 1 on failure."""
    if not hasattr(utils, "errors_in_one_line"):
        parse_arguments(argv)
        missing = "tmaTensorMap.py or its Utilities is missing: download the whole sample"
        sys.exit(f"{Path(__file__).name}: error: {missing}")
    with utils.errors_in_one_line(__file__):
        arguments, parser = parse_arguments(argv)
        utils.require_packages(sample.__file__)
        for module in ("tqdm", *(["matplotlib"] if arguments.plot else [])):
            utils.require_module(module, module)
        device = utils.open_device(arguments.device, parser)
        if tuple(device.compute_capability) < (9, 0):
            raise utils.SampleError("TMA needs compute capability 9.0 or higher (Hopper or later)")
        device.set_current()
        results = measure(device, arguments.quick)
        if arguments.json:
            write_whole(arguments.json, f"{json.dumps(results, indent=2)}\n".encode())
        if arguments.plot:
            plot_bandwidth(results, arguments.plot)
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
