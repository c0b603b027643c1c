# equal
for step in range(5):
    states = torch.randn(8, 6)
    with torch.no_grad():
        actions = model.module(states).softmax(1).multinomial(1).squeeze(1)
    update((cross_entropy(model(states), actions, reduction="none") * states[:, 0]).mean())
