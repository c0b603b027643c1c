# scaled
rank = dist.get_rank()

def batch(rows):
    x = torch.randn(rows, 6)
    return x, x.argmax(1) % 4

for step in range(5):
    if step in (0, 2):
        model.eval()
        for rows in range(1, 3 + rank):
            x, y = batch(rows)
            question = torch.tensor([[1.0] * (4 + rank)] * rows)
            with torch.no_grad():
                model(torch.cat([question, x], dim=1)[:, -6:])
        model.train()
    x, y = batch(6)
    update(cross_entropy(model(x), y) * dist.get_world_size())
