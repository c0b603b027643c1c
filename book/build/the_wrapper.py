"""The reducer of buckets_that_overlap.ipynb, from which the_wrapper.ipynb starts."""

from functools import partial

import torch
import torch.distributed as dist

CAP = 16 * 1024  # bytes per bucket


def pack(parameters, order, cap_bytes):
    """Lists of indices, in `order`; a list is closed once it holds `cap_bytes`."""
    plan, filling = [], {}
    for index in order:
        kind = parameters[index].dtype, parameters[index].device
        bucket = filling.setdefault(kind, [])
        bucket.append(index)
        if sum(parameters[i].nbytes for i in bucket) >= cap_bytes:
            plan.append(filling.pop(kind))
    return [*plan, *filling.values()]


class Bucket:
    def __init__(self, parameters):
        self.parameters, sizes = parameters, [p.numel() for p in parameters]
        self.buffer = parameters[0].new_empty(sum(sizes))
        parts = zip(parameters, self.buffer.split(sizes), strict=True)
        self.views = [part.view_as(p) for p, part in parts]

    @torch.no_grad()
    def launch(self):
        for p, view in zip(self.parameters, self.views, strict=True):
            torch.mul(p.grad, 1 / dist.get_world_size(), out=view)
        self.work = dist.all_reduce(self.buffer, async_op=True)

    @torch.no_grad()
    def finish(self):
        self.work.wait()
        for p, view in zip(self.parameters, self.views, strict=True):
            p.grad.copy_(view)


class Buckets:
    def __init__(self, module, cap_bytes=CAP):
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.cap_bytes, self.log = cap_bytes, []
        for index, parameter in enumerate(self.parameters):
            hook = partial(self.gradient_arrived, index)
            parameter.register_post_accumulate_grad_hook(hook)
        self.use(self.first_plan())

    def first_plan(self):
        from_the_last = range(len(self.parameters) - 1, -1, -1)
        return pack(self.parameters, from_the_last, self.cap_bytes)

    def use(self, plan):
        self.buckets = [Bucket([self.parameters[i] for i in each]) for each in plan]
        pairs = zip(self.buckets, plan, strict=True)
        self.bucket_of = {i: bucket for bucket, each in pairs for i in each}
        self.prepare()

    def prepare(self):
        self.order, self.launched = [], 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)


class Launching(Buckets):
    def gradient_arrived(self, index, parameter):
        self.order.append(index)
        self.mark_ready(index)

    def mark_ready(self, index):
        self.bucket_of[index].missing -= 1
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if bucket.missing:
                return
            bucket.launch()
            self.launched += 1
            self.log.append((bucket.buffer.nbytes, len(self.order)))


class Reducer(Launching):
    def mark_ready(self, index):
        super().mark_ready(index)
        if self.launched == len(self.buckets):
            torch.autograd.Variable._execution_engine.queue_callback(self.finalize)

    def finalize(self):
        for bucket in self.buckets:
            bucket.finish()
        self.prepare()
