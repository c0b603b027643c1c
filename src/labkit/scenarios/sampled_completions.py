"""A tiny language model, completions that were sampled from it, and seven losses of fine-tuning.

Each loss is a sum over a micro-batch and a count. The loss of an optimizer step is the sum of all
these sums, divided by the sum of all counts, over all micro-batches and all ranks. `accumulate` is
one such step under DDP, with the right denominator or with one of two wrong ones.

Formulas: TRL 1.16 (`GRPOTrainer`, `DPOTrainer`) without a KL term. Dr. GRPO needs
`scale_rewards="none"` there, DAPO `epsilon_high=0.28`, and GSPO `loss_type="grpo"` with
`importance_sampling_level="sequence"`. "DAPO, per prompt" is the paper's; TRL doesn't have it.
A completion or group without a token in the loss adds 0 and is counted.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LONGEST = 16, 16, 12
END = 0  # the token that ends a completion, and counts as one of its tokens
GROUP = 4  # completions per prompt
CLIP, CLIP_HIGHER = 0.2, 0.28  # DAPO's upper bound is higher
BETA = 0.1  # of DPO

Way = Literal["own micro-batch", "own window", "all ranks"]
WAYS: tuple[Way, ...] = ("own micro-batch", "own window", "all ranks")


class Policy(nn.Module):
    """Log-probabilities of `tokens` (B, T) after `prompts` (B,): float64 (B, T).

    A two-layer GRU with 3,800 parameters in float64, so that rounding stays below 1e-12.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()
        with torch.no_grad():
            self.head.bias[END] += 1.0  # about one token in seven ends its completion

    def logits(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        read = torch.cat([prompts[:, None], tokens[:, :-1]], dim=1)
        return self.head(self.layers(self.embedding(read))[0])

    def forward(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        every = self.logits(prompts, tokens).log_softmax(-1)
        return every.gather(-1, tokens[..., None]).squeeze(-1)


class Completions(NamedTuple):
    """B completions of at most 12 tokens; four in a row have the same prompt and are a group.

    Two in a row are a pair for DPO: the better one, then the worse one.

    prompts: int64 (B,), one token each.
    groups: int64 (B,), the number of the completion's prompt.
    tokens: int64 (B, 12), with END from the end on.
    mask: float64 (B, 12), 1 for a token of the completion and 0 after it.
    old: float64 (B, 12), the log-probabilities when the tokens were sampled.
    rewards: float64 (B,), the number of different tokens over 12.
    advantages: float64 (B,), the reward minus the mean of its group.
    scaled: float64 (B,), the advantage divided by its group's standard deviation.
    group_tokens: float64 (B,), the number of tokens of the whole group.
    """

    prompts: Tensor
    groups: Tensor
    tokens: Tensor
    mask: Tensor
    old: Tensor
    rewards: Tensor
    advantages: Tensor
    scaled: Tensor
    group_tokens: Tensor


def sample_completions(policy: Policy, prompts: int, seed: int) -> Completions:
    """`prompts` groups of four; the same on every machine for one policy and seed."""
    generator = torch.Generator().manual_seed(seed)
    asked = torch.randint(1, VOCABULARY, (prompts,), generator=generator)
    asked = asked.repeat_interleave(GROUP)
    tokens = torch.full((len(asked), LONGEST), END)
    with torch.no_grad():
        for t in range(LONGEST):
            chances = policy.logits(asked, tokens)[:, t].softmax(-1).cumsum(-1)
            drawn = torch.rand(len(asked), 1, dtype=torch.float64, generator=generator)
            tokens[:, t] = (chances < drawn).sum(-1).clamp(max=VOCABULARY - 1)
        before = (tokens == END).cumsum(-1) - (tokens == END).long()
        tokens, mask = tokens.masked_fill(before > 0, END), (before == 0).double()
        different = [len(set(row.tolist())) / LONGEST for row in tokens]
        rewards = torch.tensor(different, dtype=torch.float64)
        # From best to worst in each group, then best, worst, and the two between as pairs.
        order = rewards.view(-1, GROUP).argsort(dim=1, descending=True, stable=True)
        order = order[:, [0, 3, 1, 2]] + GROUP * torch.arange(prompts)[:, None]
        tokens, mask, rewards = (each[order.flatten()] for each in (tokens, mask, rewards))
        old = policy(asked, tokens) * mask
    groups = torch.arange(prompts).repeat_interleave(GROUP)
    return with_groups(Completions(asked, groups, tokens, mask, old, *[rewards] * 4))


def with_groups(found: Completions) -> Completions:
    """The same completions, with what a group needs computed from those of it that are here."""
    same = (found.groups[:, None] == found.groups).double()
    size = same.sum(1)
    advantages = found.rewards - same @ found.rewards / size
    deviation = (same @ advantages.square() / (size - 1).clamp(min=1)).sqrt()
    return found._replace(
        advantages=advantages,
        scaled=advantages / (deviation + 1e-4),
        group_tokens=same @ found.mask.sum(1),
    )


def rows(found: Completions, which: slice | Sequence[int]) -> Completions:
    """Some of the completions; group statistics stay those of the whole group."""
    return Completions(*(each[which] for each in found))


def joined(parts: Sequence[Completions]) -> Completions:
    """The parts as one batch, in order."""
    return Completions(*map(torch.cat, zip(*parts, strict=True)))


def moved_policy(policy: Policy, seed: int = 1) -> Policy:
    """A copy a few updates later: with the policy that sampled, every ratio would be 1."""
    later = Policy()
    later.load_state_dict(policy.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in later.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return later


class Loss(NamedTuple):
    """The sum over a micro-batch, of shape (), and what it is to be divided by."""

    total: Callable[[nn.Module, Completions], Tensor]
    count: Callable[[Completions], float]


def sft(policy: nn.Module, found: Completions) -> Tensor:
    return -(policy(found.prompts, found.tokens) * found.mask).sum()


def dpo(policy: nn.Module, found: Completions) -> Tensor:
    log_ratio = (policy(found.prompts, found.tokens) - found.old) * found.mask
    chosen, rejected = log_ratio.sum(1).view(-1, 2).unbind(1)
    return -F.logsigmoid(BETA * (chosen - rejected)).sum()


def clipped(ratio: Tensor, advantage: Tensor, upper: float = CLIP) -> Tensor:
    return -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + upper) * advantage)


def token_losses(
    policy: nn.Module, found: Completions, advantages: Tensor, upper: float = CLIP
) -> Tensor:
    ratio = (policy(found.prompts, found.tokens) - found.old).exp()
    return clipped(ratio, advantages[:, None], upper) * found.mask


def grpo(policy: nn.Module, found: Completions) -> Tensor:
    losses = token_losses(policy, found, found.scaled)
    return (losses.sum(1) / found.mask.sum(1).clamp(min=1)).sum()


def dr_grpo(policy: nn.Module, found: Completions) -> Tensor:
    return token_losses(policy, found, found.advantages).sum() / LONGEST


def dapo(policy: nn.Module, found: Completions) -> Tensor:
    return token_losses(policy, found, found.scaled, CLIP_HIGHER).sum()


def dapo_per_prompt(policy: nn.Module, found: Completions) -> Tensor:
    losses = token_losses(policy, found, found.scaled, CLIP_HIGHER)
    return (losses.sum(1) / found.group_tokens.clamp(min=1)).sum()


def gspo(policy: nn.Module, found: Completions) -> Tensor:
    log_ratio = (policy(found.prompts, found.tokens) - found.old) * found.mask
    tokens = found.mask.sum(1)
    ratio = (log_ratio.sum(1) / tokens.clamp(min=1)).exp()  # one per sequence
    return (clipped(ratio, found.scaled) * (tokens > 0)).sum()


def tokens_of(found: Completions) -> float:
    return found.mask.sum().item()


def sequences_of(found: Completions) -> float:
    return len(found.prompts)


def pairs_of(found: Completions) -> float:
    return len(found.prompts) / 2


def groups_of(found: Completions) -> float:
    return len(found.prompts) / GROUP


LOSSES = {
    "SFT": Loss(sft, tokens_of),
    "DPO": Loss(dpo, pairs_of),
    "GRPO": Loss(grpo, sequences_of),
    "Dr. GRPO": Loss(dr_grpo, sequences_of),
    "DAPO": Loss(dapo, tokens_of),
    "DAPO, per prompt": Loss(dapo_per_prompt, groups_of),
    "GSPO": Loss(gspo, sequences_of),
}


def deal(found: Completions, parts: int, equal: Literal["sequences", "tokens"]) -> list[slice]:
    """Consecutive rows for `parts` micro-batches, with equal numbers of sequences or of tokens.

    Equal tokens means: as equal as whole pairs allow.
    """
    weight = found.mask.sum(1) if equal == "tokens" else torch.ones(len(found.prompts))
    reached = weight.view(-1, 2).sum(1).cumsum(0)
    cuts, pairs = [0], len(reached)
    for k in range(1, parts):
        nearest = 1 + int((reached - reached[-1] * k / parts).abs().argmin())
        cuts.append(min(max(nearest, cuts[-1] + 1), pairs - parts + k))  # at least one pair each
    return [slice(2 * first, 2 * end) for first, end in pairwise([*cuts, pairs])]


def accumulate(ddp: nn.Module, window: Sequence[Completions], loss: Loss, way: Way) -> None:
    """Leave the gradient of one optimizer step in `ddp`, from this rank's micro-batches.

    "all ranks" divides by N / W and is right. "own window" divides by the rank's count, and "own
    micro-batch" by the micro-batch's count times the number of micro-batches.
    """
    counts = torch.tensor([loss.count(part) for part in window], dtype=torch.float64)
    total = counts.sum()
    dist.all_reduce(total)
    divide_by = {
        "own micro-batch": counts * len(window),
        "own window": counts.sum().expand(len(window)),
        "all ranks": (total / dist.get_world_size()).expand(len(window)),
    }[way]
    for i, part in enumerate(window):
        with nullcontext() if i == len(window) - 1 else ddp.no_sync():
            (loss.total(ddp, part) / divide_by[i]).backward()
