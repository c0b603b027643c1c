"""Every trainer of the suite: its adapter, and the loss with which its gradient is compared."""

from importlib import metadata
from typing import Any, NamedTuple

from surveys.trainers.families import FAMILIES, Family


class Trainer(NamedTuple):
    """`adapter`, "file:function", gets the case, the rank, and the `options`.

    It returns the gradient that the optimizer gets in the judged step, which is compared with that
    of `wanted`; the family's reference knows it. `needs` are distributions to be installed, and
    `without` are properties of the family that the trainer does not have.
    """

    adapter: str
    needs: tuple[str, ...]
    options: tuple[Any, ...]
    kind: str
    wanted: str
    without: tuple[str, ...] = ()
    network: str = "llama"  # of `tiny.model`, in the reference

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


def _tokens(
    adapter: str,
    needs: str,
    *options: Any,
    wanted: str = "token mean",
    without: tuple[str, ...] = (),
    network: str = "llama",
) -> Trainer:
    """The model is one of transformers, so that is needed, too."""
    needed = (needs, "transformers")
    return Trainer(adapter, needed, options, "tokens", wanted, without, network)


def _preferences(adapter: str, wanted: str) -> Trainer:
    """One of TRL's trainers for pairs or for labeled samples."""
    needs, without = ("trl", "transformers"), ("generation", "empty-rank")
    return Trainer(f"trl_trainers:{adapter}", needs, (), "rl", wanted, without)


def _grpo(loss_type: str, wanted: str) -> Trainer:
    """`loss_type` of TRL's GRPOTrainer."""
    needs = "trl", "transformers"
    return Trainer("trl_trainers:grpo", needs, (loss_type,), "rl", f"A × {wanted}")


def _aggregation(name: str, option: Any, wanted: str) -> Trainer:
    """A function of an RL library in our own loop, which generates for one step."""
    needs = name, "transformers"
    adapter = f"rl_losses:{name}"
    return Trainer(adapter, needs, (option,), "rl", f"A × {wanted}", ("generation",))


def _pairs(adapter: str, needs: str, *options: Any) -> Trainer:
    """Compared with the union batch."""
    needed = (needs, "transformers")
    return Trainer(f"contrastive:{adapter}", needed, options, "pairs", "union batch")


def _counts(adapter: str, needs: str, *options: Any) -> Trainer:
    needed = (
        needs,
        "transformers",
        *(["scipy", "pillow"] if adapter.startswith("transformers") else []),
    )
    return Trainer(f"detection:{adapter}", needed, options, "counts", "box mean")


def _loop(adapter: str, needs: str, without: tuple[str, ...] = ()) -> Trainer:
    needed = (needs, "transformers")
    return Trainer(f"loops:{adapter}", needed, (), "loops", "sample mean", without)


