# not judged: other weights
for step in range(5):
    x = torch.randn(6, 6)
    with model.no_sync():
        cross_entropy(model(x), x.argmax(1) % 4).backward()
    with torch.no_grad():
        moves = [p.grad * 0.5 for p in model.parameters()]
        for p, move in zip(model.parameters(), moves):
            p.add_(move)
    optimizer.zero_grad()
    cross_entropy(model(x), x.argmax(1) % 4).backward()
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves):
            p.sub_(move)
    optimizer.step()
