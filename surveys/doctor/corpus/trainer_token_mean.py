# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Transformers Trainer: instruction tuning where only the answers count, with accumulation."""

import tempfile

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Dialogues(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(60, (16,), generator=g)
        labels = ids.clone()
        # batches of four: short answers and long ones take turns
        answer = 2 if (i // 4) % 2 else 13
        labels[: 16 - answer] = -100
        return {"input_ids": ids, "labels": labels}


class InOrderTrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


def tiny_llama():
    set_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=60,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
    )


def main():
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=4,
            max_steps=3,
            learning_rate=5e-3,
            max_grad_norm=0.0,
            gradient_accumulation_steps=2,
            lr_scheduler_type="linear",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = InOrderTrainer(model=tiny_llama(), args=args, train_dataset=Dialogues())
        trainer.train()
        if trainer.is_world_process_zero():
            norm = trainer.accelerator.unwrap_model(trainer.model).lm_head.weight.norm()
            print(f"head norm {norm.item():.4f}")


if __name__ == "__main__":
    main()
