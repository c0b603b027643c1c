"""Every trainer of the suite: its adapter, and what its documentation promises."""

from importlib import metadata
from typing import Any, NamedTuple

from families import FAMILIES, Family
from sources import (
    ACCELERATE,
    AXOLOTL,
    COMPOSER,
    DEEPSPEED,
    DETR,
    FABRIC,
    FASTAI,
    IGNITE,
    KERAS,
    LIGER,
    LIGHTLY,
    LIGHTNING,
    LITGPT,
    LLAMA_FACTORY,
    METRIC_LEARNING,
    MMENGINE,
    MONAI,
    MONAI_DICE,
    MS_SWIFT,
    MS_SWIFT_LOSS,
    OPEN_CLIP,
    OPEN_CLIP_CODE,
    OPENRLHF,
    OURS,
    SBERT_LOSSES,
    SKORCH,
    SPEECHBRAIN,
    TORCHTITAN,
    TORCHTUNE,
    TORCHVISION,
    TRANSFORMERS,
    TRL_DPO,
    TRL_GRPO,
    TRL_SFT,
    ULTRALYTICS,
    UNSLOTH,
    VERL,
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


ONE_PROCESS = "K", "last-window"
GATHER: dict[str, Any] = {"gather_distributed": True}
ACROSS: dict[str, Any] = {"gather_across_devices": True}
CACHED = ACROSS | {"mini_batch_size": 2}


def _tokens(
    adapter: str,
    needs: str,
    source: Source,
    *options: Any,
    promise: str = "token mean",
    without: tuple[str, ...] = (),
) -> Trainer:
    """The model is one of transformers, so that is needed, too."""
    needed = (needs, "transformers")
    return Trainer(adapter, needed, options, "tokens", promise, source, without)


def _preferences(adapter: str, promise: str) -> Trainer:
    """One of TRL's trainers for pairs or for labeled samples."""
    needs, without = ("trl", "transformers"), ("generation", "empty-rank")
    return Trainer(f"trl_trainers:{adapter}", needs, (), "rl", promise, TRL_DPO, without)


def _grpo(loss_type: str, promise: str) -> Trainer:
    """`loss_type` of TRL's GRPOTrainer."""
    needs = "trl", "transformers"
    return Trainer("trl_trainers:grpo", needs, (loss_type,), "rl", f"A × {promise}", TRL_GRPO)


def _aggregation(name: str, source: Source, option: Any, promise: str) -> Trainer:
    """A function of an RL library in our own loop, which generates for one step."""
    needs = name, "transformers"
    adapter = f"rl_losses:{name}"
    return Trainer(adapter, needs, (option,), "rl", f"A × {promise}", source, ("generation",))


def _pairs(
    adapter: str, needs: str, source: Source, *options: Any, promise: str = "union batch"
) -> Trainer:
    """Whatever it promises, it is compared with the union batch."""
    needed = (needs, "transformers")
    return Trainer(f"contrastive:{adapter}", needed, options, "pairs", promise, source)


def _counts(adapter: str, needs: str, source: Source, *options: Any) -> Trainer:
    needed = (needs, "transformers")
    return Trainer(f"detection:{adapter}", needed, options, "counts", "box mean", source)


def _loop(adapter: str, needs: str, source: Source, without: tuple[str, ...] = ()) -> Trainer:
    needed = (needs, "transformers")
    return Trainer(f"loops:{adapter}", needed, (), "loops", "sample mean", source, without)


TOKENS = {
    "plain": _tokens("plain:loop", "torch", OURS, True),
    "plain-wrong": _tokens("plain:loop", "torch", OURS, False),
    "plain-fsdp2": _tokens("plain:loop", "torch", OURS, True, True),
    "accelerate": _tokens("hugging_face:accelerate_loop", "accelerate", ACCELERATE),
    "accelerate-fsdp2": _tokens(
        "hugging_face:accelerate_loop", "accelerate", ACCELERATE, True, without=ONE_PROCESS
    ),
    "transformers": _tokens("hugging_face:trainer", "accelerate", TRANSFORMERS, True),
    "transformers-per-rank": _tokens("hugging_face:trainer", "accelerate", TRANSFORMERS, False),
    "lightning": _tokens("lightning_loops:trainer", "pytorch-lightning", LIGHTNING, False),
    "lightning-counted": _tokens("lightning_loops:trainer", "pytorch-lightning", LIGHTNING, True),
    "fabric": _tokens("lightning_loops:fabric", "pytorch-lightning", FABRIC, False),
    "fabric-counted": _tokens("lightning_loops:fabric", "pytorch-lightning", FABRIC, True),
    "torchtune-recipe": _tokens("further:torchtune_recipe", "torchtune", TORCHTUNE),
    "axolotl-loss": _tokens("further:axolotl_loss", "axolotl", AXOLOTL),
    "litgpt-fit": _tokens("further:litgpt_fit", "litgpt", LITGPT),
    "torchtitan-step": _tokens("engines:torchtitan_step", "torchtitan", TORCHTITAN),
    "composer": _tokens("engines:composer", "mosaicml", COMPOSER, False),
    "composer-tokens": _tokens("engines:composer", "mosaicml", COMPOSER, True),
    "deepspeed-zero1": _tokens("engines:deepspeed", "deepspeed", DEEPSPEED, 1, False),
    "deepspeed-zero1-counted": _tokens("engines:deepspeed", "deepspeed", DEEPSPEED, 1, True),
    "deepspeed-zero2-counted": _tokens("engines:deepspeed", "deepspeed", DEEPSPEED, 2, True),
    "ms-swift-loss": _tokens("further:swift_loss", "ms-swift", MS_SWIFT_LOSS),
    "llamafactory-sft": _tokens("llama_factory:sft", "llamafactory", LLAMA_FACTORY),
    "llamafactory-dft": _tokens(
        "llama_factory:sft", "llamafactory", LLAMA_FACTORY, "dft", promise="p × token mean"
    ),
    "llamafactory-asft": _tokens(
        "llama_factory:sft", "llamafactory", LLAMA_FACTORY, "asft", promise="p × token mean"
    ),
    "unsloth-loss": _tokens("rl_losses:unsloth", "unsloth_zoo", UNSLOTH, without=("last-window",)),
    "trl-sft": _tokens("trl_trainers:sft", "trl", TRL_SFT),
}
RL = {
    "trl-dpo": _preferences("dpo", "pair mean"),
    "trl-kto": _preferences("kto", "signed sample mean"),
    "trl-reward": _preferences("reward", "pair mean"),
    "trl-grpo": _grpo("grpo", "sequence mean"),
    "trl-sapo": _grpo("sapo", "sequence mean"),
    "trl-luspo": _grpo("luspo", "sequence sum"),
    "trl-rloo": Trainer(
        "trl_trainers:rloo",
        ("trl", "transformers"),
        (),
        "rl",
        "leave-one-out A × sequence sum",
        TRL_SFT,
    ),
    "trl-bnpo": _grpo("bnpo", "token mean"),
    "trl-dr_grpo": _grpo("dr_grpo", "constant"),
    "trl-dapo": _grpo("dapo", "token mean"),
    "trl-cispo": _grpo("cispo", "token mean"),
    "trl-vespo": _grpo("vespo", "token mean"),
    "verl-tokens": _aggregation("verl", VERL, "token-mean", "token mean"),
    "verl-sequences": _aggregation("verl", VERL, "seq-mean-token-mean", "sequence mean"),
    "openrlhf-tokens": _aggregation("openrlhf", OPENRLHF, True, "token mean"),
    "openrlhf-sequences": _aggregation("openrlhf", OPENRLHF, False, "sequence mean"),
    "liger-dapo": Trainer(
        "rl_losses:liger",
        ("liger_kernel", "transformers"),
        ("dapo",),
        "rl",
        "A × token mean",
        LIGER,
        ("generation",),
    ),
}
CLIP, SBERT, PML = "open-clip-torch", "sentence-transformers", "pytorch-metric-learning"
MNRL = "MultipleNegativesRankingLoss"
PAIRS = {
    "open-clip": _pairs("open_clip", CLIP, OPEN_CLIP, {}),
    "open-clip-local": _pairs(
        "open_clip", CLIP, OPEN_CLIP_CODE, {"local_loss": True}, promise="nothing alone"
    ),
    "open-clip-grad": _pairs("open_clip", CLIP, OPEN_CLIP, {"gather_with_grad": True}),
    "open-clip-local-grad": _pairs(
        "open_clip", CLIP, OPEN_CLIP, {"local_loss": True, "gather_with_grad": True}
    ),
    "open-clip-siglip": _pairs("open_clip_siglip", CLIP, OPEN_CLIP_CODE, {}),
    "lightly-ntxent": _pairs("lightly", "lightly", LIGHTLY, "NTXentLoss", GATHER),
    "lightly-dcl": _pairs("lightly", "lightly", LIGHTLY, "DCLLoss", GATHER),
    "lightly-barlow": _pairs(
        "lightly", "lightly", LIGHTLY, "BarlowTwinsLoss", GATHER, promise="summed correlations"
    ),
    "lightly-vicreg": _pairs("lightly", "lightly", LIGHTLY, "VICRegLoss", GATHER),
    "lightly-sigreg": _pairs("lightly_sigreg", "lightly", LIGHTLY, GATHER),
    "metric-learning": _pairs("metric_learning", PML, METRIC_LEARNING, False),
    "metric-learning-efficient": _pairs("metric_learning", PML, METRIC_LEARNING, True),
    "ms-swift-infonce": _pairs("swift_infonce", "ms-swift", MS_SWIFT),
    "monai-dice": _pairs("monai_dice", "monai", MONAI_DICE, False, promise="image mean"),
    "monai-dice-batch": _pairs("monai_dice", "monai", MONAI_DICE, True, promise="own batch"),
    "sentence-transformers": _pairs(
        "sentence_transformers", SBERT, SBERT_LOSSES, MNRL, {}, promise="own batch"
    ),
    "sentence-transformers-gather": _pairs(
        "sentence_transformers", SBERT, SBERT_LOSSES, MNRL, ACROSS
    ),
    "sentence-transformers-cached": _pairs(
        "sentence_transformers",
        SBERT,
        SBERT_LOSSES,
        f"Cached{MNRL}",
        ACROSS | {"mini_batch_size": 2},
    ),
}
COUNTS = {
    "transformers-detr": _counts("transformers_detr", "accelerate", DETR, "detr"),
    "transformers-deformable-detr": _counts(
        "transformers_detr", "accelerate", DETR, "deformable-detr"
    ),
    "transformers-deformable-detr-sum": _counts(
        "transformers_detr", "accelerate", DETR, "deformable-detr", True
    ),
    "ultralytics-rtdetr": _counts("ultralytics_rtdetr", "ultralytics", ULTRALYTICS),
    "torchvision-fcos": _counts("torchvision_fcos", "torchvision", TORCHVISION),
}
LOOPS = {
    "plain-samples": _loop("plain", "torch", OURS),
    "accelerate-accumulate": _loop("accelerate_accumulate", "accelerate", ACCELERATE),
    "ignite": _loop("ignite", "pytorch-ignite", IGNITE),
    "monai": _loop("monai", "monai", MONAI, ("K", "WxK", "order", "last-window", "short-batch")),
    "skorch": _loop("skorch", "skorch", SKORCH),
    "speechbrain": _loop("speechbrain", "speechbrain", SPEECHBRAIN),
    "mmengine": _loop("mmengine", "mmengine", MMENGINE),
    "fastai": _loop("fastai", "fastai", FASTAI),
    "keras": _loop("keras", "keras", KERAS, ("W", "WxK", "order")),
}
TRAINERS = TOKENS | RL | PAIRS | COUNTS | LOOPS
