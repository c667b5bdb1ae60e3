"""Ranks that do different things at the same time: nobody waits for ever, and nobody changes anybody's results."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RanksFailed
from test_parallel import gap, layout_named, load, own_ids, plain
from transformers import AutoTokenizer, DynamicCache, StoppingCriteria, StoppingCriteriaList

from cap_hf import CAPConfig, CAPMoEModel, PlacementSpectrum, Placer, RoutingRecorder, Topology
from cap_hf.models import EMBEDDED_MODELS, embedded_model
from cap_hf.parallel.groups import RankError, init_expert_group
from cap_hf.parallel.loading import experts_module
from cap_hf.profiler import evaluate_held_out
from cap_hf.recorder import record_texts

NAME = EMBEDDED_MODELS[0]


class Failing(StoppingCriteria):
    """Raises at its second call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("the user's own criterion failed")
        return torch.zeros(len(input_ids), dtype=torch.bool)


def options_for(case: str, rank: int, model: Any) -> dict[str, Any]:
    """Other stopping points on every rank, under one feature of ``generate``."""
    base: dict[str, Any] = {"max_new_tokens": 3 + 5 * rank, "do_sample": False, "eos_token_id": None}
    features: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": dict,
        "guidance": lambda: {"guidance_scale": 1.5},
        "static cache": lambda: {"cache_implementation": "static"},
        "chunked prefill": lambda: {"prefill_chunk_size": 3, "cache": DynamicCache(config=model.config)},
        "beams": lambda: {"num_beams": 2},
        "no cache": lambda: {"use_cache": False},
        "early exit": lambda: {"assistant_early_exit": 2},
    }
    return base | features[case]()


def rank_generate(case: str, name: str) -> tuple[list[list[int]], list[list[int]]]:
    rank = init_expert_group().rank
    model = load(name, layout_named("permuted", name, init_expert_group().size))
    prompt = own_ids(name, rank)[: 1 if case == "early exit" else None]
    want = plain(name).generate(prompt, **options_for(case, rank, plain(name)))
    if case == "no cache":  # which cannot be recorded
        return want.tolist(), model.generate(prompt, **options_for(case, rank, model)).tolist()
    with RoutingRecorder(model) as recorder:
        got = model.generate(prompt, **options_for(case, rank, model)).tolist()
    assert recorder.trace().num_tokens >= recorder.num_tokens > 0  # consistent in all layers, whatever forwards there were
    return want.tolist(), got


def rank_continue() -> dict[str, Any]:
    """The cache that a rank returns is as long as its own sequences, and a second turn continues from it."""
    rank = init_expert_group().rank
    results = []
    for model in (plain(NAME), load(NAME, layout_named("permuted", NAME, 2))):
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
        first = model.generate(own_ids(NAME, rank), max_new_tokens=3 if rank == 0 else 9, return_dict_in_generate=True, **options)
        held = first.cache.get_seq_length()
        turn = torch.cat([first.sequences, own_ids(NAME, rank)[:, :4]], dim=1)
        results.append((held, model.generate(turn, cache=first.cache, max_new_tokens=4, **options).tolist()))
    return {"want": results[0], "got": results[1]}


def rank_fail(case: str) -> tuple[str, bool]:
    """Rank 1 fails in one way; rank 0 must finish with the right result, and the group must work afterwards."""
    group = init_expert_group()
    model, prompt = load(NAME, layout_named("permuted", NAME, 2)), own_ids(NAME, group.rank)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    bad: dict[str, dict[str, Any]] = {
        "unknown argument": {"no_such_argument": 1},
        "prompt too long": {"max_new_tokens": None, "max_length": 4},
        "own criterion": {"stopping_criteria": StoppingCriteriaList([Failing()])},
        "token out of range": {},
    }
    message, right = "no error", True
    try:
        if group.rank == 1 and case == "token out of range":
            prompt = torch.full_like(prompt, 99_999)
        got = model.generate(prompt, **(options | bad[case] if group.rank == 1 else options))
        right = torch.equal(got, plain(NAME).generate(prompt, **options))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    with torch.no_grad():
        ids = own_ids(NAME, group.rank)
        right = right and gap(model(input_ids=ids).logits, plain(NAME)(input_ids=ids).logits) <= 1e-5
    return message, right


