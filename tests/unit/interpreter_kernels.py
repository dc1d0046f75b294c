"""Kernels for the interpreter's tests: one operation each."""

import triton
import triton.language as tl

from triton_ep.kernels.device.spin import now_ns, pause


@triton.jit
def cast_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Cast elements to the dtype of `out`."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(out_ptr.dtype.element_ty))


@triton.jit
def truncate_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Cast elements to the dtype of `out`, rounding towards zero."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(out_ptr.dtype.element_ty, fp_downcast_rounding="rtz"))


@triton.jit
def arithmetic_kernel(a_ptr, b_ptr, out_ptr, num, BLOCK: tl.constexpr):
    """out [7, num] in the inputs' dtype: sum, difference, product, fma, maximum, where, negative."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + offs)
    b = tl.load(b_ptr + offs)
    tl.store(out_ptr + offs, a + b)
    tl.store(out_ptr + num + offs, a - b)
    tl.store(out_ptr + 2 * num + offs, a * b)
    tl.store(out_ptr + 3 * num + offs, tl.fma(a, b, a))
    tl.store(out_ptr + 4 * num + offs, tl.maximum(a, b).to(out_ptr.dtype.element_ty))
    tl.store(out_ptr + 5 * num + offs, tl.where((a < b) & (a == a), a, b + 1.0))
    tl.store(out_ptr + 6 * num + offs, -a)


@triton.jit
def reduce_kernel(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out [3, COLUMNS] float32: sum and maximum over rows, then the last row of the running sum."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + rows[:, None] * COLUMNS + columns[None, :])
    tl.store(out_ptr + columns, tl.sum(x, 0).to(tl.float32))
    tl.store(out_ptr + COLUMNS + columns, tl.max(x, 0).to(tl.float32))
    last = tl.where(rows[:, None] == ROWS - 1, tl.cumsum(x, 0).to(tl.float32), 0.0)
    tl.store(out_ptr + 2 * COLUMNS + columns, tl.sum(last, 0))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """out [M, N] float32 = a [M, K] x b [K, N]."""
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b))


@triton.jit
def dot_scaled_kernel(
    a_ptr,  # [M, K] e4m3, bf16 or packed e2m1
    a_scale_ptr,  # [M, K // 32] uint8
    b_ptr,  # [K, N] e4m3, e5m2 or packed e2m1 [K // 2, N]
    b_scale_ptr,  # [N, K // 32] uint8
    out_ptr,  # [M, N] float32
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_PACK: tl.constexpr,
    B_PACK: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
):
    """Block-scaled product added to ones."""
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    a_k = tl.arange(0, K // A_PACK)
    b_k = tl.arange(0, K // B_PACK)
    groups = tl.arange(0, K // 32)
    a = tl.load(a_ptr + m[:, None] * (K // A_PACK) + a_k[None, :])
    b = tl.load(b_ptr + b_k[:, None] * N + n[None, :])
    a_scale = tl.load(a_scale_ptr + m[:, None] * (K // 32) + groups[None, :])
    b_scale = tl.load(b_scale_ptr + n[:, None] * (K // 32) + groups[None, :])
    ones = tl.full([M, N], 1.0, tl.float32)
    product = tl.dot_scaled(a, a_scale, A_FORMAT, b, b_scale, B_FORMAT, acc=ones)
    tl.store(out_ptr + m[:, None] * N + n[None, :], product)


@triton.jit
def fp8_sum_kernel(x_ptr, out_ptr):
    """Add two e4m3 numbers, which no GPU supports."""
    x = tl.load(x_ptr)
    tl.store(out_ptr, x + x)


@triton.jit
def wait_kernel(flag_ptr, out_ptr, expected, timeout_ns):
    """Wait for an int64 flag; out [3] int64: value seen, polls, nanoseconds."""
    start = now_ns()
    polls = 0
    seen = tl.load(flag_ptr, volatile=True)
    while (seen < expected) & (now_ns() - start < timeout_ns):
        pause(polls)
        polls += 1
        seen = tl.load(flag_ptr, volatile=True)
    tl.store(out_ptr, seen)
    tl.store(out_ptr + 1, polls)
    tl.store(out_ptr + 2, now_ns() - start)


@triton.jit
def masked_kernel(x_ptr, counter_ptr, out_ptr, atomic_out_ptr, num, BLOCK: tl.constexpr):
    """Store all lanes of a load, of a load with `other`, and of an atomic, each masked past `num`."""
    offs = tl.arange(0, BLOCK)
    mask = offs < num
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=mask))
    tl.store(out_ptr + BLOCK + offs, tl.load(x_ptr + offs, mask=mask, other=7))
    tl.store(atomic_out_ptr + offs, tl.atomic_add(counter_ptr + offs, 1, mask=mask))


@triton.jit
def order_kernel(ticket_ptr, out_ptr):
    """out [x, y, z]: number of programs of the grid that ran earlier."""
    ticket = tl.atomic_add(ticket_ptr, 1)
    y = tl.program_id(1) + tl.num_programs(1) * tl.program_id(0)
    tl.store(out_ptr + tl.program_id(2) + tl.num_programs(2) * y, ticket)


@triton.jit
def own_stores_kernel(heap_ptr, out_ptr, BLOCK: tl.constexpr):
    """Store to a heap, partly twice, and read it back: out [2, BLOCK], then the value that an atomic returns."""
    offs = tl.arange(0, BLOCK)
    tl.store(heap_ptr + offs, offs)
    tl.store(heap_ptr + offs, offs + 100, mask=offs % 2 == 0)
    tl.store(out_ptr + offs, tl.load(heap_ptr + offs))
    tl.store(heap_ptr + offs, offs + 200)
    tl.store(out_ptr + 2 * BLOCK, tl.atomic_add(heap_ptr + 3, 1))
    tl.store(out_ptr + BLOCK + offs, tl.load(heap_ptr + offs))


@triton.jit
def announced_stores_kernel(heap_ptr, ticket_ptr, out_ptr, first_waiting, BLOCK: tl.constexpr):
    """Programs below `first_waiting` store; the others take a ticket, out [programs], and pause 100 times."""
    program = tl.program_id(0)
    ticket = tl.atomic_add(ticket_ptr, 1)
    tl.store(out_ptr + program, ticket)
    if program < first_waiting:
        offs = program * BLOCK + tl.arange(0, BLOCK)
        tl.store(heap_ptr + offs, offs + 1)
    else:
        for _polls in range(100):
            pause(0)
