"""Mixtures of experts in 4 bits with zero points: all that is far from transformers is a choice between near equals.

The judge is transformers in float32 with the weights that the codes stand for. Where a router's scores of two experts
are all but the same, rounding decides which of them a token takes, and every logit that sees the token is another. So
each backend's choices are read from its own router's scores and given to transformers, which must then say the same
at every position; and each choice that it would not have made itself must be one between near equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from fixtures.checkpoints import prefill_logits
from fixtures.hf import hf_logits, tiny
from formats import quantized as q
from toque import _native
from toque.backends.base import BackendOptions
from toque.backends.cpu import CpuBackend
from toque.backends.reference import ReferenceBackend
from toque.formats import load_checkpoint
from toque.formats.checkpoint import Checkpoint
from toque.graph.fuse import fuse
from toque.graph.ir import Graph, Node, Value
from toque.models import build_graph

TOKENS = [int(token) for token in np.random.default_rng(2).integers(0, 96, 60)]
USED = 2
BFLOAT16 = _native.resolve_isa("").startswith("avx512")
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
SCHEMES: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
        lambda weight: q.gptq(weight, symmetric=False),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        q.awq,
    ),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
        },
        lambda weight: q.packed(weight, symmetric=False),
    ),
}


def computed(graph: Graph, checkpoint: Checkpoint, backend: Any) -> np.ndarray:
    executable = backend.lower(fuse(graph), checkpoint, BackendOptions(threads=1))
    executable.allocate_kv(4)
    return prefill_logits(executable, TOKENS)


def chosen_experts(graph: Graph, checkpoint: Checkpoint, backend: Any) -> list[np.ndarray]:
    """The experts that each token takes in each layer, from the scores of the backend's own routers."""
    choices = []
    new = 1 + max(value.id for node in graph.nodes for value in node.outputs)
    for index, node in enumerate(graph.nodes):
        if node.op == "moe":
            scores = Value(new, node.attrs["n_experts"])
            router = Node("linear", node.inputs, (scores,), node.weights[:1], {"bias": ("",)})
            until = Graph((*graph.nodes[:index], router), scores, graph.kv)
            choices.append(np.argsort(-computed(until, checkpoint, backend), axis=1)[:, :USED])
    return choices


class ForcedRouter(torch.nn.Module):
    """A Mixtral layer's router, but for the experts: their numbers are given. ``doubt`` is what it says of them.

    ``doubt`` [tokens]: the best score that was not chosen less the worst that was, in units of the scores' spread;
    negative where it would have chosen the same.
    """

    def __init__(self, router: Any, choices: np.ndarray) -> None:
        super().__init__()
        self.weight = router.weight
        self._choices = torch.from_numpy(np.ascontiguousarray(choices))
        self.doubt = np.zeros(len(choices))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        taken = scores.gather(1, self._choices)
        others = scores.scatter(1, self._choices, -torch.inf)
        self.doubt = ((others.max(1).values - taken.min(1).values) / scores.std()).numpy()
        return scores, torch.softmax(taken, dim=-1), self._choices


def with_choices(model: Any, choices: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The model's logits when tokens take these experts, and each router's doubts [layers, tokens]."""
    routers = [ForcedRouter(layer.mlp.gate, c) for layer, c in zip(model.model.layers, choices, strict=True)]
    own = [layer.mlp.gate for layer in model.model.layers]
    for layer, router in zip(model.model.layers, routers, strict=True):
        layer.mlp.gate = router
    logits = hf_logits(model, TOKENS)
    for layer, router in zip(model.model.layers, own, strict=True):
        layer.mlp.gate = router
    return logits, np.stack([router.doubt for router in routers])


def errors(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Each token's root mean square, in units of the logits' own spread."""
    return np.sqrt(np.square(actual - expected).mean(axis=1) / np.var(expected))


@pytest.mark.parametrize("name", SCHEMES)
def test_zero_points_of_experts_are_exact_but_for_choices_between_near_equals(
    name: str, tmp_path: Path
) -> None:
    model = tiny(hf.MixtralForCausalLM, hf.MixtralConfig, num_local_experts=4, num_experts_per_tok=USED)
    model.save_pretrained(tmp_path / "plain")
    config, quantize = SCHEMES[name]
    experts = ("proj.weight", "w1.weight", "w2.weight", "w3.weight")
    meanings = q.quantize_folder(tmp_path / "plain", tmp_path / "model", config, quantize, suffix=experts)
    file = tmp_path / "plain" / "model.safetensors"
    assert set(meanings) == set(load_file(file))
    save_file({key: torch.from_numpy(value.copy()) for key, value in meanings.items()}, file)
    judge = hf.MixtralForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    unforced = hf_logits(judge, TOKENS)

    ours = load_checkpoint(tmp_path / "model")
    assert {ours.tensors[f"blk.1.ffn_{part}_exps.weight"].dtype for part in ("gate", "up", "down")} == {
        "Q4_1"
    }
    graph = build_graph(ours.config, ours.tensors.keys())
    # The reference rounds scale * zero to float16, the cpu backend each token's values to 8 bits as well. Most tokens
    # are three times as near.
    near_equal: dict[str, int] = {}
    for backend, bound, nearly in ((ReferenceBackend(), 0.008, 0.01), (CpuBackend(), 0.2, 0.15)):
        logits = computed(graph, ours, backend)
        expected, doubts = with_choices(judge, chosen_experts(graph, ours, backend))
        assert errors(logits, expected).max() < bound
        assert np.sqrt(np.square(errors(logits, expected)).mean()) < bound / 3
        assert doubts.max() < nearly
        near_equal[backend.name] = int((doubts > 0).sum())
        if near_equal[backend.name] == 0:
            np.testing.assert_allclose(expected, unforced, atol=1e-4)
    if not BFLOAT16:  # whose rounding is another, and may decide as transformers does
        assert near_equal["cpu"] > 0
        assert errors(logits, unforced).max() > 0.2