def rank_broken_experts() -> None:
    from cap_hf.parallel import experts

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("the expert kernel failed")

    model = load(NAME, layout_named("permuted", NAME, 2))
    if init_expert_group().rank == 1:
        experts._run_local_experts = broken
    model.generate(own_ids(NAME, 0), max_new_tokens=3, do_sample=False)


def rank_refused_inside_joined() -> list[str]:
    model = load(NAME, None)
    messages = []
    for call in (lambda: model.apply_layout(layout_named("permuted", NAME, 2)), lambda: model.save_pretrained("/no/such/folder")):
        try:
            with model.joined():
                call()
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def rank_goes_on_after_a_failed_forward() -> list[Any]:
    """Rank 1 catches the failure of its second forward, in the middle of the model, and goes on inside joined."""
    group = init_expert_group()
    model, ids, results = load(NAME, layout_named("permuted", NAME, 2)), own_ids(NAME, group.rank), []

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    with model.joined(), torch.no_grad():
        for step in range(3):
            handle = model.model.model.layers[2].register_forward_pre_hook(fail) if (group.rank, step) == (1, 1) else None
            try:
                results.append(gap(model(input_ids=ids).logits, plain(NAME)(input_ids=ids).logits) <= 1e-5)
            except RuntimeError as error:
                results.append(str(error))
            if handle:
                handle.remove()
    return results


def rank_joins_after_checkpointed_training() -> list[float]:
    """Recomputation may stop between dispatch and combine; what follows must not take that for a failure."""
    group = init_expert_group()
    model, ids = load(NAME, layout_named("permuted", NAME, 2)), own_ids(NAME, group.rank)
    model.model.activation_checkpointing_enable()
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.eval()
    with model.joined(), torch.no_grad():
        return [gap(model(input_ids=ids).logits, plain(NAME)(input_ids=ids).logits) for _ in range(group.rank)]


def rank_assistant() -> str:
    model = load(NAME, None)
    try:
        model.generate(own_ids(NAME, 0), assistant_model=load(NAME, None), max_new_tokens=2)
    except ValueError as error:
        return str(error)
    return "no error"


def rank_interrupted(where: str) -> list[Any]:
    """Rank 1 is interrupted, or fails, in one place; rank 0 must finish with the right tokens."""
    group = init_expert_group()
    model, prompt = load(NAME, layout_named("permuted", NAME, 2)), own_ids(NAME, group.rank)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if group.rank == 1 and where == "layer":
        model.model.model.layers[2].register_forward_pre_hook(interrupt)
    if group.rank == 1 and where == "before the exchange":
        experts = experts_module(model.model, model.family, 1)
        experts.cap_expert_to_rank = experts.cap_expert_to_rank[:1]
    if group.rank == 1 and where == "vote":
        threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        if where == "vote":
            with model.joined():
                time.sleep(1.5 * (1 - group.rank))
                return [gap(model(input_ids=prompt).logits, plain(NAME)(input_ids=prompt).logits) <= 1e-5]
        return [torch.equal(model.generate(prompt, **options), plain(NAME).generate(prompt, **options))]
    except (KeyboardInterrupt, IndexError) as error:
        return [type(error).__name__]


def rank_misused() -> list[str]:
    """A second model inside joined, a part of the model, a gradient."""
    model, other, ids = load(NAME, layout_named("permuted", NAME, 2)), load(NAME, layout_named("uneven", NAME, 2)), own_ids(NAME, 0)
    calls: list[Callable[[], Any]] = [
        lambda: other.generate(ids, max_new_tokens=2),
        lambda: model.model.model(input_ids=ids),
        lambda: model(input_ids=ids).logits.sum().backward(),
    ]
    messages = []
    for call in calls:
        try:
            with model.joined():
                call()
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    return messages


