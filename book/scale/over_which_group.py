"""For over_which_group.ipynb: plain modules, what was measured, and the figure."""

import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch import Tensor, nn

from labkit.book import table
from labkit.book.figures import RANKS, TRUTH, use
from labkit.scenarios.meshes import (
    MLP,
    TENSOR,
    WAYS,
    Judged,
    Measured,
    judge,
    parameters,
)


class PlainMlp(nn.Module):
    """The model of data × tensor: modules with the same weights, in the same order."""

    def __init__(self) -> None:
        super().__init__()
        (hidden, width), (classes, _) = MLP["up"], MLP["down"]
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, classes)
        values = parameters(TENSOR).values()
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), values, strict=True):
                parameter.copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def verdicts(held: Mapping[str, Sequence[Measured]]) -> str:
    """One line per mesh: how the rule's gradients compare with those of one process."""
    rows = []
    for name, of_ranks in held.items():
        (rule,) = judge([{"the rule": of_rank["the rule"]} for of_rank in of_ranks])
        mesh = " × ".join(WAYS[name]["the rule"].dimensions)
        copies = "agree" if rule.copies_agree else "differ"
        rows.append([mesh, *rule.comparison, *rule.of_worst, copies])
    headers = ["the rule on", "ratio", "cosine", "worst ratio", "cosine", "copies"]
    return table(headers, rows, digits=4)


def _link(thread: str, kind: str = "issues") -> str:
    repository, number = thread.split(" ")
    name = repository.partition("/")[2]
    return f"[{name} #{number}](https://github.com/{repository}/{kind}/{number})"


_MEGATRON = "NVIDIA/Megatron-LM"
SEEN = {
    "averaged over 4 ranks, × 2": _link("ByteDance-Seed/VeOmni 338", "pull"),
    "own means, averaged": "finding 9, " + _link(f"{_MEGATRON} 7513", "pull"),
    "own count, overwritten": "finding 10, " + _link(f"{_MEGATRON} 7481", "pull"),
    "summed along data only": _link("ByteDance-Seed/VeOmni 1115", "pull"),
    "keys and values gathered along data": "like finding 6, in cross-attention",
    "copies of terms summed": _link("huggingface/transformers 39648"),
    "tokens counted on all ranks": _link("huggingface/trl 7100") + ", in a metric",
    "norm summed along data only": "finding 11; like "
    + _link("pytorch/torchtitan 1878", "pull")
    + ", in all layers below the experts",
    "row bias ÷ 2, not summed": _link("pytorch/torchtitan 4332", "pull"),
    "experts averaged over copies": _link("pytorch/pytorch 160285")
    + ", "
    + _link("deepspeedai/DeepSpeed 6545"),
    "router summed along data only": _link("huggingface/transformers 48205", "pull"),
    "weights gathered plainly": "like "
    + _link("NVIDIA-NeMo/Automodel 1260", "pull")
    + ", with the gathered inputs",
    "weights zero in forward only": _link("huggingface/transformers 48687"),
    "divided in the log only": _link("pytorch/torchtitan 2972"),
    "divided by micro-batches, too": "like "
    + _link("pytorch/torchtitan 1733")
    + ", where each backward divides the earlier gradients again",
    "tied weight summed along data only": "like "
    + _link("NVIDIA-NeMo/Megatron-Bridge 5380", "pull")
    + ", an embedding's copy on another stage",
}


def wrong_ways(judged: Mapping[str, Sequence[Judged]]) -> Markdown:
    """One row per way but the rule."""
    lines = [
        "| mesh | wrong way | ratio | cosine | worst parameter | copies | seen in |",
        "|---|---|--:|--:|---|---|---|",
    ]
    for name, ways in judged.items():
        mesh = " × ".join(WAYS[name]["the rule"].dimensions)
        for way, of_all, worst, of_worst, agree in ways[1:]:
            (ratio, cosine), (r, c) = map(_number, of_all), map(_number, of_worst)
            worst_one = "all" if (r, c) == (ratio, cosine) else f"`{worst}`: {r}, {c}"
            copies = "agree" if agree else "**differ**"
            numbers = f"{ratio} | {cosine} | {worst_one} | {copies}"
            lines.append(f"| {mesh} | {way} | {numbers} | {SEEN.get(way, '')} |")
    return Markdown("\n".join(lines))


def _number(x: float) -> str:
    return "–" if math.isnan(x) else f"{x:z.2f}"


_TOKENS = {
    "context": ["0, first half", "0, second half", "1, first half", "1, second half"],
    "tensor": ["sequence 0", "sequence 0", "sequence 1", "sequence 1"],
    "expert": ["0, first half", "0, second half", "1, first half", "1, second half"],
}
_COPIES = {
    "context": ("black:\nevery parameter", "", ""),
    "tensor": ("black:\nnorm", "half of up", "other half"),
    "expert": ("black:\nrouter", "expert 0", "expert 1"),
}


def draw_who_sums_with_whom() -> Figure:
    """Three meshes of 2 × 2 ranks; a line joins the ranks that add up one gradient."""
    use()
    figure, panels = plt.subplots(1, 3, figsize=(9.4, 3.3), facecolor="white")
    for axes, (name, tokens) in zip(panels, _TOKENS.items(), strict=True):
        whole, left, right = _COPIES[name]
        corners = [(0, 0), (2, 0), (2, -2), (0, -2), (0, 0)]
        axes.plot(*zip(*corners, strict=True), color=TRUTH, lw=2, zorder=1)
        axes.text(1, -1, whole, ha="center", va="center", color=TRUTH, fontsize=9)
        for x, text, color in ((0, left, RANKS[0]), (2, right, RANKS[3])):
            if text:
                shift = -0.35 if x == 0 else 0.35
                axes.plot([x + shift] * 2, [0, -2], color=color, lw=4, zorder=1)
                axes.text(
                    x + 1.6 * shift,
                    -1,
                    text,
                    rotation=90,
                    ha="center",
                    va="center",
                    color=color,
                    fontsize=9,
                )
        for rank, of_rank in enumerate(tokens):
            _rank(axes, 2 * (rank % 2), -2 * (rank // 2), f"rank {rank}\n{of_rank}")
        axes.set_title(f"data ↓ × {name} →", fontsize=11)
        axes.set(xlim=(-0.95, 2.95), ylim=(-2.5, 0.5), aspect="equal")
        axes.set_axis_off()
    return figure


def _rank(axes: Axes, x: float, y: float, text: str) -> None:
    style = "round,pad=0,rounding_size=0.1"
    box = FancyBboxPatch(
        (x - 0.62, y - 0.35), 1.24, 0.7, boxstyle=style, fc="#F2F4F6", ec=TRUTH
    )
    axes.add_patch(box).set_zorder(2)
    axes.text(x, y, text, ha="center", va="center", color=TRUTH, fontsize=8, zorder=3)
