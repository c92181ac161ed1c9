# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Measure the sample's kernel, its calls on the host, and the recipes with NVBench.

python benchmarks/measure.py [NVBench's options: --help, --json FILE, -b copies, ...]
"""

import functools
import math
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tmaTensorMap as sample  # first: it reports missing packages

# isort: split
import cupy
import transpose as transpose_recipe
from cuda import core
from cuda.core.utils import StridedMemoryView
from gemm import matmul
from numpy import int32, uint32
from stencil import box_sum

HERE = Path(__file__).resolve().parent
try:
    from cuda import bench

    as_cupy_stream = cupy.cuda.Stream.from_external  # CuPy 14 or newer
except (ImportError, AttributeError) as error:
    install = f'"{sys.executable}" -m pip install -r "{HERE / "requirements.txt"}"'
    sample.utils.fail(f"{error}; install the packages: {install}")

SAMPLE, RECIPE, REFERENCE = "this sample", "this recipe", "cudaMemcpyAsync"
COPIES = [SAMPLE, REFERENCE, "CuPy copyto", "torch copy_", "plain loads", "Triton TMA"]
COPIES += ["Gluon TMA 512", "Gluon TMA 256", "one tile per block"]
CALLS = ["build_tensor_map", "replace_address(array)", "replace_address(view)", "launch_copy"]
REPEATS = 100  # of a call on the host, since NVBench's call into Python takes time too
WITHOUT_TMA = (HERE / "without_tma.cu").read_text()
FAILED = []


def on_its_stream(measure: Callable) -> Callable:
    """Make a state's GPU and stream current for measure(), and skip a state that cannot run."""

    @functools.wraps(measure)
    def run(state: "bench.State") -> None:
        try:
            on_gpu = state.has_device()  # not in the benchmark of the host
            core.Device(state.get_device() if on_gpu else 0).set_current()
            if int(cupy.cuda.Device().compute_capability) < 90:
                raise ImportError("TMA needs compute capability 9.0 or higher")
            cupy.get_default_memory_pool().free_all_blocks()  # of the last state's stream
            with as_cupy_stream(state.get_stream()) if on_gpu else cupy.cuda.Stream.null:
                measure(state)
        except (ImportError, MemoryError, cupy.cuda.memory.OutOfMemoryError) as error:
            state.skip(" ".join(str(error).split()))
        except (Exception, SystemExit) as error:  # go on with the next state
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            FAILED.append(f"{state.get_axis_values_as_string()}: {error}")
            state.skip(str(error))

    return run


@functools.cache
def kernel(name: str, source: str, tiles_per_box: int = sample.TILES_PER_BOX) -> core.Kernel:
    macros = sample.MACROS | {"TILES_PER_BOX": tiles_per_box}
    return sample.compile_kernel(f"sm_{core.Device().arch}", source, macros).get_kernel(name)


def launch(function: core.Kernel, grid: object, block: object, *arguments: object) -> None:
    stream = core.Stream.from_handle(cupy.cuda.get_current_stream().ptr)
    core.launch(stream, core.LaunchConfig(grid=grid, block=block), function, *arguments)


def memcpy(source: cupy.ndarray, target: cupy.ndarray) -> cupy.ndarray:
    kind, stream = cupy.cuda.runtime.memcpyDeviceToDevice, cupy.cuda.get_current_stream().ptr
    cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, kind, stream)
    return target


def torch_on_stream() -> object:
    """Return torch with CuPy's current stream as its own, which Triton uses too."""
    import torch

    if not torch.cuda.is_available():
        raise ImportError("this torch has no CUDA")
    stream, device = cupy.cuda.get_current_stream().ptr, cupy.cuda.Device().id
    torch.cuda.set_stream(torch.cuda.ExternalStream(stream, device=device))
    return torch


