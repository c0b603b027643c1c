"""Right solutions in unusual PyTorch: each has to earn every point.

Written from the assignments' texts, as students with other habits would. Losing points for one of
these is the worst mistake that a grader can make.
"""

EACH = {
    "coalesced by torch": """
def average_each(module):
    ps = [p for p in module.parameters() if p.requires_grad]
    flags = torch.tensor([float(p.grad is not None) for p in ps])
    dist.all_reduce(flags)
    ps = [p for p, f in zip(ps, flags.tolist()) if f]
    for p in ps:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    with dist._coalescing_manager(async_ops=True) as works:
        for p in ps:
            dist.all_reduce(p.grad)
    works.wait()
    for p in ps:
        p.grad /= dist.get_world_size()
""",
    "an all-reduce in a thread": """
import threading

def average_each(module):
    def average():
        for p, f in zip(ps, flags.tolist()):
            if f:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    ps = [p for p in module.parameters() if p.requires_grad]
    flags = torch.tensor([float(p.grad is not None) for p in ps])
    dist.all_reduce(flags)
    thread = threading.Thread(target=average)
    thread.start()
    thread.join()
""",
    "a frozen dataclass and futures": """
from dataclasses import dataclass

@dataclass(frozen=True)
class Slot:
    parameter: nn.Parameter
    present: bool

def average_each(module: nn.Module) -> None:
    slots = [Slot(p, p.grad is not None) for p in module.parameters() if p.requires_grad]
    votes = torch.tensor([s.present for s in slots], dtype=torch.uint8)
    dist.all_reduce(votes)
    futures = []
    for slot, vote in zip(slots, votes.tolist()):
        if vote:
            if not slot.present:
                slot.parameter.grad = torch.zeros_like(slot.parameter)
            work = dist.all_reduce(slot.parameter.grad, async_op=True)
            mean = work.get_future().then(lambda f: f.value()[0].div_(dist.get_world_size()))
            futures.append(mean)
    torch.futures.wait_all(futures)
""",
    "functional collectives": """
import torch.distributed._functional_collectives as fc

def average_each(module):
    ps = [p for p in module.parameters() if p.requires_grad]
    n = torch.tensor([float(p.grad is not None) for p in ps])
    n = fc.all_reduce(n, "sum", dist.group.WORLD)
    for p, k in zip(ps, n.tolist()):
        if k:
            g = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = fc.all_reduce(g, "avg", dist.group.WORLD) + 0
""",
    "a group of its own and a device mesh": """
from torch.distributed.device_mesh import init_device_mesh

def average_each(module):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group = mesh.get_group()
    same = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    ps = [p for p in module.parameters() if p.requires_grad]
    flags = torch.tensor([float(p.grad is not None) for p in ps])
    dist.all_reduce(flags, group=same)
    with torch.no_grad():
        for p, f in zip(ps, flags):
            if f > 0:
                g = p.grad if p.grad is not None else torch.zeros_like(p)
                g = g / dist.get_world_size(group)
                dist.all_reduce(g, group=group)
                p.grad = g
""",
    "magics, shell, a question, and a barrier": """
%%time
%matplotlib inline
!echo hello
files = !ls
nn.Linear?
def average_each(module):
    text = '''
%not a magic
!nor this
'''
    dist.barrier()
    for p in (q for q in module.parameters() if q.requires_grad):
        flag = torch.tensor(int(p.grad is not None))
        dist.all_reduce(flag)
        if flag:
            p.grad = p.grad if p.grad is not None else torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad = p.grad / dist.get_world_size()
""",
    "a callable object, and flags as a bitmask": """
class Averager:
    def __call__(self, module):
        ps = [p for p in module.parameters() if p.requires_grad]
        mask = torch.tensor(sum(1 << i for i, p in enumerate(ps) if p.grad is not None))
        dist.all_reduce(mask, op=dist.ReduceOp.BOR)
        for i, p in enumerate(ps):
            if int(mask) >> i & 1:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

average_each = Averager()
""",
    "reduced in inference mode": """
def average_each(module):
    ps = [p for p in module.parameters() if p.requires_grad]
    with torch.inference_mode():
        flags = torch.tensor([float(p.grad is not None) for p in ps])
        dist.all_reduce(flags)
        found = flags.tolist()
    for p, f in zip(ps, found):
        if f:
            g = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.all_reduce(g, op=dist.ReduceOp.AVG)
            p.grad = g
""",
}

