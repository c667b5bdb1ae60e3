"""Dispatch / combine: a token's row goes once to each rank that hosts one of its experts, and one row comes back.

Letters: ``R`` ranks of a group, ``H`` hidden size, ``V`` rows, ``P`` (row, expert) pairs, ``S`` rows by destination.
Shapes are suffixes: ``rows_VH``.

Everything is one step, ``Hop``: some rows and their pairs go to other ranks of a group, each row once per rank, and one
result per row comes back. ``run_flat`` is one hop among all ranks; ``run_hierarchical`` one hop between nodes, in which a
row enters a node once, and one inside the node.

A hop is two collectives. Each message is [sizes | rows | weights | expert ids | pairs of each row]; on gloo the receiver
keeps room for the most that can come, so that sizes need no message of their own. Where that does not work (NCCL) or the
most is not known (training), one exchange of sizes goes before, for both hops of a layer, and the host waits for it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cap_hf.parallel.groups import ExpertGroup, Pending

__all__ = ["Bounds", "Hop", "Routes", "Work", "entry_ranks", "plan_routes", "run_flat", "run_hierarchical"]

_WEIGHT, _EXPERT, _COUNT = torch.float32, torch.int16, torch.uint8  # on the wire; weights whatever the router's type
_SIZES_BYTES = 8  # two int32 at the head of a message: rows, pairs
_OVERLAP_BYTES = 1 << 18  # a message that takes longer than splitting the experts' work in two costs


@dataclass(frozen=True)
class Work:
    """Rows, and the experts that work on each: pair p is expert ``expert_P[p]`` on row ``row_P[p]`` with a gate weight."""

    rows_VH: torch.Tensor
    row_P: torch.Tensor
    expert_P: torch.Tensor
    """Expert ids of the layer, int64."""
    weight_P: torch.Tensor


Compute = Callable[[Work], torch.Tensor]
"""Weighted sum of each row's experts, (V, H); pairs come in ascending rows."""


@dataclass(frozen=True)
class Bounds:
    """The most rows that can come from, or go to, each rank of a group, (R,) each; 0 where no message passes at all."""

    rows_in: Sequence[int]
    rows_out: Sequence[int]
    top_k: int
    """The most pairs of a row."""


@dataclass(frozen=True)
class Sizes:
    """(rows, pairs) for each rank of a group and from each, the own one included."""

    out: Sequence[list[int]]
    into: Sequence[list[int]]


@dataclass(frozen=True)
class Routes:
    """Pairs grouped into rows, one per row and destination: this rank's own first, the others by rank, then by row."""

    row_S: torch.Tensor
    pairs_of_row_S: torch.Tensor
    pair_P: torch.Tensor
    """Position of each pair in the list it was planned from."""
    num_rows: list[int]
    """Rows for each rank, (R,), the own one included."""
    num_pairs: list[int]


@dataclass(frozen=True)
class _Grouping:
    """A plan whose sizes are still on the device; ``finish`` makes ``Routes`` of it once the host knows them."""

    row_P: torch.Tensor
    pair_P: torch.Tensor
    begins_row_P: torch.Tensor
    sizes_R2: torch.Tensor
    """(rows, pairs) for each rank, int32."""

    def finish(self, sizes_R2: Sequence[list[int]]) -> Routes:
        num_rows, num_pairs = ([size[column] for size in sizes_R2] for column in (0, 1))
        pair_P, row_P = self.pair_P[: sum(num_pairs)], self.row_P[: sum(num_pairs)]
        place_P = self.begins_row_P[: sum(num_pairs)].cumsum(0) - 1
        row_S = row_P.new_empty(sum(num_rows)).scatter_(0, place_P, row_P)
        pairs_of_row_S = place_P.new_zeros(sum(num_rows)).scatter_add_(0, place_P, torch.ones_like(place_P))
        return Routes(row_S, pairs_of_row_S, pair_P, num_rows, num_pairs)


