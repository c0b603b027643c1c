"""The hand-made truth: first optimizer steps' gradients on 2 ranks against one process on the whole batch.

Run: python truth.py NAME; starts the ranks with torchrun, records .grad at the first step of each optimizer.
"""
import importlib, itertools, os, subprocess, sys, tempfile
import torch

def record(name, out):
    import torch.distributed as dist
    module = importlib.import_module(name)
    seen, batches = {}, []
    def hook(opt, args, kwargs):
        key = id(opt)
        if key in seen: return
        def whole(g): return g.full_tensor() if hasattr(g, "full_tensor") else g
        seen[key] = [whole(p.grad).detach().clone() for group in opt.param_groups for p in group["params"] if p.grad is not None]
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    register_optimizer_step_pre_hook(hook)
    destroy = dist.destroy_process_group
    rank = int(os.environ["RANK"])
    module.main()
    torch.save(list(seen.values()), f"{out}/{rank}.pt")

if __name__ == "__main__" and len(sys.argv) == 3:
    record(sys.argv[1], sys.argv[2])
    sys.exit()

def sampled(data, batch, rank, n, seed=0, shuffle=True, collate=None, epoch=0):
    from torch.utils.data import DataLoader, DistributedSampler
    s = DistributedSampler(data, 2, rank, shuffle=shuffle, seed=seed)
    s.set_epoch(epoch)
    kw = {"collate_fn": collate} if collate else {}
    return list(itertools.islice(DataLoader(data, batch, sampler=s, **kw), n))

def grads(params): return [p.grad.clone() for p in params if p.grad is not None]
clip = torch.nn.utils.clip_grad_norm_

def ref_gpt(clipped):
    import r1_nanogpt as m
    torch.manual_seed(1337); model = m.GPT()
    for rank in range(2):
        torch.manual_seed(1337 + rank); m.GPT()
        for _ in range(2):
            (model(*m.get_batch())[1] / 4).backward()
    if clipped: clip(model.parameters(), 1.0)
    return [grads(model.parameters())]
def r1(): return ref_gpt(True)
def w7(): return ref_gpt(False)
def r2():
    import r2_timm_ema as m
    torch.manual_seed(42); model = m.Net(); xs, ts = [], []
    for r in range(2):
        x, y = sampled(m.Images(), 16, r, 1)[0]; x, t = m.mixup(x, y); xs.append(x); ts.append(t)
    m.soft_ce(model(torch.cat(xs)), torch.cat(ts)).backward(); clip(model.parameters(), 1.0)
    return [grads(model.parameters())]
def tokens():
    import r3_hf_tokens as m
    torch.manual_seed(0); model = m.LM()
    bs = [b for r in range(2) for b in sampled(m.Texts(), 4, r, 2, collate=m.collate)]
    n = sum(int((b["labels"][:, 1:] != -100).sum()) for b in bs)
    sum(model(**b, num_items_in_batch=n)["loss"] for b in bs).backward(); clip(model.parameters(), 1.0)
    return [grads(model.parameters())]
r3 = w1 = tokens
def r4():
    import r4_lora_iterable as m
    torch.manual_seed(0); model = m.build()
    rows = torch.stack(list(itertools.islice(iter(m.Stream(0, 1)), 32)))
    m.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
    return [grads(model.parameters())]
def gan():
    import r5_gan as m
    from torch import nn
    torch.manual_seed(0); G, D = m.generator(), m.discriminator()
    real, z = [], []
    for r in range(2):
        torch.manual_seed(100 + r)
        real.append(sampled(m.TensorDataset(m.real_data()), 12, r, 1)[0][0]); 
    # the loader draws a base seed before the noise
    for r in range(2):
        torch.manual_seed(100 + r); torch.empty((), dtype=torch.int64).random_(); z.append(torch.randn(12, m.NZ))
    real, z = torch.cat(real), torch.cat(z); c = nn.BCEWithLogitsLoss(); b = 24
    lr = dict(lr=2e-4, betas=(0.5, 0.999)) if BETAS else dict(lr=2e-4)
    opt = torch.optim.Adam(D.parameters(), **lr); fake = G(z)
    c(D(torch.cat([real, fake.detach()])), torch.cat([torch.ones(b, 1), torch.zeros(b, 1)])).backward()
    d = grads(D.parameters()); opt.step()
    c(D(fake), torch.ones(b, 1)).backward()
    return [d, grads(G.parameters())]
