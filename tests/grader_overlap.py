"""A check of an overlapped reducer, and reducers that are right, wrong, or dishonest."""

from grader.source import CheckSource

CHECK = CheckSource(
    "overlap",
    points=4,
    concept="A bucket is launched as soon as its gradients are ready, while backward goes on.",
    solutions=("reducer",),
    visible=True,
    hold=True,
    source="""
import torch
from torch import nn

LAYERS, WIDTH = 5, 8
ELEMENTS = LAYERS * (WIDTH * WIDTH + WIDTH)


class Deep(nn.Module):
    def __init__(self, given, gate):
        super().__init__()
        torch.manual_seed(given["model"])
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.gate = gate

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = self.gate(torch.tanh(layer(x)), f"after {number}")
        return x


def draw(rng):
    model = int(rng.integers(2**31))
    return [
        {
            "model": model,
            "x": rng.normal(size=(4, WIDTH)).astype("float32"),
            "gates": {f"after {n}": float(rng.uniform(0.5, 2)) for n in range(LAYERS)},
        }
        for _ in range(3)
    ]


def loss_of(model, given):
    return model(torch.from_numpy(given["x"])).square().mean()


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def on_rank(student, given):
    model = Deep(given, gate)
    reducer = student.Reducer(model)
    loss = loss_of(model, given)
    reducer.backward(loss) if hasattr(reducer, "backward") else loss.backward()
    reducer.finish()
    return gradients(model)


def expected(givens):
    own = []
    for given in givens:
        model = Deep(given, opened(given["gates"]))
        loss_of(model, given).backward()
        own.append(gradients(model))
    return {name: sum(one[name] for one in own) / len(own) for name in own[0]}


def judge(seen, results, givens):
    for rank, launches in enumerate(seen.launches):
        early = sum(one.numel for one in launches if 0 < one.gates < LAYERS)
        if sum(one.numel for one in launches) > 1.2 * ELEMENTS:
            raise Missed(f"Rank {rank} sent more than its gradients.")
        if len(set(seen.gates[rank])) < len(seen.gates[rank]):
            raise Missed(f"Rank {rank} ran backward more than once.")
        if early < ELEMENTS / 2:
            raise Missed(f"Rank {rank} launched most of its gradients after backward.")
        if any(0 < open < LAYERS for open in seen.waits[rank]):
            raise Missed(f"Rank {rank} waited in the middle of backward.")
""",
)

_HEAD = "import torch\nimport torch.distributed as dist\n"

OVERLAPPED = (
    _HEAD
    + """
class Reducer:
    def __init__(self, model):
        self.model, self.works = model, []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        p.grad /= dist.get_world_size()
        self.works.append(dist.all_reduce(p.grad, async_op=True))

    def finish(self):
        for work in self.works:
            work.wait()
"""
)

FUTURES = OVERLAPPED.replace(
    "dist.all_reduce(p.grad, async_op=True)",
    "dist.all_reduce(p.grad, async_op=True).get_future().then(lambda f: f.value())",
)

AFTER_BACKWARD = (
    _HEAD
    + """
class Reducer:
    def __init__(self, model):
        self.model = model

    def finish(self):
        parameters = list(self.model.parameters())
        flat = torch.cat([p.grad.reshape(-1) for p in parameters]) / dist.get_world_size()
        dist.all_reduce(flat)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad.copy_(part.view_as(p))
"""
)

# Claims of a recorder, wherever this process keeps anything that could be one.
FORGED_RECORDER = AFTER_BACKWARD + (
    """
import gc

class Recorder:
    launches = [[type("Launch", (), {"numel": 360, "gates": 1, "op": "all_reduce"})()]] * 3
    gates, waits, trouble = [[]] * 3, [[]] * 3, ""

seen = Recorder()
for thing in gc.get_objects():
    if isinstance(thing, dict) and ("launches" in thing or "seen" in thing):
        try:
            thing["launches"], thing["seen"] = seen.launches, seen
        except (TypeError, KeyError):
            pass
dist.recorder = dist.seen = seen
"""
)

BACKWARD_TWICE = AFTER_BACKWARD.replace(
    "    def finish(self):",
    """    def backward(self, loss):
        loss.backward(retain_graph=True)
        for p in self.model.parameters():
            p.grad = None
        self.works = []
        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(self.ready)
        loss.backward()

    def ready(self, p):
        p.grad /= dist.get_world_size()
        self.works.append(dist.all_reduce(p.grad, async_op=True))

    def finish(self):
        for work in self.works:
            work.wait()

    def unused(self):""",
)

DECOY = AFTER_BACKWARD.replace(
    "        self.model = model\n",
    """        self.model = model
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.pretend)

    def pretend(self, p):
        dist.all_reduce(torch.zeros_like(p), async_op=True)
""",
)

WAITS_IN_HOOK = OVERLAPPED.replace("work.wait()", "pass").replace(", async_op=True", "")

WAITS_FOR_FUTURE_IN_HOOK = FUTURES.replace(
    "lambda f: f.value()))", "lambda f: f.value()))\n        self.works[-1].wait()"
)

OPENS_GATES_ITSELF = AFTER_BACKWARD + (
    """
import gc

def open_all():
    from grader.inside.link import Link
    [link] = [thing for thing in gc.get_objects() if isinstance(thing, Link)]
    for number in range(5):
        link.ask({"kind": "gate", "name": f"after {number}"}, []).wait()

plain_init = Reducer.__init__

def init(self, model):
    plain_init(self, model)
    open_all()

Reducer.__init__ = init
"""
)

OTHER_ORDER_ON_ONE_RANK = (
    _HEAD
    + """
class Reducer:
    def __init__(self, model):
        self.works = []
        parameters = list(model.parameters())
        if dist.get_rank() == 1:
            parameters[-1], parameters[-2] = parameters[-2], parameters[-1]
        self.order = {id(p): number for number, p in enumerate(reversed(parameters))}
        self.waiting, self.turn = {}, 0
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        p.grad /= dist.get_world_size()
        self.waiting[self.order[id(p)]] = p.grad
        while self.turn in self.waiting:
            self.works.append(dist.all_reduce(self.waiting.pop(self.turn), async_op=True))
            self.turn += 1

    def finish(self):
        for work in self.works:
            work.wait()
"""
)