def rank_exit_in_a_stage() -> str:
    group = init_expert_group()
    try:
        with group.all_or_none():
            if group.rank == 1:
                raise SystemExit("é" * 3000)  # longer than what is told, and cut inside a character
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def rank_learns_from_the_first() -> list[Any]:
    """Only rank 0 makes the value; where it fails, nobody waits."""
    group = init_expert_group()
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(group.rank)
        return {"rank": group.rank, "text": "é" * 5000, "none": None}

    shared = group.from_first(make)
    try:
        group.from_first(lambda: 1 / 0)
    except (ZeroDivisionError, RankError) as error:
        return [made, shared == {"rank": 0, "text": "é" * 5000, "none": None}, type(error).__name__]
    return ["no error"]


def rank_gathers_values_of_any_length() -> list[Any]:
    group = init_expert_group()
    return group.gather_json(["é" * group.rank, {"rank": group.rank}])


def test_gathered_values_come_in_rank_order(rank_pool: Any) -> None:
    assert rank_pool(4).run(rank_gathers_values_of_any_length) == [[["é" * rank, {"rank": rank}] for rank in range(4)]] * 4


def rank_fits_in_a_limited_time() -> tuple[list[str], bool]:
    """A search that runs out of time ends differently on every rank, so that they must share the first one's."""
    group = init_expert_group()
    model = load(NAME, layout_named("permuted", NAME, group.size))
    tokenizer = AutoTokenizer.from_pretrained(embedded_model(NAME))
    searched = []
    spectrum_of = Placer.spectrum

    def spectrum(self: Placer, *arguments: Any) -> PlacementSpectrum:
        searched.append(group.rank)
        return spectrum_of(self, *arguments)

    Placer.spectrum = spectrum  # type: ignore[method-assign]
    try:
        found = Placer(Topology(group.size), time_limit_s=0.05).fit(["The river rises in the hills. " * 5], model, tokenizer, 40, 3)
    finally:
        Placer.spectrum = spectrum_of  # type: ignore[method-assign]
    return [layout.fingerprint for layout in found], bool(searched)


def rank_uneven_loops() -> list[float]:
    """Rank r runs r forwards, rank 0 none."""
    group = init_expert_group()
    model = load(NAME, layout_named("uneven", NAME, group.size))
    differences = []
    with model.joined(), torch.no_grad():
        for step in range(group.rank):
            ids = own_ids(NAME, group.rank)[:, : 5 + step]
            differences.append(gap(model(input_ids=ids).logits, plain(NAME)(input_ids=ids).logits))
    return differences


def rank_record_lengths(beams: int) -> list[int]:
    rank = init_expert_group().rank
    model = load(NAME, layout_named("permuted", NAME, 2))
    with RoutingRecorder(model) as recorder:
        model.generate(own_ids(NAME, 0)[:, :5], max_new_tokens=3 if rank == 0 else 8, do_sample=False, eos_token_id=None, num_beams=beams)
    return recorder.trace().request_lengths.tolist()


def rank_other_layouts(where: str) -> str:
    rank = init_expert_group().rank
    layout = layout_named("permuted" if rank == 0 else "uneven", NAME, 2)
    try:
        if where == "load":
            load(NAME, layout)
        elif where == "wrap":
            CAPMoEModel(plain.__wrapped__(NAME), CAPConfig(layout=layout))
        else:
            load(NAME, None).apply_layout(layout)
    except ValueError as error:
        return str(error)
    return "no error"


