"""The shapes and parameter counts of a model, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One kind of weight matrix inside the decoder layers.

    Attributes:
        name: last part of the module's name, which `target_modules` matches.
        in_features, out_features: the matrix' shape.
        count: how many of them the whole model has.
        active: how many of them one token passes through (fewer than `count` for experts).
        bias: whether each has a bias of `out_features`.
        expert: whether it belongs to an expert of a mixture.
    """

    name: str
    in_features: int
    out_features: int
    count: int
    active: int
    bias: bool = False
    expert: bool = False

    @property
    def weights(self) -> int:
        """Elements of one matrix, without its bias."""
        return self.in_features * self.out_features

    @property
    def biases(self) -> int:
        return self.out_features if self.bias else 0

    @property
    def parameters(self) -> int:
        """Parameters of all matrices of this kind, biases included."""
        return self.count * (self.weights + self.biases)

    @property
    def active_parameters(self) -> int:
        return self.active * (self.weights + self.biases)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Shapes and parameter counts of a causal language model.

    Attributes:
        embedding_parameters: token and position embeddings.
        head_parameters: the output matrix and its bias; 0 when tied to the embedding.
        norm_parameters: all norms, the last one included.
        other_parameters: what is none of these, such as a vision tower; never quantised or trained by an adapter.
        layer_norm: LayerNorm (with bias, run in fp32 by autocast) instead of RMSNorm.
        norms_per_layer: norms of hidden size in a layer.
        head_norms: queries and keys have norms of their own.
        fp32_norm_weights: the norm multiplies by its weight in fp32 (gemma).
        composed_activation: the MLP's activation is written in single operations (GPT-2's `gelu_new`).
        experts, active_experts: experts a layer and how many of them one token uses; 0 for a dense model.
    """

    name: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    max_positions: int
    gated_mlp: bool
    layer_norm: bool
    norms_per_layer: int = 2
    head_norms: bool = False
    fp32_norm_weights: bool = False
    composed_activation: bool = False
    linears: tuple[Linear, ...]
    embedding_parameters: int
    head_parameters: int
    norm_parameters: int
    other_parameters: int = 0
    experts: int = 0
    active_experts: int = 0
    sliding_window: int | None = None

    @property
    def linear_parameters(self) -> int:
        """Parameters of the linear layers inside the decoder, biases included, the output head not."""
        return sum(one.parameters for one in self.linears)

    @property
    def linear_weights(self) -> int:
        """Elements of those matrices without biases: what 4-bit quantisation packs."""
        return sum(one.count * one.weights for one in self.linears)

    @property
    def expert_parameters(self) -> int:
        return sum(one.parameters for one in self.linears if one.expert)

    @property
    def parameters(self) -> int:
        """All parameters; a tied head counts once."""
        rest = self.embedding_parameters + self.head_parameters + self.norm_parameters + self.other_parameters
        return self.linear_parameters + rest

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through: all but the experts it is not routed to."""
        return self.parameters - self.linear_parameters + sum(one.active_parameters for one in self.linears)

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply every token: linear layers in use and the output head, no embedding lookup."""
        return sum(one.active * one.weights for one in self.linears) + self.hidden_size * self.vocab_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer, the average where layers differ."""
        return (self.linear_parameters + self.norm_parameters) // max(1, self.num_layers)

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys (and of the values) of one token in one layer."""
        return self.num_kv_heads * self.head_dim
