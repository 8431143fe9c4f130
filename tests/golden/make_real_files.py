"""Makes real_files.json: what Hugging Face transformers says in float32 on two files' dequantized GGUF weights.

::

    PYTHONPATH=tests python tests/golden/make_real_files.py .cache/models/gemma-3-270m-q4_k_m.gguf \\
        .cache/models/Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from fixtures.hf import hf_logits, model_from_gguf
from toque.formats import load_checkpoint
from toque.text.tokenizer import load_tokenizer

TEXT = "Paris is the capital of France. Berlin is the capital of Germany. Madrid is the capital of"
TOP = 8
POSITIONS = 8


def main(paths: list[Path]) -> None:
    golden = {}
    for path in paths:
        ids = load_tokenizer(load_checkpoint(path)).encode(TEXT, add_special=True)
        logits = hf_logits(model_from_gguf(path), ids)
        logprobs = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
        rows = []
        for position in np.linspace(1, len(ids) - 1, POSITIONS).astype(int):
            best = np.argsort(-logits[position], kind="stable")[:TOP]
            values = {"logits": logits, "logprobs": logprobs}
            row = {name: [round(float(v), 4) for v in of[position][best]] for name, of in values.items()}
            rows.append({"position": int(position), "ids": best.tolist()} | row)
        golden[path.name] = {"text": TEXT, "text_ids": ids, "top": rows}
    Path(__file__).with_name("real_files.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
