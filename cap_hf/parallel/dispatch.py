"""Dispatch / combine: a token's row goes once to each rank that hosts one of its experts, and one row comes back.

Letters: ``T`` tokens of this rank, ``K`` experts per token, ``R`` ranks, ``H`` hidden size, ``P`` (token, expert) pairs,
``S`` rows sent or kept, ``V`` rows worked on here. Shapes are suffixes: ``hidden_TH``.

Two verbs. ``dispatch`` turns a rank's tokens into the rows that its own experts must work on (``Work``); ``combine``
takes one weighted sum per such row and returns (T, H). ``Dispatcher`` is the complete one-rank reference;
``GroupDispatcher`` moves rows between ranks in three collectives: sizes, rows with their ids and weights, results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cap_hf.parallel.groups import ExpertGroup

__all__ = ["Dispatcher", "GroupDispatcher", "Work"]


@dataclass(frozen=True)
class Work:
    """Rows for this rank's experts, and what ``combine`` needs to bring the results home."""

    rows_VH: torch.Tensor
    row_of_pair_P: torch.Tensor
    """Row that each (token, expert) pair works on."""
    slot_P: torch.Tensor
    """Position of the pair's expert among this rank's experts."""
    weight_P: torch.Tensor
    num_tokens: int
    """T, tokens of this rank."""
    token_S: torch.Tensor
    """Token of each row of this rank: first those it keeps, then those it sends, by rank."""
    num_kept: int
    sent: list[int]
    """Rows sent to each rank; 0 to itself."""
    received: list[int]


@dataclass(frozen=True)
class Routes:
    """(token, expert) pairs grouped into rows, one per token and destination rank, ordered by rank, then token."""

    token_S: torch.Tensor
    pairs_of_row_S: torch.Tensor
    """Number of pairs of each row."""
    pair_P: torch.Tensor
    """Position of each pair in the flattened (T, K), in row order."""
    rows_R: torch.Tensor
    """Rows per destination rank."""
    pairs_R: torch.Tensor


