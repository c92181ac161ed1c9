# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""The pitfalls and limits that README.md names are real. A failure says which to correct."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy
import pytest
import transpose
from conftest import ROOT, run

import tmaTensorMap as sample

TILE = sample.TILE_ELEMENTS

SWAPS = pytest.mark.pitfall("`replace_address()` swaps the address and nothing else.")
STRIDED = pytest.mark.pitfall(
    "A view strided in its last dimension is read as if it were contiguous."
)
BARE_ERROR = pytest.mark.pitfall("`CUDA_ERROR_INVALID_VALUE` names no cause.")
CLEAR_ERROR = pytest.mark.pitfall("Other limits raise a `ValueError` that names them:")
GRAPH = pytest.mark.pitfall("A captured CUDA graph keeps the tensor map it was captured with.")
ENDS_AT_2_31 = pytest.mark.pitfall("A 1-D tensor map ends at 2^31 elements.")
EXPECTED_BYTES = pytest.mark.pitfall("Wrong expected bytes are undefined behavior.")
FENCE = pytest.mark.pitfall("A store without a proxy fence writes old values.")
WHOLE_BOX = pytest.mark.pitfall("A box that is partly outside the tensor counts in full.")
SWIZZLE = pytest.mark.pitfall("A swizzled box needs more than 128-byte alignment.")
SAME_VALUES = pytest.mark.pitfall("Test data that repeats hides misplaced tiles.")
NO_CUDA_H = pytest.mark.pitfall("NVRTC cannot include `<cuda.h>`.")
PTX_NEEDS_DRIVER = pytest.mark.pitfall('`Program.compile("ptx")` needs a driver.')

# Loads one box to an offset in shared memory, and writes what arrived out as 32-bit words.
LOAD_BOX = r"""
#include <cuda/ptx>
namespace ptx = cuda::ptx;
struct alignas(128) CUtensorMap_st { unsigned char bytes[128]; };
using CUtensorMap = CUtensorMap_st;

extern "C" __global__ void load_box(const __grid_constant__ CUtensorMap map, unsigned int* output,
                                    int words, int column, int row, int offset)
{
    __shared__ alignas(1024) unsigned int memory[8192];
    __shared__ cuda::std::uint64_t barrier;
    unsigned int* box = memory + offset / 4;
    for (int i = threadIdx.x; i < 8192; i += blockDim.x) memory[i] = 0xdeadbeef;
    ptx::fence_proxy_async(ptx::space_shared);
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&barrier, 1);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                       &barrier, 4 * words);
        const int coordinates[2] = {column, row};
        ptx::cp_async_bulk_tensor(ptx::space_shared, ptx::space_global, box, &map, coordinates,
                                  &barrier);
    }
    __syncthreads();
    while (!ptx::mbarrier_try_wait_parity(&barrier, 0)) {}
    for (int i = threadIdx.x; i < words; i += blockDim.x) output[i] = box[i];
}
"""


def view_of(array: object) -> object:
    from cuda.core.utils import StridedMemoryView

    return StridedMemoryView.from_any_interface(array, stream_ptr=-1)


def load_box(
    arch: str,
    array: object,
    box: tuple[int, int],
    at: tuple[int, int] = (0, 0),
    offset: int = 0,
    **options: object,
) -> numpy.ndarray:
    """Return the words of one box. at: (row, column) in the tensor; offset: in bytes."""
    import cupy
    from cuda.core import LaunchConfig, Stream, launch

    kernel = sample.compile_kernel(arch, LOAD_BOX, {}).get_kernel("load_box")
    tensor_map = view_of(array).as_tensor_map(box_dim=box, **options)
    output = cupy.zeros(box[0] * box[1] * array.itemsize // 4, cupy.uint32)
    numbers = map(numpy.int32, (output.size, at[1], at[0], offset))
    stream = Stream.from_handle(cupy.cuda.get_current_stream().ptr)
    config = LaunchConfig(grid=1, block=128)
    launch(stream, config, kernel, tensor_map, output.data.ptr, *numbers)
    return output.get()


def copy(arch: str, tensor_map: object, elements: int) -> object:
    """Return the first elements of what the sample's kernel reads through a tensor map."""
    import cupy

    output = cupy.zeros(elements, cupy.float32)
    kernel = sample.compile_kernel(arch).get_kernel("tma_copy")
    sample.launch_copy(kernel, tensor_map, output)
    return output


@SWAPS
@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["shorter", "wider rows", "int32", "strided"])
def test_replace_address_takes_any_array(gpu: str, shape: str) -> None:
    """All are in one allocation, of which the kernel reads what the first array's shape says."""
    import cupy

    memory = cupy.arange(8192, dtype=cupy.float32)
    tensor_map = sample.build_tensor_map(memory[:2048])
    other = {
        "shorter": memory[4096 : 4096 + TILE],
        "wider rows": memory[4096:8192].reshape(-1, 256),
        "int32": memory.view(cupy.int32)[4096 : 4096 + 2048],
        "strided": memory[4096::2],
    }[shape]
    tensor_map.replace_address(other)
    assert cupy.array_equal(copy(gpu, tensor_map, 2048), memory[4096 : 4096 + 2048])


