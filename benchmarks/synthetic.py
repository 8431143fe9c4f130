"""Models that exist only to be timed: one shape in every format, every family at one size, random weights.

Speed does not depend on the values. They are made once, into ``.cache/bench``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from floors import ModelRows, Row, decode, prefill
from toque.formats.blocks import BY_NAME
from toque.formats.checkpoint import Bytes, TensorData
from toque.formats.convert import quantize_model
from toque.formats.gguf import ValueType
from toque.formats.gguf_model import read_parts
from toque.formats.gguf_writer import write_gguf
from toque.formats.safetensors_writer import NewTensor, write_folder
from workers import ROOT

MODELS = ROOT / ".cache" / "models"
MADE = ROOT / ".cache" / "bench"
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD = 768, 2048, 8, 12, 4, 64
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"  # lends its tokenizer
QWEN = "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"

# Where a block has its float16 scales, which random bytes would make infinite; MXFP4 has an exponent instead.
_SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
GGUF_FORMATS = (*_SCALES, "MXFP4", "F16", "BF16")
FOLDER_FORMATS = {"bf16 (safetensors)": "", "int8 W8A8": "int8", "int4 W4A16": "int4", "FP8": "fp8"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "qwen3moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "gemma": ("Gemma", {"head_dim": 64}),
    "gemma2": ("Gemma2", {"head_dim": 64}),
    "gemma3": ("Gemma3", {"head_dim": 64}),
}
_ROWS = (prefill(512), decode(1), decode(16))


def format_rows() -> list[ModelRows]:
    return [
        *(ModelRows(f, f"format-{f}.gguf", _ROWS, made=f"format-{f}.gguf") for f in GGUF_FORMATS),
        *(
            ModelRows(f, f"format-{s or 'bf16'}", _ROWS, made=f"format-{s or 'bf16'}")
            for f, s in FOLDER_FORMATS.items()
        ),
    ]


def family_rows() -> list[ModelRows]:
    made = [
        ModelRows(f, f"family-{f}", _ROWS, made=f"family-{f}", quantize="int8", engines=("toque",))
        for f in FAMILIES
    ]
    texts = Row("16 texts of 128 tokens", {"op": "embed", "batch": 16, "context": 128})
    return [
        *made,
        ModelRows("bert (the real all-MiniLM-L6-v2)", "all-MiniLM-L6-v2", (texts,), engines=("toque",)),
    ]


def model_path(rows: ModelRows) -> Path:
    """The file or folder of a model, made if it is one that is made."""
    if not rows.made:
        given = Path(rows.file)
        return given.absolute() if given.exists() else MODELS / rows.file
    path = MADE / rows.made
    if not path.exists():
        print(f"making {rows.made} (once)", flush=True)
        MADE.mkdir(parents=True, exist_ok=True)
        _make(rows.made, path)
    return path


def _make(name: str, path: Path) -> None:
    kind, _, what = name.partition("-")
    if name == "qwen-int8":
        quantize_model(float_model(MODELS / QWEN), path, "int8")
    elif kind == "family":
        _complete(path, lambda folder: _family(what, folder))
    elif what.endswith(".gguf"):
        _gguf(what.removesuffix(".gguf"), path)
    elif what == "bf16":
        _complete(path, _float_folder)
    else:
        floats = MADE / "format-bf16"
        if not floats.exists():
            _complete(floats, _float_folder)
        quantize_model(floats, path, what)


def float_model(gguf: Path) -> Path:
    """A folder with the weights of a GGUF file as bfloat16, made once."""
    path = MADE / f"{gguf.stem}-bf16"
    if not path.exists():
        print(f"making {path.name} (once)", flush=True)
        MADE.mkdir(parents=True, exist_ok=True)
        _complete(path, lambda folder: _float_copy(gguf, folder))
    return path


def _complete(path: Path, make: Callable[[Path], None]) -> None:
    """A folder is complete or not there."""
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    make(part)
    part.rename(path)


def _shapes(vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (vocab, HIDDEN)
    yield "output_norm.weight", (HIDDEN,)
    for i in range(LAYERS):
        yield f"blk.{i}.attn_norm.weight", (HIDDEN,)
        yield f"blk.{i}.attn_q.weight", (HEADS * HEAD, HIDDEN)
        yield f"blk.{i}.attn_k.weight", (KV_HEADS * HEAD, HIDDEN)
        yield f"blk.{i}.attn_v.weight", (KV_HEADS * HEAD, HIDDEN)
        yield f"blk.{i}.attn_output.weight", (HIDDEN, HEADS * HEAD)
        yield f"blk.{i}.ffn_norm.weight", (HIDDEN,)
        yield f"blk.{i}.ffn_gate.weight", (FFN, HIDDEN)
        yield f"blk.{i}.ffn_up.weight", (FFN, HIDDEN)
        yield f"blk.{i}.ffn_down.weight", (HIDDEN, FFN)


def random_blocks(dtype: str, rows: int, columns: int, rng: np.random.Generator) -> Bytes:
    """Stored bytes of random weights of about ±0.02: uint8 [rows, bytes of a row]."""
    if dtype in ("F16", "BF16"):
        values = rng.standard_normal((rows, columns), np.float32) * 0.02
        if dtype == "F16":
            return values.astype("<f2").view(np.uint8)
        return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    block = BY_NAME[dtype]
    raw = rng.integers(0, 256, (rows, columns // block.elements, block.nbytes), np.uint8)
    for at in _SCALES.get(dtype, ()):
        raw[:, :, at : at + 2] = np.full(1, 1e-4, "<f2").view(np.uint8)
    if dtype == "MXFP4":
        raw[:, :, 0] = 120
    return raw.reshape(rows, -1)


def _gguf(dtype: str, path: Path) -> None:
    (source, *_) = read_parts(MODELS / SMOLLM2)
    metadata = {
        key: (source.types[key], value)
        for key, value in source.metadata.items()
        if not key.startswith("llama.")
    }
    vocab = len(source.metadata["tokenizer.ggml.tokens"])
    sizes = {
        "block_count": LAYERS, "context_length": 8192, "embedding_length": HIDDEN, "feed_forward_length": FFN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.dimension_count": HEAD,
        "vocab_size": vocab,
    }  # fmt: skip
    metadata |= {f"llama.{key}": (ValueType.UINT32, value) for key, value in sizes.items()}
    metadata["llama.attention.layer_norm_rms_epsilon"] = (ValueType.FLOAT32, 1e-5)
    metadata["llama.rope.freq_base"] = (ValueType.FLOAT32, 1e4)
    rng = np.random.default_rng(0)
    tensors = []
    for name, shape in _shapes(vocab):
        if len(shape) == 1:
            ones = np.ones((1, *shape), np.float32).view(np.uint8)
            tensors.append(TensorData(name, "F32", shape, ones))
        else:
            tensors.append(TensorData(name, dtype, shape, random_blocks(dtype, *shape, rng)))
    write_gguf(path, metadata, tensors)


_HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def _float_folder(folder: Path) -> None:
    """The same shape as bfloat16 safetensors."""
    vocab, rng, tensors = 49152, np.random.default_rng(0), []
    for name, shape in _shapes(vocab):
        if name in _HF_NAMES:
            hf = _HF_NAMES[name]
        else:
            _, layer, part, _ = name.split(".")
            hf = f"model.layers.{layer}.{_HF_NAMES[part]}.weight"
        if len(shape) == 1:
            data = np.full((1, *shape), 0x3F80, "<u2").view(np.uint8)
        else:
            data = random_blocks("BF16", *shape, rng)
        tensors.append(NewTensor(hf, "BF16", shape, data.nbytes, lambda data=data: iter([data.reshape(-1)])))
    write_folder(folder, tensors)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": vocab, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _family(name: str, folder: Path) -> None:
    """transformers' own random initialization, bfloat16."""
    import torch
    import transformers

    family, own = FAMILIES[name]
    config_name = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
    sizes = {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**(sizes | own))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def _float_copy(gguf: Path, folder: Path) -> None:
    """A GGUF model as transformers loads it, bfloat16, with its tokenizer: for engines that read no GGUF files."""
    import torch
    import transformers

    floats = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=floats
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
