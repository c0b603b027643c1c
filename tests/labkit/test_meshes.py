"""The programs on meshes compute what plain PyTorch computes; their lab shows what is judged."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.scenarios.meshes import (
    IGNORED,
    WAYS,
    batch,
    gradients,
    parameters,
)
from labkit.testing.compare import largest_difference
from miniddp.collectives.mesh import Mesh


def mlp(p: dict[str, Tensor], x: Tensor) -> Tensor:
    normed = x * (x.square().mean(-1, keepdim=True) + torch.finfo().eps).rsqrt() * p["norm"]
    return torch.tanh(normed @ p["up"].T + p["up_bias"]) @ p["down"].T + p["down_bias"]


def attention(p: dict[str, Tensor], x: Tensor) -> Tensor:
    parts = (x @ p[name] for name in ("query", "key", "value"))
    return F.scaled_dot_product_attention(*parts, is_causal=True, scale=1.0) @ p["out"]


def experts(p: dict[str, Tensor], x: Tensor) -> Tensor:
    gates = (x @ p["router"]).softmax(-1)
    kept = gates * F.one_hot(gates.argmax(-1), 2)
    answers = torch.einsum("stw,ewh->seth", x, p["up"]).tanh() @ p["down"]
    return torch.einsum("ste,setc->stc", kept, answers)


def tied(p: dict[str, Tensor], x: Tensor) -> Tensor:
    first, last = p["layers"]
    return torch.tanh(torch.tanh(x @ p["tied"] @ first) @ last) @ p["tied"].T


PLAIN = {"tensor": mlp, "hsdp": mlp, "context": attention, "expert": experts, "pipeline": tied}


@pytest.mark.parametrize("mesh", WAYS)
def test_one_process_has_the_gradient_of_plain_pytorch_for_the_mean_over_all_targets(mesh):
    program = WAYS[mesh]["the rule"]
    inputs, targets = batch()
    p = {name: whole.requires_grad_() for name, whole in parameters(program).items()}
    scores = PLAIN[mesh](p, inputs).flatten(0, 1)
    F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORED).backward()
    found = gradients(program, Mesh())
    assert list(found) == list(p)
    assert largest_difference(found.values(), [whole.grad for whole in p.values()]) < 1e-6
    assert all(gradient.any() for gradient in found.values())