@SWAPS
@pytest.mark.gpu
def test_replace_address_checks_the_alignment(gpu: str) -> None:
    import cupy

    memory = cupy.zeros(4096, cupy.float32)
    tensor_map = sample.build_tensor_map(memory[:1024])
    with pytest.raises(ValueError, match="16"):
        tensor_map.replace_address(memory[1025:2049])


@STRIDED
@pytest.mark.gpu
def test_strided_views(gpu: str) -> None:
    import cupy

    memory = cupy.arange(64 * 256, dtype=cupy.float32).reshape(64, 256)
    # A stride between rows is taken as it is: a tensor map has one for each dimension but the last.
    for view, copied in (
        (memory[::2, :128], memory[::2, :128]),
        (memory[:, ::2], memory[:, :128]),
    ):
        tensor_map = view_of(view).as_tensor_map(box_dim=(sample.TILES_PER_BOX, TILE))
        output = copy(gpu, tensor_map, view.size).reshape(view.shape)
        assert cupy.array_equal(output, copied)
    assert not cupy.array_equal(output, memory[:, ::2])


@STRIDED
@pytest.mark.gpu
@pytest.mark.parametrize(
    "make", ["x[::2]", "x.astype('float64')", "x[:100]", "x[:0]", "x.reshape(64, 64).T"]
)
def test_build_tensor_map_refuses(gpu: str, make: str) -> None:
    import cupy

    array = eval(make, {"x": cupy.zeros(4096, cupy.float32)})
    with pytest.raises(ValueError, match="need a contiguous float32 array"):
        sample.build_tensor_map(array)


def zeros(*shape: int, dtype: str = "float32") -> object:
    import cupy

    return cupy.zeros(shape, dtype)


@BARE_ERROR
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("array", "box"),
    [
        (lambda: zeros(256, 128).T, (4, 128)),
        (lambda: zeros(256, 128)[::-1], (4, 128)),
        (lambda: zeros(256, 130)[:, :128], (4, 128)),
        (lambda: zeros(256, 128), (4, 3)),
        (lambda: zeros(0, 128), (4, 128)),
    ],
    ids=["transposed", "negative stride", "row pitch", "box rows", "empty"],
)
def test_refused_without_a_cause(gpu: str, array: Callable, box: tuple[int, int]) -> None:
    with pytest.raises(Exception, match="CUDA_ERROR_INVALID_VALUE"):
        view_of(array()).as_tensor_map(box_dim=box)


@BARE_ERROR
@pytest.mark.gpu
@pytest.mark.parametrize(("name", "longest"), [("32B", 32), ("64B", 64), ("128B", 128)])
def test_rows_of_a_swizzled_box(gpu: str, name: str, longest: int) -> None:
    from cuda.core._tensor_map import TensorMapSwizzle

    swizzle = getattr(TensorMapSwizzle, f"SWIZZLE_{name}")
    view = view_of(zeros(256, 256, dtype="uint8"))
    assert view.as_tensor_map(box_dim=(8, longest), swizzle=swizzle)
    with pytest.raises(Exception, match="CUDA_ERROR_INVALID_VALUE"):
        view.as_tensor_map(box_dim=(8, longest + 16), swizzle=swizzle)


ACCEPTED = [
    "float16",
    "float32",
    "float64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int32",
    "int64",
]


