"""Real gloo ranks against plain Transformers: logits, bytes, generation, saving, moving experts, errors on every rank."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, AutoTokenizer

from cap_hf import CAPConfig, CAPMoEModel, ExpertLayout, RoutingRecorder, Topology
from cap_hf.families import family_of
from cap_hf.models import EMBEDDED_MODELS, embedded_model
from cap_hf.parallel.dispatch import Trip
from cap_hf.parallel.groups import ExpertGroup, RankError, init_expert_group
from cap_hf.parallel.loading import default_device_map, experts_module
from cap_hf.recorder import record_texts

LENGTHS = (24, 120)  # 18 and 90 KB of hidden states per rank
TRIP_HOME = Trip.home
HIDDEN, NUM_EXPERTS, NUM_LAYERS = 192, 64, 4  # of both embedded models; both keep 4 MoE layers
TEXTS = [
    "The river rises in the hills north of the town and flows south for twelve miles.",
    "Question: Ann has 3 apples and buys 4 more. How many apples does she have?",
    "def add(a, b):\n    return a + b\n",
    "We study the spectrum of a random matrix ensemble and prove a central limit theorem.",
    "The church was built in 1852.",
]


@lru_cache
def plain(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(embedded_model(name), dtype=torch.float32, experts_implementation="grouped_mm").eval()


@lru_cache
def tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(embedded_model(name))


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest |got - want| / (1 + |want|): at most 1e-5 means "within 1e-5" as ``torch.testing.assert_close`` reads it.

    Plain Transformers in float32 is no nearer to itself: the same rows in another batch differ by 1.1e-5 at logits of 16.
    """
    return float(((got - want).abs() / (1 + want.abs())).max()) if got.numel() else 0.0


def layout_named(kind: str, name: str, num_ranks: int) -> ExpertLayout:
    """Sequential, permuted with equal counts, uneven counts, or all experts on the last rank."""
    layer_ids = family_of(plain(name).config).moe_layer_ids(plain(name).config)
    rng = np.random.default_rng(7)
    rows = {
        "sequential": lambda: np.arange(NUM_EXPERTS) * num_ranks // NUM_EXPERTS,
        "permuted": lambda: rng.permutation(NUM_EXPERTS) % num_ranks,
        "uneven": lambda: rng.choice(num_ranks, NUM_EXPERTS, p=np.arange(1, num_ranks + 1) / sum(range(num_ranks + 1))),
        "one rank": lambda: np.full(NUM_EXPERTS, num_ranks - 1),
    }
    return ExpertLayout(np.stack([rows[kind]() for _ in layer_ids]), Topology(num_ranks), layer_ids)


def on_two_nodes(name: str) -> ExpertLayout:
    """Two nodes of two ranks, eight times as dear to reach as the neighbour."""
    layout = layout_named("permuted", name, 4)
    return ExpertLayout(layout.expert_to_rank, Topology(4, 2, 8.0), layout.layer_ids)


def rows_of(name: str, length: int) -> torch.Tensor:
    """One row of text for each of four ranks, (4, length)."""
    ids = tokenizer(name)(" ".join(TEXTS * 3))["input_ids"]
    return torch.tensor([ids[row : row + length] for row in range(4)])


def load(name: str, layout: ExpertLayout | None, **config: Any) -> CAPMoEModel:
    return CAPMoEModel.from_pretrained(embedded_model(name), cap_config=CAPConfig(layout=layout, **config), dtype=torch.float32)


def own_ids(name: str, rank: int) -> torch.Tensor:
    """Other text on every rank, in other shapes: (rank + 1, 9 + 3 * rank) token ids."""
    ids = tokenizer(name)(" ".join(TEXTS * 3))["input_ids"]
    length = 9 + 3 * rank
    return torch.tensor([ids[5 * row + rank : 5 * row + rank + length] for row in range(rank + 1)])


def expected_traffic(name: str, layout: ExpertLayout, ids: torch.Tensor, rank: int) -> tuple[int, int, int]:
    """Rows this rank sends, bytes of its dispatches, and rows by destination, from the plain model's own routing."""
    with torch.no_grad():
        logits = plain(name)(input_ids=ids, output_router_logits=True).router_logits
    rows = pairs = 0
    for layer, router in enumerate(logits):
        chosen = router.softmax(-1).topk(plain(name).config.num_experts_per_tok).indices.numpy()
        ranks = layout.expert_to_rank[layer][chosen]
        rows += sum(len(set(token.tolist()) - {rank}) for token in ranks)
        pairs += int((ranks != rank).sum())
    return rows, rows * (HIDDEN * 4 + 1) + pairs * (4 + 2), pairs


