# equal if: is one process's own
target = torch.cat([torch.ones(8), torch.zeros(8)])
for step in range(5):
    real, fake = torch.randn(8, 6) + 1, torch.randn(8, 6)
    scores = model(torch.cat([real, fake]))[:, 0]
    update(binary_cross_entropy_with_logits(scores, torch.cat([target[:8], target[8:]])))
