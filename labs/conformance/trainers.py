"""Every trainer of the suite: its adapter, and what its documentation promises."""

from importlib import metadata
from typing import Any, NamedTuple

from families import FAMILIES, Family
from sources import (
    ACCELERATE,
    AXOLOTL,
    FABRIC,
    LIGHTNING,
    OURS,
    TORCHTUNE,
    TRANSFORMERS,
    TRL_DPO,
    TRL_GRPO,
    TRL_SFT,
    Source,
)


class Trainer(NamedTuple):
    """`adapter`, "file:function", gets the case, the rank, and the `options`.

    It returns the gradient that the optimizer gets in the judged step. The family's reference knows
    `promise`, and `source` says where it is made. `needs` are distributions to be installed, and
    `without` are properties of the family that the trainer does not have.
    """

    adapter: str
    needs: tuple[str, ...]
    options: tuple[Any, ...]
    kind: str
    promise: str
    source: Source
    without: tuple[str, ...] = ()

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]

    def has(self, property_: str) -> bool:
        return property_ in self.family.cases and property_ not in self.without

    def missing(self) -> list[str]:
        return [name for name in self.needs if not version(name)]


def version(distribution: str) -> str:
    """Its installed version, or nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _tokens(adapter: str, needs: str, source: Source, *options: Any) -> Trainer:
    """The model is one of transformers, so that is needed, too."""
    return Trainer(adapter, (needs, "transformers"), options, "tokens", "token mean", source)


def _grpo(loss_type: str, promise: str) -> Trainer:
    """`loss_type` of TRL's GRPOTrainer."""
    needs = "trl", "transformers"
    return Trainer("trl_trainers:grpo", needs, (loss_type,), "rl", f"A × {promise}", TRL_GRPO)


TRAINERS = {
    "plain": _tokens("plain:loop", "torch", OURS, True),
    "plain-wrong": _tokens("plain:loop", "torch", OURS, False),
    "accelerate": _tokens("hugging_face:accelerate_loop", "accelerate", ACCELERATE),
    "transformers": _tokens("hugging_face:trainer", "accelerate", TRANSFORMERS, True),
    "transformers-per-rank": _tokens("hugging_face:trainer", "accelerate", TRANSFORMERS, False),
    "lightning": _tokens("lightning_loops:trainer", "pytorch-lightning", LIGHTNING, False),
    "lightning-counted": _tokens("lightning_loops:trainer", "pytorch-lightning", LIGHTNING, True),
    "fabric": _tokens("lightning_loops:fabric", "pytorch-lightning", FABRIC, False),
    "fabric-counted": _tokens("lightning_loops:fabric", "pytorch-lightning", FABRIC, True),
    "torchtune-recipe": _tokens("further:torchtune_recipe", "torchtune", TORCHTUNE),
    "axolotl-loss": _tokens("further:axolotl_loss", "axolotl", AXOLOTL),
    "trl-sft": _tokens("trl_trainers:sft", "trl", TRL_SFT),
    "trl-dpo": Trainer(
        "trl_trainers:dpo",
        ("trl", "transformers"),
        (),
        "rl",
        "pair mean",
        TRL_DPO,
        without=("generation", "empty-rank"),
    ),
    "trl-grpo": _grpo("grpo", "sequence mean"),
    "trl-bnpo": _grpo("bnpo", "token mean"),
    "trl-dr_grpo": _grpo("dr_grpo", "constant"),
    "trl-dapo": _grpo("dapo", "token mean"),
}