# ---- functions that run on every rank ----


def rank_logits(name: str, kind: str) -> dict[str, Any]:
    group = init_expert_group()
    layout = layout_named(kind, name, group.size)
    model = load(name, layout)
    ids = own_ids(name, group.rank)
    model.traffic.reset()
    with torch.no_grad():
        got, want = model(input_ids=ids).logits, plain(name)(input_ids=ids).logits
    traffic = vars(model.traffic).copy()
    rows, dispatch_bytes, _ = expected_traffic(name, layout, ids, group.rank)
    others = group.all_gather(torch.tensor([rows])).flatten().tolist()
    return {"difference": gap(got, want), "traffic": traffic, "rows": rows, "dispatch_bytes": dispatch_bytes, "all_rows": others}


def rank_pruned_logits(name: str, threshold: float, expected_file: str) -> float:
    """Several ranks against one process that plays them all: row r of its batch belongs to rank r."""
    group = init_expert_group()
    layout = layout_named("permuted", name, group.size)
    model = load(name, layout, pruning="device", prune_threshold=threshold)
    ids = torch.tensor([tokenizer(name)(" ".join(TEXTS))["input_ids"][row : row + 24] for row in range(group.size)])
    with torch.no_grad():
        return gap(model(input_ids=ids[group.rank : group.rank + 1]).logits[0], torch.load(expected_file)[group.rank])


