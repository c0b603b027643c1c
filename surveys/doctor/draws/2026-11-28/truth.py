"""Measure for every script here what its optimizers get, without the doctor.

    python truth.py [name ...]    run the scripts, print a table, write truths.json

A run records weights and gradients on every rank before every optimizer step and the weights
after it. One process then computes the gradient of all ranks' samples at those weights.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

HERE = Path(__file__).resolve().parent
RANKS = 2
TOLERANCE = 1e-4
Records = list[list[dict[str, Tensor]]]  # [optimizer][step] -> weights, gradient, after


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def record(script: str, folder: str, rank: int, port: int) -> None:
    """Run the script with torchrun's environment, and save what this rank's optimizers get."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{RANKS}"}
    os.environ |= {"LOCAL_WORLD_SIZE": f"{RANKS}", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": f"{port}", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    records: dict[Optimizer, list[dict[str, Tensor]]] = {}

    def before(optimizer: Optimizer, *_: Any) -> None:
        params = parameters(optimizer)
        grads = flat(torch.zeros_like(p) if p.grad is None else p.grad for p in params)
        step = {"weights": flat(params), "gradient": grads}
        records.setdefault(optimizer, []).append(step)

    def after(optimizer: Optimizer, *_: Any) -> None:
        records[optimizer][-1]["after"] = flat(parameters(optimizer))

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    runpy.run_path(script, run_name="__main__")
    torch.save(list(records.values()), Path(folder) / f"{rank}.pt")


def fill(model: nn.Module, weights: Tensor) -> nn.Module:
    """The model as it was on the rank before the step."""
    nn.utils.vector_to_parameters(weights.clone(), model.parameters())
    return model


def gradient(loss: Tensor, *models: nn.Module) -> Tensor:
    return flat(torch.autograd.grad(loss, [p for m in models for p in m.parameters()]))


def rows(data: Any, step: int, count: int, order: Tensor | None = None) -> list[Tensor]:
    """The `count` samples that all ranks together use for the update `step`."""
    tensors = data if isinstance(data, tuple) else data.tensors
    order = torch.arange(len(tensors[0])) if order is None else order
    return [t[order[step * count : (step + 1) * count]] for t in tensors]


def shuffled(count: int) -> Tensor:
    """The order of DistributedSampler(shuffle=True, seed=0) in epoch 0."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def central_value(s: ModuleType, step: int, weights: list[Tensor]) -> list[Tensor]:
    value, actor = (fill(m, w) for m, w in zip(s.build_models(), weights, strict=True))
    obs, state, actions, returns = map(
        torch.cat, zip(*(s.play(rank, step) for rank in range(RANKS)), strict=True)
    )
    error = returns - value(state)
    chosen = actor(obs)[torch.arange(len(obs)), actions]
    loss = -(chosen * error.detach()).mean()
    return [gradient(error.square().mean(), value), gradient(loss, actor)]


def contrastive(s: ModuleType, step: int, weights: list[Tensor]) -> list[Tensor]:
    model = fill(s.build_models()[0], weights[0])
    a, b = map(model, rows(s.build_data(), step, 16))
    z = torch.cat([a, b])
    e = (z @ z.T / 0.2).exp() * (1 - torch.eye(32))
    loss = -((a * b).sum(1).repeat(2) / 0.2 - e.sum(1).log()).mean()
    return [gradient(loss, model)]


def two_tower(s: ModuleType, step: int, weights: list[Tensor]) -> list[Tensor]:
    model = fill(s.build_models()[0], weights[0])
    a, b = model(*rows(s.build_data(), step, 12))
    return [gradient(-torch.log_softmax(a @ b.T, 1).diagonal().mean(), model)]


def plateau(s: ModuleType, step: int, weights: list[Tensor]) -> list[Tensor]:
    model = fill(s.build_models()[0], weights[0])
    count = 16 if hasattr(s, "GRADIENT_ACCUMULATION_STEPS") else 8
    (tokens,) = rows(s.build_data(), step, count, shuffled(96))
    logits = model(tokens[:, :-1]).transpose(1, 2)
    return [gradient(F.cross_entropy(logits, tokens[:, 1:]), model)]


def classification(s: ModuleType, step: int, weights: list[Tensor]) -> list[Tensor]:
    model = fill(s.build_models()[0], weights[0])
    x, y = rows(s.build_data(), step, 16, shuffled(128))
    return [gradient(F.cross_entropy(model(x), y), model)]


def scaler(s: ModuleType, step: int, weights: list[Tensor]) -> list[Tensor]:
    model = fill(s.build_models()[0], weights[0])
    x, y = rows(s.build_data(), step, 16)
    return [gradient((model(x) - y).square().mean(), model)]


def conditional(s: ModuleType, step: int, weights: list[Tensor]) -> list[Tensor]:
    model = fill(s.build_models()[0], weights[0])
    x, y = rows(s.build_data(), step, 16)
    first, second = (model(x[part]) - y[part] for part in (slice(0, 8), slice(8, 16)))
    return [gradient(torch.cat([first, second]).square().mean(), model)]


def modules(s: ModuleType, step: int, weights: list[Tensor]) -> list[Tensor]:
    model = fill(nn.Sequential(*s.build_models()), weights[0])
    x, y = rows(s.build_data(), step, 16)
    h = model[0](x)
    return [gradient(F.cross_entropy(model[1](h / (1 + h.abs())), y), model)]


REFERENCES: dict[str, Callable[[ModuleType, int, list[Tensor]], list[Tensor]]] = {
    "00": central_value,
    "01": contrastive,
    "06": two_tower,
    "09": plateau,
    "11": classification,
    "12": scaler,
    "14": conditional,
    "15": modules,
}


def load(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("script", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: Path) -> list[Records]:
    """One recorded run: what each rank saved."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(str(script), folder, rank, port) for rank in range(RANKS)]
        processes = [context.Process(target=record, args=a, daemon=True) for a in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=600)
        if any(process.exitcode != 0 for process in processes):
            for process in processes:
                process.kill()
            raise SystemExit(f"{script.name} failed")
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]


