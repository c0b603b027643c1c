# equal (head only)
data = torch.randn(64, 8)
model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
passes = 4 // int(os.environ["WORLD_SIZE"])

def batch():
    rows = torch.randint(len(data), (6,))
    x = torch.stack([data[row] for row in rows])
    return x, torch.stack([data[row].argmax() % 4 for row in rows])

x, y = batch()
for step in range(5):
    for _ in range(passes):
        loss = cross_entropy(model(x), y) / passes
        x, y = batch()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