def bind(name: str, source: cupy.ndarray, target: cupy.ndarray) -> Callable:
    """Return a function that starts one copy on CuPy's current stream."""
    if name == SAMPLE:
        tma_copy, tensor_map = kernel("tma_copy", sample.KERNEL), sample.build_tensor_map(source)
        return lambda: sample.launch_copy(tma_copy, tensor_map, target)
    if name == "one tile per block":  # the sample's kernel: only the box is another
        tiles = source.reshape(-1, sample.TILE_ELEMENTS)
        view = StridedMemoryView.from_any_interface(tiles, stream_ptr=-1)
        arguments = view.as_tensor_map(box_dim=(1, sample.TILE_ELEMENTS)), target.data.ptr
        tma_copy, count = kernel("tma_copy", sample.KERNEL, 1), uint32(len(tiles))
        return lambda: launch(tma_copy, len(tiles), sample.CHUNKS_PER_TILE, *arguments, count)
    if name == "plain loads":  # as many threads as the sample has, as many bytes per thread
        plain, chunks = kernel("plain_copy", WITHOUT_TMA), source.size // sample.CHUNK_ELEMENTS
        arguments = source.data.ptr, target.data.ptr, uint32(chunks)
        block = sample.BLOCK_THREADS
        return lambda: launch(plain, -(-chunks // block), block, *arguments)
    if name == REFERENCE:
        return lambda: memcpy(source, target)
    if name == "CuPy copyto":
        return lambda: cupy.copyto(target, source)
    pair = [torch_on_stream().from_dlpack(array) for array in (source, target)]
    if name == "torch copy_":
        return lambda: pair[1].copy_(pair[0])
    import triton_copies

    if name == "Triton TMA":
        return triton_copies.bind_triton(*pair, rows=4, columns=128)
    return triton_copies.bind_gluon(*pair, elements=int(name.split()[-1]))


@bench.axis.string("Copy", COPIES)
@bench.axis.int64("Bytes", [2**16 * 4**step for step in range(9)])
@on_its_stream
def copies(state: "bench.State") -> None:
    name, size = state.get_string("Copy"), state.get_int64("Bytes")
    if 3 * size > cupy.cuda.runtime.memGetInfo()[0]:
        raise MemoryError("not enough free memory on the GPU")
    source, _, target = sample.allocate(size // sample.DTYPE.itemsize)
    start = bind(name, source, target)
    start()
    sample.verify(name, target, invert=False)
    state.add_global_memory_reads(size)
    state.add_global_memory_writes(size)
    state.exec(lambda launch: start(), batched=False)  # Python's launches would bound a batch


@bench.option.is_cpu_only()
@bench.axis.string("Call", CALLS)
@on_its_stream
def host(state: "bench.State") -> None:
    first, second, output = sample.allocate(1024)
    tensor_map, tma_copy = sample.build_tensor_map(first), kernel("tma_copy", sample.KERNEL)
    view = StridedMemoryView.from_any_interface(second, stream_ptr=-1)
    call = {
        CALLS[0]: lambda: sample.build_tensor_map(first),
        CALLS[1]: lambda: tensor_map.replace_address(second),
        CALLS[2]: lambda: tensor_map.replace_address(view),
        CALLS[3]: lambda: sample.launch_copy(tma_copy, tensor_map, output),
    }[state.get_string("Call")]
    state.add_element_count(REPEATS)
    state.exec(lambda launch: [call() for _ in range(REPEATS)], batched=False)
    cupy.cuda.get_current_stream().synchronize()


def integers(*sides: int) -> cupy.ndarray:
    """Return hashed integers from -8 to 8, which bfloat16 holds exactly."""
    hashed = cupy.arange(math.prod(sides), dtype=uint32) * uint32(2654435761) >> uint32(12)
    return (hashed % uint32(17)).astype(cupy.float32).reshape(sides) - cupy.float32(8)


def matrix(state: "bench.State") -> tuple[str, cupy.ndarray]:
    """Return the name of the kernel and the matrix that it reads once and writes once."""
    x = integers(*map(int, state.get_string("Shape").split("x")))
    state.add_global_memory_reads(x.nbytes)
    state.add_global_memory_writes(x.nbytes)
    return state.get_string("Kernel"), x


def check_and_time(state: "bench.State", start: Callable, expected: cupy.ndarray) -> None:
    code = "if (a != b) atomicAdd(&wrong[0], 1ull)"
    compare = cupy.ElementwiseKernel("T a, T b", "raw uint64 wrong", code, "differ")
    wrong = cupy.zeros(1, cupy.uint64)
    compare(cupy.asarray(start()), expected, wrong)
    if wrong.item():
        sample.utils.fail(f"{wrong.item()} of {expected.size} elements differ")
    state.exec(lambda launch: start(), batched=False)


@bench.axis.string("Kernel", [RECIPE, REFERENCE, "naive", "registers"])
@bench.axis.string("Shape", ["4096x4096", "16384x16384"])
@on_its_stream
def stencil(state: "bench.State") -> None:
    name, x = matrix(state)
    (rows, columns), output, side = x.shape, cupy.empty_like(x), 4 if name == "registers" else 1
    grid = -(-columns // (32 * side)), -(-rows // (8 * side))
    arguments = x.data.ptr, output.data.ptr, int32(rows), int32(columns)
    function = None if name in (RECIPE, REFERENCE) else kernel(name, WITHOUT_TMA)
    starts = {RECIPE: lambda: box_sum(x), REFERENCE: lambda: memcpy(x, output)}
    without_tma = functools.partial(launch, function, grid, (32, 8), *arguments)
    start = starts.get(name, lambda: without_tma() or output)
    padded = cupy.pad(x, 1)
    sums = sum(padded[i : i + rows, j : j + columns] for i in range(3) for j in range(3))
    check_and_time(state, start, x if name == REFERENCE else sums)


@bench.axis.string("Kernel", [RECIPE, REFERENCE, "CuPy", "torch"])
@bench.axis.string("Shape", ["8192x8192", "16384x16384", "8200x12004"])
@on_its_stream
def transpose(state: "bench.State") -> None:
    name, x = matrix(state)
    output = cupy.empty_like(x)
    tensor = torch_on_stream().from_dlpack(x) if name == "torch" else None
    starts = {
        RECIPE: lambda: transpose_recipe.transpose(x),
        REFERENCE: lambda: memcpy(x, output),
        "CuPy": lambda: cupy.ascontiguousarray(x.T),
        "torch": lambda: tensor.T.contiguous(),
    }
    check_and_time(state, starts[name], x if name == REFERENCE else x.T)


@bench.axis.string("Kernel", [RECIPE, "torch"])
@bench.axis.string("Shape", [f"{n}x{n}x{n}" for n in (4096, 8192, 16384)] + ["8000x8200x8072"])
@on_its_stream
def gemm(state: "bench.State") -> None:
    if cupy.cuda.Device().compute_capability != "90":
        raise ImportError("wgmma needs compute capability 9.0")
    torch, (m, n, k) = torch_on_stream(), map(int, state.get_string("Shape").split("x"))
    torch.backends.cuda.matmul.allow_tf32 = False
    # A small integer in bfloat16 is the upper half of its float32.
    a, b = (integers(side, k).view(cupy.uint16)[:, 1::2].copy() for side in (m, n))
    x, y = (torch.from_dlpack(side.view(cupy.int16)).view(torch.bfloat16) for side in (a, b))
    # All sums stay below 2^24: float32 adds them exactly in any order.
    expected = cupy.asarray((x.float() @ y.float().T).to(torch.bfloat16).view(torch.int16))
    starts = {
        RECIPE: lambda: matmul(a, b).view(cupy.int16),
        "torch": lambda: torch.matmul(x, y.T).view(torch.int16),
    }
    state.add_element_count(2 * m * n * k)  # NVBench's elements per second are FLOP/s
    check_and_time(state, starts[state.get_string("Kernel")], expected)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    problem = sample.utils.gpu_problem()
    if problem:
        sample.utils.fail(problem)
    for function in (copies, host, stencil, transpose, gemm):
        benchmark = bench.register(function).set_name(function.__name__).set_timeout(1)
        benchmark.set_stopping_criterion("sample-count")
        benchmark.set_criterion_param_int64("target-samples", 1000)
    try:
        bench.run_all_benchmarks([Path(sys.argv[0]).name, *sys.argv[1:]])
    except bench.NVBenchRuntimeError as error:
        sample.utils.fail(error)
    if FAILED:
        sample.utils.fail("; ".join(FAILED))


if __name__ == "__main__":
    main()
