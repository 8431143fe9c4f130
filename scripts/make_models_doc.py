"""Writes docs/models.md: what Toque loads and what it refuses, taken from the code that does it.

``python scripts/make_models_doc.py`` writes the page; a test fails while it differs from the code.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from toque import _native
from toque.formats.blocks import BY_NAME, RUNNABLE
from toque.formats.convert import FOLDER_SCHEMES, GGUF_RECIPES
from toque.formats.gguf_export import ARCHITECTURES as EXPORTED
from toque.formats.hf_config import MODEL_TYPES
from toque.formats.layout import ARCHITECTURES
from toque.formats.quantize import RECIPES
from toque.formats.schemes import LAYOUTS, METHODS
from toque.models import supported

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"

FAMILIES = {
    "bert": "BERT encoders for embeddings (MiniLM, BGE, E5, GTE)",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 (text)",
    "llama": "Llama 1-3, Mistral, Mixtral, SmolLM and whatever else is a llama",
    "phi3": "Phi 3 and 3.5 (longrope)",
    "qwen2": "Qwen 1.5, 2 and 2.5",
    "qwen3": "Qwen 3",
    "qwen3moe": "Qwen 3 mixture of experts",
}


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def bits(name: str) -> str:
    block = BY_NAME[name]
    return f"{8 * block.nbytes / block.elements:.4g}"


def kept(name: str) -> str:
    """Bits per weight in the cpu backend's own layout."""
    return f"{8 * _native.packed_size(name, 256, 4096) / (256 * 4096):.4g}"


def page() -> str:
    families = [
        (f"`{name}`", FAMILIES[name], ", ".join(f"`{t}`" for t, ours in MODEL_TYPES.items() if ours == name))
        for name in ARCHITECTURES
        if name in supported()
    ]
    files = [name for name in sorted(RUNNABLE, key=lambda name: BY_NAME[name].id) if BY_NAME[name].id >= 0]
    types = [(name, bits(name), kept(name)) for name in files]
    refused = ", ".join(name for name in BY_NAME if name not in RUNNABLE)
    load = [
        (
            f"`--quantize {name}`",
            "e4m3 values" if recipe.linear == "FP8" else recipe.linear,
            recipe.outer or "kept",
        )
        for name, recipe in RECIPES.items()
    ]
    return f"""# What Toque loads

This page is written by `scripts/make_models_doc.py` from the code; a test fails while the two differ.

## Families

An architecture that is not in this table is refused by name, with this list, before any weight is read.

{table(("GGUF architecture", "models", "`model_type` in config.json"), families)}

Rotary scaling: linear, llama3, yarn, longrope. Anything else is refused.

## GGUF

Versions 2 and 3, one file or split files. Weights may have these types; the cpu backend has kernels for all of them and
holds them at the bits of the last column, scales as float16 beside the codes.

{table(("type", "bits per weight in the file", "bits in memory"), types)}

Refused by name: {refused}.

## Safetensors folders

F32, F16 and BF16 weights, one file or shards with an index; PyTorch pickles are never opened. Of quantized
checkpoints (`quantization_config` in config.json) these:

{table(("`quant_method`", "layers", "becomes"), [(f"`{m}`", what, kind) for m, what, kind in LAYOUTS])}

Codes are kept as they are and scales are rounded to float16 once; F16 means the weight itself, rounded once,
and a model of such layers is shown with "held as F16" behind its scheme. Q8_Z is Toque's own: 8-bit codes with scale
and zero point apart, which is exact, in 9 bits. With act-order (`desc_act`, a `g_idx` in any order) columns are sorted
by their groups and activations follow, at no cost that can be measured; should an expert's gate and up be sorted
differently, which comes from no quantizer that we know, its layer's become F16. Layers that a checkpoint left in float
stay in float. Activations are quantized by Toque's own kernels whatever the checkpoint says.
Any method other than {", ".join(f"`{name}`" for name in METHODS)} is refused by name, as are 2:4 sparse
weights, transforms, NVFP4 and MXFP4 packing, and GPTQ settings that differ by module.

## Quantizing

At load, for models in F32, F16 or BF16 (`toque serve`, `run`, `eval`, `plan`; `engine.quantize` in settings):

{table(("", "linear layers", "embeddings and output matrix"), load)}

Norms, biases and the routers of experts are kept. `toque quantize IN OUT --scheme ...` writes a file that other
engines load: a GGUF file ({", ".join(GGUF_RECIPES)}) from a GGUF file or from a folder, or from a folder
a folder in compressed-tensors layout ({", ".join(FOLDER_SCHEMES)}). A folder becomes a GGUF file where it is of
{", ".join(EXPORTED)}, has a BPE tokenizer (of bytes, or
SentencePiece's) and says nothing that a GGUF file of its family cannot state; llama.cpp gives the same logits for them.

`toque eval MODEL --reference` measures what a format loses, `toque plan MODEL` what it will take.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
