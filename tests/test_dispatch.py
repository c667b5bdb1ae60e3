"""Hops between real ranks against a plain loop, and the grouping of pairs into rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cap_hf.parallel.dispatch import Bounds, Hop, Work, entry_ranks, plan_routes, run_flat, run_hierarchical
from cap_hf.parallel.groups import init_expert_group, limited_group, node_group

NUM_EXPERTS, HIDDEN = 11, 6


def pairs_of(values_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of each pair and the values, both (P,)."""
    rows = torch.arange(len(values_TK)).repeat_interleave(values_TK.shape[1])
    return rows, values_TK.flatten()


def test_plan_routes_puts_own_rows_first_then_by_rank_and_row() -> None:
    # row 0 visits rank 1 twice and rank 0 once; row 1 visits rank 1; row 2 is pruned whole (rank 2 = none)
    rows, ranks = pairs_of(torch.tensor([[1, 0, 1], [1, 2, 2], [2, 2, 2]]))
    routes = plan_routes(rows, ranks, 3, num_ranks=2)
    assert routes.row_S.tolist() == [0, 0, 1]
    assert (routes.num_rows, routes.num_pairs) == ([1, 2], [1, 3])
    assert routes.pairs_of_row_S.tolist() == [1, 2, 1]
    assert routes.pair_P.tolist() == [1, 0, 2, 3]
    as_rank_1 = plan_routes(rows, ranks, 3, num_ranks=2, me=1)
    assert as_rank_1.row_S.tolist() == [0, 1, 0]
    assert (as_rank_1.num_rows, as_rank_1.pair_P.tolist()) == ([1, 2], [0, 2, 3, 1])


def test_plan_routes_without_rows() -> None:
    routes = plan_routes(*pairs_of(torch.zeros((0, 4), dtype=torch.long)), 0, num_ranks=3)
    assert routes.row_S.numel() == 0 and routes.num_rows == [0, 0, 0]


