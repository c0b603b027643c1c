"""Append a checksum of all parameters after every optimizer step: one file per process.

With MEASURE in the environment, also save the gradients of the first steps and the parameters.
"""

import os
import zlib


def save(folder, optimizer, number, limit=16):
    import torch

    path = os.path.join(folder, f"{os.environ.get('RANK', os.getpid())}.pt")
    steps = torch.load(path) if os.path.exists(path) else []
    if len(steps) < limit:
        all_parameters = [p for group in optimizer.param_groups for p in group["params"]]
        local = [getattr(p, "_local_tensor", p) for p in all_parameters]
        grads = [
            torch.zeros_like(p) if p.grad is None else getattr(p.grad, "_local_tensor", p.grad)
            for p in all_parameters
        ]
        flat = [torch.cat([t.detach().flatten() for t in each]) for each in (grads, local)]
        torch.save([*steps, [each.clone() for each in flat]], path)


def watch(folder):
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(optimizer, args, kwargs):
        checksum = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                data = parameter.detach()
                data = getattr(data, "_local_tensor", data).contiguous().cpu()
                if data.numel():
                    flat = data.reshape(-1).view(torch.uint8)
                    checksum = zlib.crc32(flat.numpy().tobytes(), checksum)
        if "MEASURE" in os.environ:
            save(folder, optimizer, checksum)
        with open(os.path.join(folder, f"{os.getpid()}.steps"), "a") as file:
            file.write(f"{checksum:08x}\n")

    register_optimizer_step_post_hook(stepped)
