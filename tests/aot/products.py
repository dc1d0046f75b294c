"""Quantisation and grouped GEMM on one GPU; prints the hash of every result. Started by test_gpu.py.

python -m tests.aot.products            the JIT
python -m tests.aot.products --aot DIR  an ahead-of-time library, without Triton
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator

EXPERTS = 32


def _results() -> Iterator[tuple[str, object]]:
    import torch

    from triton_ep.ops import grouped_bf16, grouped_fp8, mxfp8

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
        left = grouped_fp8.equalize_scales(qa, sa)
        right = grouped_fp8.equalize_scales(qw.view(EXPERTS, n, k), sw.view(EXPERTS, n, k // 32))
        for tma in (True, False):
            yield f"fp8 {rows} tma={tma}", grouped_fp8.fp8_gemm(left, right, ends, tma=tma)


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
    for name, result in _results():
        assert isinstance(result, torch.Tensor)
        told.append([name, hashlib.sha256(result.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()])
    print(json.dumps(told))


if __name__ == "__main__":
    main()