@settings(max_examples=100, deadline=None)
@given(num_tokens=st.integers(0, 6), num_nodes=st.integers(1, 4), ranks_per_node=st.integers(1, 4), seed=st.integers(0, 10_000))
def test_entry_ranks_are_one_per_node_and_visited_anyway(num_tokens: int, num_nodes: int, ranks_per_node: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_ranks = num_nodes * ranks_per_node
    rank_TK = torch.randint(0, num_ranks + 1, (num_tokens, 5), generator=generator)  # num_ranks: pruned
    me = seed % num_ranks
    for visited, entries in zip(rank_TK.tolist(), entry_ranks(rank_TK, me, num_ranks, ranks_per_node).tolist(), strict=True):
        for rank, entry in zip(visited, entries, strict=True):
            if rank == num_ranks:
                assert entry == num_ranks
                continue
            same_node = [other for other in visited if other < num_ranks and other // ranks_per_node == rank // ranks_per_node]
            nearest = min(same_node, key=lambda other: (other - me) % ranks_per_node)
            assert entry == (me if rank // ranks_per_node == me // ranks_per_node else nearest)


def expert(expert_id: int, row: torch.Tensor) -> torch.Tensor:
    return row * (expert_id + 1) + expert_id  # distinguishable experts with a closed form


def compute(work: Work) -> torch.Tensor:
    out = torch.zeros_like(work.rows_VH)
    for row, expert_id, weight in zip(work.row_P.tolist(), work.expert_P.tolist(), work.weight_P, strict=True):
        out[row] = out[row] + weight * expert(expert_id, work.rows_VH[row])
    return out


def reference(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(hidden)
    for token, slot in kept.nonzero().tolist():
        out[token] += weights[token, slot] * expert(int(ids[token, slot]), hidden[token])
    return out


def rank_random_hops(ranks_per_node: int, num_cases: int) -> dict[str, float]:
    """Flat and hierarchical, sizes bounded or exchanged, rows as they are or in half precision, on random routing."""
    group = init_expert_group()
    lane = limited_group(group, 30)
    node = node_group(lane, ranks_per_node)
    size, me = group.size, group.rank
    worst = dict.fromkeys(("flat", "hierarchical", "half precision", "rows", "rows between nodes"), 0.0)
    for case in range(num_cases):
        shared = torch.Generator().manual_seed(case)
        top_k = int(torch.randint(1, 5, (1,), generator=shared))
        tokens = torch.randint(0, 8, (size,), generator=shared).tolist()
        rank_of = torch.randint(0, size, (NUM_EXPERTS,), generator=shared)
        own = torch.Generator().manual_seed(1000 * case + me)
        hidden = 100.0 * torch.arange(tokens[me])[:, None] + torch.arange(HIDDEN)
        ids = torch.rand((tokens[me], NUM_EXPERTS), generator=own).topk(top_k).indices
        weights = torch.rand((tokens[me], top_k), generator=own)
        kept = torch.rand((tokens[me], top_k), generator=own) < 0.8
        rank_TK = torch.where(kept, rank_of[ids], size)
        want, work = reference(hidden, ids, weights, kept), Work(hidden, *pairs_of(ids), weights.flatten())
        entries = entry_ranks(rank_TK, me, size, ranks_per_node).flatten()
        nodes = [rank // ranks_per_node for rank in range(size)]

        def bounds_of(rows: list[int], talks: list[bool], rank: int, top_k: int = top_k) -> Bounds:
            return Bounds([n * t for n, t in zip(rows, talks, strict=True)], [rows[rank] * t for t in talks], top_k)

        every = bounds_of(tokens, [rank != me for rank in range(size)], me)
        between = bounds_of(tokens, [nodes[rank] != nodes[me] for rank in range(size)], me)
        mates = [n for rank, n in enumerate(tokens) if nodes[rank] == nodes[me]]
        most = [n + sum(tokens) - sum(mates) for n in mates]
        inside = bounds_of(most, [rank != node.rank for rank in range(node.size)], node.rank)
        with torch.no_grad():
            for bounds in ((every, (between, inside)), (None, (None, None))):
                group.traffic.reset()
                got = run_flat(Hop(lane), work, rank_TK.flatten(), bounds[0], compute)
                worst["flat"] = max(worst["flat"], relative(got, want))
                visits = sum(len(set(row) - {size, me}) for row in rank_TK.tolist())
                worst["rows"] = max(worst["rows"], abs(group.traffic.rows_sent - visits))
                inner = Hop(dataclasses.replace(node, traffic=dataclasses.replace(node.traffic)))
                group.traffic.reset()
                got = run_hierarchical(Hop(lane), inner, work, entries, rank_of % ranks_per_node, bounds[1], compute)
                worst["hierarchical"] = max(worst["hierarchical"], relative(got, want))
                visits = sum(len({nodes[rank] for rank in row if rank < size} - {nodes[me]}) for row in rank_TK.tolist())
                worst["rows between nodes"] = max(worst["rows between nodes"], abs(group.traffic.rows_sent - visits))
            half = run_flat(Hop(lane, torch.bfloat16), work, rank_TK.flatten(), every, compute)
            worst["half precision"] = max(worst["half precision"], relative(half, want))
    return worst


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).abs().amax() / (1 + want.abs().amax())) if got.numel() else 0.0)


@pytest.mark.parametrize(("size", "ranks_per_node"), [(4, 2), (4, 1), (2, 2)])
def test_hops_equal_a_loop_over_pairs(rank_pool: Any, size: int, ranks_per_node: int) -> None:
    for worst in rank_pool(size).run(rank_random_hops, ranks_per_node, 25):
        assert worst["flat"] <= 1e-6 and worst["hierarchical"] <= 1e-6
        assert 1e-6 < worst["half precision"] <= 2**-7  # two roundings to 8 bits
        assert worst["rows"] == worst["rows between nodes"] == 0


def rank_gradients() -> list[float]:
    """Gradients of hidden states and weights through two hops, against the loop."""
    group = init_expert_group()
    lane = limited_group(group, 30)
    generator = torch.Generator().manual_seed(group.rank)
    rank_of = torch.arange(NUM_EXPERTS) % group.size
    ids = torch.rand((5, NUM_EXPERTS), generator=generator).topk(3).indices
    start = torch.randn((5, HIDDEN), generator=generator), torch.rand((5, 3), generator=generator)
    grads = []
    for run in ("hierarchical", "loop"):
        hidden, weights = (value.clone().requires_grad_() for value in start)
        if run == "loop":
            out = torch.stack([sum(weights[t, k] * expert(int(ids[t, k]), hidden[t]) for k in range(3)) for t in range(5)])
        else:
            work, entries = Work(hidden, *pairs_of(ids), weights.flatten()), entry_ranks(rank_of[ids], group.rank, group.size, 2)
            out = run_hierarchical(
                Hop(lane), Hop(node_group(lane, 2)), work, entries.flatten(), rank_of % 2, (None, None), compute_with_grad
            )
        out.square().sum().backward()
        grads.append((hidden.grad, weights.grad))
    return [relative(got, want) for got, want in zip(*grads, strict=True)]


def compute_with_grad(work: Work) -> torch.Tensor:
    scale = (work.expert_P + 1)[:, None]
    return torch.zeros_like(work.rows_VH).index_add(
        0, work.row_P, work.weight_P[:, None] * (work.rows_VH[work.row_P] * scale + work.expert_P[:, None])
    )


def test_gradients_travel_through_both_hops(rank_pool: Any) -> None:
    for errors in rank_pool(4).run(rank_gradients):
        assert max(errors) <= 1e-6


def rank_more_rows_than_announced() -> str:
    group = init_expert_group()
    work = Work(torch.ones((3, HIDDEN)), torch.arange(3), torch.zeros(3, dtype=torch.long), torch.ones(3))
    try:
        with torch.no_grad():
            run_flat(Hop(limited_group(group, 30)), work, torch.full((3,), 1 - group.rank), Bounds([2, 2], [2, 2], 1), compute)
    except ValueError as error:
        return str(error)
    return "no error"


def test_more_rows_than_announced_are_refused_before_they_are_sent(rank_pool: Any) -> None:
    messages = rank_pool(2).run(rank_more_rows_than_announced)
    assert messages == [f"3 rows for rank {1 - rank}, at most 2 were announced; call the wrapped model as a whole" for rank in range(2)]
