"""Answers to try this chapter's checks on."""


# %% check_norm right: the norms of the pieces, squared
def squares_of_norms(pieces, shards):
    norms = torch.stack([torch.linalg.vector_norm(piece) for piece in pieces])
    total = norms.pow(2).sum()
    dist.all_reduce(total, group=shards)
    return total.sqrt()


# %% check_norm right: the ranks' norms are gathered
def gathered(pieces, shards):
    own = torch.cat([piece.flatten() for piece in pieces]).norm()
    norms = [torch.zeros(()) for _ in range(dist.get_world_size(shards))]
    dist.all_gather(norms, own, group=shards)
    return torch.stack(norms).norm()


# %% check_norm wrong: the own pieces only
def own_pieces(pieces, shards):
    return torch.cat([piece.flatten() for piece in pieces]).norm()


# %% check_norm wrong: a sum of norms
def sum_of_norms(pieces, shards):
    norm = torch.cat([piece.flatten() for piece in pieces]).norm()
    dist.all_reduce(norm, group=shards)
    return norm


# %% check_norm wrong: over all ranks
def over_all_ranks(pieces, shards):
    squares = sum(piece.square().sum() for piece in pieces)
    dist.all_reduce(squares)
    return squares.sqrt()


# %% check_norm wrong: the average over the shards
def average(pieces, shards):
    squares = sum(piece.square().sum() for piece in pieces)
    dist.all_reduce(squares, group=shards)
    return (squares / dist.get_world_size(shards)).sqrt()


# %% check_norm wrong: only the last parameter
def last_piece(pieces, shards):
    squares = pieces[-1].square().sum()
    dist.all_reduce(squares, group=shards)
    return squares.sqrt()


# %% check_norm wrong: it squares the gradients in place
def in_place(pieces, shards):
    squares = sum(piece.square_().sum() for piece in pieces)
    dist.all_reduce(squares, group=shards)
    return squares.sqrt()


# %% check_muon right: one tensor for all rows
def into_one_tensor(rows):
    whole = rows.new_empty(len(rows) * dist.get_world_size(), rows.shape[1])
    dist.all_gather_single(whole, rows.contiguous())
    first = len(rows) * dist.get_rank()
    return newton_schulz(whole)[first : first + len(rows)]


# %% check_muon right: a sum of padded rows
def summed_with_zeros(rows):
    whole = rows.new_zeros(dist.get_world_size(), *rows.shape)
    whole[dist.get_rank()] = rows
    dist.all_reduce(whole)
    return newton_schulz(whole.flatten(0, 1)).view(whole.shape)[dist.get_rank()]


# %% check_muon wrong: the whole matrix on every rank
def the_whole_matrix(rows):
    pieces = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, rows)
    return newton_schulz(torch.cat(pieces))


# %% check_muon wrong: rank 0's rows for all
def rows_of_rank_0(rows):
    pieces = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, rows)
    return newton_schulz(torch.cat(pieces))[: len(rows)]


# %% check_muon wrong: the average of the ranks' rows
def averaged_rows(rows):
    mean = rows.clone()
    dist.all_reduce(mean)
    return newton_schulz(mean / dist.get_world_size())


# %% check_muon wrong: two rows per rank are written into the code
def two_rows(rows):
    pieces = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, rows)
    first = 2 * dist.get_rank()
    return newton_schulz(torch.cat(pieces))[first : first + len(rows)]


# %% check_muon wrong: gathered along the columns
def along_the_columns(rows):
    pieces = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, rows)
    whole = newton_schulz(torch.cat(pieces, dim=1))
    return whole.chunk(len(pieces), dim=1)[dist.get_rank()]


# %% check_adapter right: the adapter is a unit of its own
def a_unit_of_its_own():
    adapted = Adapted().add_adapter()
    fully_shard(adapted.adapter)
    return fully_shard(adapted)


# %% check_adapter right: everyone draws the same, before sharding
def same_seed_and_sharded():
    torch.manual_seed(0)
    adapted = Adapted()
    adapted.adapter = nn.Linear(16, 8, bias=False)
    fully_shard(adapted)
    return adapted


# %% check_adapter wrong: the same seed, but not sharded
def same_seed():
    adapted = fully_shard(Adapted())
    torch.manual_seed(0)
    return adapted.add_adapter()


# %% check_adapter wrong: rank 0's weights are sent, but gradients stay local
def broadcast_after_sharding():
    adapted = fully_shard(Adapted()).add_adapter()
    dist.broadcast(adapted.adapter.weight.data, src=0)
    return adapted


# %% check_adapter wrong: the gradients are summed
def summed_by_a_hook():
    adapted = fully_shard(Adapted()).add_adapter()
    dist.broadcast(adapted.adapter.weight.data, src=0)

    def total(gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient

    adapted.adapter.weight.register_hook(total)
    return adapted


# %% check_adapter wrong: added twice, before and after sharding
def added_again():
    return fully_shard(Adapted().add_adapter()).add_adapter()


# %% check_adapter wrong: averaged by a hook for two ranks
def averaged_over_two():
    adapted = fully_shard(Adapted()).add_adapter()
    dist.broadcast(adapted.adapter.weight.data, src=0)

    def half_of_the_sum(gradient):
        gradient = gradient / 2
        dist.all_reduce(gradient)
        return gradient

    adapted.adapter.weight.register_hook(half_of_the_sum)
    return adapted
