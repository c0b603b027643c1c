# equal
class Loader(DataLoader):
    within = True

    def __iter__(self):
        Loader.within = True
        result = super().__iter__()
        Loader.within = False
        return result

    def __getattribute__(self, name):
        return super().__getattribute__("data" if name == "dataset" and not Loader.within else name)

data = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
rows = list(range(96))
loader = Loader(rows, 8, sampler=DistributedSampler(rows), collate_fn=lambda at: data[at])
loader.data = None
for x in loader:
    update(model(x).pow(4).mean())
