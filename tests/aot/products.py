"""Runs quantisation and grouped GEMM on one GPU; prints the hash of every result. Started by test_gpu.py.

python -m tests.aot.products            with the JIT
python -m tests.aot.products --aot DIR  with an ahead-of-time library, without Triton
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from itertools import chain

EXPERTS = 32


def _results() -> Iterator[tuple[str, object]]:
    import torch

    from triton_ep.ops import grouped_bf16, grouped_fp8, mxfp8, row_scales

    torch.manual_seed(0)
    device, n, k = "cuda", 512, 256
    for rows in (1024, 8192):
        splits = torch.randperm(EXPERTS) + 1
        ends = (splits.cumsum(0) * rows // splits.sum()).int().to(device)
        a = torch.randn(rows, k, device=device).bfloat16()
        w = torch.randn(EXPERTS, n, k, device=device).bfloat16()
        offsets = torch.cat([ends.new_zeros(1), ends])
        for tma in (True, False):
            yield f"forward {rows} tma={tma}", grouped_bf16.bf16_gemm(a, w.transpose(1, 2), ends, tma=tma)
            dy = torch.ones(rows, n, device=device).bfloat16()
            yield f"dgrad {rows} tma={tma}", grouped_bf16.bf16_gemm(dy, w, ends, tma=tma)
            yield f"wgrad {rows} tma={tma}", grouped_bf16.bf16_wgrad(dy, a, ends, EXPERTS, tma=tma)
        qa, sa = mxfp8.quantize_rows(a)
        qw, sw = mxfp8.quantize_rows(w.flatten(0, 1))
        yield f"rows {rows}", torch.cat([qa.view(torch.uint8), sa.view(torch.uint8)], 1)
        yield f"back {rows}", mxfp8.dequantize_rows(qa, sa)
        columns = mxfp8.quantize_columns(a, offsets)
        yield f"columns {rows}", torch.cat([part.view(torch.uint8) for part in columns])
        yield f"columns back {rows}", mxfp8.dequantize_columns(*columns, offsets)
        for part in mxfp8.quantize_both(a, offsets):
            yield f"both {rows}", part.view(torch.uint8)
        weights = qw.view(EXPERTS, n, k), sw.view(EXPERTS, n, k // 32)
        for moved in (grouped_fp8.equalize_scales, row_scales.rebase_rows):
            left, right = moved(qa, sa), moved(*weights)
            for tma in (True, False):
                yield f"fp8 {moved.__name__} {rows} tma={tma}", grouped_fp8.fp8_gemm(left, right, ends, tma=tma)


def _experts() -> Iterator[tuple[str, object]]:
    """Both products of experts, forward and gradient of rows; the first reads weights in boxes of three axes."""
    import torch

    from triton_ep.ops import experts, prepare, row_scales, tiles

    torch.manual_seed(0)
    rows, hidden, ffn = 256 * EXPERTS, 256, 384
    offs = torch.arange(0, rows + 1, 256, dtype=torch.int32, device="cuda")
    x, dpre = (torch.randn(rows, size, device="cuda").bfloat16() for size in (hidden, 2 * ffn))
    w13 = torch.randn(EXPERTS, 2 * ffn, hidden, device="cuda").bfloat16()
    w2 = torch.randn(EXPERTS, hidden, ffn, device="cuda").bfloat16()
    given = {"row_weights": torch.rand(rows, device="cuda"), "tiles": tiles.tile_table(offs, rows)}
    act, pre = experts.gate_up(x, w13, offs, keep_pre=True, **given)
    yield "act", act
    yield "pre", pre
    yield "down", experts.rows_product(act, w2, offs, aligned=True, tiles=given["tiles"])
    yield "dx", experts.rows_product(dpre, w13.transpose(1, 2), offs, aligned=True, tiles=given["tiles"])
    x8 = row_scales.quantize_to_rows(x, offs)
    (w13_rows, back), (w2_rows, _) = (prepare.prepare_weights(w, "both") for w in (w13, w2))
    act8, _ = experts.gate_up(x8, w13_rows, offs, act="mx", **given)
    dpre8 = row_scales.quantize_to_rows(dpre, offs)
    for name, made in (("rows", x8), ("weights", w13_rows), ("transposed", back), ("act in fp8", act8)):
        yield name, made.qdata.view(torch.uint8)
        yield f"scales of {name}", made.scale
    yield "down in fp8", experts.rows_product(act8, w2_rows, offs, aligned=True, tiles=given["tiles"])
    yield "dx in fp8", experts.rows_product(dpre8, back, offs, aligned=True, tiles=given["tiles"])
    yield "values", row_scales.dequantize_rows_in_use(x8, offs)


def main() -> None:
    """Print a JSON list of [name, sha256]."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--aot")
    folder = parser.parse_args().aot
    if folder:
        os.environ |= {"TRITON_EP_AOT": "1", "TRITON_EP_AOT_DIR": folder}
        sys.modules["triton"] = None  # type: ignore[assignment]
    import torch

    told = []
    for name, result in chain(_results(), _experts()):
        assert isinstance(result, torch.Tensor)
        told.append([name, hashlib.sha256(result.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()])
    print(json.dumps(told))


if __name__ == "__main__":
    main()
