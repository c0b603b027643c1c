"""Where each promise is made."""

from typing import NamedTuple


class Source(NamedTuple):
    """An address, or nothing, and what it is."""

    what: str
    address: str = ""

    def __str__(self) -> str:
        return f"[{self.what}]({self.address})" if self.address else self.what


HUGGING_FACE = "https://huggingface.co/docs"
OURS = Source("this book", "../surprises/which_mean.ipynb")
ACCELERATE = Source("guide", f"{HUGGING_FACE}/accelerate/usage_guides/gradient_accumulation")
TRANSFORMERS = Source("guide", f"{HUGGING_FACE}/transformers/en/grad_accumulation")
# In these two, the loss is the user's, and we take the usual mean.
LIGHTNING = Source(
    "guide",
    "https://lightning.ai/docs/pytorch/stable/common/gradient_accumulation.html",
)
FABRIC = Source(
    "guide", "https://lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html"
)
COMPOSER = Source("argument accumulate_train_batch_on_tokens")
DEEPSPEED = Source(
    "argument gradient_accumulation_steps", "https://www.deepspeed.ai/docs/config-json/"
)
KERAS = Source("argument gradient_accumulation_steps", "https://keras.io/api/optimizers/sgd/")
LIGER = Source("docstring of _compute_dapo_normalizer")
LLAMA_FACTORY = Source("code")
MS_SWIFT = Source("pull request", "https://github.com/modelscope/ms-swift/pull/10081")
MS_SWIFT_LOSS = Source("argument num_items_in_batch")
TORCHTITAN = Source("comments in the loss")
LITGPT = Source("argument global_batch_size")
TORCHTUNE = Source("comments in the recipe")
AXOLOTL = Source("argument num_items_in_batch")
TRL_SFT = Source("code")
TRL_DPO = Source("code")
TRL_GRPO = Source("documentation", f"{HUGGING_FACE}/trl/main/en/grpo_trainer")
VERL = Source("docstring of agg_loss")
OPENRLHF = Source("docstring of aggregate_loss")
OPEN_CLIP = Source("README", "https://github.com/mlfoundations/open_clip")
OPEN_CLIP_CODE = Source("code")
LIGHTLY = Source("docstring", "https://docs.lightly.ai/self-supervised-learning/")
METRIC_LEARNING = Source(
    "documentation", "https://kevinmusgrave.github.io/pytorch-metric-learning/distributed/"
)
SBERT_LOSSES = Source(
    "documentation", "https://sbert.net/docs/package_reference/sentence_transformer/losses.html"
)
# In these, the loss is the user's: the promise is the larger effective batch.
IGNITE = Source("argument gradient_accumulation_steps", "https://docs.pytorch.org/ignite/")
MONAI = Source("code")
MONAI_DICE = Source("docstring", "https://docs.monai.io/en/stable/losses.html")
SKORCH = Source("FAQ", "https://skorch.readthedocs.io/en/stable/user/FAQ.html")
SPEECHBRAIN = Source("argument grad_accumulation_factor")
MMENGINE = Source("docstring of OptimWrapper")
FASTAI = Source("GradientAccumulation", "https://docs.fast.ai/callback.training.html")
DETR = Source("paper of DETR", "https://arxiv.org/abs/2005.12872")
UNSLOTH = Source("docstring of unsloth_fused_ce_loss")
ULTRALYTICS = Source("code; nothing about ranks")
TORCHVISION = Source("code; nothing about ranks")
