"""Topology, trace, layout and metrics: closed forms, refusals that name the value and the bound, files, immutability.

Letters: ``L`` layers, ``E`` experts, ``K`` experts per token, ``R`` ranks, ``N`` nodes, ``T`` tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cap_hf._files import VERSION, write_arrays, write_json
from cap_hf.layout import ExpertLayout
from cap_hf.metrics import (
    communication_cost,
    distinct_destinations,
    jaccard,
    load_imbalance,
    rank_loads,
    remote_rows_per_token,
)
from cap_hf.topology import Topology
from cap_hf.trace import RoutingTrace

SEEDS = st.integers(0, 2**32 - 1)


def small_trace() -> RoutingTrace:
    """Two layers of four experts, four tokens in requests of 1 and 3; a weight is 1000 * layer + 10 * token + slot."""
    ids = [[[0, 1], [0, 2], [2, 3], [0, -1]], [[3, 2], [1, 0], [-1, -1], [1, 3]]]
    layer, token, slot = np.meshgrid(range(2), range(4), range(2), indexing="ij")
    return RoutingTrace(ids, 4, 1000 * layer + 10 * token + slot, layer_ids=[1, 5], request_lengths=[1, 3])


def one_layer(*tokens: list[int], num_experts: int = 4) -> RoutingTrace:
    return RoutingTrace([list(tokens)], num_experts)


def random_trace(seed: int, num_layers: int = 2, num_tokens: int = 12, num_experts: int = 8, top_k: int = 3) -> RoutingTrace:
    draw = np.random.default_rng(seed)
    ids = np.argsort(draw.random((num_layers, num_tokens, num_experts)), axis=2)[:, :, :top_k]
    return RoutingTrace(np.where(draw.random(ids.shape) < 0.2, -1, ids), num_experts)


# --- topology --------------------------------------------------------------------------------------------------------


def test_topology_costs() -> None:
    topology = Topology(4, 2, 5.0)
    assert (topology.num_nodes, topology.rank_to_node.tolist()) == (2, [0, 0, 1, 1])
    assert topology.cost_matrix.tolist() == [[0, 1, 5, 5], [1, 0, 5, 5], [5, 5, 0, 1], [5, 5, 1, 0]]


def test_topology_is_one_node_unless_told() -> None:
    topology = Topology(3, inter_node_cost=7.0)
    assert (topology.ranks_per_node, topology.num_nodes) == (3, 1)
    assert topology.cost_matrix.tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    assert repr(topology) == "Topology(num_ranks=3, ranks_per_node=3, inter_node_cost=7.0)"
    assert topology == Topology(3, 3, 7.0) and hash(topology) == hash(Topology(3, 3, 7.0)) and topology != Topology(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "num_ranks is 0; it must be 1 or more"),
        ((-2,), "num_ranks is -2"),
        ((8, 3), "ranks_per_node is 3; it must divide num_ranks = 8"),
        ((8, 16), "ranks_per_node is 16; it must divide num_ranks = 8"),
        ((8, -4), "ranks_per_node is -4"),
        ((8, 4, 0.5), "inter_node_cost is 0.5; it must be finite and at least 1"),
        ((8, 4, float("inf")), "inter_node_cost is inf"),
        ((8, 4, float("nan")), "inter_node_cost is nan"),
    ],
)
def test_topology_refuses(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(*arguments)


# --- trace -----------------------------------------------------------------------------------------------------------


def test_trace_facts() -> None:
    trace = small_trace()
    assert (trace.num_layers, trace.num_tokens, trace.top_k, trace.num_experts, trace.num_requests) == (2, 4, 2, 4, 2)
    assert trace.token_to_request.tolist() == [0, 1, 1, 1]
    assert repr(trace) == "RoutingTrace(expert_ids=<2x4x2>, num_experts=4, expert_weights=..., requests=2)"
    bare = RoutingTrace(trace.expert_ids, 4)
    assert (bare.layer_ids.tolist(), bare.request_lengths.tolist(), bare.expert_weights) == ([0, 1], [4], None)


def test_trace_counts_skip_pruned_slots() -> None:
    trace = small_trace()
    assert trace.expert_loads().tolist() == [[3, 1, 2, 1], [1, 2, 1, 2]]
    counts = trace.coactivation_counts()
    assert counts[0].tolist() == [[3, 1, 1, 0], [1, 1, 0, 0], [1, 0, 2, 1], [0, 0, 1, 1]]
    assert counts[1].tolist() == [[1, 1, 0, 0], [1, 2, 0, 1], [0, 0, 1, 1], [0, 1, 1, 2]]


def test_trace_select_takes_requests_in_the_order_asked_for() -> None:
    trace = small_trace()
    swapped = trace.select([1, 0])
    assert swapped.request_lengths.tolist() == [3, 1] and swapped.layer_ids.tolist() == [1, 5]
    assert swapped.expert_weights is not None
    assert swapped.expert_weights[1, :, 0].tolist() == [1010, 1020, 1030, 1000]  # tokens 1, 2, 3, then 0
    assert swapped.expert_ids[0].tolist() == [[0, 2], [2, 3], [0, -1], [0, 1]]
    assert trace.select(slice(0, 1)).num_tokens == 1
    assert trace.select(slice(None)) == trace


def test_trace_select_tokens_cuts_requests() -> None:
    middle = small_trace().select_tokens(slice(0, 3))
    assert middle.request_lengths.tolist() == [1, 2]
    assert middle.expert_weights is not None and middle.expert_weights[0, :, 1].tolist() == [1, 11, 21]
    assert small_trace().select_tokens(slice(2, 4)).request_lengths.tolist() == [2]  # no empty request is left


def test_trace_concatenate_is_the_inverse_of_select() -> None:
    trace = small_trace()
    assert RoutingTrace.concatenate([trace.select([0]), trace.select([1])]) == trace
    bare = RoutingTrace(trace.expert_ids, 4)
    assert RoutingTrace.concatenate([bare, bare]).request_lengths.tolist() == [4, 4]
    with pytest.raises(ValueError, match="0 traces.*1 or more"):
        RoutingTrace.concatenate([])
    with pytest.raises(ValueError, match="2 different shapes"):
        RoutingTrace.concatenate([trace, bare])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"expert_ids": [[0, 1]]}, r"shape \(1, 2\).*layers, tokens, experts per token"),
        ({"expert_ids": np.zeros((1, 0, 2), dtype=int)}, r"shape \(1, 0, 2\).*1 or more"),
        ({"expert_ids": [[[0.0, 1.0]]]}, "type float64.*integer"),
        ({"expert_ids": [[[0, 1], [2, 4]]]}, r"expert_ids\[0, 1, 1\] is 4.*0 to 3"),
        ({"expert_ids": [[[0, -2]]]}, r"expert_ids\[0, 0, 1\] is -2.*-1 \(pruned\) or 0 to 3"),
        ({"expert_ids": [[[0, 1]], [[2, 2]]]}, r"expert 2 stands twice in expert_ids\[1, 0\]"),
        ({"num_experts": 0}, "num_experts is 0; it must be 1 to 32767"),
        ({"num_experts": 40000}, "num_experts is 40000"),
        ({"expert_weights": [[[0.5]]]}, r"shape \(1, 1, 1\).*\(1, 1, 2\)"),
        ({"layer_ids": [0, 1]}, "layer_ids has 2 entries; expert_ids has 1 layers"),
        ({"request_lengths": [1, 1]}, "request_lengths sums to 2;.*the 1 tokens"),
        ({"request_lengths": [2, -1]}, r"request_lengths is \[2, -1\].*0 or more"),
        ({"expert_weights": [[[0.5, float("nan")]]]}, r"expert_weights\[0, 0, 1\] is nan"),
    ],
)
def test_trace_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutingTrace(**({"expert_ids": [[[0, 1]]], "num_experts": 4} | arguments))


def test_trace_accepts_several_pruned_slots_of_a_token() -> None:
    assert one_layer([-1, 2, -1]).expert_loads().tolist() == [[0, 0, 1, 0]]


def test_trace_refuses_empty_selections() -> None:
    with pytest.raises(ValueError, match="of 2 requests holds 0 tokens"):
        small_trace().select(slice(5, 9))
    with pytest.raises(ValueError, match="of 4 tokens is empty"):
        small_trace().select_tokens(slice(4, 4))


def test_trace_equality_is_by_value() -> None:
    trace = small_trace()
    assert trace == small_trace() and trace != object()
    assert trace != RoutingTrace(trace.expert_ids, 4, None, trace.layer_ids, trace.request_lengths)
    assert trace != RoutingTrace(trace.expert_ids, 5, trace.expert_weights, trace.layer_ids, trace.request_lengths)
    assert trace != RoutingTrace(trace.expert_ids, 4, trace.expert_weights, trace.layer_ids)
    with pytest.raises(TypeError, match="unhashable"):
        hash(trace)


# --- layout ----------------------------------------------------------------------------------------------------------


def test_layout_facts() -> None:
    layout = ExpertLayout([[1, 0, 0, 1, 0], [0, 0, 0, 0, 1]], Topology(2), layer_ids=[1, 2])
    assert (layout.num_layers, layout.num_experts, layout.num_ranks) == (2, 5, 2)
    assert layout.experts_of(0, 0).tolist() == [1, 2, 4] and layout.experts_of(1, 1).tolist() == [4]
    assert layout.experts_per_rank().tolist() == [[3, 2], [4, 1]]
    assert layout.fingerprint in repr(layout) and len(layout.fingerprint) == 12


def test_layout_identity_covers_ranks_topology_and_layer_ids() -> None:
    layout = ExpertLayout([[0, 1]], Topology(2))
    assert layout == ExpertLayout(np.array([[0, 1]], dtype=np.uint8), Topology(2)) and layout != object()
    assert len({layout, ExpertLayout([[0, 1]], Topology(2))}) == 1
    others = [ExpertLayout([[1, 0]], Topology(2)), ExpertLayout([[0, 1]], Topology(2, 1)), ExpertLayout([[0, 1]], Topology(2), [9])]
    assert len({each.fingerprint for each in [layout, *others]}) == 4
    assert all(layout != other for other in others)


@pytest.mark.parametrize(
    ("ranks", "layer_ids", "message"),
    [
        ([0, 1], None, r"shape \(2,\).*\(layers, experts\)"),
        ([[0.0, 1.0]], None, "type float64; it must be integers"),
        (np.zeros((0, 4), dtype=int), None, r"shape \(0, 4\)"),
        ([[0]], None, "1 experts per layer for 2 ranks; use at most 1"),
        ([[0, 1], [0, 2]], None, r"expert_to_rank\[1, 1\] is 2; it must be 0 to 1"),
        ([[-1, 1]], None, r"expert_to_rank\[0, 0\] is -1"),
        ([[0, 1]], [3, 4], "layer_ids has 2 entries; expert_to_rank has 1 layers"),
    ],
)
def test_layout_refuses(ranks: Any, layer_ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertLayout(ranks, Topology(2), layer_ids)


@pytest.mark.parametrize("trace", [one_layer([0, 1], num_experts=5), small_trace()])
def test_layout_refuses_metrics_of_another_model(trace: RoutingTrace) -> None:
    with pytest.raises(ValueError, match=f"trace has {trace.num_layers} layers of {trace.num_experts} experts, the layout 1 of 4"):
        ExpertLayout([[0, 0, 1, 1]], Topology(2)).metrics(trace)


# --- metrics in closed form ------------------------------------------------------------------------------------------


def test_metrics_in_closed_form_on_two_ranks() -> None:
    trace = one_layer([0, 1], [0, 2], [2, 3], [0, -1])
    metrics = ExpertLayout([[0, 0, 1, 1]], Topology(2)).metrics(trace)
    assert metrics.devices_per_token == (1 + 2 + 1 + 1) / 4
    assert metrics.nodes_per_token == 1.0
    assert metrics.load_imbalance == pytest.approx(4 / 3.5)  # loads 3 1 2 1, so 4 and 3 on the ranks
    assert metrics.communication_cost == pytest.approx(1 / 4)  # only 0-2 crosses: together once, either in 3 + 2 - 1 tokens


def test_metrics_in_closed_form_on_two_nodes() -> None:
    trace = one_layer([0, 1], [0, 2], [2, 3], [0, -1])
    metrics = ExpertLayout([[0, 1, 2, 3]], Topology(4, 2, 5.0)).metrics(trace)
    assert metrics.devices_per_token == (2 + 2 + 2 + 1) / 4
    assert metrics.nodes_per_token == (1 + 2 + 1 + 1) / 4
    assert metrics.load_imbalance == pytest.approx(3 / (7 / 4))
    assert metrics.communication_cost == pytest.approx(1 / 3 * 1 + 1 / 4 * 5 + 1 / 2 * 1)


def test_metrics_are_means_over_layers() -> None:
    metrics = ExpertLayout([[0, 0, 1, 1], [0, 1, 0, 1]], Topology(2, 1, 2.0)).metrics(small_trace())
    assert metrics.devices_per_token_by_layer.tolist() == [5 / 4, (2 + 2 + 0 + 1) / 4]  # a token that is pruned whole visits none
    assert metrics.nodes_per_token_by_layer.tolist() == metrics.devices_per_token_by_layer.tolist()  # one rank per node
    assert metrics.load_imbalance_by_layer == pytest.approx([8 / 7, 4 / 3])  # layer 1: loads 1 2 1 2, so 2 and 4
    assert metrics.communication_cost_by_layer == pytest.approx([2 / 4, 2 * (1 / 2 + 1 / 2)])  # layer 1: 0-1 and 2-3 cross
    for name in ("devices_per_token", "nodes_per_token", "load_imbalance", "communication_cost"):
        assert getattr(metrics, name) == pytest.approx(getattr(metrics, f"{name}_by_layer").mean())


def test_jaccard_in_closed_form() -> None:
    p = jaccard(one_layer([0, 1], [0, 2], [2, 3], [0, -1], num_experts=5))[0]
    expected = np.zeros((5, 5))  # expert 4 is never used: 0 over 0 counts as 0
    expected[0, 1], expected[0, 2], expected[2, 3] = 1 / 3, 1 / 4, 1 / 2
    assert p == pytest.approx(expected + expected.T)


def test_jaccard_of_inseparable_experts_is_one() -> None:
    assert jaccard(one_layer([0, 1], [1, 0], num_experts=2))[0].tolist() == [[0, 1], [1, 0]]


def test_remote_rows_in_closed_form() -> None:
    trace, ranks = one_layer([0, 1], [0, 2], [2, 3], [0, -1]), np.array([[0, 0, 1, 1]])
    # Ranks visited: {0} {0, 1} {1} {0}
    assert remote_rows_per_token(trace.expert_ids, ranks, 2, np.array([0, 0, 1, 1])).tolist() == [(0 + 1 + 0 + 1) / 4]
    assert remote_rows_per_token(trace.expert_ids, ranks, 2, np.array([1, 1, 0, 0])).tolist() == [(1 + 1 + 1 + 0) / 4]


def test_metrics_of_a_layer_that_is_pruned_whole() -> None:
    trace, ranks = one_layer([-1, -1], [-1, -1], num_experts=2), np.array([[0, 1]])
    assert load_imbalance(trace, ranks, 2).tolist() == [1.0]
    assert distinct_destinations(trace.expert_ids, ranks, 2).tolist() == [0.0]
    assert jaccard(trace).tolist() == [[[0, 0], [0, 0]]]


@given(SEEDS)
@settings(deadline=None)
def test_metrics_equal_a_plain_count(seed: int) -> None:
    trace, topology = random_trace(seed), Topology(4, 2, 3.0)
    ranks = np.random.default_rng(seed).integers(0, 4, (2, 8))
    for layer in range(2):
        tokens = [[expert for expert in token if expert >= 0] for token in trace.expert_ids[layer].tolist()]
        visited = [{int(ranks[layer, expert]) for expert in token} for token in tokens]
        devices = sum(map(len, visited)) / len(tokens)
        assert distinct_destinations(trace.expert_ids, ranks, 4)[layer] == pytest.approx(devices)
        source = np.arange(len(tokens)) % 4
        rows = sum(len(places - {int(own)}) for places, own in zip(visited, source, strict=True)) / len(tokens)
        assert remote_rows_per_token(trace.expert_ids, ranks, 4, source)[layer] == pytest.approx(rows)
        loads = [sum(ranks[layer, expert] == rank for token in tokens for expert in token) for rank in range(4)]
        assert rank_loads(trace, ranks, 4)[layer].tolist() == loads
        cost = 0.0
        for i in range(8):
            for j in range(i):
                both, either = sum({i, j} <= set(token) for token in tokens), sum(bool({i, j} & set(token)) for token in tokens)
                cost += both / max(either, 1) * topology.cost_matrix[ranks[layer, i], ranks[layer, j]]
        assert communication_cost(jaccard(trace), ranks, topology)[layer] == pytest.approx(cost)


@given(SEEDS)
@settings(deadline=None)
def test_metrics_ignore_the_names_of_ranks_inside_a_node(seed: int) -> None:
    trace, topology = random_trace(seed), Topology(4, 2, 3.0)
    draw = np.random.default_rng(seed)
    ranks = np.stack([draw.permutation(8) % 4 for _ in range(2)])
    renamed = np.array([1, 0, 2, 3])[ranks]
    before, after = (ExpertLayout(each, topology).metrics(trace) for each in (ranks, renamed))
    for name in ("devices_per_token", "nodes_per_token", "load_imbalance", "communication_cost"):
        assert getattr(after, f"{name}_by_layer") == pytest.approx(getattr(before, f"{name}_by_layer"))


# --- files -----------------------------------------------------------------------------------------------------------

VALUES = [
    pytest.param(Topology(8, 4, 2.5), id="topology"),
    pytest.param(small_trace(), id="trace"),
    pytest.param(RoutingTrace(small_trace().expert_ids, 4), id="trace-without-weights"),
    pytest.param(ExpertLayout([[0, 1, 1], [2, 0, 1]], Topology(3, 1, 4.0), [2, 3]), id="layout"),
]


@pytest.mark.parametrize("value", VALUES)
def test_file_round_trip(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    value.save(path)
    value.save(path)  # replaces
    assert type(value).load(path) == value
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]  # nothing partial stays


@pytest.mark.parametrize("value", VALUES)
def test_file_truncated_is_refused(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    value.save(path)
    whole = path.read_bytes()
    for length in (0, 5, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"{path} is truncated or not .*again"):
            type(value).load(path)


@pytest.mark.parametrize("value", VALUES)
def test_file_that_is_missing_or_binary_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent cannot be read.*existing file"):
        type(value).load(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match="binary is truncated or not"):
        type(value).load(tmp_path / "binary")


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    Topology(2).save(path)
    with pytest.raises(ValueError, match="holds format 'cap_hf.topology', not 'cap_hf.layout'"):
        ExpertLayout.load(path)
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="JSON list, not an object"):
        ExpertLayout.load(path)
    path.write_text('{"num_ranks": 2}')
    with pytest.raises(ValueError, match="holds format None"):
        Topology.load(path)
    write_arrays(path, "weights", {"expert_ids": np.zeros((1, 1, 1), dtype=np.int16)}, {"num_experts": 1})
    with pytest.raises(ValueError, match="holds format 'cap_hf.weights', not 'cap_hf.trace'"):
        RoutingTrace.load(path)


@pytest.mark.parametrize("version", [0, VERSION + 1])
def test_file_of_another_version_is_refused(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("cap_hf._files.VERSION", version)
        for value, name in ((Topology(2), "topology"), (ExpertLayout([[0, 1]], Topology(2)), "layout"), (small_trace(), "trace")):
            value.save(tmp_path / name)
    for kind in (Topology, ExpertLayout, RoutingTrace):
        name = {"Topology": "topology", "ExpertLayout": "layout", "RoutingTrace": "trace"}[kind.__name__]
        with pytest.raises(ValueError, match=f"{name} format version {version}; this cap_hf reads 1 to {VERSION}"):
            kind.load(tmp_path / name)


def _without_ranks(content: dict[str, Any]) -> None:
    del content["expert_to_rank"]


def _ragged(content: dict[str, Any]) -> None:
    content["expert_to_rank"] = [[0, 1], [0]]


def _unknown_topology_field(content: dict[str, Any]) -> None:
    content["topology"]["num_racks"] = 2


def _rank_out_of_range(content: dict[str, Any]) -> None:
    content["expert_to_rank"][0][1] = 7


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_ranks, "lacks a valid .*expert_to_rank.*save the layout again"),
        (_ragged, "lacks a valid"),
        (_unknown_topology_field, "num_racks"),
        (_rank_out_of_range, r"expert_to_rank\[0, 1\] is 7"),
    ],
)
def test_layout_file_with_a_damaged_field_is_refused(damage: Callable[[dict[str, Any]], None], message: str, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    ExpertLayout([[0, 1]], Topology(2)).save(path)
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        ExpertLayout.load(path)


@pytest.mark.parametrize("content", [{}, {"num_ranks": 2, "num_racks": 1}])
def test_topology_file_with_other_fields_is_refused(content: dict[str, int], tmp_path: Path) -> None:
    write_json(tmp_path / "file", "topology", content)
    with pytest.raises(ValueError, match="file"):
        Topology.load(tmp_path / "file")


@pytest.mark.parametrize(
    ("arrays", "info"),
    [
        ({"layer_ids": np.zeros(1, dtype=np.int64)}, {"num_experts": 4}),
        ({"expert_ids": np.zeros((1, 1, 1), dtype=np.int16)}, {}),
        ({"expert_ids": np.zeros((1, 1, 1), dtype=np.int16), "hidden": np.zeros(1)}, {"num_experts": 4}),
    ],
)
def test_trace_file_with_other_fields_is_refused(arrays: dict[str, np.ndarray], info: dict[str, int], tmp_path: Path) -> None:
    write_arrays(tmp_path / "file", "trace", arrays, info)
    with pytest.raises(ValueError, match="file"):
        RoutingTrace.load(tmp_path / "file")


def test_interrupted_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    Topology(2).save(path)
    with pytest.raises(TypeError):
        write_json(path, "topology", {"num_ranks": object()})
    assert Topology.load(path) == Topology(2) and len(list(tmp_path.iterdir())) == 1


# --- immutability ----------------------------------------------------------------------------------------------------


def read_only_arrays() -> dict[str, np.ndarray]:
    trace, layout, topology = small_trace(), ExpertLayout([[0, 1]], Topology(2)), Topology(2)
    assert trace.expert_weights is not None
    return {
        "trace.expert_ids": trace.expert_ids,
        "trace.expert_weights": trace.expert_weights,
        "trace.layer_ids": trace.layer_ids,
        "trace.request_lengths": trace.request_lengths,
        "layout.expert_to_rank": layout.expert_to_rank,
        "layout.layer_ids": layout.layer_ids,
        "topology.rank_to_node": topology.rank_to_node,
        "topology.cost_matrix": topology.cost_matrix,
    }


@pytest.mark.parametrize("name", list(read_only_arrays()))
def test_arrays_are_read_only(name: str) -> None:
    with pytest.raises(ValueError, match="read-only"):
        read_only_arrays()[name][0] = 1


def test_values_do_not_share_the_callers_arrays() -> None:
    ids, scores, layers, lengths = np.array([[[0, 1]]], np.int16), np.ones((1, 1, 2), np.float32), np.array([3]), np.array([1])
    trace = RoutingTrace(ids, 2, scores, layers, lengths)
    ranks = np.array([[0, 1]])
    layout = ExpertLayout(ranks, Topology(2), layers)
    ids[:], scores[:], layers[:], lengths[:], ranks[:] = 0, 9, 9, 9, 1  # and the caller's arrays stay writable
    assert trace == RoutingTrace([[[0, 1]]], 2, [[[1, 1]]], [3], [1])
    assert layout == ExpertLayout([[0, 1]], Topology(2), [3])


def test_topology_fields_cannot_be_set() -> None:
    with pytest.raises(AttributeError):
        Topology(2).num_ranks = 3  # type: ignore[misc]