def _group_pairs(row_P: torch.Tensor, rank_P: torch.Tensor, num_rows: int, num_ranks: int, me: int) -> _Grouping:
    """Sort pairs by destination and row, without waiting for the device."""
    place_P = torch.where(rank_P == me, 0, rank_P + 1)  # own rank first; pairs for nobody (rank R) last
    width = max(num_rows, 1)
    key_P, pair_P = torch.sort(place_P * width + row_P, stable=True)
    begins_row_P = torch.ones_like(key_P)
    begins_row_P[1:] = key_P[1:] != key_P[:-1]
    rank_P = rank_P[pair_P]
    sizes_R2 = key_P.new_zeros((num_ranks + 1, 2))
    sizes_R2[:, 0].scatter_add_(0, rank_P, begins_row_P)
    sizes_R2[:, 1].scatter_add_(0, rank_P, torch.ones_like(rank_P))
    return _Grouping(key_P % width, pair_P, begins_row_P, sizes_R2[:num_ranks].to(torch.int32))


def plan_routes(row_P: torch.Tensor, rank_P: torch.Tensor, num_rows: int, num_ranks: int, me: int = 0) -> Routes:
    """Group pairs by destination.

    Args:
        row_P: (P,) row of each pair, in [0, ``num_rows``).
        rank_P: (P,) rank of each pair's expert, or ``num_ranks`` for a pair that goes nowhere.
        me: the own rank, whose rows come first.
    """
    grouping = _group_pairs(row_P, rank_P, num_rows, num_ranks, me)
    return grouping.finish(grouping.sizes_R2.tolist())


