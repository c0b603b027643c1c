"""What is not equal, for each trainer: the cause, others' reports, the fix, and whether it ran."""

from typing import NamedTuple


class Note(NamedTuple):
    """Markdown. `tried` is how the fix was run: another trainer of the suite, or a sentence."""

    cause: str
    report: str
    fix: str
    tried: str = "It was not run."


PULL = "https://github.com/{}/pull/{}"
USUAL = (
    "The guide promises a larger effective batch. With the usual mean loss of each micro-batch, the"
    " step's gradient is a mean of means."
)
DAPO = (
    "With `steps_per_generation=6` and `gradient_accumulation_steps=3`, each of the G = 2 steps"
    " divides by 1/G of the generation's tokens, not by its own. A step with few tokens gets a"
    " small gradient, here G·N/N_G = 0.44 of the promised one."
)
LAST_WINDOW = (
    "[#19987](https://github.com/Lightning-AI/pytorch-lightning/issues/19987) (open) for the last"
    " window, which is divided by K although it has k micro-batches."
)

NOTES = {
    "plain-wrong": Note(
        "Wrong on purpose: each micro-batch is divided by its own tokens, and by K.",
        "Many: [unequal denominators](report-ranks).",
        "Divide by the tokens of the step, and multiply by W.",
        "plain",
    ),
    "transformers-per-rank": Note(
        "`average_tokens_across_devices=False` divides by each rank's own tokens. It was the"
        " default until [#39395](https://github.com/huggingface/transformers/pull/39395).",
        "[trl#3538](https://github.com/huggingface/trl/pull/3538) shows the curves.",
        "Leave it at True.",
        "transformers",
    ),
    "lightning": Note(USUAL, LAST_WINDOW, "Back-propagate `sum · W · K / N`.", "lightning-counted"),
    "fabric": Note(
        f"{USUAL} And nothing divides by K.",
        "We found none for the missing division.",
        "`fabric.backward(loss / K)`, with `sum · W · K / N` as the loss.",
        "fabric-counted",
    ),
    "torchtune-recipe": Note(
        "With two micro-batches left of three, the epoch ends without a step. Their gradients join"
        " the next epoch's first step.",
        "[#2745](https://github.com/meta-pytorch/torchtune/pull/2745), open.",
        "Also step if `idx + 1 == len(self._dataloader)`.",
    ),
    "trl-bnpo": Note(
        "It does what its documentation says: a mean over the *local* batch.",
        "[TRL's documentation](https://huggingface.co/docs/trl/main/en/grpo_trainer) says so.",
        '`loss_type="dapo"`.',
        "trl-dapo",
    ),
    "trl-dapo": Note(
        DAPO,
        "[#6024](https://github.com/huggingface/trl/pull/6024) repaired the constant factor of"
        " [#5619](https://github.com/huggingface/trl/issues/5619). This part remains.",
        "Leave `steps_per_generation` at its default, as in the other columns.",
        "It ran: see the other columns.",
    ),
}
