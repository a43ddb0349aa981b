"""`estimate`: bytes on one GPU, by phase and by named term, and what of it nvidia-smi will show.

The peak is the largest phase, not their sum: gradients and the optimizer's temporary are not alive together with
the activations of a whole micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sft_play.facts.shapes import ModelFacts
from sft_play.plan import activations as act
from sft_play.plan import allocator, state
from sft_play.plan.dora import weight_norm_bytes
from sft_play.plan.evaluation_memory import evaluation_terms, generation_terms
from sft_play.plan.nvme import disk_bytes, pinned_bytes
from sft_play.plan.settings import Dtype, Method, Offload, Placement, Settings
from sft_play.plan.sharding import divisors, shards_weights
from sft_play.plan.terms import Phase, Term, terms, total_bytes

# DeepSpeed's default reduce and all-gather buckets, elements (deepspeed/runtime/zero/config.py).
ZERO_BUCKET_ELEMENTS = 500_000_000
# What a nearly full GPU shows: after a failed request the allocator frees its cache and tries again (fms, A100: runs
# that would cache more settle at 69 to 79 of 79 GiB).
FULL_SHARE = 0.97


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted memory of one GPU.

    Attributes:
        phases: the terms of each phase, in the order of a run.
        allocated_bytes: peak of live tensors (`torch.cuda.max_memory_allocated`).
        reserved_bytes: what the caching allocator takes for that, given room.
        device_bytes: what nvidia-smi would show, given room: reserved, CUDA context and NCCL.
        needed_bytes: the least device memory it runs in: the allocator gives cached blocks back before it fails.
        host_bytes: host memory for this GPU's share of what is offloaded or paged, or for what its rank holds while it
            reads the model, if that is more.
        nvme_bytes: disk for this GPU's share of what is offloaded there.
    """

    phases: dict[Phase, tuple[Term, ...]]
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    needed_bytes: int
    host_bytes: int
    nvme_bytes: int

    @property
    def peak_phase(self) -> Phase:
        return max(self.phases, key=lambda phase: total_bytes(self.phases[phase]))

    def shown_reserved_bytes(self, capacity_bytes: int) -> int:
        """Reserved memory on a GPU of this size: near its limit the allocator gives cached blocks back."""
        outside = self.device_bytes - self.reserved_bytes
        return max(self.allocated_bytes, min(self.reserved_bytes, round(FULL_SHARE * capacity_bytes) - outside))

    def shown_device_bytes(self, capacity_bytes: int) -> int:
        """What nvidia-smi shows on a GPU of this size, by the same rule."""
        return max(self.needed_bytes, min(self.device_bytes, round(FULL_SHARE * capacity_bytes)))

    def phase_bytes(self, phase: Phase) -> int:
        return total_bytes(self.phases.get(phase, ()))


def estimate(facts: ModelFacts, settings: Settings) -> Estimate:
    """Memory of one GPU for these settings, the fullest one where they differ."""
    resting = resting_terms(facts, settings)
    phases = {
        Phase.LOAD: loaded_weights(facts, settings),
        Phase.FORWARD_BACKWARD: resting + forward_backward_terms(facts, settings),
        Phase.OPTIMIZER_STEP: resting + optimizer_terms(facts, settings),
    }
    if settings.eval_micro_batch:
        phases[Phase.EVALUATION] = resting + evaluation_terms(facts, settings)
    if settings.max_new_tokens:
        phases[Phase.GENERATION] = resting + generation_terms(facts, settings)
    phases[Phase.SAVE] = resting + save_terms(facts, settings)
    step = total_bytes(optimizer_terms(facts, settings))
    allocated = max(total_bytes(parts) for parts in phases.values())
    reserved = allocator.reserved_bytes(facts, settings, allocated=allocated, resting=total_bytes(resting), step=step)
    outside = allocator.context_bytes(settings)
    return Estimate(
        phases=phases,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=reserved + outside,
        needed_bytes=allocated + outside + allocator.unusable_bytes(facts, settings),
        host_bytes=round(max(host_bytes(facts, settings), reading_bytes(facts, settings))),
        nvme_bytes=round(disk_bytes(facts, settings)),
    )


def loaded_weights(facts: ModelFacts, settings: Settings) -> tuple[Term, ...]:
    """Weights on this GPU when they have been read: its share, but all of a 4-bit model under ZeRO-3.

    `zero.Init` shards weights while they are made, and transformers leaves it out for a quantised model
    (`get_init_context`, 5.23): bitsandbytes packs on the GPU, and the engine shards afterwards. FSDP shards a model
    that every rank holds whole in host memory; a 4-bit one lies there only if its `device_map` says so.
    """
    if settings.placement is Placement.ZERO3 and settings.method is Method.QLORA:
        alone = replace(settings, placement=Placement.DDP, offload=Offload.NONE)
        return resting_weights(facts, alone)
    return resting_weights(facts, settings)


