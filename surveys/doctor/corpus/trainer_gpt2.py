# doctor: expect=none ranks=2 launch=torchrun
# measured: num_items_in_batch counts all ranks and micro-batches; gradient equals one process's
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, set_seed

set_seed(0)
config = GPT2Config(
    n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip


def rows():
    gen = torch.Generator().manual_seed(1)
    for i in range(48):
        ids = torch.randint(0, 32, (12,), generator=gen)
        labels = ids.clone()
        labels[2 + i % 10 :] = -100
        yield {"input_ids": ids, "labels": labels}


trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=3,
        max_steps=4,
        seed=0,
        gradient_accumulation_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    ),  # fmt: skip
    train_dataset=list(rows()),
)
trainer.remove_callback(PrinterCallback)  # it prints how long training took
result = trainer.train()
print(trainer.args.process_index, f"{result.training_loss:.5f}")
