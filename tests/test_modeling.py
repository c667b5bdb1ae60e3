"""One process: the wrapped model against plain Transformers, pruning, virtual ranks, loading and refusals."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV2Config,
    DeepseekV3Config,
    GenerationConfig,
    LlamaConfig,
    Qwen3MoeConfig,
)

from cap_hf import CAPConfig, CAPMoEModel, ExpertLayout, Placer, RoutingRecorder, Topology
from cap_hf.families import FAMILIES, family_of
from cap_hf.models import EMBEDDED_MODELS, embedded_model
from cap_hf.parallel.loading import own_shard_class
from cap_hf.recorder import record_texts

TEXT = "The river rises in the hills and flows south. def add(a, b): return a + b. Question: how many apples are left?"
SIZES: dict[str, Any] = dict(
    vocab_size=97, hidden_size=32, num_attention_heads=4, moe_intermediate_size=16, intermediate_size=48, num_experts_per_tok=3
)
MLA: dict[str, Any] = dict(kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_shared_experts=1)
CONFIGS = {  # dense layers in between: layer 1 by mlp_only_layers, layers 0, 2 by decoder_sparse_step, layer 0 by first_k_dense_replace
    "qwen3_moe, dense layer": (Qwen3MoeConfig(
            **SIZES, num_hidden_layers=3, num_key_value_heads=2, head_dim=8, num_experts=8, mlp_only_layers=[1],
        ), [0, 2]),
    "qwen3_moe, every second": (
        Qwen3MoeConfig(**SIZES, num_hidden_layers=4, num_key_value_heads=2, head_dim=8, num_experts=8, decoder_sparse_step=2),
        [1, 3],
    ),
    "deepseek_v2, groups": (
        DeepseekV2Config(
            **SIZES, **MLA, num_hidden_layers=3, n_routed_experts=8, first_k_dense_replace=1, topk_method="group_limited_greedy", n_group=4,
            topk_group=2, routed_scaling_factor=2.0,
        ),
        [1, 2],
    ),
    "deepseek_v3": (
        DeepseekV3Config(
            **SIZES, **MLA, num_hidden_layers=3, n_routed_experts=8, first_k_dense_replace=1, n_group=2, topk_group=1, norm_topk_prob=True,
            routed_scaling_factor=2.5, num_key_value_heads=4,
        ),
        [1, 2],
    ),
}  # fmt: skip


def plain(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(embedded_model(name), dtype=torch.float32, experts_implementation="grouped_mm").eval()


def load(name: str, **config: Any) -> CAPMoEModel:
    return CAPMoEModel.from_pretrained(embedded_model(name), cap_config=CAPConfig(**config), dtype=torch.float32)


def batch(name: str, rows: int = 4) -> torch.Tensor:
    ids = AutoTokenizer.from_pretrained(embedded_model(name))(TEXT)["input_ids"]
    return torch.tensor([ids[row : row + 20] for row in range(rows)])


def interleaved(name: str, num_ranks: int) -> ExpertLayout:
    layer_ids = family_of(plain(name).config).moe_layer_ids(plain(name).config)
    return ExpertLayout(np.tile(np.arange(64) % num_ranks, (len(layer_ids), 1)), Topology(num_ranks), layer_ids)


def tiny(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="grouped_mm").eval()
    for parameter in model.parameters():  # the default start leaves routers nearly tied
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("case", CONFIGS)
def test_families_find_their_layers_and_equal_transformers(case: str, tmp_path: Path) -> None:
    config, layer_ids = CONFIGS[case]
    assert family_of(config).moe_layer_ids(config) == layer_ids
    reference = tiny(config)
    reference.save_pretrained(tmp_path)
    model = CAPMoEModel.from_pretrained(tmp_path, cap_config=CAPConfig())
    ids = torch.arange(24).reshape(2, 12) * 3 % 97
    with torch.no_grad():
        want = reference(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, want)
        model.apply_layout(ExpertLayout(np.tile(np.arange(8) % 3, (len(layer_ids), 1)), Topology(3), layer_ids))
        model.set_pruning("device", 1e-9)  # takes the path of rows and sums, but nothing can be dropped
        torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
@pytest.mark.parametrize("rule", ["expert", "device"])
def test_threshold_zero_is_bit_identical(name: str, rule: str) -> None:
    with torch.no_grad():
        want = load(name)(input_ids=batch(name)).logits
        got = load(name, layout=interleaved(name, 4), pruning=rule, prune_threshold=0.0)(input_ids=batch(name)).logits
    assert torch.equal(got, want)
    assert torch.equal(plain(name)(input_ids=batch(name)).logits, want)


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
@pytest.mark.parametrize("rule", ["expert", "device"])
def test_threshold_just_below_one_keeps_the_least_possible(name: str, rule: str) -> None:
    model = load(name, layout=interleaved(name, 4), pruning=rule, prune_threshold=0.999999)
    with RoutingRecorder(model) as recorder, torch.no_grad():
        logits = model(input_ids=batch(name)).logits
    assert torch.isfinite(logits).all()
    trace = recorder.trace()
    kept = (trace.expert_ids >= 0).sum(axis=2)
    assert (kept >= 1).all()
    if rule == "expert":
        assert (kept == 1).all()
    else:
        ranks = np.where(trace.expert_ids >= 0, trace.expert_ids % 4, -1)
        assert max(len(set(token) - {-1}) for layer in ranks for token in layer.tolist()) == 1


def test_pruning_uses_the_rank_that_plays_the_row() -> None:
    """Row b belongs to rank b mod R, whose own experts cost nothing: they are all kept."""
    name = EMBEDDED_MODELS[0]
    model = load(name, layout=interleaved(name, 4), pruning="device", prune_threshold=0.6)
    unpruned = load(name)
    with torch.no_grad(), RoutingRecorder(model) as pruned, RoutingRecorder(unpruned) as free:
        model(input_ids=batch(name))
        unpruned(input_ids=batch(name))
    source = np.repeat(np.arange(4), 20)
    ours, all_ids = pruned.trace().expert_ids[0], free.trace().expert_ids[0]  # later layers see changed hidden states
    for token in range(80):
        own = {int(e) for e in all_ids[token] if e % 4 == source[token]}
        assert own <= set(ours[token].tolist())
    assert (ours == -1).any()


def test_playing_a_rank_and_running_unpruned() -> None:
    """Each row alone, played by the rank that it had in the batch, prunes as in the batch; without pruning, as plain."""
    name = EMBEDDED_MODELS[0]
    model = load(name, layout=interleaved(name, 4), pruning="device", prune_threshold=0.6)
    same = batch(name)[:1].expand(4, -1)
    with torch.no_grad():
        together = model(input_ids=same).logits
        assert not torch.allclose(together[0], together[1], atol=1e-2)  # the rank matters
        for rank in range(4):
            with model.playing(rank):
                torch.testing.assert_close(model(input_ids=same[:1]).logits[0], together[rank], atol=1e-4, rtol=1e-4)
        with model.unpruned():
            torch.testing.assert_close(model(input_ids=same).logits, load(name)(input_ids=same).logits)
        torch.testing.assert_close(model(input_ids=same).logits, together)  # and back
    with pytest.raises(ValueError, match="playing rank 4: one process can play 0 to 3"), model.playing(4):
        pass


def test_renormalising_scales_each_token_back_to_its_own_sum() -> None:
    name = EMBEDDED_MODELS[1]  # gates that do not sum to 1
    model = load(name, layout=interleaved(name, 4), pruning="device", prune_threshold=0.4, renormalize=True)
    with torch.no_grad(), RoutingRecorder(model) as recorder, RoutingRecorder(plain_model := load(name)) as free:
        model(input_ids=batch(name))
        plain_model(input_ids=batch(name))
    sums = [trace.expert_weights[0].sum(axis=1) for trace in (recorder.trace(), free.trace())]
    assert (recorder.trace().expert_ids[0] == -1).any()
    np.testing.assert_allclose(sums[0], sums[1], rtol=1e-5)


def test_generate_continues_requests_in_the_recorder() -> None:
    name = EMBEDDED_MODELS[0]
    model = load(name)
    with RoutingRecorder(model) as recorder:
        model.generate(batch(name, 2), max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert recorder.trace().request_lengths.tolist() == [24, 24]  # 20 of the prompt, 4 fed back; the fifth is never fed


def test_record_texts_cuts_at_num_tokens_and_keeps_requests() -> None:
    name = EMBEDDED_MODELS[0]
    tokenizer = AutoTokenizer.from_pretrained(embedded_model(name))
    lengths = [len(tokenizer(text)["input_ids"]) for text in (TEXT, "A short one.")]
    trace = record_texts(load(name), tokenizer, [TEXT, "", "A short one.", TEXT], num_tokens=sum(lengths) + 3, progress=False)
    assert trace.request_lengths.tolist() == [*lengths, 3]


@pytest.mark.parametrize("packed", [False, True])
def test_own_shard_reads_only_its_experts(packed: bool, tmp_path: Path) -> None:
    """Per-expert and packed checkpoints, an uneven choice, a layer without any expert."""
    config, _ = CONFIGS["qwen3_moe, dense layer"]
    reference = tiny(config)
    if packed:
        save_file(
            {key: value.contiguous() for key, value in reference.state_dict().items()},
            tmp_path / "model.safetensors",
            metadata={"format": "pt"},
        )
        config.architectures = ["Qwen3MoeForCausalLM"]
        config.save_pretrained(tmp_path)
    else:
        reference.save_pretrained(tmp_path)
    owned = {0: [1, 4, 6], 2: []}
    shard = own_shard_class(type(reference), FAMILIES["qwen3_moe"], owned).from_pretrained(tmp_path)
    for layer_id, experts in owned.items():
        for name in ("gate_up_proj", "down_proj"):
            got = getattr(shard.model.layers[layer_id].mlp.experts, name)
            assert torch.equal(got, getattr(reference.model.layers[layer_id].mlp.experts, name)[experts])
    dense = {key: value for key, value in reference.state_dict().items() if ".experts." not in key}
    assert all(torch.equal(shard.state_dict()[key], value) for key, value in dense.items())


def test_half_precision_is_what_the_user_asked_for() -> None:
    model = CAPMoEModel.from_pretrained(embedded_model(), dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert model(input_ids=batch(EMBEDDED_MODELS[0])).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"experts_implementation": "eager"}, "experts_implementation='eager' contradicts cap_config"),
        ({"tp_plan": "auto"}, "tp_plan='auto' contradicts cap_config"),
    ],
)
def test_contradicting_arguments_are_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CAPMoEModel.from_pretrained(embedded_model(), **kwargs)


def test_unsupported_and_moe_less_models_are_refused_by_name(tmp_path: Path) -> None:
    LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2).save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="'llama' is not supported; supported: qwen3_moe, qwen2_moe, deepseek_v2,"):
        CAPMoEModel.from_pretrained(tmp_path / "llama")
    Qwen3MoeConfig(**SIZES, num_hidden_layers=2, num_key_value_heads=2, num_experts=8, mlp_only_layers=[0, 1]).save_pretrained(
        tmp_path / "dense"
    )
    with pytest.raises(ValueError, match="2 layers and 0 MoE layers"):
        CAPMoEModel.from_pretrained(tmp_path / "dense")


def test_quantised_pickled_and_truncated_checkpoints_are_refused(tmp_path: Path) -> None:
    config, _ = CONFIGS["qwen3_moe, dense layer"]
    model = tiny(config)
    model.save_pretrained(tmp_path)
    file, config_file = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, settings = file.read_bytes(), json.loads(config_file.read_text())

    config_file.write_text(json.dumps(settings | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="quantised"):
        CAPMoEModel.from_pretrained(tmp_path)
    config_file.write_text(json.dumps(settings))

    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated or not safetensors"):
        CAPMoEModel.from_pretrained(tmp_path)

    file.write_bytes(whole)
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model\.layers\.2\.mlp\.experts\.5\.up_proj\.weight"):
        CAPMoEModel.from_pretrained(tmp_path)

    file.unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="is not safetensors"):
        CAPMoEModel.from_pretrained(tmp_path)


def test_saving_from_one_process_round_trips(tmp_path: Path) -> None:
    model = load(EMBEDDED_MODELS[1], layout=interleaved(EMBEDDED_MODELS[1], 4))
    model.save_pretrained(tmp_path)
    saved, original = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), plain(EMBEDDED_MODELS[1]).state_dict()
    assert all(torch.equal(saved[key], original[key]) for key in original) and saved.keys() == original.keys()


def test_wrapping_a_live_model_equals_loading_it() -> None:
    name = EMBEDDED_MODELS[0]
    wrapped = CAPMoEModel(plain(name), CAPConfig(layout=interleaved(name, 4), pruning="device", prune_threshold=0.2))
    loaded = load(name, layout=interleaved(name, 4), pruning="device", prune_threshold=0.2)
    with torch.no_grad():
        assert torch.equal(wrapped(input_ids=batch(name)).logits, loaded(input_ids=batch(name)).logits)
    assert wrapped.config is wrapped.model.config  # what is not ours is the wrapped model's


def test_placer_fit_takes_datasets_and_strings() -> None:
    import datasets

    name = EMBEDDED_MODELS[0]
    model, tokenizer = load(name), AutoTokenizer.from_pretrained(embedded_model(name))
    rows = [TEXT, "A church was built in 1852.", "def f(x): return x"]
    placer = Placer(Topology(4))
    from_strings = placer.fit(rows, model, tokenizer, num_tokens=60, num_placements=3)
    from_dataset = placer.fit(datasets.Dataset.from_dict({"body": rows}), model, tokenizer, 60, 3, text_column="body")
    expected = placer.spectrum(record_texts(load(name), tokenizer, rows, 60, progress=False), 3)
    assert from_strings == from_dataset == expected
    with pytest.raises(ValueError, match="row 0 has columns body, not text_column='text'"):
        placer.fit(datasets.Dataset.from_dict({"body": rows}), model, tokenizer)


def test_extra_forwards_inside_generate_keep_their_experts() -> None:
    name = EMBEDDED_MODELS[0]
    options: dict[str, Any] = dict(max_new_tokens=6, do_sample=False, guidance_scale=1.5, eos_token_id=None)
    assert torch.equal(load(name).generate(batch(name), **options), plain(name).generate(batch(name), **options))


def test_cache_of_a_row_that_ended_early_is_whole() -> None:
    name = EMBEDDED_MODELS[0]
    free = plain(name).generate(batch(name, 2), max_new_tokens=6, do_sample=False, eos_token_id=None)
    options: dict[str, Any] = dict(max_new_tokens=6, do_sample=False, eos_token_id=int(free[0, 21]), return_dict_in_generate=True)
    got, want = load(name).generate(batch(name, 2), **options), plain(name).generate(batch(name, 2), **options)
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got.cache.layers, want.cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-5, atol=1e-5)


def test_generation_config_set_on_the_wrapper_is_the_models() -> None:
    model = load(EMBEDDED_MODELS[0])
    model.generation_config = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=1)
    assert model.model.generation_config is model.generation_config
    assert model.generate(batch(EMBEDDED_MODELS[0])).shape[1] <= 23
    assert model.training is model.model.training is False
    assert copy.deepcopy(model).layout == model.layout


def test_ways_around_the_wrapper_are_refused(tmp_path: Path) -> None:
    name = EMBEDDED_MODELS[0]
    model = load(name)
    with pytest.raises(ValueError, match="would bypass placement"):
        model.set_experts_implementation("grouped_mm")
    with pytest.raises(ValueError, match="this rank's experts only"):
        model.push_to_hub("somewhere")
    for again in (model, model.model):
        with pytest.raises(ValueError, match="wrapped already"):
            CAPMoEModel(again)
    with pytest.raises(ValueError, match="cap_config is a dict"):
        CAPMoEModel.from_pretrained(embedded_model(name), cap_config={"pruning": "none"})
    with pytest.raises(ValueError, match="use apply_layout"):
        model.set_pruning("none", layout=interleaved(name, 4))


def test_layout_of_the_config_follows_the_model() -> None:
    model = load(EMBEDDED_MODELS[0])
    model.apply_layout(interleaved(EMBEDDED_MODELS[0], 4))
    assert model.cap_config.layout == model.layout == interleaved(EMBEDDED_MODELS[0], 4)


def test_owners_of_one_forward_do_not_leak_into_the_next() -> None:
    name = EMBEDDED_MODELS[0]
    model = load(name, layout=interleaved(name, 4), pruning="device", prune_threshold=0.5)
    block, hidden = model.model.model.layers[0].mlp, torch.randn((1, 20, 192), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = block(hidden)
        model(input_ids=batch(name, 1))
        assert torch.equal(block(hidden), before)
        with pytest.raises(IndexError):
            model(input_ids=torch.full((1, 20), 99_999))
        assert torch.equal(block(hidden), before)


def test_recorder_ignores_what_is_computed_again_or_failed() -> None:
    name = EMBEDDED_MODELS[0]
    model = load(name)
    first, second = batch(name, 1), batch(name, 2)
    with RoutingRecorder(model) as once, torch.no_grad():
        model(input_ids=first)
        model(input_ids=second)
    model.train()
    model.activation_checkpointing_enable()
    with RoutingRecorder(model) as outer:
        model(input_ids=first, labels=first, use_cache=False).loss.backward()
        with pytest.raises(IndexError):
            model(input_ids=torch.full((1, 20), 99_999))
        with RoutingRecorder(model) as inner:
            model(input_ids=second, labels=second, use_cache=False).loss.backward()
    model(input_ids=second)  # nobody listens any more
    assert outer.trace().request_lengths.tolist() == [20, 20, 20]
    np.testing.assert_array_equal(outer.trace().expert_ids, once.trace().expert_ids)
    assert inner.trace() == once.trace().select([1, 2])


def test_recorder_follows_caches_and_refuses_what_it_did_not_see() -> None:
    name = EMBEDDED_MODELS[0]
    model, token = load(name), torch.tensor([[7]])
    with torch.no_grad():
        unseen = model(input_ids=batch(name, 1), use_cache=True).cache
        with RoutingRecorder(model) as recorder:
            caches = [model(input_ids=batch(name, 1)[:, :length], use_cache=True).cache for length in (5, 6)]
            for cache in (caches[0], caches[1], caches[0]):  # two conversations in turn
                model(input_ids=token, cache=cache)
            with pytest.raises(ValueError, match="a forward of 1 rows continues a cache with no recorded rows"):
                model(input_ids=token, cache=unseen)
            with pytest.raises(ValueError, match="use_cache is False"):
                model.generate(batch(name, 1), max_new_tokens=3, use_cache=False)
    assert recorder.trace().request_lengths.tolist() == [7, 7]


def test_one_string_is_not_a_list_of_texts() -> None:
    name = EMBEDDED_MODELS[0]
    model, tokenizer = load(name), AutoTokenizer.from_pretrained(embedded_model(name))
    with pytest.raises(ValueError, match="one string of 5 characters"):
        record_texts(model, tokenizer, "hello")
    with pytest.raises(ValueError, match="one string of 5 characters"):
        Placer(Topology(4)).fit("hello", model, tokenizer)


@pytest.mark.parametrize("overrides", [{"num_hidden_layers": 2}, {"mlp_only_layers": [1]}])
def test_config_overrides_reach_the_layout(overrides: dict[str, Any]) -> None:
    name = EMBEDDED_MODELS[0]
    options: dict[str, Any] = {"dtype": torch.float32, **overrides}
    torch.manual_seed(0)
    want = AutoModelForCausalLM.from_pretrained(embedded_model(name), experts_implementation="grouped_mm", **options)
    torch.manual_seed(0)
    model = CAPMoEModel.from_pretrained(embedded_model(name), **options)
    assert model.layout.layer_ids.tolist() == ([0, 1] if "num_hidden_layers" in overrides else [0, 2, 3])
    with torch.no_grad():
        assert torch.equal(model(input_ids=batch(name)).logits, want(input_ids=batch(name)).logits)


def test_a_state_dict_in_place_of_files() -> None:
    reference = plain(EMBEDDED_MODELS[0])
    model = CAPMoEModel.from_pretrained(None, config=reference.config, state_dict=reference.state_dict(), dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model(input_ids=batch(EMBEDDED_MODELS[0])).logits, reference(input_ids=batch(EMBEDDED_MODELS[0])).logits)


def test_tables_follow_the_module_and_stay_out_of_checkpoints() -> None:
    model = load(EMBEDDED_MODELS[0], layout=interleaved(EMBEDDED_MODELS[0], 4))
    assert not any("cap_" in key for key in model.model.state_dict())
    model.to("meta")
    assert {buffer.device.type for name, buffer in model.named_buffers() if "cap_expert" in name} == {"meta"}


def test_exact_pruning_of_many_experts_is_refused_at_load(tmp_path: Path) -> None:
    sizes = SIZES | {"num_experts_per_tok": 14}
    tiny(Qwen3MoeConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2, head_dim=8, num_experts=16)).save_pretrained(tmp_path)
    config = CAPConfig(pruning="device", prune_threshold=0.1, prune_solver="exact")
    with pytest.raises(ValueError, match="14 experts per token, at most 12"):
        CAPMoEModel.from_pretrained(tmp_path, cap_config=config)


def test_a_wrong_shape_in_the_file_names_its_key(tmp_path: Path) -> None:
    tiny(CONFIGS["qwen3_moe, dense layer"][0]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.experts.3.down_proj.weight"
    save_file(tensors | {key: tensors[key][:, :-1].contiguous()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"experts\.3\.down_proj\.weight has shape \(32, 15\), not \(32, 16\)"):
        CAPMoEModel.from_pretrained(tmp_path)
