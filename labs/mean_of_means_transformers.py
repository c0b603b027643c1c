"""What Hugging Face's Trainer divides by: its gradient against the full batch's.

    python labs/mean_of_means_transformers.py                                     one process
    torchrun --standalone --nproc-per-node 2 labs/mean_of_means_transformers.py   1, 2, or 4

Tiny models with random weights take one Trainer step on 16 sequences of different lengths. The
sequences are cut into micro-batches in several ways. The script reads the gradient just before the
optimizer's step and compares it with the gradient of the mean loss over all tokens, from one
backward of the same model. Ratio 1 and cosine 1 are right. A cosine below 1 is a direction bug;
another ratio alone is a scale bug. The last columns are the loss that the Trainer logs and the
true one.

With several processes each case runs twice: with average_tokens_across_devices on (the default) and
off. A last table shows what Accelerate alone does, without the Trainer.
"""

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from labkit.launch.arguments import explained_by, parse_arguments
from labkit.launch.memory import gc_paused

SEED = 0
SEQUENCES = 16


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    parser = explained_by(__doc__)
    parser.add_argument("--seed", type=int, default=SEED, help=f"default {SEED}")
    ARGUMENTS = parse_arguments(parser)
    if (world_size := int(os.environ.get("WORLD_SIZE", 1))) not in (1, 2, 4):
        raise SystemExit(
            f"{SEQUENCES} sequences are shared among 1, 2 or 4 processes, not {world_size}"
        )

# The imports below read these: nothing is downloaded, and GPUs are not used.
os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TORCH_CPP_LOG_LEVEL="ERROR")

# The Trainer collects garbage after each training, and skips what is frozen here.
with gc_paused():
    import accelerate
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    import transformers
    from torch import Tensor, nn

    from labkit.launch.lab import leave_group
    from labkit.scenarios.padded_captioner import PADDING, PIXELS, START, VOCABULARY, draw_captions
    from labkit.tables import Cell, table
    from labkit.testing.compare import gradients, ratio_and_cosine

HIDDEN = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}

Sequence = dict[str, Tensor]


class TrainerCase(NamedTuple):
    """A model, its data, and a loss function if the case needs its own."""

    name: str
    make: Callable[[], nn.Module]
    data: list[Sequence]
    compute_loss: Callable[..., Tensor] | None = None


def trainer_cases(seed: int) -> list[TrainerCase]:
    return [
        TrainerCase("Llama", llama, texts(seed)),
        TrainerCase("GPT-2", gpt2, texts(seed)),
        TrainerCase("VisionEncoderDecoder", captioner, pictures(seed)),
        TrainerCase("GPT-2, first label ignored", gpt2, texts(seed, first_label=PADDING)),
        TrainerCase(
            "VisionEncoderDecoder, own loss",
            captioner,
            pictures(seed, read=True),
            sum_over_items,
        ),
    ]


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **HIDDEN)
    return transformers.LlamaForCausalLM(config)


def gpt2(**looks_at_picture: bool) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY + 1,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=START,
        eos_token_id=START,
        # Without dropout, as in the thread: it would differ between ways of cutting the batch.
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        **looks_at_picture,
    )
    return transformers.GPT2LMHeadModel(config)


def captioner() -> nn.Module:
    """The class of the thread's model: a vision transformer, and a GPT-2 with cross-attention."""
    vision = transformers.ViTConfig(image_size=PIXELS, patch_size=4, num_hidden_layers=1, **HIDDEN)
    decoder = gpt2(add_cross_attention=True, is_decoder=True)
    model = transformers.VisionEncoderDecoderModel(
        encoder=transformers.ViTModel(vision), decoder=decoder
    )
    model.config.decoder_start_token_id = model.config.pad_token_id = START
    return model


def texts(seed: int, first_label: int | None = None) -> list[Sequence]:
    """Sequences of 2 to 12 tokens. A causal model's labels are its inputs, which it shifts."""
    tokens = draw_captions(SEQUENCES, seed).targets
    labels = tokens.clone()
    if first_label is not None:
        labels[:, 0] = first_label
    rows = zip(tokens.clamp(min=0), labels, strict=True)
    return [{"input_ids": inputs, "labels": wanted} for inputs, wanted in rows]


def pictures(seed: int, read: bool = False) -> list[Sequence]:
    """Captioned pictures; with `read` they include the inputs of the decoder."""
    captions = draw_captions(SEQUENCES, seed)
    rows: Iterator[tuple[Tensor, ...]] = zip(*captions, strict=True)
    sequences = []
    for pixels, tokens, targets in rows:
        sequences.append({"pixel_values": pixels, "labels": targets})
        if read:
            sequences[-1]["decoder_input_ids"] = tokens
    return sequences