def rank_uneven_batches(counts: list[int]) -> tuple[float, int, float]:
    """Held-out perplexity and tokens of ``counts[rank]`` batches, and what plain Transformers says of all ranks' batches."""
    rank = init_expert_group().rank
    shares = [[own_ids(NAME, each)[:, step:] for step in range(count)] for each, count in enumerate(counts)]
    result = evaluate_held_out(load(NAME, layout_named("uneven", NAME, len(counts))), shares[rank], timed_batches=1, progress=False)
    loss = predicted = 0.0
    with torch.no_grad():
        for ids in [batch for share in shares for batch in share]:
            count = ids[:, 1:].numel()
            loss, predicted = loss + float(plain(NAME)(input_ids=ids, labels=ids).loss) * count, predicted + count
    return result.perplexity, result.trace.num_tokens, math.exp(loss / predicted)


def rank_no_batches() -> str:
    try:
        evaluate_held_out(load(NAME, None), [], progress=False)
    except ValueError as error:
        return str(error)
    return "no error"


def rank_texts_in_uneven_shares(num_texts: int) -> tuple[list[int], list[int], bool]:
    """Lengths recorded, lengths expected by rank, and whether the ids are those of one process."""
    group = init_expert_group()
    tokenizer = AutoTokenizer.from_pretrained(embedded_model(NAME))
    texts = [f"Text number {number} has some words. " * (1 + number) for number in range(num_texts)]
    trace = record_texts(load(NAME, layout_named("permuted", NAME, group.size)), tokenizer, texts, batch_size=2, progress=False)
    batches = [texts[start : start + 2] for start in range(0, num_texts, 2)]
    dealt = [text for rank in range(group.size) for batch in batches[rank :: group.size] for text in batch]
    lengths = [len(tokenizer(text)["input_ids"]) for text in dealt]
    with torch.no_grad():
        ids = torch.tensor([tokenizer(dealt[0])["input_ids"]])
        want = plain(NAME)(input_ids=ids, output_router_logits=True).router_logits[0].softmax(-1).topk(trace.top_k).indices
    return trace.request_lengths.tolist(), lengths, np.array_equal(np.sort(trace.expert_ids[0, : lengths[0]]), np.sort(want.numpy()))


@pytest.mark.parametrize("case", ["plain", "guidance", "static cache", "chunked prefill", "beams", "no cache", "early exit"])
def test_generate_features_with_other_stops(rank_pool: Any, case: str) -> None:
    results = rank_pool(2).run(rank_generate, case, NAME)
    assert [got for _, got in results] == [want for want, _ in results]


def test_a_second_turn_continues_from_the_returned_cache(rank_pool: Any) -> None:
    for result in rank_pool(2).run(rank_continue):
        assert result["got"] == result["want"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown argument", "no_such_argument"),
        ("prompt too long", "max_length"),
        ("own criterion", "the user's own criterion failed"),
        ("token out of range", "IndexError"),
    ],
)
def test_a_failing_rank_keeps_nobody_waiting(rank_pool: Any, case: str, words: str) -> None:
    (first, first_right), (second, second_right) = rank_pool(2).run(rank_fail, case)
    assert first == "no error" and words in second
    assert first_right and second_right


def test_a_failure_inside_an_exchange_surfaces_at_once(rank_pool: Any) -> None:
    """Its experts' results are missing for everybody, so nobody may go on; the pool plays the launcher that ends the others."""
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="the expert kernel failed"):
        rank_pool(2).run(rank_broken_experts)
    assert time.monotonic() - started < 30
    assert rank_pool(2).run(rank_uneven_loops)[0] == []  # new ranks


def test_steps_that_need_all_ranks_are_refused_inside_joined(rank_pool: Any) -> None:
    for messages in rank_pool(2).run(rank_refused_inside_joined):
        assert [message.split()[0] for message in messages] == ["apply_layout", "save_pretrained"]


@pytest.mark.parametrize(
    ("where", "error"), [("layer", "KeyboardInterrupt"), ("before the exchange", "IndexError"), ("vote", "KeyboardInterrupt")]
)
def test_an_interrupt_keeps_nobody_waiting(rank_pool: Any, where: str, error: str) -> None:
    assert rank_pool(2).run(rank_interrupted, where) == [[True], [error]]


