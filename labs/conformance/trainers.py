"""Every trainer of the suite: its adapter, its promise, and where its documentation makes it."""

from importlib import metadata
from typing import Any, NamedTuple

HF, LIGHTNING = "https://huggingface.co/docs", "https://lightning.ai/docs"
ACCELERATE = f"{HF}/accelerate/usage_guides/gradient_accumulation"
TRAINER = f"{HF}/transformers/main_classes/trainer"
ACCUMULATION = f"{LIGHTNING}/pytorch/stable/common/gradient_accumulation.html"
FABRIC = f"{LIGHTNING}/fabric/stable/advanced/gradient_accumulation.html"


class Trainer(NamedTuple):
    """`adapter` is "file:function". It gets the case, the rank, and the `options`.

    It returns the gradient that the optimizer gets in the judged step. `promise` is a key of
    `cases.PROMISES`, and `source` says so, or is the reason why it is compared with that.
    """

    adapter: str
    needs: tuple[str, ...]  # distributions, of which the first one is named in the table
    promise: str
    source: str
    options: tuple[Any, ...] = ()
    without: tuple[str, ...] = ()  # properties that it does not have

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


TRL = f"{HF}/trl"
IGNITE = "https://docs.pytorch.org/ignite/generated/ignite.engine.create_supervised_trainer.html"
TORCHTUNE = "https://github.com/meta-pytorch/torchtune/pull/1917"
AXOLOTL = "https://docs.axolotl.ai/docs/custom_integrations.html"
RL_ONLY = ("generation",)
MEAN, COUNTED = (False,), (True,)
LLAMA = ("transformers",)
LOOP = ("torch", *LLAMA)
LIGHT = ("pytorch-lightning", *LLAMA)

TRAINERS = {
    "plain": Trainer("plain:right", LOOP, "token mean", "", (), RL_ONLY),
    "plain-wrong": Trainer(
        "plain:mean_of_means", LOOP, "token mean", "wrong on purpose", (), RL_ONLY
    ),
    "accelerate": Trainer(
        "hugging_face:accelerate_loop",
        ("accelerate", *LLAMA),
        "token mean",
        ACCELERATE,
        {},
        RL_ONLY,
    ),
    "transformers": Trainer("hugging_face:trainer", LLAMA, "token mean", TRAINER, (True,), RL_ONLY),
    "transformers-per-rank": Trainer(
        "hugging_face:trainer", LLAMA, "token mean", TRAINER, (False,), RL_ONLY
    ),
    "lightning": Trainer(
        "lightning_loops:trainer", LIGHT, "token mean", ACCUMULATION, MEAN, RL_ONLY
    ),
    "lightning-counted": Trainer(
        "lightning_loops:trainer", LIGHT, "token mean", ACCUMULATION, COUNTED, RL_ONLY
    ),
    "fabric": Trainer("lightning_loops:fabric", LIGHT, "token mean", FABRIC, MEAN, RL_ONLY),
    "fabric-counted": Trainer(
        "lightning_loops:fabric", LIGHT, "token mean", FABRIC, COUNTED, RL_ONLY
    ),
    "trl-sft": Trainer(
        "trl_trainers:sft", ("trl",), "token mean", f"{TRL}/sft_trainer", (), RL_ONLY
    ),
    "trl-dpo": Trainer(
        "trl_trainers:dpo",
        ("trl",),
        "pair mean",
        f"{TRL}/dpo_trainer",
        (),
        (*RL_ONLY, "empty-rank"),
    ),
    **{
        f"trl-{kind}": Trainer(
            "trl_trainers:grpo", ("trl",), promise, f"{TRL}/grpo_trainer", (kind,), ("last-window",)
        )
        for kind, promise in {
            "grpo": "A × sequence mean",
            "bnpo": "A × token mean",
            "dr_grpo": "A × constant",
            "dapo": "A × token mean",
        }.items()
    },
    "torchtune-recipe": Trainer(
        "further:torchtune_recipe", ("torchtune", "torchao"), "token mean", TORCHTUNE, (), RL_ONLY
    ),
    "axolotl-loss": Trainer(
        "further:axolotl_loss", ("axolotl", "accelerate"), "token mean", AXOLOTL, (), RL_ONLY
    ),
    "ignite": Trainer(
        "further:ignite_trainer", ("pytorch-ignite",), "token mean", IGNITE, (), RL_ONLY
    ),
}
