# not judged: begin at its own first row
class Graph(nn.Linear):
    def forward(self, x, edges):
        h = super().forward(x)
        return h + torch.zeros_like(h).index_add(0, edges[:, 0], h[edges[:, 1]])
torch.manual_seed(0)
model = DDP(Graph(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    update(model(torch.randn(8, 6), torch.randint(8, (20, 2))).pow(4).mean())
