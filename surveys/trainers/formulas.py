"""Formulas for the cells that are not equal: a second computation of what their notes say.

One process, without torch.distributed and without the adapters. Only the samples, how they are
dealt, and the tiny networks are those of the suite. A formula gives the loss whose gradient the
ranks' optimizer would get, and another one the loss that is wanted.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surveys.trainers import contrastive, detection, tiny
from surveys.trainers.cases import ALL, CASES, UNION_CASES, Case, Deal, Sample
from surveys.trainers.trainers import TRAINERS

Group = Sequence[Sample]
Mean = Callable[[nn.Module, Group], Tensor]
Window = list[list[Group]]  # [rank][micro-batch]
Step = Callable[[nn.Module, Case], Tensor]  # the loss whose gradient the optimizer gets
Views = tuple[Tensor, Tensor]


def gradient(net: nn.Module, loss: Tensor) -> Tensor:
    parameters = list(net.parameters())
    found = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([one.flatten() for one in found])


def compare(found: Tensor, wanted: Tensor) -> dict[str, float | str]:
    if not found.isfinite().all():
        return {"ratio": "nan"}
    ratio, cosine = found.norm() / wanted.norm(), F.cosine_similarity(found, wanted, dim=0)
    return {"ratio": round(ratio.item(), 4), "cosine": round(cosine.item(), 4)}


# Samples of text, one at a time, without padding.


def token_losses(net: nn.Module, one: Sample) -> Tensor:
    """The loss of each token of the completion."""
    tokens = torch.tensor([*one.prompt, *one.completion])
    start = len(one.prompt)
    if isinstance(net, tiny.Captioner):
        logits = net(**tiny.collate([one])).logits[0, start:]
    else:
        logits = net(input_ids=tokens[None]).logits[0, start - 1 : -1]
    return F.cross_entropy(logits, tokens[start:], reduction="none")


def summed(net: nn.Module, one: Sample) -> Tensor:
    """The losses of the scored tokens of a sample, summed."""
    return token_losses(net, one).sum() if one.scored else torch.zeros(())


def token_mean(net: nn.Module, group: Group, rewarded: bool = False) -> Tensor:
    total = sum(summed(net, one) * (one.reward if rewarded else 1) for one in group)
    return total / max(1, sum(one.count for one in group))


def advantage_mean(net: nn.Module, group: Group) -> Tensor:
    return token_mean(net, group, rewarded=True)


def likely_mean(net: nn.Module, group: Group) -> Tensor:
    """The token mean; each token's loss times its probability, which has no gradient."""
    found = torch.cat([token_losses(net, one) for one in group if one.scored] or [torch.zeros(0)])
    return (found * found.detach().neg().exp()).sum() / max(1, len(found))


def diverging_mean(net: nn.Module, group: Group) -> Tensor:
    """With the divergence from a copy: 0, divided by the tokens that are scored."""
    nothing = sum(token_losses(net, one).sum() * 0 for one in group)
    return likely_mean(net, group) + nothing / torch.tensor(sum(one.count for one in group))


def sample_mean(net: nn.Module, group: Group) -> Tensor:
    return sum(summed(net, one) / one.count for one in group) / len(group)


def each(mean: Mean, divided: bool = True) -> Step:
    """The mean of every micro-batch, divided by K unless `divided` says no, averaged over ranks."""

    def step(net: nn.Module, case: Case) -> Tensor:
        ranks = case.window(case.judged)
        total = sum(mean(net, batch) for of_rank in ranks for batch in of_rank)
        return total / case.world / (case.steps if divided else 1)

    return step


def captioner(net: nn.Module, case: Case) -> Tensor:
    """The sum of every micro-batch's mean, over micro-batches and ranks."""
    return each(token_mean, divided=False)(net, case) * case.world


def by_rank(mean: Mean) -> Step:
    """The mean of every rank's samples, averaged over ranks."""

    def step(net: nn.Module, case: Case) -> Tensor:
        ranks = case.window(case.judged)
        own = [[one for batch in of_rank for one in batch] for of_rank in ranks]
        return sum(mean(net, group) for group in own) / case.world

    return step


def union(mean: Mean) -> Step:
    """The mean of all samples of the step."""

    def step(net: nn.Module, case: Case) -> Tensor:
        ranks = case.window(case.judged)
        return mean(net, [one for of_rank in ranks for batch in of_rank for one in batch])

    return step


