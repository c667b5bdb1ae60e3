"""``CAPTrainer``: the method with the face of a Transformers ``Trainer``.

Trace, place, adjust and profile are methods that log through the trainer's callbacks and are done once; training runs with
the pruning rule in the forward pass, so that the model learns to do without what pruning takes away.

Letters: ``B`` rows, ``S`` positions, ``T`` = B * S tokens.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Trainer, TrainingArguments, default_data_collator

from cap_hf._files import read_json, write_json
from cap_hf.config import CAPConfig
from cap_hf.evaluation.routing import RoutingMeter
from cap_hf.fingerprint import weights_fingerprint
from cap_hf.layout import ExpertLayout
from cap_hf.modeling import CAPMoEModel
from cap_hf.placement import PlacementSpectrum, Placer
from cap_hf.profiler import LayoutTiming, profile_layouts
from cap_hf.recorder import record_requests
from cap_hf.topology import Topology
from cap_hf.trace import RoutingTrace
from cap_hf.training.data import first_requests, first_rows, packed
from cap_hf.training.losses import distillation_loss, locality_loss
from cap_hf.training.stages import once

__all__ = ["CAPTrainer", "CAPTrainingArguments"]

TRAINED = ("all", "moe", "router")


@dataclass
class CAPTrainingArguments(TrainingArguments):
    """Everything a ``TrainingArguments`` has, and the method's own options."""

    pruning: Literal["none", "expert", "device"] = field(
        default="device", metadata={"help": "rule in force while training: device, expert or none"}
    )
    prune_threshold: float = field(default=0.3, metadata={"help": "p of the rule while training; of no rule 0"})
    eval_thresholds: str = field(default="0,0.1,0.2,0.3,0.4", metadata={"help": "p at which evaluate() reports, with commas"})
    num_ranks: int = field(default=8, metadata={"help": "ranks that one process plays; several processes are the ranks themselves"})
    ranks_per_node: int = field(default=0, metadata={"help": "ranks in one node; 0 for all"})
    inter_node_cost: float = field(default=1.0, metadata={"help": "cost of a row to another node, 1 inside a node"})
    trace_tokens: int = field(default=8000, metadata={"help": "tokens of training text that calibrate() records"})
    trace_threshold: float = field(default=0.3, metadata={"help": "p of expert pruning while recording; 0 for none"})
    placement_method: str = field(default="connectivity", metadata={"help": "how place() and adjust() search"})
    num_placements: int = field(default=8, metadata={"help": "layouts between least traffic and best balance"})
    profile_batches: int = field(default=4, metadata={"help": "batches of each rank that profile() times every layout on"})
    text_column: str = field(default="text", metadata={"help": "column of datasets that hold text"})
    block_size: int = field(default=0, metadata={"help": "tokens of a row made from text; 0 for the model's context, 1024 at most"})
    trained: str = field(default="all", metadata={"help": "what is trained: all, moe (routers and experts) or router"})
    distillation_weight: float = field(
        default=0.0, metadata={"help": "share of the loss that is KL to the model before training, unpruned"}
    )
    locality_weight: float = field(default=0.0, metadata={"help": "weight of the loss that keeps a token's experts on few ranks"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.remove_unused_columns = False  # the wrapped model's forward takes what it is given, and its signature says nothing
        self.label_names = self.label_names or ["labels"]
        if self.pruning == "none":
            self.prune_threshold = 0.0
        CAPConfig(pruning=self.pruning if self.prune_threshold else "none", prune_threshold=self.prune_threshold)
        CAPConfig(pruning="expert" if self.trace_threshold else "none", prune_threshold=self.trace_threshold)
        for threshold in self.thresholds:
            CAPConfig(pruning="device", prune_threshold=threshold)
        if self.trained not in TRAINED:
            raise ValueError(f"trained is {self.trained!r}; choose one of {', '.join(TRAINED)}")
        if not 0 <= self.distillation_weight <= 1:
            raise ValueError(f"distillation_weight is {self.distillation_weight}; it must be in [0, 1], the share of the loss")
        for name, least in (("locality_weight", 0), ("trace_tokens", 1), ("num_placements", 1), ("profile_batches", 1), ("block_size", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {least} or more")

    @property
    def thresholds(self) -> list[float]:
        """``eval_thresholds`` as numbers, ascending."""
        try:
            return sorted({float(value) for value in self.eval_thresholds.split(",") if value.strip()})
        except ValueError as error:
            raise ValueError(f"eval_thresholds is {self.eval_thresholds!r}; it must be numbers with commas between them") from error


class CAPTrainer(Trainer):
    """Trains a ``CAPMoEModel`` under pruning, and runs the four steps of the method.

    Args:
        model: the model, in one process, which plays ``args.num_ranks`` ranks.
        args: options; the usual ones mean what they mean to ``Trainer``.
        train_dataset: ``datasets`` with a text column or with ``input_ids``; streamed ones too.
        eval_dataset: the same.
        processing_class: the tokenizer.
        **kwargs: everything else of ``Trainer``.

    Raises:
        ValueError: before the first step, for what does not fit: another kind of model, datasets without text, an empty
            evaluation set, an option out of range.
    """

    model: CAPMoEModel
    args: CAPTrainingArguments

    def __init__(
        self,
        model: CAPMoEModel,
        args: CAPTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        data_collator: Any = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(model, CAPMoEModel):
            raise ValueError(f"CAPTrainer needs a CAPMoEModel, not a {type(model).__name__}; load it with CAPMoEModel.from_pretrained")
        if not isinstance(args, CAPTrainingArguments):
            raise ValueError(f"CAPTrainer needs CAPTrainingArguments, not {type(args).__name__}")
        self._texts = train_dataset
        length = args.block_size or min(int(model.config.max_position_embeddings), 1024)
        if train_dataset is not None:
            train_dataset = packed(train_dataset, processing_class, length, args.text_column, "training")
        if eval_dataset is not None:
            eval_dataset = packed(eval_dataset, processing_class, length, args.text_column, "evaluation")
        if hasattr(eval_dataset, "__len__") and len(eval_dataset) == 0:
            raise ValueError(f"the evaluation dataset yields no row of {length} tokens; give more text or a smaller block_size")
        super().__init__(
            model,
            args,
            data_collator=data_collator or default_data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        size = model.group.size
        self.topology = Topology(size if size > 1 else args.num_ranks, args.ranks_per_node, args.inter_node_cost)
        if model.layout.num_ranks != self.topology.num_ranks:
            model.apply_layout(
                ExpertLayout.sequential(model.layout.num_layers, model.layout.num_experts, self.topology, model.layout.layer_ids)
            )
        self._teacher: Any = None

    # ---- the four steps ----

    def calibrate(self) -> RoutingTrace:
        """Routing of the first training texts, under expert pruning: ``trace.safetensors``."""
        args, model = self.args, self.model
        longest = int(model.config.max_position_embeddings)
        requests = first_requests(self._texts, self.processing_class, args.trace_tokens, longest, args.text_column, "training")
        inputs = {"weights": weights_fingerprint(model), "requests": _digest(requests), "threshold": args.trace_threshold}
        path = self._out / "trace.safetensors"

        def make() -> RoutingTrace:
            with self._pruned("expert", args.trace_threshold):
                return record_requests(model, requests, args.per_device_eval_batch_size, progress=not args.disable_tqdm)

        trace, is_new = once(
            model.group, self._out, "calibrate", inputs, make, lambda made: made.save(path), lambda: RoutingTrace.load(path)
        )
        return self._told("calibrate", is_new, trace, {"tokens": trace.num_tokens, "requests": trace.num_requests})

    def place(self) -> ExpertLayout:
        """The layout with the least traffic: ``layout.json``."""
        trace, placer, path = self.calibrate(), self._placer, self._out / "layout.json"
        layout, is_new = once(
            self.model.group,
            self._out,
            "place",
            self._placing_inputs(trace),
            lambda: ExpertLayout.from_dict(self.model.group.from_first(lambda: placer.place(trace).to_dict())),
            lambda made: made.save(path),
            lambda: ExpertLayout.load(path),
        )
        return self._told("place", is_new, layout, _numbers(layout, trace))

    def adjust(self) -> PlacementSpectrum:
        """Layouts from least traffic to best balance: ``spectrum.json``."""
        trace, placer, path, count = self.calibrate(), self._placer, self._out / "spectrum.json", self.args.num_placements

        def make() -> PlacementSpectrum:
            made = self.model.group.from_first(lambda: [layout.to_dict() for layout in placer.spectrum(trace, count)])
            return PlacementSpectrum([ExpertLayout.from_dict(each) for each in made])

        inputs = self._placing_inputs(trace) | {"num_placements": count}
        spectrum, is_new = once(
            self.model.group, self._out, "adjust", inputs, make, lambda made: made.save(path), lambda: PlacementSpectrum.load(path)
        )
        numbers = {f"{index}_{name}": value for index, layout in enumerate(spectrum) for name, value in _numbers(layout, trace).items()}
        return self._told("adjust", is_new, spectrum, numbers)

    def profile(self) -> list[LayoutTiming]:
        """Seconds of every layout of the spectrum on this machine and its ranks, on evaluation rows: ``profile.json``.

        One process that plays all ranks sends nothing, so that its timings say nothing about traffic.
        """
        spectrum, args, model, path = self.adjust(), self.args, self.model, self._out / "profile.json"
        count, batch = args.profile_batches, args.per_device_eval_batch_size
        dataset = self.eval_dataset if self.eval_dataset is not None else self.train_dataset
        rows = first_rows(dataset, count * batch * model.group.size)
        batches = list(torch.tensor(rows).split(batch)[model.group.rank :: model.group.size])
        inputs = {"layouts": [layout.fingerprint for layout in spectrum], "rows": _digest(rows), "weights": weights_fingerprint(model)}

        def make() -> list[LayoutTiming]:
            before = model.layout
            with self._pruned(args.pruning, args.prune_threshold):
                timings = profile_layouts(model, spectrum, batches, progress=not args.disable_tqdm)
            model.apply_layout(before)
            return timings

        def load() -> list[LayoutTiming]:
            made = read_json(path, "profile")["timings"]
            return [LayoutTiming(layout, each["forward_s"], each["tokens_per_s"]) for layout, each in zip(spectrum, made, strict=True)]

        def save(timings: list[LayoutTiming]) -> None:
            write_json(path, "profile", {"timings": [{"forward_s": t.forward_s, "tokens_per_s": t.tokens_per_s} for t in timings]})

        timings, is_new = once(model.group, self._out, "profile", inputs | {"ranks": model.group.size}, make, save, load)
        return self._told("profile", is_new, timings, {f"{index}_forward_s": timing.forward_s for index, timing in enumerate(timings)})

    def optimize(self) -> ExpertLayout:
        """The four steps in order; the model gets the fastest layout, in one process the one with the least traffic:
        ``chosen_layout.json``."""
        spectrum, timings = self.adjust(), self.profile()
        fastest = min(range(len(timings)), key=lambda index: timings[index].forward_s)
        layout = spectrum[fastest if self.model.group.size > 1 else 0]
        self.model.apply_layout(layout)
        self.model.group.from_first(lambda: layout.save(self._out / "chosen_layout.json"))
        self.log({f"optimize_{name}": value for name, value in _numbers(layout, self.calibrate()).items()})
        return layout

    @property
    def _out(self) -> Path:
        return Path(str(self.args.output_dir))

    @property
    def _placer(self) -> Placer:
        return Placer(self.topology, self.args.placement_method, seed=self.args.seed)

    def _placing_inputs(self, trace: RoutingTrace) -> dict[str, Any]:
        topology = [self.topology.num_ranks, self.topology.ranks_per_node, self.topology.inter_node_cost]
        trace_hash = hashlib.sha256(trace.expert_ids.tobytes()).hexdigest()[:16]
        return {"trace": trace_hash, "topology": topology, "method": self.args.placement_method, "seed": self.args.seed}

    def _told(self, stage: str, is_new: bool, value: Any, numbers: dict[str, float]) -> Any:
        """Log a stage once it is made, and hand its value on."""
        if is_new:
            self.log({f"{stage}_{name}": value for name, value in numbers.items()})
        return value

    # ---- training and evaluation under pruning ----

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer.train``, with the rule of the arguments in force."""
        if self.model.group.size > 1:
            raise ValueError(
                f"train() runs in one process, which plays all ranks, not on {self.model.group.size}; the other methods run on ranks"
            )
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self._is_trained(name))
        if self.args.distillation_weight and self._teacher is None:
            self._teacher = copy.deepcopy(self.model.model).requires_grad_(False).eval()
        with self._pruned(self.args.pruning, self.args.prune_threshold):
            return super().train(*args, **kwargs)

    def _is_trained(self, name: str) -> bool:
        family = self.model.family
        places = {"all": ("",), "router": (f".{family.router}.",), "moe": (f".{family.router}.", f".{family.experts}.")}
        return any(place in name for place in places[self.args.trained])

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """The model's own loss; in training also the terms that the arguments weigh in."""
        args = self.args
        if not model.training or not (args.distillation_weight or args.locality_weight):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with self._router_logits() as router_logits:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if args.distillation_weight:
            with torch.no_grad():
                teacher = self._teacher(**{key: value for key, value in inputs.items() if key != "labels"}, use_cache=False).logits
            loss = torch.lerp(loss, distillation_loss(outputs.logits, teacher, inputs["labels"]), args.distillation_weight)
        if args.locality_weight:
            loss = loss + args.locality_weight * self._locality(router_logits, inputs["input_ids"])
        return (loss, outputs) if return_outputs else loss

    def _locality(self, router_logits: list[torch.Tensor], ids_BS: torch.Tensor) -> torch.Tensor:
        layout, device = self.model.layout, ids_BS.device
        owner_T = (torch.arange(len(ids_BS), device=device) % layout.num_ranks).repeat_interleave(ids_BS.shape[1])
        ranks_LE = torch.tensor(layout.expert_to_rank, device=device).long()
        terms = [
            locality_loss(logits, ranks, owner_T, layout.num_ranks, self.model.top_k)
            for logits, ranks in zip(router_logits, ranks_LE, strict=True)
        ]
        return torch.stack(terms).mean()

    @contextmanager
    def _router_logits(self) -> Iterator[list[torch.Tensor]]:
        """What the routers give inside, (T, E) per MoE layer in order."""
        model, seen = self.model, []
        routers = [
            model.model.get_submodule(f"{model.family.layers}.{layer}.{model.family.router}") for layer in model.layout.layer_ids.tolist()
        ]
        handles = [router.register_forward_hook(lambda _, __, output: seen.append(output[0].flatten(0, -2))) for router in routers]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _pruned(self, rule: str, threshold: float) -> Iterator[None]:
        """The model under a rule, and as it was afterwards."""
        before = self.model.cap_config
        self.model.set_pruning(rule if threshold else "none", threshold)
        try:
            yield
        finally:
            self.model.set_pruning(before.pruning, before.prune_threshold)

    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        """Runs the loader at every threshold; metrics are ``<prefix>_loss`` of the rule in training, and for each p
        ``<prefix>_loss_p<p>``, ``<prefix>_perplexity_p<p>`` and ``<prefix>_devices_per_token_p<p>``.
        """
        prefix = kwargs.get("metric_key_prefix", "eval")
        rule, trained = self.args.pruning, self.args.prune_threshold
        output, metrics = None, dict[str, float]()
        for threshold in dict.fromkeys([*(p for p in self.args.thresholds if rule != "none" or not p), trained]):
            meter = RoutingMeter(self.model)
            self.model.attach(meter)
            try:
                with self._pruned(rule, threshold):
                    result = super().evaluation_loop(dataloader, f"{description}, p = {threshold:g}", *args, **kwargs)
            finally:
                self.model.detach(meter)
            loss = (result.metrics or {})[f"{prefix}_loss"]
            metrics |= {
                f"{prefix}_loss_p{threshold:g}": loss,
                f"{prefix}_perplexity_p{threshold:g}": math.exp(min(loss, 700.0)),
                f"{prefix}_devices_per_token_p{threshold:g}": meter.means()["devices_per_token"],
            }
            output = result if threshold == trained else output
        assert output is not None and output.metrics is not None
        output.metrics.update(metrics)
        return output

    # ---- saving and loading ----

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """A checkpoint that plain Transformers loads."""
        folder = Path(output_dir) if output_dir else self._out
        self.model.save_pretrained(folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            (folder / "training_args.json").write_text(self.args.to_json_string())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        saved = CAPMoEModel.from_pretrained(resume_from_checkpoint, cap_config=CAPConfig(layout=self.model.layout), dtype=self.model.dtype)
        self.model.model.load_state_dict(saved.model.state_dict())

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))


def _digest(rows: list[list[int]]) -> str:
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def _numbers(layout: ExpertLayout, trace: RoutingTrace) -> dict[str, float]:
    measured = layout.metrics(trace)
    return {"devices_per_token": measured.devices_per_token, "load_imbalance": measured.load_imbalance}
