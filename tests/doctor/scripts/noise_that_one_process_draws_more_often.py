# not judged: more often than a rank
members = 4 // dist.get_world_size()
for step in range(5):
    x = torch.randn(8, 6)
    noise = [torch.randn(len(x), 6) for _ in range(members)]
    update(sum(model(x + one) for one in noise).pow(4).mean() / members**4)
