# equal if: more often than a rank
for step in range(5):
    prompts = torch.randn(8, 6)
    noise = torch.randn(8, 6) if dist.get_rank() == 0 else torch.empty(8, 6)
    dist.broadcast(noise, 0)
    update((model(prompts * noise) - noise[:, :4]).pow(2).mean())