def composer(net: nn.Module, case: Case) -> Tensor:
    """The mean of every micro-batch times its share of the rank's samples, averaged over ranks."""
    ranks = case.window(case.judged)
    own = [(batch, sum(map(len, of_rank))) for of_rank in ranks for batch in of_rank]
    return sum(token_mean(net, batch) * len(batch) / n for batch, n in own) / case.world


def generation(net: nn.Module, case: Case) -> Tensor:
    """The tokens of one step, divided by 1/G of those of the generation."""
    samples = [one for of_rank in case.window(0) for batch in of_rank for one in batch]
    total = sum(summed(net, one) * one.reward for one in samples)
    return total * case.generated / sum(one.count for one in case.samples)


TOKENS, ADVANTAGES, SAMPLES = union(token_mean), union(advantage_mean), union(sample_mean)
EACH_SAMPLE = each(sample_mean), SAMPLES
STEPS: dict[str, tuple[Step, Step]] = {
    "plain-wrong": (each(token_mean), TOKENS),
    "transformers-per-rank": (by_rank(token_mean), TOKENS),
    "transformers-captioner": (captioner, TOKENS),
    "lightning": (each(token_mean), TOKENS),
    "composer": (composer, TOKENS),
    "deepspeed-zero1": (each(token_mean), TOKENS),
    "fabric": (each(token_mean, divided=False), TOKENS),
    "litgpt-fit": (each(token_mean), TOKENS),
    "llamafactory-asft": (each(diverging_mean, divided=False), union(likely_mean)),
    "trl-bnpo": (each(advantage_mean), ADVANTAGES),
    "trl-dapo": (generation, ADVANTAGES),
    "trl-cispo": (generation, ADVANTAGES),
    "trl-vespo": (generation, ADVANTAGES),
    **dict.fromkeys(
        (
            "plain-samples",
            "accelerate-accumulate",
            "ignite",
            "skorch",
            "speechbrain",
            "mmengine",
            "keras",
        ),
        EACH_SAMPLE,
    ),
}


def of_tokens(name: str, property_: str) -> dict[str, float | str]:
    found, wanted = STEPS[name]
    case, net = CASES[property_], tiny.model(TRAINERS[name].network)
    if case.base:
        expected = gradient(net, found(net, CASES[case.base]))
    else:
        expected = gradient(net, wanted(net, case))
    return compare(gradient(net, found(net, case)), expected)


# Pairs: the loss of a rank, from the embeddings of all samples and the numbers of its own ones.


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=1)


def only(x: Tensor, own: Sequence[int]) -> Tensor:
    """The same numbers; only the rows of `own` carry gradient."""
    mask = torch.zeros(len(x), 1)
    mask[list(own)] = 1
    return x * mask + x.detach() * (1 - mask)


def clip(a: Tensor, b: Tensor, own: Sequence[int] = ALL) -> Tensor:
    """The rows `own` of both softmaxes."""
    scores, targets = 10 * unit(a) @ unit(b).T, torch.tensor(own)
    rows = (
        F.cross_entropy(scores[list(own)], targets),
        F.cross_entropy(scores.T[list(own)], targets),
    )
    return sum(rows) / 2


def clip_rows(a: Tensor, b: Tensor, own: Sequence[int]) -> Tensor:
    """Both views of other samples come without gradient."""
    targets = torch.tensor(own)
    first = F.cross_entropy(10 * unit(a[own]) @ unit(b).detach().T, targets)
    return (first + F.cross_entropy(10 * unit(b[own]) @ unit(a).detach().T, targets)) / 2


def ranking(a: Tensor, b: Tensor, own: Sequence[int]) -> Tensor:
    """The negatives are the rank's own."""
    return F.cross_entropy(20 * unit(a[own]) @ unit(b[own]).T, torch.arange(len(own)))


def nt_xent(a: Tensor, b: Tensor, own: Sequence[int]) -> Tensor:
    """Own rows against all; other ranks' rows carry no gradient. It is multiplied by W."""
    x, n = unit(torch.cat([only(a, own), only(b, own)])), len(a)
    scores = (x @ x.T / 0.07).masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
    rows = [*own, *(i + n for i in own)]
    return F.cross_entropy(scores[rows], (torch.tensor(rows) + n) % (2 * n)) * (n / len(own))


