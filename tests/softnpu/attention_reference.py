"""Attention of one sequence, from its definition, in float64."""

import math
import random

import torch


def attention(q, k, v, scale, hidden=None, sink=None):
    """q [S, N, D], k [L, M, D], v [L, M, E], hidden [S, L] (True: not seen) or None, sink [N] or None.

    Returns out [S, N, E] and lse [S, N]. A query that sees no key gets out = 0 and lse = inf.
    """
    (queries, heads, _), keys = q.shape, k.shape[0]
    out, lse = torch.zeros(queries, heads, v.shape[-1]), torch.full((queries, heads), math.inf)
    for s in range(queries):
        seen = [j for j in range(keys) if hidden is None or not hidden[s, j]]
        for n in range(heads if seen else 0):
            m = n // (heads // k.shape[1])
            weights = (k[seen, m].double() @ q[s, n].double() * scale).exp()
            total = weights.sum() + (sink[n].double().exp() if sink is not None else 0)
            out[s, n] = weights @ v[seen, m].double() / total
            lse[s, n] = total.log()
    return out.to(v.dtype), lse


def causal(queries, keys):
    """The last query sees all keys, each one before it one less."""
    return torch.tensor([[j > i + keys - queries for j in range(keys)] for i in range(queries)]).view(queries, keys)


def band(queries, keys, before, after):
    """As `causal` places queries among keys: `before` keys back and `after` ahead."""
    rows = [[not -before <= j - (i + keys - queries) <= after for j in range(keys)] for i in range(queries)]
    return torch.tensor(rows).view(queries, keys)


def paginate(sequences, block_size, spare=3):
    """Sequences [L, M, D] into blocks in random order: cache [blocks, block_size, M, D], NaN where nothing is, and the
    block table, int32, of unused blocks where a sequence is short."""
    counts = [-(-len(s) // block_size) for s in sequences]
    order = list(range(sum(counts) + spare))
    random.shuffle(order)
    cache = torch.full((len(order), block_size, *sequences[0].shape[1:]), math.nan, dtype=sequences[0].dtype)
    table = torch.full((len(sequences), max(counts) + 1), order[-1], dtype=torch.int32)
    used = iter(order)
    for b, sequence in enumerate(sequences):
        for i, piece in enumerate(sequence.split(block_size) if len(sequence) else ()):
            table[b, i] = block = next(used)
            cache[block, : len(piece)] = piece
    return cache, table