FLAT = {
    "flags in the same vector": """
def average_flat(module):
    ps = [p for p in module.parameters() if p.requires_grad]
    flags = torch.tensor([float(p.grad is not None) for p in ps])
    grads = [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in ps]
    vector = torch.cat([flags, *grads])
    dist.all_reduce(vector)
    counts, vector = vector[: len(ps)], vector[len(ps):] / dist.get_world_size()
    for p, c, part in zip(ps, counts, vector.split([p.numel() for p in ps])):
        p.grad = part.reshape(p.shape).clone() if c else None
""",
    "flags as objects, vector in double": """
def average_flat(module):
    ps = [p for p in module.parameters() if p.requires_grad]
    table = [None for _ in range(dist.get_world_size())]
    dist.all_gather_object(table, [p.grad is not None for p in ps])
    used = [p for p, column in zip(ps, zip(*table)) if any(column)]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in used]
    flat = torch.cat([g.double().view(-1) for g in grads])
    work = dist.all_reduce(flat, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    offset = 0
    for p in used:
        p.grad = flat[offset : offset + p.numel()].view_as(p).float()
        offset += p.numel()
""",
    "a padded matrix": """
def average_flat(module):
    ps = [p for p in module.parameters() if p.requires_grad]
    flags = torch.tensor([float(p.grad is not None) for p in ps])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    total = sum(p.numel() for p in ps)
    buffer = torch.zeros(-(-total // 8) * 8).view(-1, 8)
    line = buffer.view(-1)
    at = 0
    for p in ps:
        if p.grad is not None:
            line[at : at + p.numel()] = p.grad.reshape(-1)
        at += p.numel()
    dist.all_reduce(buffer)
    line /= dist.get_world_size()
    at = 0
    for p, f in zip(ps, flags.tolist()):
        if f:
            p.grad = line[at : at + p.numel()].reshape(p.shape).clone()
        at += p.numel()
""",
}