def sum_over_items(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    scores = outputs.logits.flatten(0, 1)
    losses = F.cross_entropy(scores, labels.flatten(), ignore_index=PADDING, reduction="sum")
    return losses / num_items_in_batch


class Found(NamedTuple):
    loss: float
    gradient: list[Tensor]


def full_batch_of_case(case: TrainerCase, seed: int) -> Found:
    """The mean over all tokens by torch's cross-entropy, from one forward and backward."""
    torch.manual_seed(seed)
    model = case.make()
    batch = {name: torch.stack([row[name] for row in case.data]) for name in case.data[0]}
    scores, labels = model(**batch).logits, batch["labels"]
    if not model.config.is_encoder_decoder:
        scores, labels = scores[:, :-1], labels[:, 1:]
    loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=PADDING)
    loss.backward()
    return Found(loss.item(), gradients(model))


class Watch(transformers.TrainerCallback):
    """Keeps the last step's complete gradient and the last logged loss."""

    gradient: list[Tensor]
    loss: float

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.gradient = gradients(model)

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:  # the very last log is a summary of the run
            self.loss = logs["loss"]


def trainer_step(
    case: TrainerCase, size: int, steps: int, average: bool, seed: int, windows: int = 1
) -> Found:
    """The last of `windows` Trainer steps: `steps` backwards of `size` sequences per process."""
    torch.manual_seed(seed)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            average_tokens_across_devices=average,
            train_sampling_strategy="sequential",
            max_steps=windows,
            learning_rate=0,  # every window from the same weights
            max_grad_norm=0,  # no clipping
            optim="sgd",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            case.make(),
            arguments,
            train_dataset=case.data,
            compute_loss_func=case.compute_loss,
            callbacks=[watch],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return Found(watch.loss, watch.gradient)


def trainer_rows(seed: int, world_size: int) -> list[list[Cell]]:
    splits = [(16, 1), (4, 4), (1, 16)] if world_size == 1 else [(SEQUENCES // world_size // 2, 2)]
    rows: list[list[Cell]] = []
    for case in trainer_cases(seed):
        wanted = full_batch_of_case(case, seed)
        for size, steps in splits:
            for average in (True, False) if world_size > 1 else (True,):
                found = trainer_step(case, size, steps, average, seed)
                split = f"{size}×{steps}" if world_size == 1 else f"{size}×{steps}×{world_size}"
                flag = [average] if world_size > 1 else []
                rows.append([case.name, split, *flag, *compared(found, wanted)])
    if world_size == 1:
        # Windows of three micro-batches of two: two micro-batches are left for the last.
        case = TrainerCase("Llama, last window", llama, texts(seed))
        wanted = full_batch_of_case(case._replace(data=case.data[12:]), seed)
        found = trainer_step(case, 2, 3, True, seed, windows=3)
        rows.append([case.name, "2×2", *compared(found, wanted)])
    return rows


def compared(found: Found, wanted: Found) -> list[Cell]:
    ratio, cosine = ratio_and_cosine(found.gradient, wanted.gradient)
    # Three digits of what is far from 1: a fourth one would be rounding's, on another processor.
    return [ratio, f"{cosine:.4f}", found.loss, wanted.loss]


def accelerate_rows(seed: int) -> list[list[Cell]]:
    """The summed loss with three factors, passed to `accelerator.backward`."""
    case = TrainerCase("", llama, texts(seed))
    wanted = full_batch_of_case(case, seed)
    count = sum(int((row["labels"][1:] != PADDING).sum()) for row in case.data)
    steps = 4
    rows: list[list[Cell]] = []
    for name in ("sum / N", "W · sum / N", "K · W · sum / N"):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps)
        world_size = accelerator.num_processes
        factor = {"s": 1, "W": world_size, "K": steps * world_size}[name[0]]
        torch.manual_seed(seed)
        model = accelerator.prepare(case.make())
        mine = case.data[accelerator.process_index :: world_size]
        for i in range(steps):
            part = mine[i::steps]
            batch = {key: torch.stack([row[key] for row in part]) for key in part[0]}
            with accelerator.accumulate(model):
                scores, labels = model(input_ids=batch["input_ids"]).logits, batch["labels"]
                losses = F.cross_entropy(
                    scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
                )
                accelerator.backward(losses * factor / count)
        rows.append([name, *ratio_and_cosine(gradients(model), wanted.gradient)])
    return rows


def main(seed: int) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    # Both libraries print advice on GPUs to stderr; here only a failure matters.
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

    labels = torch.stack([row["labels"] for row in texts(seed)]) != PADDING
    default = transformers.TrainingArguments.average_tokens_across_devices
    by_trainer, by_accelerate = trainer_rows(seed, world_size), accelerate_rows(seed)
    if int(os.environ.get("RANK", 0)) == 0:
        flag = ["average_tokens"] if world_size > 1 else []
        print(f"transformers {transformers.__version__}, accelerate {accelerate.__version__}")
        print(f"average_tokens_across_devices is {default} by default")
        tokens, predicted = int(labels.sum()), int(labels[:, 1:].sum())
        print(f"{SEQUENCES} sequences, {tokens} tokens, {predicted} without each first one\n")
        headers = ["Trainer", "split", *flag, "ratio", "cosine", "logged", "true loss"]
        print(table(headers, by_trainer, digits=3))
        print(f"\n{table(['accelerator.backward of', 'ratio', 'cosine'], by_accelerate)}")
    if dist.is_initialized():
        leave_group()


if __name__ == "__main__":
    main(ARGUMENTS.seed)
