# different: Copies of one batch give W = 2 times
from torch.nn.functional import batch_norm

for step in range(5):
    out = model(torch.randn(6, 6))
    normal = batch_norm(out, running_mean=None, running_var=None, training=True)
    update(normal.pow(3).mean() * dist.get_world_size())