def resting_weights(facts: ModelFacts, settings: Settings) -> tuple[Term, ...]:
    """Weights and adapters of this GPU's share."""
    if settings.offload is Offload.PARAMS:
        return terms(adapters=state.adapter_bytes(facts, settings) / divisors(settings).weights)
    share = divisors(settings).weights
    frozen = settings.trains_adapter
    kind = "frozen" if frozen else "trained"
    return terms(
        **{
            f"{kind}_decoder_weights": state.decoder_weight_bytes(facts, settings) / share,
            f"{kind}_embeddings_and_head": state.outer_weight_bytes(facts, settings) / share,
            "adapters": state.adapter_bytes(facts, settings) / share,
        }
    )


def resting_terms(facts: ModelFacts, settings: Settings) -> tuple[Term, ...]:
    """What is there between two steps: weights, optimizer state, and the strategy's own buffers."""
    optimizer = state.optimizer_bytes(facts, settings) / divisors(settings).optimizer
    buckets = bucket_bytes(facts, settings)
    return resting_weights(facts, settings) + terms(optimizer_state=optimizer, communication_buckets=buckets)


def forward_backward_terms(facts: ModelFacts, settings: Settings) -> tuple[Term, ...]:
    """The largest of five moments: the loss, the last layer's backward (first to run), the first's, the embedding's.

    The fifth is a DoRA adapter's norm of a weight, in the last layer's forward pass.
    """
    moments = (
        _loss_moment(facts, settings),
        _backward_start(facts, settings),
        _backward_end(facts, settings),
        _embedding_moment(facts, settings),
        _weight_norm_moment(facts, settings),
    )
    return max(moments, key=total_bytes)


def optimizer_terms(facts: ModelFacts, settings: Settings) -> tuple[Term, ...]:
    """Gradients and the step's temporary."""
    d = divisors(settings)
    gradients = state.gradient_bytes(facts, settings) / d.gradients
    if settings.offload is not Offload.NONE:
        gradients = 0.0
    return terms(gradients=gradients, optimizer_temporary=state.step_temporary_bytes(facts, settings) / d.optimizer)


def save_terms(facts: ModelFacts, settings: Settings) -> tuple[Term, ...]:
    """Sharded full weights are gathered to the host one layer at a time; adapters are small enough to gather whole."""
    if not shards_weights(settings):
        return ()
    if settings.trains_adapter:
        return terms(gathered_adapters=state.adapter_bytes(facts, settings))
    outer = facts.vocab_size * facts.hidden_size * settings.param_dtype.bytes
    return terms(gathered_for_saving=max(outer, facts.layer_parameters * settings.param_dtype.bytes))


def bucket_bytes(facts: ModelFacts, settings: Settings) -> float:
    """Communication buffers: DDP's buckets copy every gradient once; ZeRO has a reduce and a gather bucket."""
    trained = state.trained_parameters(facts, settings)
    if settings.data_parallel < 2 and settings.offload is Offload.NONE:
        return 0.0
    if settings.placement is Placement.DDP:
        return trained * state.trained_dtype(settings).bytes / divisors(settings).gradients
    if settings.placement in {Placement.ZERO1, Placement.ZERO2, Placement.ZERO3}:
        return 2 * min(trained, ZERO_BUCKET_ELEMENTS) * settings.compute_dtype.bytes
    return 0.0


def host_bytes(facts: ModelFacts, settings: Settings) -> float:
    """Offloaded or paged state, weights and gradients of this GPU's share; gradients stay in it under NVMe offload."""
    d = divisors(settings)
    held = state.optimizer_host_bytes(facts, settings) / d.optimizer
    if settings.nvme:
        held = pinned_bytes(facts, settings)
    if settings.offload is not Offload.NONE:
        held += state.gradient_bytes(facts, settings) / d.gradients
    if settings.offload is Offload.PARAMS and not settings.nvme:
        weights = state.decoder_weight_bytes(facts, settings) + state.outer_weight_bytes(facts, settings)
        held += weights / d.weights
    if settings.offload_activations:
        held += act.stored_bytes(facts, replace(settings, offload_activations=False))
    return held


def reading_bytes(facts: ModelFacts, settings: Settings) -> float:
    """Host memory of one rank while the model is read whole, which FSDP does before it shards.

    Weights in the type of their files, taken to be a 16-bit one, stay those files' pages: ranks share them and the
    system can drop them. Those of another type, or packed into 4 bits, are copies: of 135M parameters (0.27 GB in
    bf16) a process grew by 0.09 GB in bf16 and by 0.60 GB in fp32 (transformers 5.23).
    """
    copied = settings.method is Method.QLORA or settings.param_dtype is Dtype.FP32
    if settings.placement not in {Placement.FSDP, Placement.HSDP} or not copied:
        return 0.0
    return state.decoder_weight_bytes(facts, settings) + state.outer_weight_bytes(facts, settings)


