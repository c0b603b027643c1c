# doctor: expect=loss_not_divided_by_accumulation ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 4 cosine 1; replicas equal at the end
# also: unequal_denominators,unequal_denominators_accumulation
"""Transformers Trainer with a label-smoothed loss of its own."""

import tempfile

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Numbers(Dataset):
    """Counting sequences modulo 30."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        ids = (torch.arange(10) * (1 + i % 5) + i) % 30
        return {"input_ids": ids, "labels": ids.clone()}


class SmoothedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = smoothed(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


def smoothed(logits, labels):
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
    )


def tiny_gpt2():
    set_seed(0)
    config = GPT2Config(
        vocab_size=30,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def main():
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            max_steps=3,
            learning_rate=1e-3,
            max_grad_norm=0.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = SmoothedTrainer(model=tiny_gpt2(), args=args, train_dataset=Numbers())
        trainer.train()
        if trainer.is_world_process_zero():
            norm = trainer.accelerator.unwrap_model(trainer.model).lm_head.weight.norm()
            print(f"embedding norm {norm.item():.4f}")


if __name__ == "__main__":
    main()
