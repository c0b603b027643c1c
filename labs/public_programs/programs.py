"""The public programs of the table: what is checked out, how it runs, what is known of it.

Data are made up. A shim is a file of ours that stands for a package which is not installed, or a
small script around a repository's loss. Sizes are numbers in the program's own text that no option
sets: they alone are changed, in the temporary copy.
"""

import json
import pickle
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Program:
    """One row. `command` runs in `folder` of the checkout; `paths` are all that is checked out."""

    name: str
    repository: str
    commit: str
    command: str
    paths: str = ""
    folder: str = "."
    shims: tuple[str, ...] = ()
    sizes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    data: Callable[[Path], None] = lambda folder: None
    packages: tuple[str, ...] = ()  # to install besides the project's own
    launched: bool = True  # whether it expects ranks from a launcher
    known: str = ""  # a publicly reported defect; empty: believed right
    report: str = ""  # where it was reported


def _ids(count: int, most: int = 64) -> np.ndarray:
    return np.random.default_rng(0).integers(0, most, count)


def nanogpt(folder: Path) -> None:
    """Random token ids below 64."""
    data = folder / "data/tiny"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        _ids(4096).astype(np.uint16).tofile(data / f"{split}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))


def build_nanogpt(folder: Path) -> None:
    """Random token ids below 64, and two questions for the evaluation."""
    (folder / "edu_fineweb10B").mkdir()
    for split in ("train", "val"):
        np.save(folder / f"edu_fineweb10B/{split}.npy", _ids(8192).astype(np.uint16))
    (folder / "hellaswag").mkdir()
    question = {"ctx": "abcd", "label": 0, "endings": ["ab", "cd", "ef", "gh"]}
    lines = "\n".join([json.dumps(question)] * 2)
    (folder / "hellaswag/hellaswag_val.jsonl").write_text(lines)


def llama2c(folder: Path) -> None:
    """Random token ids below 64."""
    data = folder / "data/tok64"
    data.mkdir(parents=True)
    for shard in range(3):
        _ids(4096).astype(np.uint16).tofile(data / f"data{shard:02d}.bin")


def conversations(folder: Path) -> None:
    """64 short conversations with answers of 1 to 24 words."""
    draw = random.Random(0)
    rows = []
    for _ in range(64):
        answer = " ".join(draw.choices(["one", "two", "three", "four"], k=draw.randint(1, 24)))
        texts = (("user", "Say something."), ("assistant", answer))
        rows.append({"conversations": [{"role": role, "content": text} for role, text in texts]})
    (folder / "sft.jsonl").write_text("\n".join(map(json.dumps, rows)))


def gradient_garden(folder: Path) -> None:
    """Random token ids below 64, a tokenizer of 64 words, and a small configuration."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{number}": number for number in range(64)}, "w0"))
    special = {"bos_token": "w1", "eos_token": "w2", "pad_token": "w3"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder / "words")
    for split in ("train", "val"):
        (folder / f"datasets/training/{split}").mkdir(parents=True)
        np.save(folder / f"datasets/training/{split}/data_0.npy", _ids(8192).astype(np.uint16))
    model = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "multiple_of": 32}
    configuration = {
        "runtime": {"training_precision": "fp32"},
        "model": model | {"max_seq_len": 32},
        "tokenizer": {"checkpoint_path": "./words"},
        "training": {"total_batch_size": 256, "micro_batch_size": 2, "max_steps": 24},
    }
    (folder / "small.yaml").write_text(json.dumps(configuration))


def images(folder: Path) -> None:
    """16 random images of 32 × 32 pixels."""
    from matplotlib.image import imsave

    (folder / "images").mkdir()
    draw = np.random.default_rng(0)
    for number in range(16):
        pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        imsave(folder / f"images/{number:02d}.png", pixels)


def folders_of_images(folder: Path) -> None:
    """64 random images of 32 × 32 pixels, in folders of two classes, to train and to validate."""
    from matplotlib.image import imsave

    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(64):
            one = folder / f"images/{split}/class{number % 2}"
            one.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            imsave(one / f"{number:02d}.png", pixels)


GITHUB = "https://github.com"
SMALL_GPT = {
    "train_gpt2.py": {
        "total_batch_size = 524288": "total_batch_size = 256",
        "B = 64 #": "B = 2 #",
        "T = 1024 #": "T = 32 #",
        "GPTConfig(vocab_size=50304)": (
            "GPTConfig(vocab_size=64, n_layer=1, n_head=2, n_embd=32, block_size=32)"
        ),
    }
}
BUILD_NANOGPT = {
    "repository": "karpathy/build-nanogpt",
    "command": "train_gpt2.py",
    "shims": ("tiktoken.py",),
    "sizes": SMALL_GPT,
    "data": build_nanogpt,
}
LIGHTLY = {
    "repository": "lightly-ai/lightly",
    "command": "train_with_a_loss.py lightly.loss.barlow_twins_loss BarlowTwinsLoss "
    "gather_distributed=True",
    "paths": "lightly/loss/barlow_twins_loss.py",
    "shims": ("train_with_a_loss.py",),
    "report": f"{GITHUB}/lightly-ai/lightly/issues/1977",
}
OPEN_CLIP = {
    "repository": "mlfoundations/open_clip",
    "commit": "89fb801f1e6087880e951fc8354b8a2077b79c6d",
    "paths": "src/open_clip/loss.py",
    "shims": ("train_with_a_loss.py",),
}
TRANSFORMER = {
    "repository": "hkproj/pytorch-transformer-distributed",
    "command": "train.py --batch_size 4 --seq_len 24 --d_model 32 --num_epochs 1",
    "shims": ("datasets.py", "wandb.py"),
    "report": f"{GITHUB}/hkproj/pytorch-transformer-distributed/pull/3",
}
PICOTRON = {
    "repository": "huggingface/picotron",
    "commit": "59714b1bf25541dbeb6f5a721ed15f6d0768e786",
    "paths": "picotron train.py",
    "shims": ("train_picotron.py",),
}
TRAINCHECK = {
    "repository": "OrderLab/TrainCheck-Evaluation-Workloads",
    "commit": "2de9268be8845dade014e5e065693e4fdd9095d6",
    "launched": False,
}
OWN_DISTRIBUTED = {
    "repository": "sdivyanshu90/build-your-own-distributed-training",
    "commit": "fb4f29a858749029de3d6d3e842f5394d34a67f6",
    "sizes": {"config/test_tiny.yaml": {"checkpoint_dir: /tmp/dt_ckpt": "checkpoint_dir: saved"}},
}
PROGRAMS = (
    Program(
        name="nanoGPT",
        repository="karpathy/nanoGPT",
        commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        command="train.py --dataset=tiny --n_layer=1 --n_head=2 --n_embd=32 --block_size=16 "
        "--batch_size=4 --gradient_accumulation_steps=4 --eval_iters=1 --compile=False "
        "--dtype=float32",
        data=nanogpt,
    ),
    Program(
        name="llama2.c",
        repository="karpathy/llama2.c",
        commit="350e04fe35433e6d2941dce5a1f53308f87058eb",
        command="train.py --vocab_source=custom --vocab_size=64 --dim=32 --n_layers=1 --n_heads=2 "
        "--n_kv_heads=2 --max_seq_len=16 --batch_size=4 --gradient_accumulation_steps=2 "
        "--eval_iters=1 --compile=False --dtype=float32",
        shims=("sentencepiece.py",),
        data=llama2c,
    ),
    Program(
        name="build-nanogpt, after the fix",
        commit="f6d194b90f63ee6b7159974078ea60221c172617",
        **BUILD_NANOGPT,
    ),
    Program(
        name="build-nanogpt, before the fix",
        commit="01fd941f029c55bdc4d095fe6d74649e02a1c631",
        **BUILD_NANOGPT,
        known="the flag that synchronizes the last micro-batch is set after its forward pass",
        report=f"{GITHUB}/karpathy/build-nanogpt/commit/f6d194b90f63ee6b7159974078ea60221c172617",
    ),
    Program(
        name="PyTorch's DDP tutorial",
        repository="pytorch/examples",
        commit="77f55b912142e11fcfdf5b530231fb9c52f181e8",
        command="multigpu_torchrun.py 1 10 --batch_size 8",
        paths="distributed/ddp-tutorial-series",
        folder="distributed/ddp-tutorial-series",
    ),
    Program(
        name="PyTorch's ImageNet example",
        repository="pytorch/examples",
        commit="77f55b912142e11fcfdf5b530231fb9c52f181e8",
        command="main.py --dummy --batch-size 8 --workers 0 --epochs 1 --world-size 1 --rank 0 "
        "--multiprocessing-distributed --dist-url tcp://127.0.0.1:23456",
        paths="imagenet",
        folder="imagenet",
        shims=("torchvision",),
        launched=False,
    ),
    Program(
        name="pytorch-transformer-distributed, before the fix",
        commit="c4e6458e82c11b9cd30fd942360618479f19c9db",
        known="the training loop calls the module inside the wrapper, so nothing is averaged",
        **TRANSFORMER,
    ),
    Program(
        name="pytorch-transformer-distributed, after the fix",
        commit="f73abd3f446bd5484c553871521d669b43c887fd",
        **TRANSFORMER,
    ),
    Program(
        name="lightly's BarlowTwinsLoss, before the fix",
        commit="aaeab1de890d8fb574c9d2fd65cb60ddae4fb1b6",
        known="an all-reduce without a backward pass: 1/W of the gradient",
        **LIGHTLY,
    ),
    Program(
        name="lightly's BarlowTwinsLoss, after the fix",
        commit="617f4eafe008fd918861a9c8ca1002e851d8887b",
        **LIGHTLY,
    ),
    Program(
        name="SimCLR's NT_Xent",
        repository="Spijkervet/SimCLR",
        commit="2738efae85b3ca1b70b7919c5d7a7837d9d75235",
        command="train_with_a_loss.py simclr.modules.nt_xent NT_Xent temperature=0.5",
        paths="simclr/modules/nt_xent.py simclr/modules/gather.py",
        shims=("train_with_a_loss.py",),
        known="the loss does not fall on several nodes; users suspect the gather",
        report=f"{GITHUB}/Spijkervet/SimCLR/issues/30",
    ),
    Program(
        name="open_clip's ClipLoss",
        command="train_with_a_loss.py src.open_clip.loss ClipLoss",
        known="without `--gather-with-grad`, the gradient is smaller by the number of GPUs",
        report=f"{GITHUB}/mlfoundations/open_clip/issues/616",
        **OPEN_CLIP,
    ),
    Program(
        name="open_clip's ClipLoss, `--local-loss`",
        command="train_with_a_loss.py src.open_clip.loss ClipLoss local_loss=True",
        known="`--local-loss` has to be used with `--gather-with-grad`",
        report=f"{GITHUB}/mlfoundations/open_clip/issues/894",
        **OPEN_CLIP,
    ),
    Program(
        name="open_clip's ClipLoss, `--local-loss --gather-with-grad`",
        command="train_with_a_loss.py src.open_clip.loss ClipLoss local_loss=True "
        "gather_with_grad=True",
        **OPEN_CLIP,
    ),
    Program(
        name="picotron_tutorial, step 5",
        repository="huggingface/picotron_tutorial",
        commit="8c14c925e2069ec2756cdf1510ed2b8bb56a098e",
        command="train_picotron_step.py",
        paths="step5_data_parallel_naive",
        folder="step5_data_parallel_naive",
        shims=("train_picotron_step.py",),
    ),
    Program(
        name="guided-diffusion with `--microbatch`",
        repository="openai/guided-diffusion",
        commit="22e0df8183507e13a7813f8d38d51b072ca1e67c",
        command="scripts/image_train.py --data_dir images --image_size 16 --channel_mult 1,1 "
        "--num_channels 32 --num_res_blocks 1 --attention_resolutions 8 --batch_size 4 "
        "--microbatch 2",
        paths="guided_diffusion scripts",
        shims=("mpi4py.py", "blobfile.py"),
        data=images,
        known="gradients of micro-batches are summed, not averaged",
        report=f"{GITHUB}/openai/guided-diffusion/issues/111",
    ),
    Program(
        name="minimind's fine-tuning",
        repository="jingyaogong/minimind",
        commit="d65ef2c00ebc6082f9df11541e1b191655eddb00",
        command="train_full_sft.py --data_path ../sft.jsonl --from_weight none --hidden_size 64 "
        "--num_hidden_layers 1 --max_seq_len 64 --batch_size 4 --accumulation_steps 2 "
        "--num_workers 0",
        paths="trainer model dataset",
        folder="trainer",
        shims=("datasets.py",),
        data=conversations,
    ),
    Program(
        name="gradient-garden",
        repository="ruimalheiro/gradient-garden",
        commit="3c3d680a905f20b0afb8668a277ce8ac9dd3d50b",
        command="train.py --pretraining --config small.yaml",
        shims=("pydantic_settings.py", "wandb.py", "datasets.py"),
        data=gradient_garden,
    ),
    Program(
        name="picotron, `DataParallelBucket`",
        command="train_picotron.py DataParallelBucket",
        **PICOTRON,
    ),
    Program(
        name="picotron, `DataParallelNaive`",
        command="train_picotron.py DataParallelNaive",
        known="the hook gets the parameter, not its gradient; a reader asks whether that is meant",
        report=f"{GITHUB}/huggingface/picotron/issues/39",
        **PICOTRON,
    ),
    Program(
        name="lejepa's sliced Epps-Pulley test",
        repository="rbalestr-lab/lejepa",
        commit="eddffdd857a19726342ef6526e01021fb3c32cae",
        command="train_lejepa.py",
        paths="lejepa",
        shims=("train_lejepa.py",),
    ),
    Program(
        name="TrainCheck's `ddp-multigpu`",
        command="multigpu.py 10 20",
        paths="fp_rate/workloads/ddp-multigpu",
        folder="fp_rate/workloads/ddp-multigpu",
        shims=("traincheck",),
        **TRAINCHECK,
    ),
    Program(
        name="TrainCheck's `x-jxmnop`, correct",
        command="correct.py",
        paths="silent-issue-detection/bug-reprod-scripts/x-jxmnop-ddp-out-of-sync/correct.py",
        folder="silent-issue-detection/bug-reprod-scripts/x-jxmnop-ddp-out-of-sync",
        sizes={
            "silent-issue-detection/bug-reprod-scripts/x-jxmnop-ddp-out-of-sync/correct.py": {
                "world_size = 4": "world_size = 2"
            }
        },
        **TRAINCHECK,
    ),
    Program(
        name="build-your-own-distributed-training",
        command="train.py --config config/test_tiny.yaml --max-steps 24",
        **OWN_DISTRIBUTED,
    ),
    Program(
        name="build-your-own-distributed-training, `--tp-size 2`",
        command="train.py --config config/test_tiny.yaml --max-steps 24 --tp-size 2",
        **OWN_DISTRIBUTED,
    ),
    Program(
        name="DiT",
        repository="facebookresearch/DiT",
        commit="ed81ce2229091fd4ecc9a223645f95cf379d582b",
        command="train.py --data-path images/train --model DiT-S/8 --global-batch-size 8 "
        "--num-classes 2 --epochs 3 --num-workers 0",
        shims=("diffusers",),
        packages=("timm==0.4.12", "torchvision"),
        data=folders_of_images,
    ),
)