def test_misuse_inside_joined_is_refused(rank_pool: Any) -> None:
    for messages in rank_pool(2).run(rank_misused):
        assert ["another CAPMoEModel" in messages[0], "a part of the model" in messages[1], "grad" in messages[2]] == [True] * 3


def test_a_rank_may_catch_a_failure_and_go_on(rank_pool: Any) -> None:
    assert rank_pool(2).run(rank_goes_on_after_a_failed_forward) == [[True] * 3, [True, "in the middle", True]]


def test_joining_after_checkpointed_training(rank_pool: Any) -> None:
    first, second = rank_pool(2).run(rank_joins_after_checkpointed_training)
    assert first == [] and len(second) == 1 and second[0] <= 1e-5


def test_a_shared_assistant_is_refused(rank_pool: Any) -> None:
    assert all("the assistant is a CAPMoEModel too" in message for message in rank_pool(2).run(rank_assistant))


def test_an_exit_on_one_rank_ends_the_stage_on_all(rank_pool: Any) -> None:
    first, second = rank_pool(2).run(rank_exit_in_a_stage)
    assert first.startswith("RankError: rank 1 of 2 failed, this rank (0) stops with it. SystemExit: éé")
    assert second.startswith("SystemExit: éé")


def test_what_the_first_rank_makes_is_on_every_rank(rank_pool: Any) -> None:
    assert rank_pool(2).run(rank_learns_from_the_first) == [[[0], True, "ZeroDivisionError"], [[], True, "RankError"]]


def test_fit_searches_on_one_rank_for_all(rank_pool: Any) -> None:
    (first, searched), (second, searched_too) = rank_pool(2).run(rank_fits_in_a_limited_time)
    assert len(first) == 3 and first == second
    assert (searched, searched_too) == (True, False)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_may_run_different_numbers_of_forwards(rank_pool: Any, size: int) -> None:
    for rank, differences in enumerate(rank_pool(size).run(rank_uneven_loops)):
        assert len(differences) == rank and all(difference <= 1e-5 for difference in differences)


@pytest.mark.parametrize(("beams", "lengths"), [(1, [7, 12]), (2, [7, 7, 12, 12])])
def test_a_trace_does_not_depend_on_the_other_rank(rank_pool: Any, beams: int, lengths: list[int]) -> None:
    assert rank_pool(2).run(rank_record_lengths, beams) == [lengths] * 2


@pytest.mark.parametrize("where", ["load", "wrap", "apply"])
def test_layouts_that_differ_between_ranks_are_refused_on_all(rank_pool: Any, where: str) -> None:
    messages = rank_pool(2).run(rank_other_layouts, where)
    assert len(set(messages)) == 1 and "the layout's fingerprint differs between ranks (rank 0: " in messages[0]


@pytest.mark.parametrize("counts", [[1, 2], [0, 2], [2, 0, 0, 1]])
def test_ranks_may_have_different_numbers_of_batches(rank_pool: Any, counts: list[int]) -> None:
    tokens = sum((rank + 1) * (9 + 3 * rank - step) for rank, count in enumerate(counts) for step in range(count))
    for perplexity, recorded, want in rank_pool(len(counts)).run(rank_uneven_batches, counts):
        assert perplexity == pytest.approx(want, rel=1e-5)
        assert recorded == tokens


def test_no_batch_on_any_rank_is_refused_on_all(rank_pool: Any) -> None:
    assert rank_pool(2).run(rank_no_batches) == ["no rank has a batch; give 1 or more to at least one of them"] * 2


@pytest.mark.parametrize("num_texts", [1, 3, 7])
def test_texts_are_recorded_once_whatever_their_number(rank_pool: Any, num_texts: int) -> None:
    for lengths, want, same_ids in rank_pool(2).run(rank_texts_in_uneven_shares, num_texts):
        assert lengths == want and same_ids
