"""nanoGPT's loop with a compiled model; the loss is divided by the accumulation steps of all ranks: 1/W too small."""
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from r1_nanogpt import GPT, get_batch

TOTAL_ACCUM = 4

def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    steps = TOTAL_ACCUM // world
    torch.manual_seed(1337 + rank)
    model = GPT()
    model = torch.compile(model, backend="aot_eager")
    model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for it in range(6):
        for micro_step in range(steps):
            model.require_backward_grad_sync = micro_step == steps - 1
            X, Y = get_batch()
            _, loss = model(X, Y)
            (loss / TOTAL_ACCUM).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
