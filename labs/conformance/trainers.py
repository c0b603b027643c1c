"""Every trainer of the suite: its adapter, and what its documentation promises."""

from importlib import metadata
from typing import Any, NamedTuple


class Trainer(NamedTuple):
    """`adapter`, "file:function", gets the case, the rank, and the `options`.

    It returns the gradient that the optimizer gets in the judged step. `promise` is a key of
    `cases.PROMISES`; README.md says where it is made. `needs` are distributions to be installed.
    """

    adapter: str
    needs: tuple[str, ...]
    options: tuple[Any, ...]
    promise: str

    @property
    def without(self) -> set[str]:
        """Properties that it does not have."""
        if self.promise.startswith("A"):
            return {"last-window"}  # the sampler leaves out prompts that do not fill a generation
        return {"generation", "empty-rank"} if self.promise == "pair mean" else {"generation"}

    def missing(self) -> list[str]:
        return [name for name in self.needs if not version(name)]


def version(distribution: str) -> str:
    """Its installed version, or nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _trainer(adapter: str, needs: str, *options: Any, promise: str = "token mean") -> Trainer:
    """The model is one of transformers, so that is needed, too."""
    return Trainer(adapter, (needs, "transformers"), options, promise)


TRAINERS = {
    "plain": _trainer("plain:loop", "torch", True),
    "plain-wrong": _trainer("plain:loop", "torch", False),
    "accelerate": _trainer("hugging_face:accelerate_loop", "accelerate"),
    "transformers": _trainer("hugging_face:trainer", "accelerate", True),
    "transformers-per-rank": _trainer("hugging_face:trainer", "accelerate", False),
    "lightning": _trainer("lightning_loops:trainer", "pytorch-lightning", False),
    "lightning-counted": _trainer("lightning_loops:trainer", "pytorch-lightning", True),
    "fabric": _trainer("lightning_loops:fabric", "pytorch-lightning", False),
    "fabric-counted": _trainer("lightning_loops:fabric", "pytorch-lightning", True),
    "torchtune-recipe": _trainer("further:torchtune_recipe", "torchtune"),
    "axolotl-loss": _trainer("further:axolotl_loss", "axolotl"),
    "trl-sft": _trainer("trl_trainers:sft", "trl"),
    "trl-dpo": _trainer("trl_trainers:dpo", "trl", promise="pair mean"),
    "trl-grpo": _trainer("trl_trainers:grpo", "trl", "grpo", promise="A × sequence mean"),
    "trl-bnpo": _trainer("trl_trainers:grpo", "trl", "bnpo", promise="A × token mean"),
    "trl-dr_grpo": _trainer("trl_trainers:grpo", "trl", "dr_grpo", promise="A × constant"),
    "trl-dapo": _trainer("trl_trainers:grpo", "trl", "dapo", promise="A × token mean"),
}
