"""Append a checksum of all parameters after every optimizer step: one file per process."""

import os
import zlib


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
        with open(os.path.join(folder, f"{os.getpid()}.steps"), "a") as file:
            file.write(f"{checksum:08x}\n")

    register_optimizer_step_post_hook(stepped)
