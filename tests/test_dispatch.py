"""One-rank dispatch / combine against a plain loop, and the grouping of pairs into rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cap_hf.parallel.dispatch import Dispatcher, plan_routes


def test_plan_routes_groups_pairs_by_rank_then_token() -> None:
    # token 0 visits rank 1 twice and rank 0 once; token 1 visits rank 1; token 2 is pruned whole (rank 2 = none)
    rank_TK = torch.tensor([[1, 0, 1], [1, 2, 2], [2, 2, 2]])
    routes = plan_routes(rank_TK, num_ranks=2)
    assert routes.token_S.tolist() == [0, 0, 1]
    assert routes.rows_R.tolist() == [1, 2]
    assert routes.pairs_R.tolist() == [1, 3]
    assert routes.pairs_of_row_S.tolist() == [1, 2, 1]
    assert routes.pair_P.tolist() == [1, 0, 2, 3]


def test_plan_routes_without_tokens() -> None:
    routes = plan_routes(torch.zeros((0, 4), dtype=torch.long), num_ranks=3)
    assert routes.token_S.numel() == 0 and routes.rows_R.tolist() == [0, 0, 0]


def _expert(slot: int, row: torch.Tensor) -> torch.Tensor:
    return row * (slot + 1) + slot  # distinguishable experts with a closed form


def _reference(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for k in range(ids.shape[1]):
            if kept[token, k]:
                out[token] += weights[token, k] * _expert(int(ids[token, k]), hidden[token])
    return out


@settings(max_examples=40, deadline=None)
@given(num_tokens=st.integers(0, 7), num_ranks=st.integers(1, 4), seed=st.integers(0, 10_000))
def test_reference_dispatcher_equals_a_loop_over_pairs(num_tokens: int, num_ranks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_experts, top_k = 8, 3
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)] or [torch.zeros(3).long()])[
        :num_tokens
    ]
    weights = torch.rand((num_tokens, top_k), generator=generator)
    hidden = 1000.0 * torch.arange(num_tokens)[:, None] + torch.arange(5)  # token value = 1000 * token + column
    kept = torch.rand((num_tokens, top_k), generator=generator) < 0.7
    expert_to_rank = torch.randint(0, num_ranks, (num_experts,), generator=generator)
    rank_TK = torch.where(kept, expert_to_rank[ids], num_ranks)

    dispatcher = Dispatcher()
    work = dispatcher.dispatch(hidden, rank_TK, ids, weights, num_ranks)
    result = torch.zeros_like(work.rows_VH)
    for row, slot, weight in zip(work.row_of_pair_P.tolist(), work.slot_P.tolist(), work.weight_P, strict=True):
        result[row] += weight * _expert(slot, work.rows_VH[row])
    torch.testing.assert_close(dispatcher.combine(result, work), _reference(hidden, ids, weights, kept))
    visits = [len({int(rank_TK[t, k]) for k in range(top_k)} - {num_ranks}) for t in range(num_tokens)]
    assert len(work.rows_VH) == sum(visits)  # one row per token and rank, however many of its experts are there


def test_combine_gives_zeros_to_a_token_without_rows() -> None:
    hidden = torch.ones((2, 3))
    rank_TK = torch.tensor([[1, 1], [0, 1]])  # with one rank, 1 means pruned
    dispatcher = Dispatcher()
    work = dispatcher.dispatch(hidden, rank_TK, torch.zeros((2, 2), dtype=torch.long), torch.ones((2, 2)))
    out = dispatcher.combine(work.rows_VH, work)
    assert out.tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_keep_the_dtype(dtype: torch.dtype) -> None:
    work = Dispatcher().dispatch(
        torch.ones((2, 3), dtype=dtype), torch.zeros((2, 1), dtype=torch.long), torch.zeros((2, 1), dtype=torch.long), torch.ones((2, 1))
    )
    assert work.rows_VH.dtype == dtype