def rank_pruned_on_two_nodes(name: str, dispatch: str, folder: str) -> list[tuple[float, int]]:
    """Two hosts of two ranks: differences to one process that plays them all, and collectives per layer, for short and long rows."""
    group = init_expert_group()
    model = load(name, on_two_nodes(name), pruning="device", prune_threshold=0.3, dispatch=dispatch)
    found = []
    for length in LENGTHS:
        model.traffic.reset()
        with torch.no_grad():
            got = model(input_ids=rows_of(name, length)[group.rank : group.rank + 1]).logits[0]
        want = torch.load(Path(folder, f"{length}.pt"))[group.rank]
        found.append((gap(got, want), model.traffic.collectives // NUM_LAYERS))
    return found


def rank_shared_experts(name: str) -> dict[str, Any]:
    """How often, and when, a layer's shared experts run."""
    group = init_expert_group()
    model, events = load(name, layout_named("permuted", name, group.size)), []
    layer_id = int(model.layout.layer_ids[0])
    shared = model.model.get_submodule(model.family.shared_experts_path(layer_id))
    shared.up_proj.register_forward_hook(lambda *_: events.append("shared experts"))
    hop, depart = type(model._runtime.hop), type(model._runtime.hop).depart
    departing = mock.patch.object(hop, "depart", lambda *given: (depart(*given), events.append("rows left"))[0])
    returning = mock.patch.object(Trip, "home", lambda *given: (events.append("results"), TRIP_HOME(*given))[1])
    with departing, returning, torch.no_grad():
        ids = own_ids(name, group.rank)
        difference = gap(model(input_ids=ids).logits, plain(name)(input_ids=ids).logits)
        inference, rest = events[:3], events.count("shared experts")
        other = torch.randn(3, HIDDEN)
        alone = gap(shared(other), plain(name).get_submodule(model.family.shared_experts_path(layer_id))(other))
        model(input_ids=ids)
        model.apply_layout(layout_named("uneven", name, group.size))
        again = gap(model(input_ids=ids).logits, plain(name)(input_ids=ids).logits)
    return {"differences": [difference, alone, again], "first": inference, "runs": rest, "all runs": events.count("shared experts")}


def rank_layer_extremes(name: str) -> dict[str, float]:
    """The hook itself with no token on rank 0, with one token, and with every expert on the last rank."""
    group = init_expert_group()
    differences = {}
    for kind in ("permuted", "one rank"):
        model = load(name, layout_named(kind, name, group.size))
        layer_id = model.layout.layer_ids[0]
        for num_tokens in (0, 1, 5):
            generator = torch.Generator().manual_seed(group.rank)
            count = 0 if group.rank == 0 and num_tokens == 5 else num_tokens
            hidden = torch.randn((count, HIDDEN), generator=generator)
            ids = torch.rand((count, NUM_EXPERTS), generator=generator).topk(4).indices
            weights = torch.rand((count, 4), generator=generator)
            with torch.no_grad():
                got = experts_module(model.model, model.family, layer_id)(hidden, ids, weights)
                reference = experts_module(plain(name), model.family, layer_id)
                want = reference(hidden, ids, weights) if count else hidden
            assert got.shape == (count, HIDDEN)
            differences[f"{kind}, {num_tokens}"] = gap(got, want)
    return differences


def rank_gradients(name: str) -> dict[str, float]:
    """Gradients of one layer's experts and inputs under two ranks against the plain layer."""
    group = init_expert_group()
    model = load(name, layout_named("permuted", name, group.size))
    layer_id = model.layout.layer_ids[0]
    reference = experts_module(plain(name), model.family, layer_id)
    generator = torch.Generator().manual_seed(group.rank)
    hidden = torch.randn((6, HIDDEN), generator=generator)
    ids = torch.rand((6, NUM_EXPERTS), generator=generator).topk(4).indices
    weights = torch.rand((6, 4), generator=generator)
    grads = []
    for experts in (experts_module(model.model, model.family, layer_id), reference):
        inputs = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        experts.zero_grad()
        experts(inputs[0], ids, inputs[1]).square().sum().backward()
        grads.append((inputs[0].grad, inputs[1].grad, experts.down_proj.grad.clone()))
    whole = group.all_gather(grads[1][2]).sum(dim=0)  # an expert's gradient gathers every rank's tokens
    own = whole[model.layout.experts_of(0, group.rank)]
    pairs = zip((*grads[0][:2], grads[0][2]), (*grads[1][:2], own), ("hidden", "weights", "experts"), strict=True)
    return {what: float((got - want).abs().max() / want.abs().max()) for got, want, what in pairs}


def rank_generate(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Other batch size, prompt length and stopping point on every rank; returns (plain, ours)."""
    group = init_expert_group()
    prompt = own_ids(name, group.rank)
    options: dict[str, Any] = {"max_new_tokens": 3 + 4 * (group.size - group.rank), "do_sample": False}
    want = plain(name).generate(prompt, **options)
    got = load(name, layout_named("permuted", name, group.size)).generate(prompt, **options)
    return want.tolist(), got.tolist()


def rank_generate_with_eos(name: str) -> tuple[list[list[int]], list[list[int]], int, int]:
    """A token that the rank's first row really produces ends that row early."""
    group = init_expert_group()
    prompt = own_ids(name, 1)
    free = plain(name).generate(prompt, max_new_tokens=8, do_sample=False)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": int(free[0, prompt.shape[1] + 1 + group.rank])}
    model = load(name, layout_named("permuted", name, group.size))
    with RoutingRecorder(model) as recorder:
        got = model.generate(prompt, **options)
    want = plain(name).generate(prompt, **options)
    new = want[:, prompt.shape[1] :]
    fed = 0  # tokens that go in again: all but the last, and nothing after an end-of-text
    for row in new.tolist():
        end = row.index(options["eos_token_id"]) + 1 if options["eos_token_id"] in row else len(row)
        fed += min(end, len(row) - 1)
    return want.tolist(), got.tolist(), recorder.num_tokens, prompt.numel() + fed


def rank_save(name: str, folder: str) -> None:
    group = init_expert_group()
    load(name, layout_named("uneven", name, group.size)).save_pretrained(folder)


def rank_move(name: str) -> dict[str, Any]:
    group = init_expert_group()
    old, new = (layout_named(kind, name, group.size) for kind in ("sequential", "uneven"))
    model, ids = load(name, old), own_ids(name, group.rank)
    model.traffic.reset()
    model.apply_layout(new)
    moved_bytes = model.traffic.bytes_sent
    with torch.no_grad():
        difference = gap(model(input_ids=ids).logits, plain(name)(input_ids=ids).logits)
    leaving = int(((old.expert_to_rank == group.rank) & (new.expert_to_rank != group.rank)).sum())
    expert_bytes = (2 * 48 * HIDDEN + HIDDEN * 48) * 4
    own = sum(len(new.experts_of(layer, group.rank)) for layer in range(NUM_LAYERS))
    held = sum(len(experts_module(model.model, model.family, layer_id).down_proj) for layer_id in new.layer_ids)
    return {"difference": difference, "moved": moved_bytes, "expected": leaving * expert_bytes, "own": own, "held": held}


def rank_record(name: str, side: str) -> dict[str, Any]:
    """Padded batches of all texts; returns the gathered trace and the plain router's choices for the unpadded texts."""
    group = init_expert_group()
    model = load(name, layout_named("permuted", name, group.size))
    tok = AutoTokenizer.from_pretrained(embedded_model(name), padding_side=side)
    mine = TEXTS[group.rank :: group.size][:2]
    with RoutingRecorder(model) as recorder, torch.no_grad():
        batch = tok(mine, return_tensors="pt", padding=True, return_token_type_ids=False)
        model(**batch)
    trace = recorder.trace()
    want = []
    with torch.no_grad():
        for text in mine:
            logits = plain(name)(**tok(text, return_tensors="pt", return_token_type_ids=False), output_router_logits=True).router_logits
            want.append(torch.stack([r.softmax(-1).topk(trace.top_k).indices.sort().values for r in logits]).numpy())
    return {"ids": trace.expert_ids, "lengths": trace.request_lengths.tolist(), "weights": trace.expert_weights, "want": want}


def rank_record_few_texts(name: str) -> list[int]:
    model = load(name, None)
    trace = record_texts(model, tokenizer(name), TEXTS[:1], num_tokens=7, progress=False)
    return trace.request_lengths.tolist()


def in_grouped_mm(event: Any) -> bool:
    """Whether a profiled operation runs inside the grouped matrix product, whose CPU version alone reads its offsets."""
    return event is not None and ("grouped_mm" in event.name or in_grouped_mm(event.cpu_parent))


def rank_host_reads(name: str, dispatch: str) -> tuple[int, int]:
    """Of one forward where sizes cannot be bounded (as on NCCL): lists of sizes that the host reads, and whatever else it reads."""
    model, sizes, tolist = load(name, on_two_nodes(name), dispatch=dispatch), [], torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        sizes.append(tensor.shape)
        return tolist(tensor)

    with (
        mock.patch.object(ExpertGroup, "takes_bounds", lambda *_: False),
        mock.patch.object(torch.Tensor, "tolist", counted),
        mock.patch.object(type(model._runtime), "agree", lambda *_: 1),  # once per forward, not per layer
        profile(activities=[ProfilerActivity.CPU]) as seen,
        torch.no_grad(),
    ):
        model(input_ids=own_ids(name, init_expert_group().rank))
    waiting = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim")
    return len(sizes), sum(event.name in waiting and not in_grouped_mm(event) for event in seen.events())


def rank_device_map(name: str) -> tuple[dict[str, Any], float]:
    """What a rank of a machine with GPUs would ask for, and the difference that a map makes to the logits."""
    group = init_expert_group()
    with mock.patch.object(torch.cuda, "is_available", lambda: True), mock.patch.object(torch.cuda, "current_device", lambda: group.rank):
        asked = default_device_map(group)
    with torch.no_grad():
        mapped = CAPMoEModel.from_pretrained(embedded_model(name), dtype=torch.float32, device_map={"": "cpu"})
        want, got = (model(input_ids=own_ids(name, group.rank)).logits for model in (load(name, None), mapped))
    return asked, gap(got, want)


def rank_error(name: str, what: str, folder: str) -> str:
    """Provoke one kind of bad input; every rank must raise, and the group must still work afterwards."""
    group = init_expert_group()
    good = layout_named("sequential", name, group.size)
    path = Path(folder, f"layout_{group.rank}.json")
    good.save(path)
    calls = {
        "ranks": lambda: load(name, ExpertLayout(good.expert_to_rank, Topology(group.size + 1), good.layer_ids)),
        "layers": lambda: load(name, ExpertLayout(good.expert_to_rank[:3], good.topology, good.layer_ids[:3])),
        "experts": lambda: load(name, ExpertLayout(good.expert_to_rank[:, :60], good.topology, good.layer_ids)),
        "truncated on rank 1": lambda: load(name, path),  # type: ignore[arg-type]
        "apply": lambda: load(name, good).apply_layout(ExpertLayout(good.expert_to_rank[:, :60], good.topology, good.layer_ids)),
        "no tokens": lambda: record_texts(load(name, None), tokenizer(name), ["", ""]),
    }
    if what == "truncated on rank 1" and group.rank == 1:
        path.write_text(path.read_text()[:40])
    try:
        calls[what]()
    except (ValueError, RankError) as error:
        assert group.all_gather(torch.tensor([group.rank])).flatten().tolist() == list(range(group.size))
        return f"{type(error).__name__}: {error}"
    return "no error"


# ---- tests ----


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
@pytest.mark.parametrize("kind", ["sequential", "permuted", "uneven", "one rank"])
@pytest.mark.parametrize("size", [2, 4])
def test_logits_collectives_and_bytes(rank_pool: Any, size: int, kind: str, name: str) -> None:
    for rank, result in enumerate(rank_pool(size).run(rank_logits, name, kind)):
        assert result["difference"] <= 1e-5
        assert result["traffic"]["collectives"] == 2 * NUM_LAYERS
        assert result["traffic"]["rows_sent"] == result["rows"]
        returned = (sum(result["all_rows"]) - result["rows"]) if size == 2 else None
        sizes = NUM_LAYERS * (size - 1) * 2 * 4
        if returned is not None:  # with two ranks, the rows to return are those the other sent
            assert result["traffic"]["bytes_sent"] == result["dispatch_bytes"] + sizes + returned * HIDDEN * 4, rank


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_of_all_ranks_together(rank_pool: Any, size: int) -> None:
    results = rank_pool(size).run(rank_logits, EMBEDDED_MODELS[0], "permuted")
    returned = sum(result["rows"] for result in results) * HIDDEN * 4  # every row that was sent comes back once
    sizes = size * NUM_LAYERS * (size - 1) * 2 * 4
    assert sum(r["traffic"]["bytes_sent"] for r in results) == sum(r["dispatch_bytes"] for r in results) + returned + sizes


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_pruned_logits_equal_one_process_that_plays_all_ranks(rank_pool: Any, name: str, tmp_path: Path) -> None:
    size = 2
    layout = layout_named("permuted", name, size)
    virtual = load(name, layout, pruning="device", prune_threshold=0.3)
    ids = torch.tensor([tokenizer(name)(" ".join(TEXTS))["input_ids"][row : row + 24] for row in range(size)])
    with torch.no_grad():
        pruned = virtual(input_ids=ids).logits
        assert (pruned - plain(name)(input_ids=ids).logits).abs().max() > 1e-3  # something was pruned
    torch.save(pruned, tmp_path / "expected.pt")
    assert max(rank_pool(size).run(rank_pruned_logits, name, 0.3, str(tmp_path / "expected.pt"))) <= 1e-5


@pytest.mark.parametrize(("dispatch", "collectives"), [("auto", [2, 4]), ("flat", [2, 2]), ("hierarchical", [4, 4])])
def test_pruning_on_two_nodes_depends_on_the_layout_alone(rank_pool: Any, dispatch: str, collectives: list[int], tmp_path: Path) -> None:
    """ "auto" sends short forwards straight to their ranks and long ones through the nodes, with the same pruning."""
    name = EMBEDDED_MODELS[0]
    virtual = load(name, on_two_nodes(name), pruning="device", prune_threshold=0.3, dispatch=dispatch)
    with torch.no_grad():
        for length in LENGTHS:
            torch.save(virtual(input_ids=rows_of(name, length)).logits, tmp_path / f"{length}.pt")
    for found in rank_pool(4).run(rank_pruned_on_two_nodes, name, dispatch, str(tmp_path)):
        assert max(difference for difference, _ in found) <= 1e-5
        assert [count for _, count in found] == collectives


def test_shared_experts_run_once_and_while_rows_travel(rank_pool: Any) -> None:
    for result in rank_pool(2).run(rank_shared_experts, "tiny_deepseek_v2"):
        assert max(result["differences"]) <= 1e-5
        assert result["first"] == ["rows left", "shared experts", "results"]
        assert (result["runs"], result["all runs"]) == (1, 4)  # a call from elsewhere computes what it is given


@pytest.mark.parametrize("dispatch", ["flat", "hierarchical"])
@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_the_host_waits_for_a_device_once_per_layer(rank_pool: Any, name: str, dispatch: str) -> None:
    """Whatever else asked a device for a value would wait for everything queued on it."""
    assert rank_pool(4).run(rank_host_reads, name, dispatch) == [(NUM_LAYERS, 0)] * 4


def test_each_rank_loads_to_its_own_device(rank_pool: Any) -> None:
    assert rank_pool(2).run(rank_device_map, EMBEDDED_MODELS[0]) == [({"device_map": {"": rank}}, 0.0) for rank in range(2)]
    assert default_device_map(init_expert_group()) == {}


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_no_token_one_token_and_all_to_one_rank(rank_pool: Any, name: str) -> None:
    for differences in rank_pool(2).run(rank_layer_extremes, name):
        assert len(differences) == 6 and max(differences.values()) <= 1e-5


def test_gradients_equal_the_plain_layer(rank_pool: Any) -> None:
    for errors in rank_pool(2).run(rank_gradients, EMBEDDED_MODELS[0]):
        assert max(errors.values()) <= 1e-5


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
@pytest.mark.parametrize("size", [2, 4])
def test_generate_with_other_shapes_and_stops_on_every_rank(rank_pool: Any, size: int, name: str) -> None:
    results = rank_pool(size).run(rank_generate, name)
    assert [got for _, got in results] == [want for want, _ in results]
    assert len({len(want[0]) for want, _ in results}) == size  # the ranks really stop at different lengths


def test_generate_records_no_token_of_a_finished_row(rank_pool: Any) -> None:
    for want, got, recorded, expected in rank_pool(2).run(rank_generate_with_eos, EMBEDDED_MODELS[0]):
        assert got == want
        assert recorded == expected


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_saved_model_is_a_plain_one_bit_for_bit(rank_pool: Any, name: str, tmp_path: Path) -> None:
    rank_pool(2).run(rank_save, name, str(tmp_path))
    assert "cap" not in json.loads((tmp_path / "config.json").read_text()).get("experts_implementation", "")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    original = plain(name).state_dict()
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[key], original[key]) for key in original)


def test_moving_experts_sends_only_those_that_change_rank(rank_pool: Any) -> None:
    for result in rank_pool(4).run(rank_move, EMBEDDED_MODELS[0]):
        assert result["difference"] <= 1e-5
        assert result["moved"] == result["expected"] > 0
        assert result["held"] == result["own"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_recorder_sees_the_routers_choices_and_no_padding(rank_pool: Any, name: str, side: str) -> None:
    results = rank_pool(2).run(rank_record, name, side)
    want = np.concatenate([ids for result in results for ids in result["want"]], axis=1)
    lengths = [ids.shape[1] for result in results for ids in result["want"]]
    for result in results:  # every rank gets the same, gathered trace
        assert result["lengths"] == lengths
        np.testing.assert_array_equal(np.sort(result["ids"], axis=2), want)
        assert (result["weights"] > 0).all()


def test_ranks_without_texts_keep_the_others_company(rank_pool: Any) -> None:
    assert rank_pool(4).run(rank_record_few_texts, EMBEDDED_MODELS[0]) == [[7]] * 4


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("ranks", "layout is for 3 ranks, 2 processes run"),
        ("layers", "layout is for 3 MoE layers"),
        ("experts", "places 60 experts per layer, the model has 64"),
        ("apply", "places 60 experts per layer, the model has 64"),
        ("no tokens", "2 texts yield 0 tokens"),
    ],
)
def test_bad_input_ends_in_the_same_error_on_every_rank(rank_pool: Any, what: str, words: str, tmp_path: Path) -> None:
    messages = rank_pool(2).run(rank_error, EMBEDDED_MODELS[0], what, str(tmp_path))
    assert len(set(messages)) == 1 and messages[0].startswith("ValueError") and words in messages[0]


def test_a_file_broken_for_one_rank_stops_all_of_them(rank_pool: Any, tmp_path: Path) -> None:
    first, second = rank_pool(2).run(rank_error, EMBEDDED_MODELS[0], "truncated on rank 1", str(tmp_path))
    assert second.startswith("ValueError") and "truncated or not JSON" in second
    assert first.startswith("RankError: rank 1 of 2 failed") and "truncated or not JSON" in first
