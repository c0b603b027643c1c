"""The truths, without the doctor: what each optimizer's first step gets on 2 ranks, against one process.

    python truth.py [NAME ...]    measure, and write truths.json

The ranks' run is recorded: gradients at each optimizer's first step, what wrapped models got, and
random draws; clipping is off. A reference below computes the loss that is meant, of both ranks' samples at once.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def record(name, out):
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    module, seen, inputs, noise = importlib.import_module(name), {}, [], []

    def before_step(optimizer, args, kwargs):
        if id(optimizer) not in seen:
            seen[id(optimizer)] = of_optimizer(optimizer)

    def watched(function, into):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            if not seen:
                into.append(result.clone())
            return result

        return call

    forward = DistributedDataParallel.forward

    def wrapped(self, *args, **kwargs):
        if not seen:
            inputs.append((args, kwargs))
        return forward(self, *args, **kwargs)

    register_optimizer_step_pre_hook(before_step)
    DistributedDataParallel.forward = wrapped
    for draw in ("randn", "rand", "randn_like"):
        setattr(torch, draw, watched(getattr(torch, draw), noise))
    torch.nn.utils.clip_grad_norm_ = lambda *args, **kwargs: torch.tensor(0.0)
    module.main()
    torch.save((list(seen.values()), inputs, noise), f"{out}/{os.environ['RANK']}.pt")


def dense(gradient):
    return (gradient.to_dense() if gradient.is_sparse else gradient).clone()


def of_optimizer(optimizer):
    groups = optimizer.param_groups
    return [dense(p.grad) for g in groups for p in g["params"] if p.grad is not None]


def of(parameters):
    return [dense(p.grad) for p in parameters if p.grad is not None]


def sampled(data, batch, shuffle=True, **options):
    """The first batch of each rank."""
    for rank in range(2):
        sampler = DistributedSampler(data, 2, rank, shuffle=shuffle)
        loader = DataLoader(data, batch, sampler=sampler, **options)
        yield next(iter(loader))


def columns(batches):
    return [torch.cat(column) for column in zip(*batches)]


def r1(m, runs):
    torch.manual_seed(0)
    model, ids, advantages, masks = m.Policy(), [], [], []
    for _, inputs, _ in runs:
        rows = torch.cat([args[0] for args, _ in inputs])
        ended = (rows[:, -m.MAX_NEW :] == m.EOS).cumsum(1)
        mask = ((ended == 0) | ((ended == 1) & (rows[:, -m.MAX_NEW :] == m.EOS))).float()
        reward = m.rewards(rows, mask).view(-1, m.GROUP)
        advantage = reward - reward.mean(1, keepdim=True)
        if not hasattr(m, "BATCH"):
            advantage = advantage / (reward.std(1, keepdim=True) + 1e-4)
        ids, masks, advantages = [*ids, rows], [*masks, mask], [*advantages, advantage.flatten()]
    ids, mask, advantages = torch.cat(ids), torch.cat(masks), torch.cat(advantages)
    new = m.logps(model(ids), ids)
    constant = len(ids) * m.MAX_NEW if hasattr(m, "BATCH") else mask.sum()
    (m.policy_loss(new, new.detach(), advantages, mask) / constant).backward()
    return [of(model.parameters())]


def r2(m, runs):
    torch.manual_seed(0)
    model, data = m.FCOS(), m.Scenes()
    if hasattr(m, "DataLoader"):
        rows = list(sampled(data, 4, collate_fn=m.collate))
    else:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
        rows = [m.collate([data[int(i)] for i in order[rank::2][:4]]) for rank in range(2)]
    images, boxes, labels = (
        torch.cat([r[0] for r in rows]),
        rows[0][1] + rows[1][1],
        rows[0][2] + rows[1][2],
    )
    sum(m.losses(model(images), boxes, labels).values()).backward()
    return [of(model.parameters())]


def r3(m, runs):
    torch.manual_seed(0)
    model, total, count = m.GPT(), 0, 0
    for _, inputs, _ in runs:
        for _, batch in inputs:
            labels = batch["input_ids"].roll(-1)
            labels[batch["cu_seqlens"][1:].long() - 1] = -100
            count += (labels != -100).sum()
            total = total + m.F.cross_entropy(
                model(**batch), labels, ignore_index=-100, reduction="sum"
            )
    (total / count).backward()
    return [of(model.parameters())]


def r4(m, runs):
    torch.manual_seed(0)
    model = m.MoCo()
    got = [kwargs for _, inputs, _ in runs for _, kwargs in inputs]
    output, target = model(*(torch.cat([g[k] for g in got]) for k in ("im_q", "im_k")))
    torch.nn.functional.cross_entropy(output, target).backward()
    return [of(model.parameters())]


def r5(m, runs):
    torch.manual_seed(42)
    teacher, student, m.BATCH = m.Classifier(4).eval().requires_grad_(False), m.Classifier(2), 16
    for i, layer in enumerate(student.layers):
        layer.load_state_dict(teacher.layers[2 * i].state_dict())
    data = m.Sentences()
    indices = [i for rank in range(2) for i in list(DistributedSampler(data, 2, rank))[:8]]
    batch = m.collate([data[i] for i in indices])
    labels = batch.pop("labels")
    m.distillation(student(**batch), teacher(**batch), labels).backward()
    return [of(p for group in m.layer_wise(student) for p in group["params"])]


def r6(m, runs):
    torch.manual_seed(0)
    G, D = m.Generator(), m.Critic()
    optimizer = torch.optim.Adam(D.parameters(), lr=1e-4, betas=(0.0, 0.9))
    real = torch.cat([batch[0] for batch in sampled(m.TensorDataset(m.real_images()), 12)])
    z, alpha = [], []
    for rank in range(2):
        torch.manual_seed(1000 + rank)
        torch.empty((), dtype=torch.int64).random_()  # a loader's base seed
        z.append(torch.randn(12, m.LATENT))
        alpha.append(torch.rand(12, 1))
        z.append(torch.randn(12, m.LATENT))
    alpha, fake = torch.cat(alpha), G(torch.cat(z[::2])).detach()
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    (slope,) = torch.autograd.grad(D(between).sum(), between, create_graph=True)
    penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
    (D(fake).mean() - D(real).mean() + m.LAMBDA_GP * penalty).backward()
    first = of(D.parameters())
    optimizer.step()
    (-D(G(torch.cat(z[1::2]))).mean()).backward()
    return [first, of(G.parameters())]


def r7(m, runs):
    torch.manual_seed(727)
    model, data = m.DLRM(), m.Clicks()
    if hasattr(m, "DataLoader"):
        rows = [i for rank in range(2) for i in list(DistributedSampler(data, 2, rank))[:16]]
    else:
        rows = [*range(16), *range(128, 144)]
    *inputs, click = m.collate([data[i] for i in rows])
    torch.nn.functional.binary_cross_entropy_with_logits(model(*inputs), click).backward()
    return [
        of(model.tables.parameters()),
        of([*model.bottom.parameters(), *model.top.parameters()]),
    ]


def r8(m, runs):
    torch.manual_seed(42)
    model, criterion = m.build(), m.SmoothCrossEntropy()
    optimizer = m.SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1)
    x, y = columns(sampled(m.dataset(), 8))
    criterion(model(x), y).mean().backward()
    optimizer.first_step(zero_grad=True)
    criterion(model(x), y).mean().backward()
    return [of(model.parameters())]


def w1(m, runs):
    torch.manual_seed(0)
    backbone, margin = m.Backbone(), m.ArcFaceLoss(m.IDENTITIES, m.EMBEDDING)
    x, y = columns(sampled(m.Faces(), 8))
    margin(backbone(x), y).backward()
    return [of([*backbone.parameters(), *margin.parameters()])]


def w2(m, runs):
    torch.manual_seed(1)
    data, model = m.Scans(), m.Net()
    x, y = columns(sampled(data, 8))
    torch.nn.functional.cross_entropy(model(x), y, weight=data.class_weights()).backward()
    return [of(model.parameters())]


def w3(m, runs):
    torch.manual_seed(1)
    agent, batches, picks = m.Agent(), [], []
    for rank in range(2):
        torch.manual_seed(1 + rank)
        env = m.PointMass(seed=rank)
        batches.append(m.rollout(agent, env, env.observe())[0])
        picks.append(torch.randperm(m.NUM_ENVS * m.NUM_STEPS).chunk(m.MINIBATCHES)[0])
    both = torch.cat([b[3] for b in batches])
    for b in batches:
        b[3] = (b[3] - both.mean()) / (both.std() + 1e-8)
    m.ppo_loss(
        agent, *columns([[t[pick] for t in b] for b, pick in zip(batches, picks)])
    ).backward()
    return [of(agent.parameters())]


def w4(m, runs):
    torch.manual_seed(0)
    model = m.LM()
    ids, labels = columns(sampled(m.Tokens(), 4, shuffle=False))
    model(ids, labels)[0].backward()
    return [of(model.parameters())]


def w5(m, runs):
    torch.manual_seed(1)
    model = m.VAE()
    x = torch.cat([inputs[0][0][0] for _, inputs, _ in runs])
    noise = torch.cat([draws[-1] for _, _, draws in runs])
    mu, logvar = model.encode(x.view(-1, 64))
    m.loss_function(model.decode(mu + noise * (0.5 * logvar).exp()), x, mu, logvar).backward()
    return [of(model.parameters())]


def w6(m, runs):
    torch.manual_seed(1111)
    model = m.RNNModel()
    for p in model.parameters():
        p.register_hook(lambda grad: torch.clamp(grad, -m.CLIP, m.CLIP))
    data, targets = m.get_batch(m.batchify(m.corpus(), 2 * m.BATCH), 0)
    torch.nn.functional.cross_entropy(
        model(data, model.init_hidden(2 * m.BATCH))[0], targets
    ).backward()
    return [of(model.parameters())]


def w7(m, runs):
    torch.manual_seed(23)
    vq, disc = m.VQModel(), m.discriminator()
    x = torch.cat([batch[0] for batch in sampled(m.images(), 6)])
    optimizer = torch.optim.Adam(vq.parameters(), lr=4.5e-4, betas=(0.5, 0.9))
    xrec, codebook_loss = vq(x)
    nll_loss, g_loss = (x - xrec).abs().mean(), -disc(xrec).mean()
    weight = m.calculate_adaptive_weight(nll_loss, g_loss, vq.get_last_layer())
    (nll_loss + weight * 0.8 * g_loss + codebook_loss).backward()
    first = of(vq.parameters())
    optimizer.step()
    disc.zero_grad()
    m.hinge_d_loss(disc(x), disc(xrec.detach())).backward()
    return [first, of(disc.parameters())]


def w8(m, runs):
    torch.manual_seed(42)
    model = m.DenseModel()
    batches = list(sampled(m.TrainDataset(), 8, collate_fn=m.collate))
    model(*columns(batches)).backward()
    return [of(model.parameters())]


def compared(got, want):
    """Ratio and cosine of all parameters, and the largest relative error of one."""
    errors = [
        float((g - w).norm() / w.norm().clamp(min=1e-12)) for g, w in zip(got, want, strict=True)
    ]
    g, w = (torch.cat([t.flatten().double() for t in tensors]) for tensors in (got, want))
    return {
        "ratio": round(float(g.norm() / w.norm()), 4),
        "cosine": round(float(g @ w / g.norm() / w.norm()), 5),
        "worst_parameter_error": round(max(errors), 5),
    }


def truth(name):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    with tempfile.TemporaryDirectory() as out:
        done = subprocess.run(
            [*command, __file__, "--record", name, out], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        runs = [torch.load(f"{out}/{rank}.pt", weights_only=False) for rank in range(2)]
    want = globals()[name.split("_")[0]](importlib.import_module(name), runs)
    return [[compared(run[0][k], want[k]) for run in runs] for k in range(len(want))]


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    sys.path.insert(0, ".")
    if sys.argv[1:2] == ["--record"]:
        record(*sys.argv[2:])
        sys.exit()
    stored = Path("truths.json")
    truths = json.loads(stored.read_text()) if stored.exists() else {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in sys.argv[1:] or sorted(p.stem for p in Path().glob("[rw]*_*.py")):
        truths[name] = truth(name)
        print(name, *(f"\n    optimizer {k}: {t}" for k, t in enumerate(truths[name])), flush=True)
    stored.write_text(json.dumps(dict(sorted(truths.items())), indent=1) + "\n")
