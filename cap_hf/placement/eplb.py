"""DeepSeek's EPLB (Expert Parallelism Load Balancer): experts spread, and copied, by load alone.

Written from the published description: DeepSeek-V3 report, arXiv:2412.19437, section 3.4, and the README and behaviour of
github.com/deepseek-ai/EPLB, whose printed example plan the tests reproduce. Three steps, every layer alone:

1. groups of experts go to nodes, the same number to each (*hierarchical* policy; the *global* one sees a single node);
2. inside a node, each redundant slot goes to the expert that then has the most load per copy;
3. the copies go to the node's ranks. Packing, here and in step 1: heaviest first, each to the least loaded rank with room.

Tokens are taken to spread evenly over the copies of an expert. Which experts are used together plays no part: tokens visit
about as many ranks as with experts in id order (DeepSeek-V2-Lite on 8 ranks, held-out tokens: 4.66, in id order 4.56). Loads
that change are not foreseen: there an imbalance of 1.01 to 1.03 became 1.03 to 1.10, on Qwen3-30B-A3B and other text 1.4.

Unlike the original, loads are float64, and slots need not divide evenly: ranks may then differ by one slot.

Letters: ``L`` layers, ``E`` experts per layer, ``R`` ranks, ``N`` nodes, ``S`` slots on the fullest rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cap_hf.layout import rank_capacities
from cap_hf.topology import Topology

__all__ = ["POLICIES", "balanced_packing", "eplb", "eplb_slots", "expected_rank_loads", "replicate"]

POLICIES = ("auto", "hierarchical", "global")
"""What ``policy`` may be; "auto" is hierarchical where N divides the number of groups, else global, as in EPLB."""


def balanced_packing(loads: Any, capacities: Any) -> np.ndarray:
    """Pack of each item, (L, n): heaviest item first, each into the least loaded pack that has room.

    Equal loads go in id order, to the lowest pack. Where there are as many packs as items, with room for one each, item i
    goes to pack i. With capacities that are equal and all used, the heaviest and the lightest pack differ by at most the
    difference of the heaviest and the lightest item; where capacities differ by one, by at most the heaviest item.

    Args:
        loads: (L, n) load of each item, finite and 0 or more.
        capacities: (m,) integers, the items that each pack has room for, the same in every layer.

    Raises:
        ValueError: malformed loads, or capacities that are malformed or too small for n items.
    """
    loads, capacities = _checked_loads(loads), np.asarray(capacities)
    num_layers, num_items = loads.shape
    if capacities.ndim != 1 or not np.issubdtype(capacities.dtype, np.integer):
        raise ValueError(f"capacities has shape {capacities.shape} and type {capacities.dtype}; it must be integers, (packs,)")
    if (capacities < 0).any() or capacities.sum() < num_items:
        raise ValueError(
            f"capacities {capacities.tolist()} for {num_items} items; give sizes of 0 or more with a sum of {num_items} or more"
        )
    if len(capacities) == num_items and (capacities == 1).all():
        return np.tile(np.arange(num_items), (num_layers, 1))  # any assignment is as balanced; this one moves nothing
    packs = np.empty((num_layers, num_items), dtype=np.int64)
    pack_loads = np.zeros((num_layers, len(capacities)))
    room = np.tile(capacities, (num_layers, 1))
    layers = np.arange(num_layers)
    for items in np.argsort(-loads, axis=1, kind="stable").T:  # items (L,): the next one of each layer
        lightest = np.where(room > 0, pack_loads, np.inf).argmin(axis=1)
        packs[layers, items] = lightest
        pack_loads[layers, lightest] += loads[layers, items]
        room[layers, lightest] -= 1
    return packs


def replicate(loads: Any, num_slots: int) -> np.ndarray:
    """Expert of each slot, (L, num_slots): experts 0 .. E-1 once each, then one copy after another of the hottest expert.

    The hottest expert has the most load per copy so far, the lowest id among equals; no other choice of copies has a lower
    maximum. In a layer without load that is always expert 0.

    Args:
        loads: (L, E) load of each expert, finite and 0 or more.
        num_slots: E or more.

    Raises:
        ValueError: malformed loads, or fewer slots than experts.
    """
    loads = _checked_loads(loads)
    num_layers, num_experts = loads.shape
    if num_slots < num_experts:
        raise ValueError(f"{num_slots} slots for {num_experts} experts; every expert needs one: use {num_experts} or more")
    slot_to_expert = np.tile(np.arange(num_slots), (num_layers, 1))
    copies = np.ones((num_layers, num_experts))
    layers = np.arange(num_layers)
    for slot in range(num_experts, num_slots):
        hottest = (loads / copies).argmax(axis=1)
        slot_to_expert[:, slot] = hottest
        copies[layers, hottest] += 1
    return slot_to_expert


def eplb_slots(loads: Any, topology: Topology, *, num_redundant: int = 0, policy: str = "auto", num_groups: int = 1) -> np.ndarray:
    """Expert in each slot of each rank, (L, R, S) int64, -1 where a rank has a slot less than the fullest.

    Every expert has a slot at least; on a rank, slots are in the order they were packed, the heaviest copy first. As in
    EPLB, two copies of an expert may land on one rank, where the second is of no use.

    Args:
        loads: (L, E) load of each expert, finite and 0 or more: (token, expert) pairs, or any other estimate.
        topology: ranks and nodes; costs play no part.
        num_redundant: slots beyond one per expert, on all ranks together; r more on each rank is ``r * R``.
        policy: one of ``POLICIES``.
        num_groups: groups of experts with consecutive ids that the router selects from (``n_group`` of DeepSeek-V3's config).
            1 where the router has no groups: then ids mean nothing, binding ranges of them to nodes would cost balance
            and save no traffic, and "auto" is the global policy on several nodes.

    Raises:
        ValueError: malformed loads, fewer experts than ranks, an unknown policy, groups that do not divide E, or, for the
            hierarchical policy, groups or redundant slots that nodes cannot share equally.
    """
    loads = _checked_loads(loads)
    num_layers, num_experts = loads.shape
    rank_capacities(num_experts, topology.num_ranks)
    num_nodes, num_groups = _division(num_experts, topology.num_nodes, num_redundant, policy, num_groups)
    group_loads = loads.reshape(num_layers, num_groups, -1).sum(axis=2)
    node_to_group = _pack(group_loads, np.full(num_nodes, num_groups // num_nodes))  # (L, N, groups of a node)
    group_to_expert = np.arange(num_experts).reshape(num_groups, -1)
    # from here on a row is one node of one layer
    node_to_expert = group_to_expert[node_to_group].reshape(num_layers * num_nodes, -1)
    node_loads = np.take_along_axis(np.repeat(loads, num_nodes, axis=0), node_to_expert, axis=1)
    copy_to_local = replicate(node_loads, (num_experts + num_redundant) // num_nodes)  # positions in a row of node_to_expert
    copy_loads = np.take_along_axis(node_loads / _num_copies(copy_to_local, node_loads.shape[1]), copy_to_local, axis=1)
    slot_to_copy = _pack(copy_loads, rank_capacities(copy_loads.shape[1], topology.num_ranks // num_nodes))
    copy_to_expert = np.take_along_axis(node_to_expert, copy_to_local, axis=1)
    return _read(copy_to_expert, slot_to_copy, -1).reshape(num_layers, topology.num_ranks, -1)


def eplb(loads: Any, topology: Topology, *, policy: str = "auto", num_groups: int = 1) -> np.ndarray:
    """Rank of each expert, (L, E) int64: ``eplb_slots`` without redundancy.

    Where R does not divide E, the first ``E % R`` ranks hold one expert more; with the hierarchical policy every node holds
    ``E / N`` experts, and it is the first ranks of each node that do.

    Raises:
        ValueError: as ``eplb_slots``.
    """
    slot_to_expert = eplb_slots(loads, topology, policy=policy, num_groups=num_groups)
    layers, ranks, slots = np.nonzero(slot_to_expert >= 0)
    expert_to_rank = np.empty(np.shape(loads), dtype=np.int64)
    expert_to_rank[layers, slot_to_expert[layers, ranks, slots]] = ranks
    return expert_to_rank


def expected_rank_loads(loads: Any, slot_to_expert: np.ndarray) -> np.ndarray:
    """Load of each rank, (L, R), if the copies of an expert share its load equally.

    Tokens that prefer the nearest copy make it less even than this.

    Args:
        loads: (L, E) load of each expert.
        slot_to_expert: (L, R, S) as ``eplb_slots`` returns it.

    Raises:
        ValueError: malformed loads, slots of another model, or an expert without a slot.
    """
    loads = _checked_loads(loads)
    num_layers, num_experts = loads.shape
    if slot_to_expert.ndim != 3 or len(slot_to_expert) != num_layers:
        raise ValueError(f"slot_to_expert has shape {slot_to_expert.shape}; it must be (layers, ranks, slots) with {num_layers} layers")
    if slot_to_expert.min(initial=-1) < -1 or slot_to_expert.max(initial=-1) >= num_experts:
        raise ValueError(
            f"slot_to_expert holds {slot_to_expert.min()} to {slot_to_expert.max()}; it must be -1 (empty) or 0 to {num_experts - 1}: "
            "use loads of the model that was placed"
        )
    copies = _num_copies(slot_to_expert.reshape(num_layers, -1), num_experts)
    if not copies.all():
        layer, expert = (int(i) for i in np.argwhere(copies == 0)[0])
        raise ValueError(f"expert {expert} of layer {layer} has 0 slots; every expert needs 1 or more: place again")
    rank_loads: np.ndarray = _read(loads / copies, slot_to_expert, 0.0).sum(axis=2)
    return rank_loads


def _checked_loads(loads: Any) -> np.ndarray:
    """``loads`` as float64 (L, n), or ValueError."""
    loads = np.asarray(loads)
    if loads.ndim != 2 or 0 in loads.shape or loads.dtype.kind not in "iuf":
        raise ValueError(f"loads has shape {loads.shape} and type {loads.dtype}; it must be numbers, (layers, experts), each 1 or more")
    bad = ~(np.isfinite(loads) & (loads >= 0))
    if bad.any():
        layer, expert = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"loads[{layer}, {expert}] is {loads[layer, expert]}; loads must be finite and 0 or more: count them again")
    return loads.astype(np.float64)


def _division(num_experts: int, num_nodes: int, num_redundant: int, policy: str, num_groups: int) -> tuple[int, int]:
    """Nodes and groups that the policy sees, (1, 1) for the global one, or ValueError."""
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; choose one of {', '.join(POLICIES)}")
    if not isinstance(num_redundant, int | np.integer) or num_redundant < 0:
        raise ValueError(f"num_redundant is {num_redundant!r}; it must be an integer, 0 or more")
    if not isinstance(num_groups, int | np.integer) or num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups is {num_groups}; it must divide the {num_experts} experts per layer: use the router's, or 1 if none")
    if policy == "global" or (policy == "auto" and num_groups % num_nodes):
        return 1, 1
    if num_groups % num_nodes:
        raise ValueError(f"num_groups is {num_groups}; the hierarchical policy needs a multiple of the {num_nodes} nodes: use 'global'")
    if num_redundant % num_nodes:
        raise ValueError(
            f"num_redundant is {num_redundant}; with the hierarchical policy the {num_nodes} nodes share it equally: "
            f"use a multiple of {num_nodes}, or policy='global'"
        )
    return num_nodes, num_groups


def _pack(loads: np.ndarray, capacities: np.ndarray) -> np.ndarray:
    """Items of each pack by falling load, (L, m, S), -1 where there is no slot; the capacities must sum to the items."""
    order = np.lexsort((-loads, balanced_packing(loads, capacities)), axis=1)
    assert capacities.sum() == loads.shape[1]
    items = np.full((len(loads), len(capacities), int(capacities.max())), -1)
    items[:, np.arange(items.shape[2]) < capacities[:, None]] = order
    return items


def _num_copies(slot_to_expert: np.ndarray, num_experts: int) -> np.ndarray:
    """Slots of each expert, (L, E), from the expert of each slot, (L, n), -1 for none."""
    return np.stack([np.bincount(layer + 1, minlength=num_experts + 1)[1:] for layer in slot_to_expert])


def _read(values: np.ndarray, index: np.ndarray, empty: float) -> np.ndarray:
    """``values`` (L, n) at ``index`` (L, ...), and ``empty`` where it is -1."""
    spare = np.full((len(values), 1), empty, dtype=values.dtype)
    flat = index.reshape(len(values), -1)  # -1 reads the spare, last column
    return np.take_along_axis(np.concatenate([values, spare], axis=1), flat, axis=1).reshape(index.shape)