def _kept_gradients(facts: ModelFacts, settings: Settings) -> float:
    """Gradients that the earlier micro-batches of this step left."""
    if settings.grad_accum == 1 and settings.method is Method.FULL:
        return 0.0
    return _all_gradients(facts, settings)


def _all_gradients(facts: ModelFacts, settings: Settings) -> float:
    if settings.offload is not Offload.NONE:
        return 0.0
    return state.gradient_bytes(facts, settings) / divisors(settings).gradients


def _gradients_of_later_layers(facts: ModelFacts, settings: Settings) -> float:
    """What is there when the first layer starts: its own gradients and an untied embedding's come after."""
    still_to_come = facts.layer_parameters + (0 if facts.tied else facts.vocab_size * facts.hidden_size)
    missing = still_to_come * settings.param_dtype.bytes / divisors(settings).gradients
    if settings.trains_adapter:
        missing = 0.0
    return max(_kept_gradients(facts, settings), _all_gradients(facts, settings) - missing)


def _loss_moment(facts: ModelFacts, settings: Settings) -> tuple[Term, ...]:
    return terms(
        gradients=_kept_gradients(facts, settings),
        stored_activations=act.stored_bytes(facts, settings),
        attention_masks=act.mask_bytes(facts, settings, layers=act.layers_with_masks(facts, settings)),
        logits_and_loss=act.logits_bytes(facts, settings),
        gathered_weights=act.gathered_bytes(facts, settings, layers=0),
        autocast_copies=act.autocast_bytes(facts, settings),
    )


def _backward_start(facts: ModelFacts, settings: Settings) -> tuple[Term, ...]:
    head = 0.0
    if not settings.trains_adapter:
        head = facts.vocab_size * facts.hidden_size * settings.param_dtype.bytes / divisors(settings).gradients
    return terms(
        gradients=max(_kept_gradients(facts, settings), head),
        stored_activations=act.stored_bytes(facts, settings),
        attention_masks=act.mask_bytes(facts, settings, layers=max(1.0, act.layers_with_masks(facts, settings))),
        layer_at_work=act.live_layer_bytes(facts, settings),
        gathered_weights=act.gathered_bytes(facts, settings),
        unsharded_gradients=act.unsharded_gradient_bytes(facts, settings),
        autocast_copies=act.autocast_bytes(facts, settings, backward=True),
    )


def _backward_end(facts: ModelFacts, settings: Settings) -> tuple[Term, ...]:
    held = act.held_bytes(facts, settings)
    first = act.stored_bytes(facts, settings) if held else act.stored_bytes(facts, settings) / facts.num_layers
    return terms(
        gradients=_gradients_of_later_layers(facts, settings) + state.largest_gradient_bytes(facts, settings),
        stored_activations=first,
        attention_masks=act.mask_bytes(facts, settings, layers=1.0),
        held_by_hooks=held,
        layer_at_work=act.live_layer_bytes(facts, settings),
        gathered_weights=act.gathered_bytes(facts, settings),
        unsharded_gradients=act.unsharded_gradient_bytes(facts, settings),
    )


def _weight_norm_moment(facts: ModelFacts, settings: Settings) -> tuple[Term, ...]:
    if not settings.dora:
        return ()
    return terms(
        gradients=_kept_gradients(facts, settings),
        stored_activations=act.stored_bytes(facts, settings),
        attention_masks=act.mask_bytes(facts, settings, layers=max(1.0, act.layers_with_masks(facts, settings))),
        layer_at_work=act.recomputed_layer_bytes(facts, settings),
        weight_norm=weight_norm_bytes(facts, settings),
        gathered_weights=act.gathered_bytes(facts, settings),
    )


def _embedding_moment(facts: ModelFacts, settings: Settings) -> tuple[Term, ...]:
    """All gradients, and what adding up the embedding's takes, at the end of the backward pass.

    Tied to the head: both gradients and their sum are alive at once (torch's engine adds out of place; measured on
    tensors with data). A micro-batch before this one left a gradient that the new one is added to.
    """
    if settings.trains_adapter or settings.optimizer_in_backward:
        return ()
    more = 2 * facts.tied + (settings.grad_accum > 1)
    embedding = facts.vocab_size * facts.hidden_size * settings.param_dtype.bytes / settings.tensor_parallel
    return terms(
        gradients=_all_gradients(facts, settings),
        embedding_gradients=more * embedding,
        gathered_weights=act.gathered_bytes(facts, settings, layers=0),
    )
