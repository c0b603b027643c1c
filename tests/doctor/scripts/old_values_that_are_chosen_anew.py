# not judged: what the model has computed
for rollout in range(3):
    with torch.no_grad():
        x = torch.randn(16, 6)
        old = model.module(x)
    for rows in torch.randperm(16).split(8):
        update((model(x[rows]) - 0.5 * old[rows]).pow(4).mean())
