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
DEEPSPEED_WINDOW = (
    "The engine's `step` updates the weights at every K-th micro-batch only, counted over all"
    " epochs. So the last window of the data gets no step."
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
        f"{USUAL} Fabric does not divide by K, either.",
        "We found none for the missing division.",
        "`fabric.backward(loss / K)`, with `sum · W · K / N` as the loss.",
        "fabric-counted",
    ),
    "torchtune-recipe": Note(
        "If only two of three micro-batches are left, the epoch ends without a step. Their"
        " gradients are added to those of the next epoch's first step.",
        "[#2745](https://github.com/meta-pytorch/torchtune/pull/2745), open.",
        "Also step if `idx + 1 == len(self._dataloader)`.",
    ),
    "litgpt-fit": Note(
        "The loss is the mean over the micro-batch's tokens, divided by K. The argument promises a"
        " larger batch, but says nothing about tokens. With `epochs=1`, an epoch's last window"
        " gets no step.",
        "We found none for litgpt. [Unequal denominators](report-ranks) has others.",
        "Divide the sum of the losses by the tokens of the step, and multiply by W.",
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
    "open-clip": Note(
        "Every rank computes the loss of all pairs, and only its own features carry gradient."
        " Averaging divides by W once too often. The README says that `--local-loss` with"
        " `--gather-with-grad` gives one-to-one the numerical results of this naive method. They"
        " differ by the factor W.",
        "[#616](https://github.com/mlfoundations/open_clip/issues/616) has the factor of the two"
        " gathers. [Contrastive losses](report-contrastive) has more.",
        "Use both options, as its maintainers do.",
        "open-clip-local-grad",
    ),
    "open-clip-local": Note(
        "Each rank computes the rows of its own samples. What it gathered from other ranks carries"
        " no gradient, so samples get no gradient as others' negatives.",
        "[#894](https://github.com/mlfoundations/open_clip/issues/894): both options belong"
        " together. The code allows this one alone, and does not warn.",
        "Add `--gather-with-grad`.",
        "open-clip-local-grad",
    ),
    "lightly-barlow": Note(
        "Each rank normalizes with the mean and the standard deviation of its own batch, and then"
        " the correlations are summed over all ranks. The docstring promises only the sum. The loss"
        " of the union batch has the statistics of the union.",
        "[#1977](https://github.com/lightly-ai/lightly/issues/1977) is about a factor 1/W, which is"
        " repaired. We found no report of the statistics.",
        "Normalize with the statistics of all ranks, for example with SyncBatchNorm without"
        " parameters.",
    ),
    "metric-learning-efficient": Note(
        "The documentation says that with `efficient=True` the gradients differ from those of"
        " non-distributed code.",
        "Documented. In"
        " [#380](https://github.com/KevinMusgrave/pytorch-metric-learning/issues/380), before the"
        " option existed, the library's author got different gradients and did not know why.",
        "`efficient=False`, the default.",
        "metric-learning",
    ),
    "sentence-transformers": Note(
        "By default each rank takes its negatives from its own batch. More ranks do not give more"
        " negatives. The documentation recommends gathering on several GPUs.",
        "[#2831](https://github.com/huggingface/sentence-transformers/issues/2831) asked for"
        " gathering.",
        "`gather_across_devices=True`.",
        "sentence-transformers-gather",
    ),
    "transformers-detr": Note(
        "Two causes. The number of boxes is averaged over the ranks (the default of Accelerate's"
        " `reduce`), and then divided by W again: the box losses are W times too large. And the"
        " classification loss divides by the weights of the rank's own images. The paper divides"
        " all losses by the objects of all sub-batches.",
        "[#28309](https://github.com/huggingface/transformers/issues/28309) proposed the call. We"
        " found no report of the factor.",
        '`reduce(num_boxes, reduction="sum")` repairs the box losses. The classification loss needs'
        " the sum of the weights over all ranks.",
        "The first part ran: [transformers-deformable-detr-sum](trainers-counts). The second part"
        " was not run.",
    ),
    "transformers-deformable-detr": Note(
        "As transformers-detr, but here all losses are divided by the number of boxes. So the"
        " gradient is W times too large, and the direction is right. (The number is at least 1, so"
        " with very few boxes the factor is smaller.) MaskFormer, Mask2Former, OneFormer, and EoMT"
        " have the same lines for masks: read, not run.",
        "[#28309](https://github.com/huggingface/transformers/issues/28309) proposed the call. We"
        " found no report of the factor.",
        '`reduce(num_boxes, reduction="sum")`.',
        "transformers-deformable-detr-sum",
    ),
    "ultralytics-rtdetr": Note(
        "The box losses are divided by the boxes of the rank's own batch. Nothing in the code"
        " promises more.",
        "[#23152](https://github.com/ultralytics/ultralytics/pull/23152) (closed) counted the boxes"
        " of all ranks. [Detection losses](report-detection).",
        "Divide by the boxes of all ranks, and multiply by W.",
    ),
    "torchvision-fcos": Note(
        "The losses are divided by the matched boxes of the rank's own batch. Nothing in the code"
        " promises more.",
        "[FCOS#284](https://github.com/tianzhi0549/FCOS/issues/284) asks about the authors' code."
        " [Detection losses](report-detection).",
        "Divide by the matched boxes of all ranks, and multiply by W.",
    ),
    "plain-samples": Note(
        "The loop of many tutorials: `loss / K`, and a step after the last micro-batch. A last"
        " window of k micro-batches is still divided by K, and a sample of a short micro-batch"
        " weighs more.",
        "[The last window](report-last-window).",
        "Divide the sum of the losses by the number of samples in the step.",
        "plain",
    ),
    "accelerate-accumulate": Note(
        "`accumulate` divides by K in every window. It steps at the end of the data, where a window"
        " may have fewer micro-batches. The guide's longer loop divides by the counts of the"
        " step.",
        "[The last window](report-last-window). We found no report for Accelerate.",
        "Use the guide's loop for losses with counts.",
        "accelerate",
    ),
    "ignite": Note(
        "`gradient_accumulation_steps` steps at every K-th iteration only, so an epoch's last"
        " window is completed by the first micro-batches of the next one. A sample of a short"
        " micro-batch weighs more.",
        "We found none for the last window.",
        "Drop the rest of the data, or call `optimizer.step()` in a handler of EPOCH_COMPLETED.",
    ),
    "skorch": Note(
        "The class of the FAQ steps at every K-th batch only, so an epoch's last window gets"
        " no step. A sample of a short micro-batch weighs more.",
        "We found none.",
        "Also step at the last batch of the epoch.",
    ),
    "speechbrain": Note(
        "`fit_batch` steps at every K-th batch only, so an epoch's last window gets no step. A"
        " sample of a short micro-batch weighs more.",
        "We found none.",
        "Drop the rest of the data.",
    ),
    "mmengine": Note(
        "The last window is divided by its own number of micro-batches, as promised. A sample of a"
        " short micro-batch weighs more.",
        "[The last window](report-last-window) has reports about other trainers.",
        "Drop the short micro-batch.",
    ),
    "fastai": Note(
        "`n_acc` counts samples, and every batch gets its share. But it takes a step only"
        " after `n_acc` samples, so an epoch's last window gets no step.",
        "We found none.",
        "Choose `n_acc` so that it divides the number of samples.",
    ),
    "trl-cispo": Note(
        "As in trl-dapo, each step divides by 1/G of the generation's tokens.",
        "[#6024](https://github.com/huggingface/trl/pull/6024), as for trl-dapo.",
        "Leave `steps_per_generation` at its default, as in the other columns.",
        "It ran: see the other columns.",
    ),
    "trl-vespo": Note(
        "As in trl-dapo, each step divides by 1/G of the generation's tokens.",
        "[#6024](https://github.com/huggingface/trl/pull/6024), as for trl-dapo.",
        "Leave `steps_per_generation` at its default, as in the other columns.",
        "It ran: see the other columns.",
    ),
    "keras": Note(
        "The optimizer steps at every K-th batch, counted over all epochs. So the last window of"
        " the data gets no step. A sample of a short micro-batch weighs more.",
        "We found none.",
        "Drop the rest of the data.",
    ),
    "llamafactory-dft": Note(
        "`dft_loss_func` divides by the tokens of the step, as it should. But a rank whose"
        " micro-batch has no scored token gets `torch.tensor(0.0)`, which has no graph, and"
        " `backward` raises. `eaft_loss_func` has the same line: read, not run.",
        "We found none.",
        "Return a zero with a graph: `source.sum() * 0`.",
    ),
    "llamafactory-asft": Note(
        "`asft_loss_func` does not get the count of the step. It takes the mean of the rank's own"
        " micro-batch, and because the Trainer has a loss function of its own, nothing divides by"
        " K. So the gradient is K times a mean of means. On a rank without a scored token, the"
        " divergence is 0/0. (Here the reference model is a copy, so its divergence has no"
        " gradient.)",
        "[#9409](https://github.com/hiyouga/LlamaFactory/pull/9409) is about the same factor in"
        " training with KTransformers. We found none for ASFT.",
        "Pass `num_items_in_batch` on, as `dft_loss_func` does, and divide both sums by it.",
    ),
    "composer": Note(
        "By default Composer weights a micro-batch by its samples. With the usual mean loss of each"
        " micro-batch, the step's gradient is a mean of means.",
        "The argument in the fix is Composer's remedy. [Unequal denominators](report-ranks) has"
        " reports about other trainers.",
        "`accumulate_train_batch_on_tokens=True`, with the counts in the DataSpec.",
        "composer-tokens",
    ),
    "deepspeed-zero1": Note(
        USUAL + " The engine divides by K and by W, whatever the loss is."
        " It counts micro-batches over all epochs, so the last window of the data gets no step.",
        "[Unequal denominators](report-ranks) has reports about other trainers.",
        "Back-propagate `sum · W · K / N`.",
        "deepspeed-zero1-counted",
    ),
    "monai-dice-batch": Note(
        "`batch=True` sums the areas over the rank's own images, and then divides. The loss of the"
        " union batch sums over the images of all ranks. The docstring promises a sum over the"
        " batch dimension, which is the rank's own batch. Here, the difference is small: for W=2,"
        " the ratio is 0.997 and the cosine 0.9997.",
        "We found none.",
        "`batch=False`, the default, if each image may count by itself. Otherwise sum the areas"
        " over the ranks, with gradient.",
        "The first one ran: [monai-dice](trainers-pairs).",
    ),
    "torchtitan-step": Note(
        "If the data run out within a step, that step is not taken: a comment says so. Its loaders"
        " repeat the data by default.",
        "Documented in the code.",
        "Let the data repeat.",
    ),
    "deepspeed-zero1-counted": Note(
        DEEPSPEED_WINDOW, "We found none.", "Drop the rest of the data, or let it repeat."
    ),
    "deepspeed-zero2-counted": Note(
        DEEPSPEED_WINDOW, "We found none.", "Drop the rest of the data, or let it repeat."
    ),
}