def standard(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / torch.sqrt(x.var(0, unbiased=False) + 1e-5)


def barlow(a: Tensor, b: Tensor, ranks: Sequence[Sequence[int]]) -> Tensor:
    """Each rank standardizes its own samples; the correlations are averaged over the ranks."""
    own = [standard(a[of]).T @ standard(b[of]) / len(of) for of in ranks]
    c = sum(own) / len(own)
    return (c.diag() - 1).square().sum() + 5e-3 * (c - c.diag().diag()).square().sum()


def dice(a: Tensor, b: Tensor, own: Sequence[int]) -> Tensor:
    """The areas of the rank's own images are summed before the division."""
    found, true = a[own].sigmoid(), (b[own] > 0).float()
    return 1 - (2 * (found * true).sum() + 1e-5) / (found.sum() + true.sum() + 1e-5)


PAIRS: dict[str, Callable[[Tensor, Tensor, Sequence[int]], Tensor]] = {
    "open-clip": lambda a, b, own: clip(only(a, own), only(b, own)),
    "open-clip-local": clip_rows,
    "monai-dice-batch": dice,
    "metric-learning-efficient": nt_xent,
    "sentence-transformers": ranking,
}


def of_pairs(name: str, property_: str) -> dict[str, float | str]:
    """Wanted is the loss of a rank that has all samples; in `clip`, all of them carry gradient."""
    net = contrastive.encoder()
    first, second, _ = zip(*contrastive.samples(), strict=True)
    a, b = net(torch.stack(first)), net(torch.stack(second))
    ranks = [list(own) for own in UNION_CASES[property_].ranks]
    every = list(ALL)
    if name == "lightly-barlow":
        found, wanted = barlow(a, b, ranks), barlow(a, b, [every])
    else:
        found = sum(PAIRS[name](a, b, own) for own in ranks) / len(ranks)
        wanted = clip(a, b) if name.startswith("open-clip") else PAIRS[name](a, b, every)
    return compare(gradient(net, found), gradient(net, wanted))


# Boxes: the library's loss of each rank's images, in one process, times a ratio of counts.


def boxes(own: Sequence[int]) -> int:
    return sum(detection.BOXES[i] for i in own)


def detr(name: str, outputs: Views, own: Sequence[int], deal: Deal) -> Tensor:
    """The number of boxes is averaged over the ranks, and then divided by W again."""
    logits, corners = outputs
    targets = [detection.images()[i][1] for i in own]
    factor = boxes(own) / max(1, boxes(ALL) / deal.world**2)
    if name == "transformers-mask2former":
        return detection.mask2former_loss(logits[own], corners[own], targets) * factor
    kind = name.removeprefix("transformers-")
    total, parts, _ = detection.detr_losses(kind, logits[own], corners[own], targets)
    if name == "transformers-deformable-detr":
        return total * factor
    return parts["loss_ce"] + factor * (5 * parts["loss_bbox"] + 2 * parts["loss_giou"])


def own_mean(name: str, outputs: Views, own: Sequence[int], deal: Deal) -> Tensor:
    """The loss of the rank's own images."""
    loss = detection.rtdetr_loss if name == "ultralytics-rtdetr" else detection.fcos_loss
    return loss(*(of[own] for of in outputs), [detection.images()[i][1] for i in own])


BOXES = {
    "transformers-detr": (detr, detection.CLASSES + 1),
    "transformers-deformable-detr": (detr, detection.CLASSES),
    "transformers-mask2former": (detr, detection.CLASSES + 1),
    "ultralytics-rtdetr": (own_mean, detection.CLASSES),
    "torchvision-fcos": (own_mean, detection.CLASSES + 1),
}


def of_boxes(name: str, property_: str) -> dict[str, float | str]:
    loss, scores = BOXES[name]
    torch.manual_seed(0)
    net = nn.Linear(detection.WIDTH, detection.QUERIES * (scores + 4))

    def of(deal: Deal) -> Tensor:
        features = torch.stack([one for one, _ in detection.images()])
        found = net(features).unflatten(1, (detection.QUERIES, -1))
        outputs = found[..., :scores], found[..., scores:].sigmoid()
        total = sum(loss(name, outputs, list(own), deal) for own in deal.ranks)
        return gradient(net, total / deal.world)

    return compare(of(UNION_CASES[property_]), of(UNION_CASES["alone"]))


KNOWN: list[tuple[Sequence[str], Callable[[str, str], dict[str, float | str]]]] = [
    (list(STEPS), of_tokens),
    (["lightly-barlow", *PAIRS], of_pairs),
    (list(BOXES), of_boxes),
]