def plan_routes(rank_TK: torch.Tensor, num_ranks: int) -> Routes:
    """Group pairs by destination: ``rank_TK`` holds the rank of each pair's expert, or ``num_ranks`` for a pruned pair."""
    num_tokens, top_k = rank_TK.shape
    token_TK = torch.arange(num_tokens, device=rank_TK.device)[:, None].expand(-1, top_k)
    key, pair_P = torch.sort((rank_TK * max(num_tokens, 1) + token_TK).flatten(), stable=True)
    num_pairs = int((rank_TK < num_ranks).sum())  # pruned pairs sort to the tail
    row_key, pairs_of_row_S = torch.unique_consecutive(key[:num_pairs], return_counts=True)
    row_rank = row_key // max(num_tokens, 1)
    return Routes(
        token_S=row_key % max(num_tokens, 1),
        pairs_of_row_S=pairs_of_row_S,
        pair_P=pair_P[:num_pairs],
        rows_R=torch.bincount(row_rank, minlength=num_ranks),
        pairs_R=torch.bincount(key[:num_pairs] // max(num_tokens, 1), minlength=num_ranks),
    )


class Dispatcher:
    """One rank: every expert is here and nothing travels."""

    def dispatch(
        self, hidden_TH: torch.Tensor, rank_TK: torch.Tensor, slot_TK: torch.Tensor, weight_TK: torch.Tensor, num_ranks: int = 1
    ) -> Work:
        """Rows for the local experts. A row per token and (virtual) rank, so that sums are grouped as on ``num_ranks`` ranks.

        Args:
            hidden_TH: (T, H) hidden states.
            rank_TK: (T, K) rank of each selected expert; ``num_ranks`` for a pruned pair.
            slot_TK: (T, K) position of the expert on its rank.
            weight_TK: (T, K) gate scores.
        """
        routes = plan_routes(rank_TK, num_ranks)
        rows = torch.arange(len(routes.token_S), device=hidden_TH.device)
        return Work(
            rows_VH=hidden_TH[routes.token_S],
            row_of_pair_P=torch.repeat_interleave(rows, routes.pairs_of_row_S, output_size=len(routes.pair_P)),
            slot_P=slot_TK.flatten()[routes.pair_P],
            weight_P=weight_TK.flatten()[routes.pair_P],
            num_tokens=len(hidden_TH),
            token_S=routes.token_S,
            num_kept=len(routes.token_S),
            sent=[0],
            received=[0],
        )

    def combine(self, result_VH: torch.Tensor, work: Work) -> torch.Tensor:
        """Sum the results of each token's rows, (V, H) -> (T, H); a token without rows gets zeros."""
        out_TH = result_VH.new_zeros((work.num_tokens, result_VH.shape[1]))
        return out_TH.index_add(0, work.token_S, result_VH)


class GroupDispatcher(Dispatcher):
    """Several ranks: rows for other ranks travel, rows for the own rank never enter a collective."""

    def __init__(self, group: ExpertGroup) -> None:
        self.group = group

    def dispatch(
        self, hidden_TH: torch.Tensor, rank_TK: torch.Tensor, slot_TK: torch.Tensor, weight_TK: torch.Tensor, num_ranks: int = 0
    ) -> Work:
        """As the reference; every rank of the group must call it, with any number of tokens, 0 included."""
        me, size = self.group.rank, self.group.size
        routes = plan_routes(rank_TK, size)
        row_counts, pair_counts = torch.stack([routes.rows_R, routes.pairs_R]).tolist()
        token_S, row_order = _own_first(routes.token_S, row_counts, me)
        pair_P, _ = _own_first(routes.pair_P, pair_counts, me)
        pairs_of_row_S = routes.pairs_of_row_S[row_order]
        kept_rows, kept_pairs = row_counts[me], pair_counts[me]
        row_counts[me] = pair_counts[me] = 0

        others = [int(rank != me) for rank in range(size)]
        sizes = [[row_counts[rank], pair_counts[rank]] for rank in range(size) if rank != me]
        sizes_in = self.group.all_to_all(torch.tensor(sizes, dtype=torch.int32, device=hidden_TH.device), others, others)
        rows_in, pairs_in = (list(column) for column in zip(*_insert_own(sizes_in.tolist(), me), strict=True))

        rows_SH = hidden_TH[token_S]
        # float32 whatever the router's type, which a rank without tokens could not know
        weight_P, slot_P = weight_TK.flatten()[pair_P].float(), slot_TK.flatten()[pair_P].to(torch.int16)
        exchange = _Exchange(self.group, (row_counts, pair_counts), (rows_in, pairs_in))
        rows, weights, slots, counts = _SendRows.apply(
            rows_SH[kept_rows:], weight_P[kept_pairs:], slot_P[kept_pairs:], pairs_of_row_S[kept_rows:].to(torch.uint8), exchange
        )
        rows_VH = torch.cat([rows_SH[:kept_rows], rows])
        counts_V = torch.cat([pairs_of_row_S[:kept_rows], counts.long()])
        self.group.traffic.rows_sent += sum(row_counts)
        return Work(
            rows_VH=rows_VH,
            row_of_pair_P=torch.repeat_interleave(torch.arange(len(rows_VH), device=rows_VH.device), counts_V),
            slot_P=torch.cat([slot_P[:kept_pairs], slots]).long(),
            weight_P=torch.cat([weight_P[:kept_pairs], weights]),
            num_tokens=len(hidden_TH),
            token_S=token_S,
            num_kept=kept_rows,
            sent=row_counts,
            received=rows_in,
        )

    def combine(self, result_VH: torch.Tensor, work: Work) -> torch.Tensor:
        """Return results to where their rows came from, then sum as the reference does."""
        back = _ReturnRows.apply(result_VH[work.num_kept :], self.group, work.received, work.sent)
        return super().combine(torch.cat([result_VH[: work.num_kept], back]), work)


def _own_first(values: torch.Tensor, counts: list[int], me: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the own rank's segment of rank-ordered ``values`` to the front; also the order used."""
    start = sum(counts[:me])
    positions = torch.arange(len(values), device=values.device)
    end = start + counts[me]
    order = torch.cat([positions[start:end], positions[:start], positions[end:]])
    return values[order], order


def _insert_own(sizes: list[list[int]], me: int) -> list[list[int]]:
    return [*sizes[:me], [0, 0], *sizes[me:]]


@dataclass(frozen=True)
class _Exchange:
    """Sizes of one dispatch: (rows, pairs) to and from each rank."""

    group: ExpertGroup
    sent: tuple[list[int], list[int]]
    received: tuple[list[int], list[int]]


def _pack_and_send(group: ExpertGroup, sections: Sequence[tuple[torch.Tensor, Sequence[int], Sequence[int]]]) -> list[torch.Tensor]:
    """Send several tensors in one collective: (tensor, entries to each rank, entries from each rank) per section.

    Each rank's message is its share of every section, as bytes, one after the other.
    """
    size = group.size
    entry_bytes = [tensor.element_size() * int(tensor[0].numel() if len(tensor) else _numel(tensor.shape[1:])) for tensor, _, _ in sections]
    as_bytes = [tensor.detach().contiguous().view(torch.uint8).flatten() for tensor, _, _ in sections]
    out_sizes = [[count * width for count in sent] for (_, sent, _), width in zip(sections, entry_bytes, strict=True)]
    in_sizes = [[count * width for count in received] for (_, _, received), width in zip(sections, entry_bytes, strict=True)]
    shares = [torch.split(flat, sizes) for flat, sizes in zip(as_bytes, out_sizes, strict=True)]
    message = torch.cat([share[rank] for rank in range(size) for share in shares])
    arrived = group.all_to_all(
        message, [sum(s[r] for s in in_sizes) for r in range(size)], [sum(s[r] for s in out_sizes) for r in range(size)]
    )
    pieces = torch.split(arrived, [sizes[rank] for rank in range(size) for sizes in in_sizes])
    return [
        torch.cat(pieces[index :: len(sections)]).view(tensor.dtype).view(-1, *tensor.shape[1:])  # cat aligns the bytes
        for index, (tensor, _, _) in enumerate(sections)
    ]


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


class _SendRows(torch.autograd.Function):
    """Rows, weights, slots and pair counts to their ranks, one collective; gradients of rows and weights travel back in one."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, exchange: _Exchange) -> Any:
        (rows_out, pairs_out), (rows_in, pairs_in) = exchange.sent, exchange.received
        ctx.exchange = exchange
        sections = [(rows, rows_out, rows_in), (weights, pairs_out, pairs_in), (slots, pairs_out, pairs_in), (counts, rows_out, rows_in)]
        arrived = _pack_and_send(exchange.group, sections)
        ctx.mark_non_differentiable(arrived[2], arrived[3])
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, rows_grad: torch.Tensor, weights_grad: torch.Tensor, *_: Any) -> Any:
        (rows_out, pairs_out), (rows_in, pairs_in) = ctx.exchange.sent, ctx.exchange.received
        rows, weights = _pack_and_send(ctx.exchange.group, [(rows_grad, rows_in, rows_out), (weights_grad, pairs_in, pairs_out)])
        return rows, weights, None, None, None


class _ReturnRows(torch.autograd.Function):
    """Result rows back to the ranks that sent the rows; the gradient takes the way out again."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: ExpertGroup, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return group.all_to_all(rows, received, sent)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.group.all_to_all(grad, ctx.sent, ctx.received), None, None, None