@CLEAR_ERROR
@pytest.mark.gpu
def test_dtypes(gpu: str) -> None:
    for dtype in ACCEPTED:
        array = zeros(256, 128, dtype=dtype)
        array[1, 0] = 1
        words = array.itemsize * 128 // 4
        assert load_box(gpu, array, (2, 128))[:words].any() == 0
        assert load_box(gpu, array, (2, 128))[words:].any()
    for dtype in ("int8", "int16", "bool", "complex64"):
        with pytest.raises(ValueError):
            view_of(zeros(256, 128, dtype=dtype)).as_tensor_map(box_dim=(4, 128))
    # bfloat16 bits in a uint16 array.
    ml_dtypes = pytest.importorskip("ml_dtypes")
    view = view_of(zeros(256, 128, dtype="uint16"))
    assert view.as_tensor_map(box_dim=(4, 128), data_type=ml_dtypes.bfloat16)


@CLEAR_ERROR
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("array", "box"),
    [
        (lambda: zeros(256, 512), (4, 257)),
        (lambda: zeros(256, 128), (0, 128)),
        (lambda: zeros(256, 128), (128,)),
        (lambda: zeros(256 * 128 + 4)[1:-3].reshape(256, 128), (4, 128)),
        (lambda: zeros(2, 2, 2, 2, 2, 4), (1, 1, 1, 1, 1, 4)),
    ],
    ids=["box over 256", "box of 0", "box of another rank", "base address", "6 dimensions"],
)
def test_refused_with_a_clear_error(gpu: str, array: Callable, box: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        view_of(array()).as_tensor_map(box_dim=box)


@WHOLE_BOX
@pytest.mark.gpu
@pytest.mark.parametrize("at", [(0, 0), (-1, -4), (30, 56), (-100, 0), (8, 1000)], ids=str)
def test_outside_is_zeros_and_counts(gpu: str, at: tuple[int, int]) -> None:
    """Boxes are dense and row-major in shared memory, and may be wider than the tensor."""
    import cupy

    array = cupy.arange(1, 32 * 60 + 1, dtype=cupy.uint32).reshape(32, 60)
    for box in ((4, 16), (16, 128)):
        padded = numpy.zeros((32 + 512, 60 + 3000), numpy.uint32)
        padded[256:288, 1024:1084] = array.get()
        row, column = 256 + at[0], 1024 + at[1]
        expected = padded[row : row + box[0], column : column + box[1]]
        # The kernel sets the bytes of the whole box as expected, and ends.
        assert numpy.array_equal(load_box(gpu, array, box, at), expected.ravel())


SWIZZLES = [("32B", 32, 256), ("64B", 64, 512), ("128B", 128, 1024)]


@SWIZZLE
@pytest.mark.gpu
@pytest.mark.parametrize(("name", "row_bytes", "alignment"), SWIZZLES)
def test_swizzle(gpu: str, name: str, row_bytes: int, alignment: int) -> None:
    """By rows the formula holds at multiples of the alignment; by addresses, always."""
    import cupy
    from cuda.core._tensor_map import TensorMapSwizzle

    chunks = row_bytes // 16
    rows = 32
    array = cupy.arange(rows * chunks, dtype=cupy.uint32).repeat(4).reshape(rows, chunks * 4)
    swizzle = getattr(TensorMapSwizzle, f"SWIZZLE_{name}")

    def chunk_places(offset: int) -> list[int]:
        words = load_box(gpu, array, array.shape, offset=offset, swizzle=swizzle)
        return words[::4].reshape(rows, chunks).tolist()

    def formula(row_of: Callable[[int], int]) -> list[list[int]]:
        # Rows shorter than 128 bytes: the XOR counts lines of 128 bytes.
        place = [[c ^ row_of(r * row_bytes) % chunks for c in range(chunks)] for r in range(rows)]
        return [[r * chunks + place[r][c] for c in range(chunks)] for r in range(rows)]

    for offset in (0, alignment, 2 * alignment):
        assert chunk_places(offset) == formula(lambda byte: byte // 128)
    assert chunk_places(128) != formula(lambda byte: byte // 128)
    assert chunk_places(128) == formula(lambda byte: (byte + 128) // 128)


@GRAPH
@pytest.mark.gpu
def test_graph_keeps_the_old_tensor_map(gpu: str) -> None:
    import cupy

    first, second = cupy.arange(1024, dtype=cupy.float32), cupy.full(1024, 7, cupy.float32)
    output = cupy.zeros(1024, cupy.float32)
    kernel = sample.compile_kernel(gpu).get_kernel("tma_copy")
    tensor_map = sample.build_tensor_map(first)
    sample.launch_copy(kernel, tensor_map, output)  # loads the kernel, which a capture cannot
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        sample.launch_copy(kernel, tensor_map, output)
        graph = stream.end_capture()
        tensor_map.replace_address(second)
        graph.launch(stream)
        stream.synchronize()
        assert cupy.array_equal(output, first)
        sample.launch_copy(kernel, tensor_map, output)
        assert cupy.array_equal(output, second)


@GRAPH
@pytest.mark.gpu
def test_replace_address_right_after_a_launch(gpu: str) -> None:
    """The launch has copied the tensor map, even while it still waits for its turn."""
    import cupy

    first, second = cupy.arange(1024, dtype=cupy.float32), cupy.full(1024, 7, cupy.float32)
    kernel = sample.compile_kernel(gpu).get_kernel("tma_copy")
    busy = cupy.zeros(2**28, cupy.uint8)
    for _ in range(50):
        output = cupy.zeros(1024, cupy.float32)
        tensor_map = sample.build_tensor_map(first)
        busy += 1  # the launch is queued behind this
        sample.launch_copy(kernel, tensor_map, output)
        tensor_map.replace_address(second)
        assert cupy.array_equal(output, first)


@pytest.mark.gpu
def test_tensor_map_keeps_its_array_alive(gpu: str) -> None:
    import cupy

    array = cupy.full(2**20, 5, cupy.float32)
    tensor_map = sample.build_tensor_map(array)
    del array
    gc.collect()
    assert (copy(gpu, tensor_map, 1024) == 5).all()
    # The memory is not handed out again.
    other = [cupy.full(2**20, 6, cupy.float32) for _ in range(4)]
    assert (copy(gpu, tensor_map, 2**20) == 5).all()
    assert len(other) == 4


@pytest.mark.gpu
def test_row_stride_of_2_31_elements_and_more(gpu: str) -> None:
    import cupy

    for stride in (2**31, 2**32 + 4):
        memory = cupy.zeros(stride + 8, cupy.uint8)
        memory[:4], memory[stride : stride + 4] = 1, 2
        strides = (stride, 1)
        array = cupy.ndarray((2, 16), cupy.uint8, memory.data, strides)
        if stride % 16:
            with pytest.raises(Exception, match="CUDA_ERROR_INVALID_VALUE"):
                view_of(array).as_tensor_map(box_dim=(2, 16))
        else:
            assert load_box(gpu, array, (2, 16)).tolist() == [
                0x01010101,
                0,
                0,
                0,
                0x02020202,
                0,
                0,
                0,
            ]


@ENDS_AT_2_31
@pytest.mark.gpu
@pytest.mark.parametrize("elements", [2**31, 2**31 + TILE])
def test_1d_tensor_map_ends(elements: int) -> None:
    """The next tile's coordinate does not fit into 32 bits, and the kernel faults.

    test_gpu.py runs the sample, whose tensor map is 2-D, beyond 2^32 elements.
    """
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}]
import tmaTensorMap as sample
import cupy
from cuda.core import Device
device = Device(0)
device.set_current()
source = sample.KERNEL.replace("{{0, first_tile}}", "{{first_tile * 128}}")
source = source.replace("coordinates[2]", "coordinates[1]")
macros = sample.MACROS | {{"TILES_PER_BOX": 1}}
kernel = sample.compile_kernel(f"sm_{{device.arch}}", source, macros)
sample.TILES_PER_BOX, sample.BLOCK_THREADS = 1, 32
array, output = cupy.ones({elements}, "float32"), cupy.zeros({elements}, "float32")
view = sample.StridedMemoryView.from_any_interface(array, stream_ptr=-1)
tensor_map = view.as_tensor_map(box_dim=(128,))
sample.launch_copy(kernel.get_kernel("tma_copy"), tensor_map, output)
print(output[-128:].get().sum())
"""
    process = run("-c", code)
    if elements == 2**31:
        assert process.stdout == "128.0\n", process
    else:
        assert process.returncode != 0, process
        assert "IllegalInstruction" in process.stderr, process


TWO_LOADS = r"""
#include <cuda/ptx>
using namespace cuda::ptx;
struct alignas(128) CUtensorMap_st { unsigned char bytes[128]; };
using CUtensorMap = CUtensorMap_st;

extern "C" __global__ void two_loads(const __grid_constant__ CUtensorMap map, float* output)
{
    __shared__ alignas(128) float boxes[2][512];
    __shared__ cuda::std::uint64_t barrier;
    const int at[2] = {0, 0};
    boxes[1][threadIdx.x] = 0;
    fence_proxy_async(space_shared);
    if (threadIdx.x == 0) {
        mbarrier_init(&barrier, 1);
        fence_mbarrier_init(sem_release, scope_cluster);
        mbarrier_arrive_expect_tx(sem_release, scope_cta, space_shared, &barrier, sizeof(boxes[0]));
        cp_async_bulk_tensor(space_shared, space_global, boxes[0], &map, at, &barrier);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (const long long begin = clock64(); clock64() - begin < 1000000;) {}
        cp_async_bulk_tensor(space_shared, space_global, boxes[1], &map, at, &barrier);
    }
    while (!mbarrier_try_wait_parity(&barrier, 0)) {}
    output[threadIdx.x] = boxes[1][threadIdx.x];
    if (threadIdx.x == 0) {  // the block must not end before the second box has arrived
        mbarrier_arrive_expect_tx(sem_release, scope_cta, space_shared, &barrier, sizeof(boxes[1]));
        while (!mbarrier_try_wait_parity(&barrier, 1)) {}
    }
}
"""


@EXPECTED_BYTES
@pytest.mark.gpu
def test_too_few_bytes_complete_the_phase_early(gpu: str) -> None:
    """Two loads, and the expected bytes of one; the second is issued late."""
    import cupy
    from cuda.core import LaunchConfig, Stream, launch

    kernel = sample.compile_kernel(gpu, TWO_LOADS).get_kernel("two_loads")
    tensor_map = sample.build_tensor_map(cupy.ones(512, cupy.float32))
    output = cupy.full(TILE, 2, cupy.float32)
    stream = Stream.from_handle(cupy.cuda.get_current_stream().ptr)
    launch(stream, LaunchConfig(grid=1, block=TILE), kernel, tensor_map, output.data.ptr)
    # The first warp, which waited for its thread that loads, is not looked at.
    assert output.tolist()[32:] == [0] * (TILE - 32)


@FENCE
@pytest.mark.gpu
def test_store_without_a_fence(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    fence = "    ptx::fence_proxy_async(ptx::space_shared);\n"
    assert transpose.KERNEL.count(fence) == 1
    x = cupy.arange(4096 * 4096, dtype=cupy.uint32).reshape(4096, 4096)
    for source, right in ((transpose.KERNEL, True), (transpose.KERNEL.replace(fence, ""), False)):
        code = sample.compile_kernel(gpu, source, transpose.MACROS)
        kernel = code.get_kernel("transpose")
        monkeypatch.setattr(transpose, "kernel_for", lambda device_id, kernel=kernel: kernel)
        output = transpose.transpose(x.view(cupy.float32)).view(cupy.uint32)
        assert bool((output == x.T).all()) == right


@SAME_VALUES
def test_float32_counts_to_2_24() -> None:
    below = numpy.arange(2**24 - 128, 2**24, dtype=numpy.float32)
    above = numpy.arange(2**24, 2**24 + 256, dtype=numpy.float32)
    assert numpy.unique(below).size == 128
    assert numpy.unique(above).size < 256


@NO_CUDA_H
def test_nvrtc_cannot_include_cuda_h() -> None:
    with pytest.raises(Exception, match=r"cannot open source file .stdlib\.h"):
        sample.compile_kernel("sm_90", "#include <cuda.h>\n" + sample.KERNEL)


@pytest.mark.parametrize("header", ["cuda_fp16.h", "cuda_bf16.h", "cuda/barrier"])
def test_headers_that_a_kernel_may_add(header: str) -> None:
    """<cuda/barrier> declares CUtensorMap_st and CUtensorMap too."""
    assert sample.compile_kernel("sm_90", f"#include <{header}>\n" + sample.KERNEL).code


@PTX_NEEDS_DRIVER
@pytest.mark.no_driver
def test_compiling_to_ptx_asks_the_driver() -> None:
    from cuda.core import Program, ProgramOptions

    program = Program("__global__ void nothing() {}", "c++", ProgramOptions(arch="sm_90"))
    assert program.compile("cubin").code
    with pytest.raises(RuntimeError):
        program.compile("ptx")


def test_cuda_core_has_what_the_recipes_import() -> None:
    """Where no GPU shows that it works. README.md says that the enums are not public."""
    import cuda.core
    from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapOOBFill, TensorMapSwizzle

    for enum in (TensorMapL2Promotion, TensorMapOOBFill, TensorMapSwizzle):
        assert not hasattr(cuda.core, enum.__name__), "README.md: it is public now"
    assert cuda.core.TensorMapDescriptorOptions
