"""Speed of the linear kernels on SmolLM2-135M's shapes: GMAC/s (1e9 multiply-adds) and, for one token, GB/s of weights.

    python benchmarks/kernels.py [--isa avx2] [--threads 1 2] [--dtypes Q4_1 Q8_0] [--tokens 1 4 16 64 512]

Each figure is the best of several passes over enough copies of the weight to exceed the caches. Two virtual CPUs may be
two threads of one core: `--threads 2` then shows what sharing it costs.
"""

from __future__ import annotations

import argparse

import numpy as np

from toque import _native

SHAPES = {
    "qkv 576x960": (960, 576, False),
    "o 576x576": (576, 576, False),
    "gate/up 576x2*1536": (1536, 576, True),
    "down 1536x576": (576, 1536, False),
    "logits 576x49152": (49152, 576, False),
}
WORKING_SET = 96 << 20  # bytes of weights per pass when one token is computed: more than any L3 here


def random_weight(arena: _native.Arena, dtype: str, rows: int, cols: int) -> _native.PackedMatrix:
    block, size = {
        "Q4_0": (32, 18),
        "Q4_1": (32, 20),
        "Q5_0": (32, 22),
        "Q8_0": (32, 34),
        "Q6_K": (256, 210),
        "F16": (1, 2),
    }[dtype]
    raw = np.random.default_rng(0).integers(0, 63, (rows, cols // block * size), dtype=np.uint8)
    return _native.pack(arena, dtype, raw, cols)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default="")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--dtypes", nargs="+", default=["Q4_1", "Q4_0", "Q5_0", "Q8_0"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"isa {_native.resolve_isa(options.isa)}, at most {_native.tile_max(options.isa)} tokens per tile")
    for dtype in options.dtypes:
        for name, (rows, cols, gated) in SHAPES.items():
            one = _native.packed_size(dtype, rows, cols)
            for threads in options.threads:
                line = f"{dtype:5} {name:20} {threads} threads:"
                for tokens in options.tokens:
                    wanted = WORKING_SET if tokens == 1 else 8 << 20
                    pairs = 2 if gated else 1
                    copies = max(1, min(wanted // one, 40) // pairs) * pairs
                    arena = _native.Arena(one * copies)
                    weights = [random_weight(arena, dtype, rows, cols) for _ in range(copies)]
                    x = np.random.default_rng(1).standard_normal((tokens, cols), dtype=np.float32)
                    seconds = _native.time_linear(
                        options.isa, weights, x, threads=threads, repeats=options.repeats, gated=gated
                    )
                    line += f"  M={tokens}: {tokens * rows * cols * copies / seconds / 1e9:.0f}"
                    if tokens == 1:
                        line += f" ({one * copies / seconds / 1e9:.1f} GB/s)"
                print(line, flush=True)


if __name__ == "__main__":
    main()
