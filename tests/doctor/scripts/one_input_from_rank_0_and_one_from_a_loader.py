# equal if: more often than a rank
class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, latents, prompts):
        return self.a(latents) * self.b(prompts)

torch.manual_seed(0)
model = DDP(Denoiser())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(0)))
for (prompts,) in DataLoader(data, 6, sampler=DistributedSampler(data)):
    latents = torch.zeros(6, 6)
    if dist.get_rank() == 0:
        latents.normal_()
    dist.broadcast(latents, src=0)
    update((model(latents, prompts) - latents[:, :4]).pow(2).mean())