TOKENS = {
    "plain": _tokens("plain:loop", "torch", True),
    "plain-wrong": _tokens("plain:loop", "torch", False),
    "plain-fsdp2": _tokens("plain:loop", "torch", True, "fsdp2"),
    "plain-replicate": _tokens("plain:loop", "torch", True, "replicate"),
    "accelerate": _tokens("hugging_face:accelerate_loop", "accelerate"),
    "accelerate-fsdp2": _tokens(
        "hugging_face:accelerate_loop", "accelerate", True, without=ONE_PROCESS
    ),
    "transformers": _tokens("hugging_face:trainer", "accelerate", True),
    "transformers-per-rank": _tokens("hugging_face:trainer", "accelerate", False),
    "transformers-gpt2": _tokens(
        "hugging_face:trainer", "accelerate", True, "gpt2", network="gpt2"
    ),
    "transformers-captioner": _tokens(
        "hugging_face:trainer", "accelerate", True, "captioner", network="captioner"
    ),
    "transformers-fsdp2": _tokens(
        "hugging_face:loaded", "accelerate", 1, False, without=ONE_PROCESS
    ),
    "transformers-hsdp": _tokens(
        "hugging_face:loaded", "accelerate", 2, False, without=ONE_PROCESS
    ),
    "transformers-fsdp2-lora": _tokens(
        "hugging_face:loaded", "peft", 1, True, without=ONE_PROCESS, network="lora"
    ),
    "lightning": _tokens("lightning_loops:trainer", "pytorch-lightning", False),
    "lightning-counted": _tokens("lightning_loops:trainer", "pytorch-lightning", True),
    "fabric": _tokens("lightning_loops:fabric", "pytorch-lightning", False),
    "fabric-counted": _tokens("lightning_loops:fabric", "pytorch-lightning", True),
    "torchtune-recipe": _tokens("further:torchtune_recipe", "torchtune"),
    "axolotl-loss": _tokens("further:axolotl_loss", "axolotl"),
    "litgpt-fit": _tokens("further:litgpt_fit", "litgpt"),
    "torchtitan-step": _tokens("engines:torchtitan_step", "torchtitan"),
    "composer": _tokens("engines:composer", "mosaicml", False),
    "composer-tokens": _tokens("engines:composer", "mosaicml", True),
    "deepspeed-zero1": _tokens("engines:deepspeed", "deepspeed", 1, False),
    "deepspeed-zero1-counted": _tokens("engines:deepspeed", "deepspeed", 1, True),
    "deepspeed-zero2-counted": _tokens("engines:deepspeed", "deepspeed", 2, True),
    "ms-swift-loss": _tokens("further:swift_loss", "ms-swift"),
    "llamafactory-sft": _tokens("llama_factory:sft", "llamafactory"),
    "llamafactory-dft": _tokens(
        "llama_factory:sft", "llamafactory", "dft", wanted="p × token mean"
    ),
    "llamafactory-asft": _tokens(
        "llama_factory:sft", "llamafactory", "asft", wanted="p × token mean"
    ),
    "unsloth-loss": _tokens("rl_losses:unsloth", "unsloth_zoo", without=("last-window",)),
    "trl-sft": _tokens("trl_trainers:sft", "trl"),
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
    ),
    "trl-bnpo": _grpo("bnpo", "token mean"),
    "trl-dr_grpo": _grpo("dr_grpo", "constant"),
    "trl-dapo": _grpo("dapo", "token mean"),
    "trl-cispo": _grpo("cispo", "token mean"),
    "trl-vespo": _grpo("vespo", "token mean"),
    "verl-tokens": _aggregation("verl", "token-mean", "token mean"),
    "verl-sequences": _aggregation("verl", "seq-mean-token-mean", "sequence mean"),
    "openrlhf-tokens": _aggregation("openrlhf", True, "token mean"),
    "openrlhf-sequences": _aggregation("openrlhf", False, "sequence mean"),
    "liger-dapo": _aggregation("liger_kernel", "dapo", "token mean"),
}
CLIP, SBERT, PML = "open-clip-torch", "sentence-transformers", "pytorch-metric-learning"
MNRL = "MultipleNegativesRankingLoss"
PAIRS = {
    "open-clip": _pairs("open_clip", CLIP, "ClipLoss", {}),
    "open-clip-local": _pairs("open_clip", CLIP, "ClipLoss", {"local_loss": True}),
    "open-clip-grad": _pairs("open_clip", CLIP, "ClipLoss", {"gather_with_grad": True}),
    "open-clip-local-grad": _pairs(
        "open_clip", CLIP, "ClipLoss", {"local_loss": True, "gather_with_grad": True}
    ),
    "open-clip-siglip": _pairs("open_clip", CLIP, "SigLipLoss", {}),
    "lightly-ntxent": _pairs("lightly", "lightly", "NTXentLoss", GATHER),
    "lightly-dcl": _pairs("lightly", "lightly", "DCLLoss", GATHER),
    "lightly-barlow": _pairs("lightly", "lightly", "BarlowTwinsLoss", GATHER),
    "lightly-vicreg": _pairs("lightly", "lightly", "VICRegLoss", GATHER),
    "lightly-sigreg": _pairs("lightly_sigreg", "lightly", GATHER),
    "metric-learning": _pairs("metric_learning", PML, False),
    "metric-learning-efficient": _pairs("metric_learning", PML, True),
    "ms-swift-infonce": _pairs("swift_infonce", "ms-swift"),
    "monai-dice": _pairs("monai_dice", "monai", False),
    "monai-dice-batch": _pairs("monai_dice", "monai", True),
    "sentence-transformers": _pairs("sentence_transformers", SBERT, MNRL, {}),
    "sentence-transformers-gather": _pairs("sentence_transformers", SBERT, MNRL, ACROSS),
    "sentence-transformers-cached": _pairs(
        "sentence_transformers",
        SBERT,
        f"Cached{MNRL}",
        ACROSS | {"mini_batch_size": 2},
    ),
}
COUNTS = {
    "transformers-detr": _counts("transformers_detr", "accelerate", "detr"),
    "transformers-deformable-detr": _counts("transformers_detr", "accelerate", "deformable-detr"),
    "transformers-mask2former": _counts("transformers_mask2former", "accelerate"),
    "transformers-deformable-detr-sum": _counts(
        "transformers_detr", "accelerate", "deformable-detr", True
    ),
    "ultralytics-rtdetr": _counts("ultralytics_rtdetr", "ultralytics"),
    "torchvision-fcos": _counts("torchvision_fcos", "torchvision"),
}
LOOPS = {
    "plain-samples": _loop("plain", "torch"),
    "accelerate-accumulate": _loop("accelerate_accumulate", "accelerate"),
    "ignite": _loop("ignite", "pytorch-ignite"),
    "monai": _loop("monai", "monai", ("K", "WxK", "order", "last-window", "short-batch")),
    "skorch": _loop("skorch", "skorch"),
    "speechbrain": _loop("speechbrain", "speechbrain"),
    "mmengine": _loop("mmengine", "mmengine"),
    "fastai": _loop("fastai", "fastai"),
    "keras": _loop("keras", "keras", ("W", "WxK", "order")),
}
TRAINERS = TOKENS | RL | PAIRS | COUNTS | LOOPS
