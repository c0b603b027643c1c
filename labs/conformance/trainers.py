"""Every trainer of the suite: its adapter, and what its documentation promises."""

from importlib import metadata
from typing import Any, NamedTuple


class Trainer(NamedTuple):
    """`adapter`, "file:function", gets the case, the rank, and the `options`.

    It returns the gradient that the optimizer gets in the judged step. `promise` is a key of
    `cases.PROMISES`; README.md says where the promise is made. `without` names the properties that
    the trainer does not have, and `needs` the distributions that have to be installed.
    """

    adapter: str
    needs: tuple[str, ...]
    options: tuple[Any, ...]
    promise: str
    without: tuple[str, ...]

    @property
    def file(self) -> str:
        return self.adapter.partition(":")[0]

    def missing(self) -> list[str]:
        return [name for name in self.needs if not version(name)]


def version(distribution: str) -> str:
    """Its installed version, or nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


TRAINERS: dict[str, Trainer] = {}


def add(
    name: str,
    adapter: str,
    needs: str,
    *options: Any,
    promise: str = "token mean",
    without: tuple[str, ...] = ("generation",),
) -> None:
    """The model is one of transformers, so that is needed, too."""
    TRAINERS[name] = Trainer(adapter, (needs, "transformers"), options, promise, without)


add("plain", "plain:right", "torch")
add("plain-wrong", "plain:mean_of_means", "torch")
add("accelerate", "hugging_face:accelerate_loop", "accelerate")
add("transformers", "hugging_face:trainer", "accelerate", True)
add("transformers-per-rank", "hugging_face:trainer", "accelerate", False)
add("lightning", "lightning_loops:trainer", "pytorch-lightning", False)
add("lightning-counted", "lightning_loops:trainer", "pytorch-lightning", True)
add("fabric", "lightning_loops:fabric", "pytorch-lightning", False)
add("fabric-counted", "lightning_loops:fabric", "pytorch-lightning", True)
add("ignite", "further:ignite_trainer", "pytorch-ignite")
add("torchtune-recipe", "further:torchtune_recipe", "torchtune")
add("axolotl-loss", "further:axolotl_loss", "axolotl")
add("trl-sft", "trl_trainers:sft", "trl")
NO_PAIR = ("generation", "empty-rank")  # every pair has a loss
add("trl-dpo", "trl_trainers:dpo", "trl", promise="pair mean", without=NO_PAIR)
# The sampler leaves out prompts that do not fill a generation.
GRPO = {
    "grpo": "A × sequence mean",
    "bnpo": "A × token mean",
    "dr_grpo": "A × constant",
    "dapo": "A × token mean",
}
for loss, mean in GRPO.items():
    add(f"trl-{loss}", "trl_trainers:grpo", "trl", loss, promise=mean, without=("last-window",))
