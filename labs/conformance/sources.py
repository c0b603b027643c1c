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
TORCHTUNE = Source("comments in the recipe")
AXOLOTL = Source("argument num_items_in_batch")
TRL_SFT = Source("code")
TRL_DPO = Source("code")
TRL_GRPO = Source("documentation", f"{HUGGING_FACE}/trl/main/en/grpo_trainer")
