"""Makes smollm2.json: what Hugging Face transformers says in float32 on SmolLM2's dequantized GGUF weights.

::

    PYTHONPATH=tests python tests/golden/make_smollm2.py .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf

The weights are read by the `gguf` package and the text is tokenized by `tokenizers` from the file's own vocabulary, so
nothing of Toque is involved.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from fixtures.hf import model_from_gguf

TEXT = (
    "The lighthouse keeper climbed the 217 steps twice a day, once to light the lamp and once to put it out. "
    "In winter the wind came off the sea so hard that he had to lean into it; in summer he left the door open, "
    'and swallows nested on the stairs. "Nobody," he used to say, "has ever thanked a light that worked."\n\n'
    "def area(r):\n    return 3.14159 * r ** 2\n"
)
CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
TOP = 20
POSITIONS = 8
NEW_TOKENS = 16


def tokenizer_of(path: Path) -> Tokenizer:
    fields = gguf.GGUFReader(path)
    tokens = fields.get_field("tokenizer.ggml.tokens").contents()
    merges = [tuple(pair.split(" ")) for pair in fields.get_field("tokenizer.ggml.merges").contents()]
    kinds = fields.get_field("tokenizer.ggml.token_type").contents()
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def main(path: Path) -> None:
    model, tokenizer = model_from_gguf(path), tokenizer_of(path)
    ids = tokenizer.encode(TEXT).ids
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    top = []
    for position in np.linspace(0, len(ids) - 1, POSITIONS).astype(int):
        best = np.argsort(-logits[position], kind="stable")[:TOP]
        row = {"position": int(position), "ids": best.tolist()}
        top.append(row | {"logits": [round(float(value), 4) for value in logits[position][best]]})
    prompt = tokenizer.encode(CHAT).ids
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)[
        0, len(prompt) :
    ]
    golden = {
        "model": path.name,
        "text": TEXT,
        "text_ids": ids,
        "top": top,
        "chat": CHAT,
        "chat_ids": prompt,
        "answer_ids": answer.tolist(),
        "answer": tokenizer.decode(answer.tolist(), skip_special_tokens=True),
    }
    Path(__file__).with_suffix("").with_name("smollm2.json").write_text(
        json.dumps(golden, indent=None) + "\n"
    )
    print(golden["answer"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
