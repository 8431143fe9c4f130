"""Write hf_encodings.json: digests of the ids that transformers' own GGUF reader gives for the texts of strings.py.

    .venv/bin/python tests/text/golden/make_golden.py .cache/models

It takes minutes (transformers builds each tokenizer in Python), which is why the tests compare digests. Made with
transformers 5.24.0, tokenizers 0.23.3. To see what differs after a failure: ``... .cache/models --show``.
"""

from __future__ import annotations

import hashlib
import json
import sys
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from strings import texts

CHUNK = 100
GOLDEN = Path(__file__).with_name("hf_encodings.json")


def without_numbers(given: Iterable[str]) -> list[str]:
    """transformers' GGUF reader does not cut digits apart for SmolLM2, as the model's own tokenizer does."""
    return [text for text in given if not any(unicodedata.category(c)[0] == "N" for c in text)]


def composed(given: Iterable[str]) -> list[str]:
    """transformers' GGUF reader leaves out the NFC normalisation that Qwen's own tokenizer has."""
    return [unicodedata.normalize("NFC", text) for text in given]


FILES: dict[str, tuple[str, Callable[[Iterable[str]], list[str]]]] = {
    "smollm2": ("SmolLM2-135M-Instruct.Q4_1.gguf", without_numbers),
    "qwen": ("Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf", composed),
    "gemma3": ("gemma-3-270m-q4_k_m.gguf", list),
}


def digests(encoded: list[list[int]]) -> list[str]:
    """One digest for each hundred texts."""
    chunks = [encoded[start : start + CHUNK] for start in range(0, len(encoded), CHUNK)]
    return [hashlib.sha256(json.dumps(chunk).encode()).hexdigest()[:16] for chunk in chunks]


def main() -> None:
    from transformers import AutoTokenizer

    folder, given, made = Path(sys.argv[1]), texts(10_000), {}
    for name, (file, select) in FILES.items():
        reference = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        selected = select(given)
        encoded = [reference.encode(text, add_special_tokens=False) for text in selected]
        made[name] = {"with_special": reference.encode("Hello"), "digests": digests(encoded)}
        if "--show" in sys.argv:
            from toque.formats import load_checkpoint
            from toque.text.tokenizer import load_tokenizer

            ours = load_tokenizer(load_checkpoint(folder / file))
            for text, ids in zip(selected, encoded, strict=True):
                if ours.encode(text, add_special=False) != ids:
                    print(name, repr(text), ids, ours.encode(text, add_special=False))
    if "--show" not in sys.argv:
        GOLDEN.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
