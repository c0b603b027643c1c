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
from typing import Any

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
    """Random images of 32 × 32 pixels, of two classes: 256 to train, and 256 to validate."""
    from matplotlib.image import imsave

    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(256):
            one = folder / f"images/{split}/class{number % 2}"
            one.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            imsave(one / f"{number:03d}.png", pixels)


def nanochat(folder: Path) -> None:
    """Documents of random words, and a tokenizer whose tokens are bytes."""
    import pyarrow
    import pyarrow.parquet
    import tiktoken
    import torch

    words = folder / "made/tokenizer"
    words.mkdir(parents=True)
    names = ["bos", "user_start", "user_end", "assistant_start", "assistant_end", "python_start"]
    names += ["python_end", "output_start", "output_end"]
    special = {f"<|{name}|>": 256 + number for number, name in enumerate(names)}
    single = {bytes([number]): number for number in range(256)}
    tokens = tiktoken.Encoding("bytes", pat_str=".", mergeable_ranks=single, special_tokens=special)
    (words / "tokenizer.pkl").write_bytes(pickle.dumps(tokens))
    torch.save(torch.ones(tokens.n_vocab, dtype=torch.int32), words / "token_bytes.pt")
    draw = random.Random(0)
    texts = [
        " ".join(draw.choices(["one", "two", "three"], k=draw.randint(2, 9))) for _ in _ids(2048)
    ]
    (folder / "made/base_data_climbmix").mkdir()
    for shard in range(2):
        path = folder / f"made/base_data_climbmix/shard_{shard:05d}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=64)


def modded_nanogpt(folder: Path) -> None:
    """Random token ids below 64, behind the header that the script reads."""
    data = folder / "data/fineweb10B"
    data.mkdir(parents=True)
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, 8192
    for split in ("train", "val"):
        tokens = _ids(8192).astype(np.uint16).tobytes()
        (data / f"fineweb_{split}_0.bin").write_bytes(header.tobytes() + tokens)


def coco(folder: Path) -> None:
    """32 random images of 64 × 64 pixels with 1 to 5 boxes, to train and to validate."""
    from matplotlib.image import imsave

    draw = np.random.default_rng(0)
    (folder / "coco/annotations").mkdir(parents=True)
    for split in ("train", "val"):
        (folder / f"coco/{split}2017").mkdir()
        boxes: list[dict[str, Any]] = []
        for number in range(32):
            pixels = draw.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            imsave(folder / f"coco/{split}2017/{number:02d}.jpg", pixels)
            for _ in range(draw.integers(1, 6)):
                left, top, width, height = (int(one) for one in draw.integers(8, 30, 4))
                box = {"bbox": [left, top, width, height], "area": width * height, "iscrowd": 0}
                place = {"id": len(boxes) + 1, "image_id": number, "segmentation": []}
                boxes.append(box | place | {"category_id": int(draw.integers(1, 90))})
        files = [
            {"id": n, "file_name": f"{n:02d}.jpg", "width": 64, "height": 64} for n in range(32)
        ]
        kinds = [{"id": number, "name": f"kind{number}"} for number in range(1, 91)]
        said = {"info": {}, "images": files, "annotations": boxes, "categories": kinds}
        (folder / f"coco/annotations/instances_{split}2017.json").write_text(json.dumps(said))


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
DEIT = {
    "repository": "facebookresearch/deit",
    "commit": "7e160fe43f0252d17191b71cbb5826254114ea5b",
    "packages": ("timm==0.4.12", "torchvision"),
    "data": folders_of_images,
}
DEIT_COMMAND = (
    "main.py --model deit_tiny_patch16_224 --input-size 32 --data-path images --batch-size 4 "
    "--epochs 1 --num_workers 0 --drop-path 0 --repeated-aug"
)
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
        command="train_picotron.py DataParallelNaive",
        paths="step5_data_parallel_naive",
        folder="step5_data_parallel_naive",
        shims=("train_picotron.py",),
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
        "--num-classes 2 --epochs 1 --num-workers 0",
        shims=("diffusers",),
        packages=("timm", "torchvision"),
        data=folders_of_images,
    ),
    Program(
        name="nanochat",
        repository="karpathy/nanochat",
        commit="92d63d4e8bb4df75c3b71618f31ddde2378b2bcd",
        command="train_nanochat.py --depth 2 --aspect-ratio 16 --head-dim 16 --max-seq-len 32 "
        "--window-pattern L --device-batch-size 2 --total-batch-size 256 --num-iterations 12 "
        "--eval-every -1 --core-metric-every -1 --sample-every -1 --warmup-steps 1",
        shims=("train_nanochat.py", "rustbpe.py", "wandb.py"),
        packages=("pyarrow", "tiktoken"),
        data=nanochat,
    ),
    Program(
        name="litgpt's pretraining",
        repository="Lightning-AI/litgpt",
        commit="26857050fe3ff627cd714fe92f5838f51a3d5efa",
        command="train_litgpt.py",
        paths="litgpt",
        shims=("train_litgpt.py",),
        packages=("lightning", "torchmetrics", "jsonargparse", "tokenizers"),
    ),
    Program(name="DeiT", command=DEIT_COMMAND, **DEIT),
    Program(
        name="DeiT, without Mixup and CutMix",
        command=f"{DEIT_COMMAND} --mixup 0 --cutmix 0",
        **DEIT,
    ),
    Program(
        name="modded-nanogpt of November 2024",
        repository="KellerJordan/modded-nanogpt",
        commit="7c1a1af3be06a40000fb5a263577f7430ad03b52",
        command="train_gpt2.py",
        paths="train_gpt2.py",
        sizes={
            "train_gpt2.py": {
                "    batch_size : int = 8*64": "    batch_size : int = 8",
                "device_batch_size : int = 64": "device_batch_size : int = 2",
                "sequence_length : int = 1024": "sequence_length : int = 32",
                "num_iterations : int = 3242": "num_iterations : int = 12",
                "warmdown_iters : int = 926": "warmdown_iters : int = 4",
                "val_loss_every : int = 125": "val_loss_every : int = 0",
                "val_tokens : int = 10485760": "val_tokens : int = 128",
                "num_vocab = 50304": "num_vocab = 64",
                "n_layer=12, n_head=6, n_embd=768)": "n_layer=2, n_head=2, n_embd=32)",
            }
        },
        data=modded_nanogpt,
    ),
    Program(
        name="DETR",
        repository="facebookresearch/detr",
        commit="29901c51d7fe8712168b8d0d64351170bc0f83e0",
        command="train_detr.py --coco_path coco --backbone resnet18 --hidden_dim 32 --nheads 2 "
        "--enc_layers 1 --dec_layers 2 --dim_feedforward 32 --num_queries 10 --dropout 0 "
        "--batch_size 2 --num_workers 0 --epochs 2 --eos_coef 0.1",
        shims=("train_detr.py",),
        packages=("torchvision", "scipy", "pycocotools"),
        sizes={
            "datasets/coco.py": {
                "scales = [480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800]": "scales = [64]",
                "T.RandomResize([400, 500, 600])": "T.RandomResize([64])",
                "T.RandomSizeCrop(384, 600)": "T.RandomSizeCrop(64, 64)",
                "T.RandomResize([800], max_size=1333)": "T.RandomResize([64], max_size=1333)",
            }
        },
        data=coco,
    ),
)