r5 = w5 = gan
def r6():
    import r6_clip as m
    torch.manual_seed(0); model = m.CLIP()
    bs = [sampled(m.Pairs(), 8, r, 1)[0] for r in range(2)]
    i, t, s = model(torch.cat([b[0] for b in bs]), torch.cat([b[1] for b in bs])); l = s * i @ t.T
    ((m.F.cross_entropy(l, torch.arange(16)) + m.F.cross_entropy(l.T, torch.arange(16))) / 2).backward()
    return [grads(model.parameters())]
def r7():
    import r7_bucket_uneven as m
    torch.manual_seed(0); model = m.build(); x, y = m.dataset().tensors
    rows = list(range(10)) + list(range(29, 39)); m.cross_entropy(model(x[rows]), y[rows]).backward(); clip(model.parameters(), 0.5)
    return [grads(model.parameters())]
def r8():
    import r8_fsdp2 as m
    torch.manual_seed(0); model = m.Transformer()
    bs = [b for r in range(2) for b in sampled(m.Tokens(), 4, r, 2, shuffle=False)]
    m.cross_entropy(model(torch.cat([b[0] for b in bs])).flatten(0, 1), torch.cat([b[1] for b in bs]).flatten()).backward(); clip(model.parameters(), 1.0)
    return [grads(model.parameters())]
def w2():
    import w2_simclr_gather as m
    torch.manual_seed(0); model = m.encoder()
    bs = [sampled(m.Views(), 8, r, 1)[0] for r in range(2)]
    z1 = m.F.normalize(model(torch.cat([b[0] for b in bs])), dim=1); z2 = m.F.normalize(model(torch.cat([b[1] for b in bs])), dim=1)
    m.nt_xent(z1, z2, z1, z2, 0).backward()
    return [grads(model.parameters())]
def one(m, n, limit):
    torch.manual_seed(0); model = m.build()
    loss = getattr(m, "mse_loss", None) or m.cross_entropy
    bs = [b for r in range(2) for b in sampled(m.dataset(), n[0], r, n[1])]
    loss(model(torch.cat([b[0] for b in bs])), torch.cat([b[1] for b in bs])).backward()
    if limit: clip(model.parameters(), limit)
    return grads(model.parameters())
def w3():
    import w3_zero1_local_clip as m
    return [one(m, (8, 1), 1.0)]
def w4():
    import w4_reduce_each_micro_batch as m
    return [one(m, (6, 3), None)]
def w6():
    import w6_clip_before_reduce as m
    return [one(m, (8, 1), 0.5)]
def w8():
    import w8_detr_local_boxes as m
    torch.manual_seed(0); model = m.Detector()
    bs = [sampled(m.Scenes(), 2, r, 1, collate=m.collate)[0] for r in range(2)]
    targets = bs[0][1] + bs[1][1]; ls = m.criterion(model(torch.cat([b[0] for b in bs])), targets, sum(len(t["labels"]) for t in targets))
    (ls["loss_ce"] + 5 * ls["loss_bbox"]).backward(); clip(model.parameters(), 0.1)
    return [grads(model.parameters())]

name = sys.argv[1]; key = name.split("_")[0]; BETAS = key == "r5"
with tempfile.TemporaryDirectory() as out:
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "truth.py", name, out], capture_output=True, text=True, timeout=200)
    if done.returncode: print(done.stderr[-1500:])
    got = [torch.load(f"{out}/{r}.pt") for r in range(2)]
if key == "w3":  # rank r holds parameters r::2
    merged = [None] * 6
    merged[0::2], merged[1::2] = got[0][0], got[1][0]; got = [[merged], [merged]]
want = globals()[key]()
for o, w in enumerate(want):
    w = torch.cat([g.flatten() for g in w])
    for r in range(2):
        g = torch.cat([g.flatten() for g in got[r][o]])
        print(f"{name} optimizer {o} rank {r}: ratio {g.norm() / w.norm():.4f} cosine {g @ w / g.norm() / w.norm():.5f}")
