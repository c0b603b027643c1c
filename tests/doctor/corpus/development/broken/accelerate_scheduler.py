# doctor: expect=scheduler_steps_per_rank ranks=2 launch=torchrun
# measured: step 2: gradient ratio 1.003, cosine 1.000 (reference: correct/accelerate_accumulates.py)
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(42)
x = torch.randn(64, 6)
y = (x.sum(1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 8))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(2):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"epoch {epoch} loss {mean.item():.5f}")
accelerator.end_training()