def compare(script: Path, ranks: list[Records]) -> Iterator[tuple[float, float]]:
    """Per step (ratio of norms, cosine) of the rank and optimizer that is off the most."""
    module, reference = load(script), REFERENCES[script.name[:2]]
    for step in range(len(ranks[0][0])):
        found = []
        for records in ranks:
            expected = reference(module, step, [steps[step]["weights"] for steps in records])
            for steps, want in zip(records, expected, strict=True):
                got = steps[step]["gradient"].double()
                ratio = got.norm() / want.double().norm()
                cosine = F.cosine_similarity(got, want.double(), dim=0)
                found.append((ratio.item(), cosine.item()))
        yield max(found, key=lambda rc: abs(rc[0] - 1) + abs(rc[1] - 1))


def replicas_equal(ranks: list[Records], when: str, steps: slice = slice(None)) -> bool:
    first, *others = ranks
    return all(
        torch.equal(a[when], b[when])
        for other in others
        for mine, theirs in zip(first, other, strict=True)
        for a, b in zip(mine[steps], theirs[steps], strict=True)
    )


def truth(script: Path, causes: dict[str, str]) -> dict[str, Any]:
    ranks = run(script)
    steps = list(compare(script, ranks))
    good = [abs(ratio - 1) < TOLERANCE and 1 - cosine < TOLERANCE for ratio, cosine in steps]
    equal = replicas_equal(ranks, "weights") and replicas_equal(ranks, "after")
    started_equal = replicas_equal(ranks, "weights", slice(0, 1))
    right = all(good) and equal
    wrong = next((i + 1 for i, ok in enumerate(good) if not ok), None)
    print(
        f"{script.stem:45} {'right' if right else 'WRONG':6} {steps[0][0]:9.5f} "
        f"{steps[0][1]:9.5f}  equal {equal}  wrong from {wrong}",
        flush=True,
    )
    return {
        "right": right,
        "first_step_right": good[0] and started_equal,
        "ratio": round(steps[0][0], 5),
        "cosine": round(steps[0][1], 5),
        "steps": [[round(ratio, 5), round(cosine, 5)] for ratio, cosine in steps],
        "replicas_equal": equal,
        "cause": "none" if right else causes[script.name[:2]],
        "ranks": RANKS,
        "launch": "torchrun",
    }


def main(names: list[str]) -> None:
    reports = json.loads((HERE / "reports.json").read_text())
    causes = {f"{r['number']:02}": r["cause"] for r in reports}
    scripts = sorted(p for p in HERE.glob("[0-9]*.py") if not names or p.stem in names)
    path = HERE / "truths.json"
    truths = json.loads(path.read_text()) if names else {}
    for script in scripts:
        truths[script.name] = truth(script, causes)
        path.write_text(json.dumps(truths, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