COUNT = {
    "an expanded number": """
def count_tokens(batches):
    n = torch.stack([b["counts"].sum() for b in batches]).sum()
    both = n.expand(2)
    dist.all_reduce(both)
    return int(both[1])
""",
    "in floating point": """
def count_tokens(batches):
    dist.barrier()
    total = torch.stack([b["counts"].float().sum() for b in batches]).sum().double()
    dist.all_reduce(total)
    return round(total.item())
""",
    "functional": """
import torch.distributed._functional_collectives as fc
def count_tokens(batches):
    own = sum(b["counts"].sum() for b in batches)
    return int(fc.all_reduce(own, "sum", dist.group.WORLD))
""",
}
LOSS = {
    "one backward for all": """
def backward_weighted(model, batches, total):
    losses = torch.cat([token_losses(model, b) for b in batches])
    (losses.sum() / total * dist.get_world_size()).backward()
""",
    "weights on means": """
def backward_weighted(model, batches, total):
    scale = dist.get_world_size() / total
    for b in batches:
        n = int(b["counts"].sum())
        if n == 0:
            continue
        loss = token_losses(model, b).mean()
        loss.backward(torch.tensor(n * scale))
""",
    "autograd.grad, added up by hand": """
def backward_weighted(model, batches, total):
    params = [p for p in model.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in params]
    for batch in batches:
        loss = token_losses(model, batch).sum()
        for s, g in zip(sums, torch.autograd.grad(loss, params, allow_unused=True)):
            if g is not None:
                s.add_(g, alpha=dist.get_world_size() / total)
    for p, s in zip(params, sums):
        p.grad = s if p.grad is None else p.grad + s
""",
}
RATE = {
    "match": """
def equivalent_rate(lr, reduction, combine, world_size, per_rank):
    match (reduction, combine):
        case ("mean", "average"): return lr
        case ("mean", "sum"): return lr / world_size
        case ("sum", "average"): return lr / per_rank
        case _: return torch.tensor(lr) .item() / (world_size * per_rank)
""",
}
DATA_PARALLEL = {
    "functional_call": """
from torch.func import functional_call
def data_parallel_gradients(model, x, y, replicas):
    ps = dict(model.named_parameters())
    outs = [functional_call(model, ps, (part,)) for part in torch.chunk(x, replicas)]
    loss = ((torch.cat(outs) - y) ** 2).mean()
    for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(ps.values()))):
        p.grad = g
""",
    "shares of the loss": """
def data_parallel_gradients(model, x, y, replicas):
    for a, b in zip(x.chunk(replicas), y.chunk(replicas)):
        (mse_loss(model(a), b, reduction="sum") / y.numel()).backward()
""",
}
STEP = {
    "samples gathered": """
def train_step(model, x, y, lr):
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    xs, ys = ([torch.empty_like(t) for _ in range(dist.get_world_size())] for t in (x, y))
    dist.all_gather(xs, x)
    dist.all_gather(ys, y)
    model.zero_grad()
    mse_loss(model(torch.cat(xs)), torch.cat(ys)).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=lr)
""",
    "steps alone, then averages the weights": """
def train_step(model, x, y, lr):
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    dist.broadcast(flat, 0)
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    grads = torch.autograd.grad(mse_loss(model(x), y), list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), grads):
            p.sub_(g, alpha=lr)
            dist.all_reduce(p.data)
            p.data.div_(dist.get_world_size())
""",
    "foreach": """
@torch.no_grad()
def train_step(model, x, y, lr):
    params = list(model.parameters())
    for work in [dist.broadcast(p.data, src=0, async_op=True) for p in params]:
        work.wait()
    with torch.enable_grad():
        grads = torch.autograd.grad(mse_loss(model(x), y), params)
    grads = [g.contiguous() for g in grads]
    for work in [dist.all_reduce(g, async_op=True) for g in grads]:
        work.wait()
    torch._foreach_add_(params, grads, alpha=-lr / dist.get_world_size())
""",
}
BUCKETS = {
    "tuples and numpy": """
import itertools
def assign_buckets(sizes, cap):
    result = []
    for i, size in reversed(list(enumerate(sizes))):
        if not result or result[-1][1] >= cap:
            result.append([[], 0])
        result[-1][0].append(i)
        result[-1][1] += size
    return tuple(tuple(b) for b, _ in result)
""",
}
REDUCER = {
    "gradients are views of the buckets": """
from dataclasses import dataclass, field

@dataclass
class Bucket:
    flat: torch.Tensor
    left: set = field(default_factory=set)
    members: tuple = ()
    work: object = None

class Reducer:
    def __init__(self, model, buckets):
        ps = list(model.parameters())
        for p in ps:
            dist.broadcast(p.detach(), src=0)
        dist.barrier()
        self.buckets = []
        for ids in buckets:
            b = Bucket(torch.zeros(sum(ps[i].numel() for i in ids)), members=tuple(ids))
            b.left = set(ids)
            self.buckets.append(b)
            offset = 0
            for i in ids:
                view = b.flat[offset : offset + ps[i].numel()].view_as(ps[i])
                offset += ps[i].numel()
                ps[i].register_post_accumulate_grad_hook(
                    lambda p, b=b, i=i, view=view: self.on_ready(p, b, i, view)
                )
        self.ps, self.next = ps, 0

    def on_ready(self, p, b, i, view):
        view.copy_(p.grad)
        p.grad = view
        b.left.discard(i)
        while self.next < len(self.buckets) and not self.buckets[self.next].left:
            n = self.buckets[self.next]
            n.work = dist.all_reduce(n.flat, op=dist.ReduceOp.AVG, async_op=True)
            self.next += 1

    def finish(self):
        for b in self.buckets:
            b.work.wait()
            for i in b.members:
                self.ps[i].grad = self.ps[i].grad.clone()
            b.left, b.work = set(b.members), None
        self.next = 0
""",
    "hooks on the graph's AccumulateGrad nodes": """
class Reducer:
    def __init__(self, model, buckets):
        self.params = list(model.parameters())
        self.buckets = [tuple(b) for b in buckets]
        self.nodes = []
        for b, ids in enumerate(self.buckets):
            for i in ids:
                node = self.params[i].expand_as(self.params[i]).grad_fn.next_functions[0][0]
                node.register_hook(lambda *_, b=b: self.arrived(b))
                self.nodes.append(node)
        self.reset()

    def reset(self):
        self.pending = {b: len(ids) for b, ids in enumerate(self.buckets)}
        self.flying = []

    def arrived(self, b):
        self.pending[b] -= 1
        while len(self.flying) in self.pending and self.pending[len(self.flying)] == 0:
            ids = self.buckets[len(self.flying)]
            flat = torch.cat([self.params[i].grad.flatten() for i in ids])
            self.flying.append((ids, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        for ids, flat, work in self.flying:
            work.wait()
            flat.div_(dist.get_world_size())
            parts = flat.split([self.params[i].numel() for i in ids])
            for i, part in zip(ids, parts):
                self.params[i].grad.copy_(part.view_as(self.params[i]))
        self.reset()
""",
}
CLIPPING = {
    "by hand": """
def clipped_gradients(model, x, y, norm):
    mse_loss(model(x), y).backward()
    average_gradients(model)
    total = torch.sqrt(sum(p.grad.pow(2).sum() for p in model.parameters()))
    for p in model.parameters():
        p.grad *= torch.clamp(norm / (total + 1e-6), max=1.0)
""",
}
ACCUMULATION = {
    "averages every micro-batch": """
def accumulated_gradients(model, batches):
    total = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in batches:
        model.zero_grad()
        mse_loss(model(x), y).backward()
        average_gradients(model)
        for t, p in zip(total, model.parameters()):
            t += p.grad / len(batches)
    for t, p in zip(total, model.parameters()):
        p.grad = t
""",
    "one backward over all micro-batches": """
def accumulated_gradients(model, batches):
    torch.stack([mse_loss(model(x), y) for x, y in batches]).mean().backward()
    average_gradients(model)
""",
}
DENOMINATOR = {
    "counts as objects": """
def gradients_of_all_samples(model, x, y):
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(x))
    loss = (model(x) - y).square().sum() / sum(counts)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
""",
    "the mean, weighted by the share of the samples": """
def gradients_of_all_samples(model, x, y):
    n = torch.tensor([len(x)], dtype=torch.float64)
    every = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    dist.all_gather_into_tensor(every, n)
    weight = (len(x) / every.mean()).item()
    (weight * mse_loss(model(x), y)).backward()
    average_gradients(model)
""",
}
START = {
    "a state dict": """
def prepare(model):
    box = [model.state_dict()]
    dist.broadcast_object_list(box, src=0)
    model.load_state_dict(box[0])
""",
    "zeros and a sum": """
@torch.no_grad()
def prepare(model):
    for p in model.parameters():
        if dist.get_rank() != 0:
            p.zero_()
        dist.all_reduce(p)
""",
}
UNUSED = {
    "flags by MAX, one vector": """
def gradients_of_heads(loss, heads):
    loss.backward()
    ps = list(heads.parameters())
    used = torch.tensor([p.grad is not None for p in ps])
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    ps = [p for p, u in zip(ps, used) if u]
    flat = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in ps])
    dist.all_reduce(flat)
    for p, part in zip(ps, flat.split([p.numel() for p in ps])):
        p.grad = part.view_as(p) / dist.get_world_size()
""",
}
TEST = {
    "a deeper model, two steps, other seeds": """
def accepts(wrap):
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(7)
    x = torch.randn(world, 6, 5, generator=g)
    y = torch.randn(world, 6, 2, generator=g)
    torch.manual_seed(100 + rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    reference = [{k: v.clone() for k, v in model.state_dict().items()}]
    dist.broadcast_object_list(reference, src=0)
    alone = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    alone.load_state_dict(reference[0])
    wrapped = wrap(model)
    good = True
    for _ in range(2):
        model.zero_grad()
        alone.zero_grad()
        nn.functional.mse_loss(wrapped(x[rank]), y[rank]).backward()
        wrapped.finish()
        nn.functional.mse_loss(alone(x.flatten(0, 1)), y.flatten(0, 1)).backward()
        for a, b in zip(model.parameters(), alone.parameters()):
            good &= a.grad is not None and torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-6)
    return good
""",
    "verdicts shared by a vote": """
def accepts(wrap):
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(2, 1, bias=False)
    wrapped = wrap(model)
    weights = [None] * dist.get_world_size()
    dist.all_gather_object(weights, model.weight.detach().tolist())
    x = torch.full((1, 2), float(dist.get_rank() + 1))
    wrapped(x).sum().backward()
    wrapped.finish()
    mean = (dist.get_world_size() + 1) / 2
    fine = weights.count(weights[0]) == len(weights)
    fine = fine and torch.allclose(model.weight.grad, torch.full((1, 2), mean), rtol=1e-4)
    vote = torch.tensor(int(fine))
    dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    return bool(vote)
""",
}

