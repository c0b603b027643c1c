"""The HF Trainer before October 2024: each micro-batch takes the mean over its own tokens, then / accumulation."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from r3_hf_tokens import LM, Texts, collate

ACCUM = 2

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(LM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Texts()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, seed=0), collate_fn=collate)
    for i, batch in enumerate(loader):
        sync = (i + 1) % ACCUM == 0
        model.require_backward_grad_sync = sync
        loss = model(**batch)["loss"] / ACCUM
        loss.backward()
        if sync:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
