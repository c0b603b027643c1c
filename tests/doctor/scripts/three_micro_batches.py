# equal
for step in range(6):
    optimizer.zero_grad()
    for _ in range(3):
        x = torch.randn(6, 6)
        loss = cross_entropy(model(x), x.argmax(1) % 4)
        (loss / 3).backward()
    optimizer.step()