PIECES = {
    "one dimension of a table": """
def piece_of(tensor):
    w = dist.get_world_size()
    size = (tensor.numel() + w - 1) // w
    table = tensor.new_zeros(w, size)
    table.view(-1)[: tensor.numel()] = tensor.reshape(-1)
    return table[dist.get_rank()].clone()

def whole_of(piece, shape):
    parts = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, piece)
    return torch.cat(parts)[: shape.numel()].reshape(shape)
""",
    "functional collectives and a sum of embedded pieces": """
import torch.distributed._functional_collectives as fc

def piece_of(tensor):
    w, r = dist.get_world_size(), dist.get_rank()
    size = -(-tensor.numel() // w)
    own = tensor.detach().flatten()[r * size : (r + 1) * size]
    return torch.cat([own, own.new_zeros(size - len(own))])

def whole_of(piece, shape):
    flat = fc.all_gather_tensor(piece, 0, dist.group.WORLD) + 0
    return flat[: torch.Size(shape).numel()].view(*shape)
""",
}
SHARDED = {
    "matrices only, gathered into lists, with norms and biases averaged at the end": """
class FullyShardedDataParallel(nn.Module):
    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module = module
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.handles, self.replicated = [], []
        sharded = set()
        for m in module.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                self.shard(m)
                sharded.add(id(m.weight))
        self.replicated = [p for p in module.parameters() if id(p) not in sharded]

    def shard(self, m):
        w = m.weight
        m._shape = w.shape
        flat = w.data.reshape(-1)
        m._size = -(-flat.numel() // self.world_size)
        flat = torch.cat([flat, flat.new_zeros(m._size * self.world_size - flat.numel())])
        m._shard = flat[self.rank * m._size : (self.rank + 1) * m._size].clone()
        w.data = m._shard
        m.register_forward_pre_hook(self.unshard)
        m.register_forward_hook(self.reshard)
        m.register_full_backward_pre_hook(self.unshard)
        w.register_post_accumulate_grad_hook(lambda p, m=m: self.reduce(m))

    def unshard(self, m, *_):
        parts = [torch.empty_like(m._shard) for _ in range(self.world_size)]
        dist.all_gather(parts, m._shard)
        m.weight.data = torch.cat(parts)[: m._shape.numel()].view(m._shape)

    def reshard(self, m, *_):
        m.weight.data = m._shard

    def reduce(self, m):
        g = m.weight.grad.reshape(-1)
        g = torch.cat([g, g.new_zeros(m._size * self.world_size - g.numel())])
        m.weight.grad = None
        self.reshard(m)
        out = torch.empty_like(m._shard)
        parts = list(g.chunk(self.world_size))
        self.handles.append((m, out, dist.reduce_scatter(out, parts, async_op=True)))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        for m, out, work in self.handles:
            work.wait()
            m.weight.grad = out.div_(self.world_size)
        self.handles.clear()
        for p in self.replicated:
            dist.all_reduce(p.grad)
            p.grad /= self.world_size

def get_fsdp(module, compute_dtype=None):
    return FullyShardedDataParallel(module, compute_dtype=compute_dtype)

def after_backward(model):
    model.finish_gradient_synchronization()
""",
    "torch's fully_shard per layer": """
from torch.distributed.fsdp import fully_shard

def get_fsdp(module):
    for child in module.children():
        fully_shard(child)
    return fully_shard(module)

def after_backward(model):
    pass
""",
    "one flat parameter per layer, exchanged by all-to-all": """
class Flat(nn.Module):
    # The layer's parameters are views of one flat tensor while it computes.
    def __init__(self, layer):
        super().__init__()
        self.names = [n for n, _ in layer.named_parameters(recurse=False)]
        own = [getattr(layer, n) for n in self.names]
        self.shapes = [p.shape for p in own]
        flat = torch.cat([p.detach().flatten() for p in own])
        self.w = dist.get_world_size()
        self.size = -(-flat.numel() // self.w)
        flat = nn.functional.pad(flat, (0, self.size * self.w - flat.numel()))
        self.piece = nn.Parameter(flat.view(self.w, -1)[dist.get_rank()].clone())
        for n in self.names:
            delattr(layer, n)
        object.__setattr__(self, "layer", layer)

    def whole(self):
        flat = Gathered.apply(self.piece, self.w)
        sizes = [s.numel() for s in self.shapes]
        return dict(zip(self.names, (
            v.view(s) for v, s in zip(flat.split([*sizes, flat.numel() - sum(sizes)]), self.shapes)
        )))

class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, w):
        ctx.w = w
        flat = piece.new_empty(w * piece.numel())
        dist.all_gather_into_tensor(flat, piece.detach())
        return flat

    @staticmethod
    def backward(ctx, grad):
        parts = torch.empty_like(grad)
        dist.all_to_all_single(parts, grad.contiguous())
        return parts.view(ctx.w, -1).sum(0) / ctx.w, None

class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        layers = [m for m in module.modules() if list(m.parameters(recurse=False))]
        self.flats = nn.ModuleList(Flat(m) for m in layers)
        for flat in self.flats:
            call = flat.layer.forward

            def forward(x, flat=flat, call=call):
                def compute(x):
                    for name, tensor in flat.whole().items():
                        setattr(flat.layer, name, tensor)
                    try:
                        return call(x)
                    finally:
                        for name in flat.names:
                            delattr(flat.layer, name)
                if not torch.is_grad_enabled():
                    return compute(x)
                return torch.utils.checkpoint.checkpoint(compute, x, use_reentrant=False)

            flat.layer.forward = forward

    def forward(self, x):
        return self.module(x)

def get_fsdp(module):
    import torch.utils.checkpoint
    return Wrapped(module)

def after_backward(model):
    pass
""",
}

RIGHT = {
    1: {"each": EACH, "flat": FLAT},
    2: {"count": COUNT, "loss": LOSS},
    3: {"rate": RATE, "data_parallel": DATA_PARALLEL, "step": STEP},
    4: {"buckets": BUCKETS, "reducer": REDUCER},
    5: {
        "clipping": CLIPPING,
        "accumulation": ACCUMULATION,
        "denominator": DENOMINATOR,
        "start": START,
        "unused": UNUSED,
        "test": TEST,
    },
    6: {"pieces": PIECES, "sharded": SHARDED},
}