def entry_ranks(rank_TK: torch.Tensor, me: int, num_ranks: int, ranks_per_node: int) -> torch.Tensor:
    """Where a token's row enters the node of each of its experts, (T, K): the own rank for the own node, else the rank
    among those it visits there that follows this rank's place in its node, so that the ranks of a node share the entries.

    Args:
        rank_TK: (T, K) rank of each selected expert; ``num_ranks`` for a pruned pair, and so in the result.
    """
    is_real_TK, place = rank_TK < num_ranks, me % ranks_per_node
    node_TK = torch.where(is_real_TK, rank_TK // ranks_per_node, num_ranks // ranks_per_node)
    after_TK = (rank_TK - place) % ranks_per_node
    num_nodes = num_ranks // ranks_per_node + 1
    nearest_TN = after_TK.new_full((len(rank_TK), num_nodes), ranks_per_node).scatter_reduce_(1, node_TK, after_TK, "amin")
    entry_TK = node_TK * ranks_per_node + (place + nearest_TN.gather(1, node_TK)) % ranks_per_node
    entry_TK = torch.where(node_TK == me // ranks_per_node, me, entry_TK)
    return torch.where(is_real_TK, entry_TK, num_ranks)


def run_flat(
    hop: Hop,
    work: Work,
    rank_P: torch.Tensor,
    bounds: Bounds | None,
    compute: Compute,
    meanwhile: Callable[[], None] | None = None,
    sizes: Sizes | None = None,
) -> torch.Tensor:
    """Every row straight to each of its ranks; sums of the results, (V, H).

    Args:
        work: this rank's rows and pairs.
        rank_P: (P,) rank of each pair's expert in the hop's group; its size for a pruned pair.
        bounds: the most that can come from each rank; None exchanges sizes first. Given on all ranks or on none.
        compute: this rank's experts.
        meanwhile: something to do while rows travel.
        sizes: of the messages, where they are known; nothing is exchanged before the rows then.
    """
    trip = hop.depart(work, rank_P, bounds, sizes)
    if meanwhile is not None:
        meanwhile()
    if trip.bytes_sent >= _OVERLAP_BYTES:
        kept_VH = compute(trip.kept)
        return trip.home(kept_VH, compute(trip.arrive()))
    return trip.home_joined(compute(trip.arrive_joined()))


def run_hierarchical(
    outer: Hop,
    inner: Hop,
    work: Work,
    entry_P: torch.Tensor,
    place_of_expert: torch.Tensor,
    bounds: tuple[Bounds | None, Bounds | None],
    compute: Compute,
    meanwhile: Callable[[], None] | None = None,
) -> torch.Tensor:
    """A row enters each node once, is fanned out inside it, and one sum comes back from the node; (V, H).

    Args:
        outer: hop among all ranks.
        inner: hop among the ranks of this node.
        entry_P: (P,) rank at which each pair's row enters the node of its expert, as ``entry_ranks`` gives it.
        place_of_expert: (E,) rank of each expert within its node.
        bounds: for the outer and the inner hop.
    """
    size, inner_size = outer.group.size, inner.group.size
    told_RX2 = _sizes_inside(work, entry_P, place_of_expert, size, inner_size) if outer.exchanges_sizes(bounds[0], work) else None
    trip = outer.depart(work, entry_P, bounds[0], told_RX2=told_RX2)
    if meanwhile is not None:
        meanwhile()
    entered = trip.arrive_joined()
    inner_sizes = Sizes(trip.heard[:inner_size], trip.heard[inner_size:]) if trip.heard else None
    result_VH = run_flat(inner, entered, place_of_expert[entered.expert_P], bounds[1], compute, sizes=inner_sizes)
    return trip.home_joined(result_VH)


def _sizes_inside(work: Work, entry_P: torch.Tensor, place_of_expert: torch.Tensor, num_ranks: int, ranks_per_node: int) -> torch.Tensor:
    """What each rank has to know of this rank's rows for the hop inside its node, (R, 2 L, 2) int32 (rows, pairs): how many
    it passes on to each of the L places of its node, then how many it gets from each."""
    num_ways = num_ranks * ranks_per_node  # from the rank of entry to a place of its node
    way_P = (entry_P * ranks_per_node + place_of_expert[work.expert_P]).clamp(max=num_ways)
    sizes = _group_pairs(work.row_P, way_P, len(work.rows_VH), num_ways, me=-1).sizes_R2
    by_node = sizes.view(num_ranks // ranks_per_node, ranks_per_node, ranks_per_node, 2)
    return torch.cat([by_node, by_node.transpose(1, 2)], dim=2).flatten(0, 1)


class Hop:
    """Moves rows among the ranks of ``group`` and results back; rows for the own rank never enter a collective.

    Args:
        group: the ranks; each must run every hop, with any number of rows, none included.
        wire_dtype: type of travelling rows, results included; None leaves them as they are.
    """

    def __init__(self, group: ExpertGroup, wire_dtype: torch.dtype | None = None) -> None:
        self.group, self.wire_dtype = group, wire_dtype

    def exchanges_sizes(self, bounds: Bounds | None, work: Work) -> bool:
        """Whether ``depart`` asks the other ranks for the sizes of their messages before it sends rows."""
        return bounds is None or not self.group.takes_bounds(work.rows_VH)

    def depart(
        self, work: Work, rank_P: torch.Tensor, bounds: Bounds | None, sizes: Sizes | None = None, told_RX2: torch.Tensor | None = None
    ) -> Trip:
        """Send rows on their way; see ``run_flat`` for the other arguments.

        Args:
            told_RX2: (R, X, 2) int32, more numbers for each rank where sizes are exchanged; ``Trip.heard`` is the sum of all ranks'.
        """
        group, me = self.group, self.group.rank
        grouping = _group_pairs(work.row_P, rank_P, len(work.rows_VH), group.size, me)
        sizes_in: Sequence[list[int]] | None = None
        heard: Sequence[list[int]] = ()
        if sizes is not None:
            sizes_out, sizes_in = sizes.out, sizes.into
        elif self.exchanges_sizes(bounds, work):
            sizes_out, sizes_in, heard = self._exchange_sizes(grouping.sizes_R2, told_RX2)
        else:
            sizes_out = grouping.sizes_R2.tolist()
        routes = grouping.finish(sizes_out)
        kept, going = _split(work, routes, me)
        rows_VH = going.rows_VH if self.wire_dtype is None else going.rows_VH.to(self.wire_dtype)
        counts_V = routes.pairs_of_row_S[len(kept.rows_VH) :]
        parts = (rows_VH, going.weight_P.to(_WEIGHT), going.expert_P.to(_EXPERT), counts_V.to(_COUNT))
        group.traffic.rows_sent += len(rows_VH)
        trip = Trip(self, routes, kept, len(work.rows_VH), _without(sizes_out, me), None if sizes_in is None else _without(sizes_in, me))
        trip.like, trip.heard = parts, heard
        if trip.sizes_in is None:
            assert bounds is not None and not torch.is_grad_enabled(), "bounds are for inference"
            trip.pending, trip.rooms = _start_bounded(group, parts, trip.sizes_out, bounds)
        elif torch.is_grad_enabled():
            trip.arrived = _SendRows.apply(*parts, trip)
        else:
            trip.pending, trip.rooms = _start(group, parts, trip.sizes_out, trip.sizes_in)
        return trip

    def _exchange_sizes(self, sizes_R2: torch.Tensor, told_RX2: torch.Tensor | None) -> list[list[list[int]]]:
        """Sizes to each rank, sizes from each, and the sum of what was told; the one time in a layer that the host waits."""
        size = self.group.size
        message = sizes_R2[:, None] if told_RX2 is None else torch.cat([sizes_R2[:, None], told_RX2], dim=1)
        incoming = self.group.all_to_all(message, [1] * size, [1] * size)
        numbers = torch.cat([sizes_R2, incoming[:, 0], incoming[:, 1:].sum(dim=0, dtype=torch.int32)]).tolist()
        return [numbers[:size], numbers[size : 2 * size], numbers[2 * size :]]


@dataclass
class Trip:
    """Rows under way: first ``arrive``, then ``home`` with the results; ``*_joined`` treat kept and arrived rows as one."""

    hop: Hop
    routes: Routes
    kept: Work
    """Rows that stay on this rank."""
    num_rows: int
    sizes_out: list[list[int]]
    """(rows, pairs) for each rank, 0 for this one."""
    sizes_in: list[list[int]] | None
    """The same from each rank; None until the messages that tell are here."""
    pending: Pending | None = None
    rooms: Sequence[int] = ()
    """Bytes kept for each rank's message."""
    like: Sequence[torch.Tensor] = ()
    arrived: Any = None
    heard: Sequence[list[int]] = ()
    """What all ranks told this one with the sizes."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that are under way from this rank."""
        return self.pending.sent.numel() if self.pending is not None else 0

    def arrive(self) -> Work:
        """Rows from other ranks, by rank."""
        if self.pending is not None:
            buffer = self.pending.wait()
            starts = [sum(self.rooms[:rank]) for rank in range(len(self.rooms))]
            if self.sizes_in is None:
                self.sizes_in = _read_sizes(buffer, starts, self.rooms)
                starts = [start + _SIZES_BYTES for start in starts]
            self.arrived = _unpack(buffer, starts, self.sizes_in, self.like)
        rows_VH, weight_P, expert_P, pairs_of_row_V = self.arrived
        row_P = _rows_of_pairs(pairs_of_row_V.long(), len(weight_P))
        return Work(rows_VH.to(self.kept.rows_VH.dtype), row_P, expert_P.long(), weight_P)

    def arrive_joined(self) -> Work:
        """All rows for this rank, its own first."""
        kept, arrived = self.kept, self.arrive()
        return Work(
            torch.cat([kept.rows_VH, arrived.rows_VH]),
            torch.cat([kept.row_P, arrived.row_P + len(kept.rows_VH)]),
            torch.cat([kept.expert_P, arrived.expert_P]),
            torch.cat([kept.weight_P, arrived.weight_P]),
        )

    def home(self, kept_VH: torch.Tensor, arrived_VH: torch.Tensor) -> torch.Tensor:
        """One result per row back to where the row came from, and their sums there, (V, H); zeros for a row without pairs."""
        assert self.sizes_in is not None
        sent, received = ([rows for rows, _ in sizes] for sizes in (self.sizes_in, self.sizes_out))
        result_VH = arrived_VH if self.hop.wire_dtype is None else arrived_VH.to(self.hop.wire_dtype)
        if torch.is_grad_enabled():
            back_VH = _ReturnRows.apply(result_VH, self.hop.group, received, sent)
        else:
            back_VH = self.hop.group.all_to_all(result_VH, received, sent)
        result_SH = torch.cat([kept_VH.float(), back_VH.float()])  # half-precision sums are kept exact until the end
        sums_VH = result_SH.new_zeros((self.num_rows, result_SH.shape[1])).index_add(0, self.routes.row_S, result_SH)
        return sums_VH.to(kept_VH.dtype)

    def home_joined(self, result_VH: torch.Tensor) -> torch.Tensor:
        """As ``home``, for the results of ``arrive_joined``."""
        num_kept = len(self.kept.rows_VH)
        return self.home(result_VH[:num_kept], result_VH[num_kept:])


def _rows_of_pairs(pairs_of_row_V: torch.Tensor, num_pairs: int) -> torch.Tensor:
    rows = torch.arange(len(pairs_of_row_V), device=pairs_of_row_V.device)
    return torch.repeat_interleave(rows, pairs_of_row_V, output_size=num_pairs)


def _split(work: Work, routes: Routes, me: int) -> tuple[Work, Work]:
    """Rows that stay and rows that go, one per destination."""
    kept_rows, kept_pairs = routes.num_rows[me], routes.num_pairs[me]
    rows_SH = work.rows_VH[routes.row_S]
    row_P = _rows_of_pairs(routes.pairs_of_row_S, len(routes.pair_P))
    expert_P, weight_P = work.expert_P[routes.pair_P], work.weight_P[routes.pair_P]
    return (
        Work(rows_SH[:kept_rows], row_P[:kept_pairs], expert_P[:kept_pairs], weight_P[:kept_pairs]),
        Work(rows_SH[kept_rows:], row_P[kept_pairs:], expert_P[kept_pairs:], weight_P[kept_pairs:]),
    )


def _without(sizes: Sequence[list[int]], me: int) -> list[list[int]]:
    return [*sizes[:me], [0, 0], *sizes[me + 1 :]]


def _counts(sizes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Entries by section and rank: a message holds, per row, its values and its number of pairs; per pair, weight and id."""
    rows, pairs = ([size[column] for size in sizes] for column in (0, 1))
    return [rows, pairs, pairs, rows]


def _entry_bytes(part: torch.Tensor) -> int:
    return part.element_size() * torch.Size(part.shape[1:]).numel()


def _lengths(parts: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]) -> list[int]:
    """Bytes of each rank's message."""
    widths = [_entry_bytes(part) for part in parts]
    return [sum(width * count for width, count in zip(widths, of_rank, strict=True)) for of_rank in zip(*counts, strict=True)]


def _pack(parts: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Messages as bytes, by rank: its share of every part, one after the other."""
    as_bytes = [part.detach().contiguous().view(torch.uint8).flatten() for part in parts]
    shares = [
        flat.split([_entry_bytes(part) * count for count in of_part]) for flat, part, of_part in zip(as_bytes, parts, counts, strict=True)
    ]
    return torch.cat([share for of_rank in zip(*shares, strict=True) for share in of_rank])


def _unpack(
    buffer: torch.Tensor, starts: Sequence[int], sizes: Sequence[Sequence[int]], like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Inverse of ``_pack``: each part of all ranks, joined by rank; ``like`` gives types and shapes."""
    parts, offsets = [], list(starts)
    for part, of_part in zip(like, _counts(sizes)[: len(like)], strict=True):
        width = _entry_bytes(part)
        pieces = [buffer[offset : offset + width * count] for offset, count in zip(offsets, of_part, strict=True)]
        parts.append(torch.cat(pieces).view(part.dtype).view(-1, *part.shape[1:]))  # cat aligns the bytes
        offsets = [offset + width * count for offset, count in zip(offsets, of_part, strict=True)]
    return parts


def _start(
    group: ExpertGroup, parts: Sequence[torch.Tensor], sizes_out: list[list[int]], sizes_in: list[list[int]]
) -> tuple[Pending, list[int]]:
    """Send messages whose sizes are known on both sides; also the bytes that come from each rank."""
    counts_out, counts_in = (_counts(sizes)[: len(parts)] for sizes in (sizes_out, sizes_in))
    lengths_in = _lengths(parts, counts_in)
    return group.start_all_to_all(_pack(parts, counts_out), lengths_in, _lengths(parts, counts_out)), lengths_in


def _start_bounded(
    group: ExpertGroup, parts: Sequence[torch.Tensor], sizes_out: list[list[int]], bounds: Bounds
) -> tuple[Pending, list[int]]:
    """Send messages that begin with their sizes; the receiver keeps room for the most that can come."""
    for rank, ((rows, _), bound) in enumerate(zip(sizes_out, bounds.rows_out, strict=True)):
        if rows > bound:
            raise ValueError(f"{rows} rows for rank {rank}, at most {bound} were announced; call the wrapped model as a whole")
    heads = [int(bound > 0) for bound in bounds.rows_out]
    head = torch.tensor([size for size, sends in zip(sizes_out, heads, strict=True) if sends], dtype=torch.int32).view(-1, 2)
    counts = [heads, *_counts(sizes_out)]
    most = _lengths(parts, _counts([(bound, bound * bounds.top_k) for bound in bounds.rows_in]))
    rooms = [-(-(length + _SIZES_BYTES) // 8) * 8 if length else 0 for length in most]  # aligned, so that sizes can be read in place
    return group.start_all_to_all(_pack([head, *parts], counts), rooms, _lengths([head, *parts], counts)), rooms


def _read_sizes(buffer: torch.Tensor, starts: Sequence[int], rooms: Sequence[int]) -> list[list[int]]:
    return [
        buffer[start : start + _SIZES_BYTES].view(torch.int32).tolist() if room else [0, 0]
        for start, room in zip(starts, rooms, strict=True)
    ]


class _SendRows(torch.autograd.Function):
    """Rows, weights, ids and counts to their ranks, one collective; gradients of rows and weights travel back in one."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, counts: torch.Tensor, trip: Trip) -> Any:
        ctx.group, ctx.sizes = trip.hop.group, (trip.sizes_out, trip.sizes_in)
        arrived = _exchange(ctx.group, [rows, weights, experts, counts], *ctx.sizes)
        ctx.mark_non_differentiable(arrived[2], arrived[3])
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, rows_grad: torch.Tensor, weights_grad: torch.Tensor, *_: Any) -> Any:
        sizes_out, sizes_in = ctx.sizes
        rows, weights = _exchange(ctx.group, [rows_grad, weights_grad], sizes_in, sizes_out)
        return rows, weights, None, None, None


def _exchange(group: ExpertGroup, parts: Sequence[torch.Tensor], sizes_out: Any, sizes_in: Any) -> list[torch.Tensor]:
    pending, rooms = _start(group, parts, sizes_out, sizes_in)
    return _unpack(pending.wait(), [sum(rooms[:rank]) for rank in range(group.size)], sizes_in, parts)


class _ReturnRows(torch.autograd.Function):
    """Result rows back to the ranks that sent the rows; the gradient takes the way out again."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: ExpertGroup, received: list[int], sent: list[int]) -> torch.Tensor:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        return group.all_to_all(rows, received, sent)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.group.all_to_all(grad, ctx.sent, ctx.received), None, None, None
