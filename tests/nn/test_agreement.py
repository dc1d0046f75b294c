"""Ranks that create different modules learn so at once, all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from triton_ep.errors import ConfigError
from triton_ep.nn import MoE, finalize_exchanges

pytestmark = pytest.mark.plain
SIZES: dict[str, Any] = {"num_experts": 4, "topk": 2, "max_tokens": 8, "timeout_s": 60.0}


def _apart(rank: int, nodes: int, ranks_per_node: int) -> None:
    MoE(64, 96, **SIZES)  # from here on, rank 0 finds its exchange where rank 1 asks for another
    for options, words in (
        ({"max_tokens": 8 + rank}, "max_tokens: 8 by rank 0; 9 by rank 1"),
        ({"capacity": [None, 2.0][rank]}, r"capacity: None by rank 0; 2\.0 by rank 1"),
        ({"payload": "mxfp8", "precision": ["default", "exact"][rank]}, "precision: 'default' by rank 0; 'exact' by"),
        ({"activation": ["silu", "gelu"][rank]}, "activation: 'silu' by rank 0; 'gelu' by rank 1"),
        ({"bias": bool(rank)}, "bias: False by rank 0; True by rank 1"),
        ({"separate": bool(rank)}, "separate: False by rank 0; True by rank 1"),
        ({"router": [False, "softmax"][rank]}, "router: False by rank 0; 'of type str' by rank 1"),
        ({"shared": [None, torch.nn.Linear][rank]}, "shared: None by rank 0; 'of type type' by rank 1"),
        ({"num_experts": 4 + rank}, "num_experts: 4 by rank 0; 5 by rank 1"),
        ({"payload": [None, "fp8"][rank]}, "payload: None by rank 0; 'fp8' by rank 1"),
    ):
        with pytest.raises(ConfigError, match=f"were given different values of MoE's {words}"):
            MoE(64, 96, **{**SIZES, **options})
    with pytest.raises(ConfigError, match="ffn: 96 by rank 0; 128 by rank 1"):
        MoE(64, [96, 128][rank], **SIZES)
    with torch.device("meta"):
        assert MoE(64, 96, **SIZES).experts.w2.is_meta
    finalize_exchanges()


def test_modules_that_differ_between_ranks(run_ranks):
    """Sizes of the exchange, whose collectives would not meet, and options of the experts."""
    run_ranks(_apart, 1, 2)
