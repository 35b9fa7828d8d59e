"""Settings and rules of the model and of its parallelism."""

from dataclasses import dataclass, replace
from typing import Literal

from diptych.plans.config.context import CONTEXT_RULES
from diptych.plans.config.experts import EXPERT_RULES
from diptych.plans.config.offload import OFFLOAD_LAYER_RULES, OFFLOAD_RULES
from diptych.plans.config.pipeline import PIPELINE_RULES
from diptych.plans.config.precision import DEFAULT_HISTORY, FP8_RULES, STORAGE_RULES
from diptych.plans.config.recompute import RECOMPUTE_RULES, RecomputeModule
from diptych.plans.config.rules import Rule, choice, count, flag, number, validate
from diptych.plans.config.tensor import TENSOR_RULES
from diptych.plans.model.implementation import IMPLEMENTATIONS, MAX_KERNEL_CHANNELS, MAX_KERNEL_STREAMS
from diptych.plans.model.layers import (
    ACTIVATIONS,
    SOFTMAX_MIXERS,
    LayerConfig,
    LayerDefaults,
    is_named,
    offloaded_values,
    parse_layer,
)
from diptych.plans.schedule.actions import Schedule
from diptych.plans.schedule.partition import PipelineSplit, get_stage_place, layers_by_stage
from diptych.plans.schedule.placement import FROM_FILE, V_SCHEDULES, Placement, ScheduleName

DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class TransformerConfig:
    """The model: widths, layers, hyper-connections, dropout, and its parallelism.

    Raises:
        ValueError: the settings break a rule of MODEL_RULES; the message names the setting and the remedy.
    """

    hidden_size: int
    """Width D of one residual stream."""
    num_layers: int
    """Number of transformer layers in the whole model."""
    num_attention_heads: int
    """Query heads; must divide hidden_size unless kv_channels is given."""
    enable_hyper_connections: bool = False
    """Replace every residual connection by a manifold-constrained hyper-connection (mHC)."""
    num_residual_streams: int = 4
    """Number S of parallel residual streams of mHC."""
    sinkhorn_iterations: int = 20
    """Pairs of column and row normalizations that make h_res doubly stochastic."""
    sinkhorn_last: Literal["row", "column"] = "row"
    """Last normalization of an iteration, the only exact one (the paper: row)."""
    do_self_attention_hyper_connection: bool = True
    """Use mHC around attention; False: a plain residual on every stream."""
    do_mlp_hyper_connection: bool = True
    """Use mHC around the MLP; False: a plain residual on every stream."""
    mhc_init_gating_factor: float = 0.01
    """Initial value of the three scalars alpha of a hyper-connection."""
    mhc_epsilon: float = 0.0
    """Epsilon added to h_pre, to the first normalization of h_res and to the sums of the others (the paper: 0)."""
    mhc_transpose_h_res: bool = False
    """Columns of the projection of hyper-connections: those of h_res transposed (True), or of h_res (False)."""
    mhc_head: Literal["mean", "learned"] = "mean"
    """Hidden states after the last layer with mHC: the mean of the streams, or a learned sum of them."""
    num_query_groups: int | None = None
    """Key/value heads of grouped-query attention; None: num_attention_heads."""
    kv_channels: int | None = None
    """Width of one head; None: hidden_size / num_attention_heads."""
    ffn_hidden_size: int | None = None
    """Inner width of the MLP; None: 4 D for gelu, 8/3 D rounded up to a multiple of 8 for swiglu."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Activation function of the MLP."""
    layer_pattern: str = "attention"
    """Layers, separated by commas and repeated over the depth; each is a mixer (attention, mla, gdn, kda) and, after +,
    options: moe, swiglu, gelu, ffn=<width>, post-norm, no-attention-hc, no-mlp-hc."""
    kv_lora_rank: int | None = None
    """Width of the latent of mla layers, from which keys and values of all heads are projected."""
    qk_head_dim: int | None = None
    """Width of the part of a head's queries and keys in mla layers whose keys come from the latent."""
    qk_pos_emb_head_dim: int | None = None
    """Width of the other part of a head's queries and keys in mla layers, whose keys all heads share."""
    v_head_dim: int | None = None
    """Width of a head's values in mla layers."""
    mla_norm_epsilon: float | None = None
    """Epsilon of the norm of the latent in mla layers; None: layernorm_epsilon."""
    num_moe_experts: int | None = None
    """Experts of a layer with moe in layer_pattern. Every token goes to its experts; none is dropped."""
    moe_router_topk: int = 2
    """Experts of a token, beside the shared one."""
    moe_ffn_hidden_size: int | None = None
    """Inner width of an expert; None: that of an MLP."""
    moe_shared_expert_intermediate_size: int | None = None
    """Inner width of the shared expert, which every token has; None: there is none."""
    moe_shared_expert_gate: bool = False
    """Multiply the output of the shared expert by the sigmoid of a projection of its input."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts: the softmax of the router's logits over all experts, or their sigmoid."""
    moe_router_norm_topk_prob: bool = True
    """Divide the scores of a token's experts by their sum."""
    moe_router_enable_expert_bias: bool = False
    """Choose experts by score plus a bias per expert, whose gradient is 0; the bias is not in the weights."""
    moe_router_num_groups: int | None = None
    """Groups of experts, of which a token chooses some before it chooses experts in them; None: one."""
    moe_router_group_topk: int | None = None
    """Groups that a token chooses, by the sum of the two highest scores in each."""
    moe_router_topk_scaling_factor: float = 1.0
    """Factor of the weights of a token's experts."""
    moe_aux_loss_coeff: float = 0.0
    """Factor of the load-balancing loss of each layer of experts, in training; 0: there is none."""
    linear_num_key_heads: int | None = None
    """Query and key heads of gdn and kda layers; None: num_attention_heads."""
    linear_num_value_heads: int | None = None
    """Value heads of gdn and kda layers, a multiple of their key heads; None: the number of key heads."""
    linear_key_head_dim: int | None = None
    """Width of a key head of gdn and kda layers; None: the width of an attention head."""
    linear_value_head_dim: int | None = None
    """Width of a value head of gdn and kda layers; None: the width of their key heads."""
    linear_conv_kernel_dim: int = 4
    """Kernel width of the causal short convolution of gdn and kda layers, in tokens."""
    linear_allow_neg_eigval: bool = False
    """Allow negative eigenvalues of the state transition in gdn and kda layers: beta in (0, 2) instead of (0, 1)."""
    kda_lower_bound: float | None = None
    """Lower bound of the log decays of kda layers, in [-5, 0); None: unbounded."""
    vocab_size: int = 256
    """Number of token ids; 256 for bytes."""
    seq_length: int = 128
    """Maximum sequence length T."""
    rotary_base: float = 10000.0
    """Base of the rotary position embedding's wavelengths."""
    rotary_percent: float = 1.0
    """Share of the channels of a head that the rotary position embedding turns, the first ones; 0: no positions."""
    qk_layernorm: bool = False
    """Normalize queries and keys before the rotary position embedding."""
    qk_layernorm_scope: Literal["head", "projection"] = "head"
    """With qk_layernorm: the channels of a norm, those of one head or those of all heads together (projection)."""
    attention_output_gate: bool = False
    """Multiply the output of softmax attention by the sigmoid of a projection of its input."""
    layernorm_epsilon: float = 1e-5
    """Epsilon added to the mean square in every norm."""
    linear_norm_epsilon: float | None = None
    """Epsilon of the output norm of gdn and kda layers; None: layernorm_epsilon."""
    layernorm_zero_centered_gamma: bool = False
    """Multiply by 1 + weight instead of weight in all norms but the output norm of gdn and kda layers."""
    use_flash_attn: bool = False
    """Use the framework's fused attention kernel, if there is one; it does not store the T x T weights."""
    impl: Literal["auto", "reference", "triton"] = "auto"
    """Implementation of hyper-connections, activation functions and delta rule: the shared Triton kernels (triton) or
    the framework's operations (reference); auto: kernels on a CUDA device. On a CPU, triton uses Triton's slow
    interpreter."""
    add_bias_linear: bool = False
    """Give every linear layer a bias."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weight instead of the embedding's."""
    hidden_dropout: float = 0.0
    """Dropout probability of the elements that a sublayer adds to the residual."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights; divided by sqrt(2 num_layers) for output projections."""
    params_dtype: Literal["float32", "float64"] = "float32"
    """Type of parameters, and of activations without bf16."""
    bf16: bool = False
    """Mixed precision: activations in bfloat16, except for the values in diptych.plans.config.KEPT_IN_FLOAT32."""
    pipeline_model_parallel_size: int = 1
    """Number of pipeline ranks."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks (virtual stages) per pipeline rank; None: one."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first pipeline rank, over all its virtual stages; None: as many as the others."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last pipeline rank, over all its virtual stages; None: as many as the others."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """Count head and loss as a layer of the last stage."""
    pipeline_model_parallel_layout: str | None = None
    """List of every stage, e.g. ``E t*3 | (tt|)*2 t L``: E embedding, t layer, L loss, | between stages."""
    pipeline_schedule: ScheduleName | None = None
    """Pipeline schedule; None: none, 1f1b or interleaved, depending on the ranks and virtual stages."""
    pipeline_schedule_file: Schedule | None = None
    """Pipeline schedule from a CSV file in the format of torch.distributed.pipelining. A path on the command line; in
    Python the result of diptych.plans.schedule.csv.read_schedule."""
    microbatch_group_size_per_vp_stage: int | None = None
    """Consecutive microbatches of one virtual stage; None: as many as pipeline ranks."""
    deallocate_pipeline_outputs: bool = True
    """PyTorch: free a stage's output after it is sent; backward does not read it."""
    overlap_p2p_comm: bool = True
    """PyTorch: post receives early and wait for sends late; False: wait for each message at its place in the order."""
    variable_seq_lengths: bool = False
    """PyTorch: send the shape with every message, so that microbatches may differ in length."""
    calculate_per_token_loss: bool = False
    """PyTorch: divide gradients by the number of tokens of the batch; False: average the means of the microbatches."""
    pipeline_timeout: float = 600.0
    """PyTorch: seconds that a rank waits for a message before it raises an error that names the message."""
    context_parallel_size: int = 1
    """Number of context-parallel ranks, which share the tokens of every microbatch."""
    cp_exchange: Literal["all_gather", "ring", "scan", "pipelined"] = "all_gather"
    """Exchange of the states of gdn and kda layers between context-parallel ranks: gather all, send to the next rank
    (ring), or compose in a logarithmic number of rounds (scan). pipelined: microbatches follow one another over the
    ranks, which also send keys and values of attention to the next rank."""
    cp_wire_dtype: Literal["bfloat16"] | None = None
    """Type of the exchanged states; None: their own. bfloat16 adds a relative error of up to 2**-9 per message."""
    cp_truncate_ranks: int | None = None
    """With cp_exchange ring: the number of following ranks that a state reaches; None: all. An approximate state
    exchange with the error bound of diptych.plans.context.approximation."""
    cp_transition_rank: int | None = None
    """With cp_exchange all_gather: the rank of the low-rank part of a sent transition, in addition to its diagonal;
    None: the full matrix. An approximate state exchange with the error bound of diptych.plans.context.approximation."""
    cp_attention_layout: Literal["contiguous", "zigzag"] = "contiguous"
    """Queries of softmax attention per context-parallel rank: one contiguous part, whose last rank attends to the most
    keys, or half a part from each end (zigzag), which balances the ranks. Other layers keep contiguous parts."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute full layers (full) or the selected modules (selective); None: save everything for backward."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full: recompute all layers of a stage in chunks (uniform), or the first layers one by one (block)."""
    recompute_num_layers: int | None = None
    """With uniform: layers per chunk, None: 1. With block: layers per pipeline rank, None: all."""
    recompute_modules: tuple[RecomputeModule, ...] = ()
    """With selective: the recomputed modules, in any combination."""
    recompute_hyper_connections: bool = False
    """With selective: recompute module mhc."""
    recompute_pre_mlp_layernorm: bool = False
    """With selective: recompute only the norm before the MLP."""
    recompute_mlp: bool = False
    """With selective: recompute module mlp."""
    mhc_recompute_layer_num: int | None = None
    """Layers per block of recomputed hyper-connections; None: the length that needs the least memory."""
    recompute_activation_function: bool = False
    """Recompute activation functions; with full recompute of method block, in the layers not fully recomputed."""
    recompute_activation_function_num_layers: int | None = None
    """Layers per pipeline rank whose activation function is recomputed; None: all remaining layers, 0: none."""
    recompute_layout: str | None = None
    """Recompute of every layer, instead of the other recompute settings: blocks in the order of the layers, each none,
    full or modules joined by +, and after * its number of layers, as in full*4,layernorm+mlp*2,none. diptych plan with
    activation_memory_budget finds one."""
    enable_tensor_offload: bool = False
    """Keep the layers' parameters in host memory; each layer is on the device for its forward, backward and update."""
    tensor_offload_pin_memory: bool = True
    """PyTorch, on a GPU: pin the host copies, so that copying overlaps with computation."""
    tensor_offload_num_prefetch_layers: int = 1
    """Layers fetched ahead of the current one; 0: fetch each layer on use."""
    enable_activation_offload: bool = False
    """Move the tensors that layers save for backward to host memory between forward and backward."""
    activation_offload_layers: str | None = None
    """Layers for which enable_activation_offload is used, as in 0-3,7; None: all. Of a layer, only some values move if
    their names follow, as in 0-3:fc1+activation,7; see diptych.plans.model.values."""
    activation_offload_min_bytes: int = 2**20
    """Minimum size in bytes of an offloaded activation; smaller ones stay on the device."""
    seed: int = 0
    """Seed of initial parameters and dropout."""
    tensor_model_parallel_size: int = 1
    """Ranks that share the heads, inner channels and token ids of every layer."""
    sequence_parallel: bool = False
    """Divide the tokens, too, among the ranks of tensor parallelism where their layers compute token by token: norms,
    dropout, residual streams and hyper-connections."""
    use_distributed_optimizer: bool = False
    """Divide the optimizer's state among all ranks with the same parameters; each updates its shard and sends it to the
    others. Of the gradients that a step leaves, a rank's shard alone is summed."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """Matrix products of 8-bit floats in linear layers of attention, delta-rule layers and MLPs: e4m3 for all arrays,
    or hybrid: e5m2 for gradients; None: none."""
    fp8_recipe: Literal["current", "delayed", "blockwise"] = "current"
    """Scales of 8-bit floats: one per array, from its largest entry (current) or from the largest entries of earlier
    steps (delayed), or one per block of 1 x 128 entries of inputs and gradients and of 128 x 128 of weights
    (blockwise)."""
    fp8_amax_history_len: int = DEFAULT_HISTORY
    """Optimizer steps whose largest entries decide the scales of the delayed recipe."""
    activation_storage: Literal["fp8"] | None = None
    """Save the inputs of linear layers and of activation functions for backward in 8 bits; None: as they are."""
    activation_storage_layers: str | None = None
    """Layers for which activation_storage is used, as in 0-3,7; None: all."""

    def __post_init__(self) -> None:
        self.check(MODEL_RULES)

    def check(self, rules: tuple[Rule, ...]) -> None:
        """Check that the settings satisfy the rules.

        Raises:
            ValueError: the settings break a rule.
        """
        validate(self, rules)

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that run one copy of the model: pipeline, context- and tensor-parallel ranks multiplied."""
        return self.pipeline_model_parallel_size * self.context_parallel_size * self.tensor_model_parallel_size

    @property
    def compute_dtype(self) -> str:
        """Type of activations between layers."""
        return "bfloat16" if self.bf16 else self.params_dtype

    @property
    def product_dtype(self) -> str:
        """Name of the narrowest operand type of matrix products, by which parity selects its tolerances."""
        return self.compute_dtype if self.fp8 is None and self.activation_storage is None else "float8"

    @property
    def schedule_name(self) -> str:
        """Name of the pipeline schedule: the configured one, or the default for the ranks and virtual stages."""
        if self.pipeline_schedule_file is not None:
            return FROM_FILE
        if self.pipeline_schedule is not None:
            return self.pipeline_schedule
        if self.pipeline_model_parallel_size == 1:
            return "none"
        return "interleaved" if (self.virtual_pipeline_model_parallel_size or 1) > 1 else "1f1b"

    @property
    def placement(self) -> Placement:
        """Placement of the pipeline stages on ranks."""
        if self.pipeline_schedule_file is not None:
            return self.pipeline_schedule_file.placement
        return "v" if self.schedule_name in V_SCHEDULES else "loop"

    @property
    def pipeline_split(self) -> PipelineSplit:
        """The settings that decide how many layers each pipeline stage has."""
        return PipelineSplit(
            num_layers=self.num_layers,
            pp_size=self.pipeline_model_parallel_size,
            stages_per_rank=self.virtual_pipeline_model_parallel_size or 1,
            placement=self.placement,
            layout=self.pipeline_model_parallel_layout,
            first_rank_layers=self.num_layers_in_first_pipeline_stage,
            last_rank_layers=self.num_layers_in_last_pipeline_stage,
            counts_embedding=self.account_for_embedding_in_pipeline_split,
            counts_loss=self.account_for_loss_in_pipeline_split,
        )

    @property
    def layers_per_rank(self) -> int:
        """Largest number of layers of any pipeline rank, over all its virtual stages."""
        found = [0] * self.pipeline_model_parallel_size
        for stage, layers in enumerate(layers_by_stage(self)):
            found[get_stage_place(self, stage).pp_rank] += layers
        return max(found)

    @property
    def layers_per_stage(self) -> int:
        """Largest number of layers of any pipeline stage."""
        return max(layers_by_stage(self))

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that the rotary position embedding turns."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def residual_streams(self) -> int:
        """Number of residual streams: 1 without mHC."""
        return self.num_residual_streams if self.enable_hyper_connections else 1

    @property
    def stage_width(self) -> int:
        """Elements per token between stages: the residual streams, and the load-balancing loss if there is one."""
        return self.residual_streams * self.hidden_size + (self.moe_aux_loss_coeff > 0)

    @property
    def linear_heads(self) -> tuple[int, int, int, int]:
        """Key heads, value heads, key head width and value head width of gdn and kda layers."""
        heads = self.linear_num_key_heads or self.num_attention_heads
        width = self.linear_key_head_dim or self.head_dim
        return heads, self.linear_num_value_heads or heads, width, self.linear_value_head_dim or width

    @property
    def has_softmax(self) -> bool:
        """True if a layer attends to all earlier tokens."""
        return not self.mixers.isdisjoint(SOFTMAX_MIXERS)

    def attention_heads(self, mixer: str) -> tuple[int, int, int, int]:
        """Return query heads, key and value heads, key width and value width of attention or mla layers."""
        if mixer == "mla":
            heads = self.num_attention_heads
            return heads, heads, (self.qk_head_dim or 0) + (self.qk_pos_emb_head_dim or 0), self.v_head_dim or 0
        return self.num_attention_heads, self.query_groups, self.head_dim, self.head_dim

    @property
    def mixers(self) -> frozenset[str]:
        """Mixers that the layers use."""
        return frozenset(layer.mixer for layer in self.repeated_layers)

    @property
    def repeated_layers(self) -> tuple[LayerConfig, ...]:
        """Settings of the layers that ``layer_pattern`` names, which the other layers repeat."""
        period = self.layer_pattern.count(",") + 1
        return tuple(self.layer(number) for number in range(min(period, self.num_layers)))

    def layer(self, layer_number: int) -> LayerConfig:
        """Return the settings of one layer.

        Args:
            layer_number: global index of the layer, from 0 (Megatron-core's layer_number counts from 1).

        Raises:
            ValueError: layer_number is out of range.
        """
        if not 0 <= layer_number < self.num_layers:
            raise ValueError(
                f"layer_number: expected 0 <= layer_number < num_layers={self.num_layers}, got {layer_number}"
            )
        pattern = self.layer_pattern.split(",")
        layer = parse_layer(pattern[layer_number % len(pattern)], self.layer_defaults)
        if self.activation_storage and is_named(layer_number, self.activation_storage_layers):
            layer = replace(layer, storage=self.activation_storage)
        if self.enable_activation_offload:
            layers = self.activation_offload_layers
            layer = replace(layer, offload="all" if layers is None else offloaded_values(layers).get(layer_number))
        return layer

    @property
    def layer_defaults(self) -> LayerDefaults:
        """Settings of layers that ``layer_pattern`` may omit."""
        return LayerDefaults(
            hidden_size=self.hidden_size,
            activation=self.activation,
            ffn_hidden_size=self.ffn_hidden_size,
            moe_ffn_hidden_size=self.moe_ffn_hidden_size,
            enable_hyper_connections=self.enable_hyper_connections,
            self_attention_hyper_connection=self.do_self_attention_hyper_connection,
            mlp_hyper_connection=self.do_mlp_hyper_connection,
        )


def _pattern_error(config: TransformerConfig) -> str:
    """Return the first fault of the layer pattern, or the empty string."""
    if not isinstance(config.layer_pattern, str):
        return f"layer_pattern: expected layers separated by commas, got {config.layer_pattern!r}"
    try:
        descriptions = config.layer_pattern.split(",")
        for description in descriptions:
            parse_layer(description, config.layer_defaults)
    except ValueError as error:
        return str(error)
    if len(descriptions) > config.num_layers:
        return f"layer_pattern: expected at most num_layers={config.num_layers} layers, got {len(descriptions)}"
    return ""


LATENT_SETTINGS = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
LATENT_RULES: tuple[Rule, ...] = (
    *(count(name) for name in LATENT_SETTINGS),
    Rule(
        "mla_norm_epsilon",
        lambda c: c.mla_norm_epsilon is None or number("mla_norm_epsilon", "(0, inf)").holds(c),
        lambda c: f"mla_norm_epsilon: expected None or a number in (0, inf), got {c.mla_norm_epsilon!r}",
    ),
    Rule(
        "mla has widths",
        lambda c: "mla" not in c.mixers or None not in [getattr(c, name) for name in LATENT_SETTINGS],
        lambda c: (
            f"{', '.join(LATENT_SETTINGS)}: expected integers with mla in layer_pattern={c.layer_pattern!r}, got "
            f"{', '.join(repr(getattr(c, name)) for name in LATENT_SETTINGS)}"
        ),
    ),
    Rule(
        "mla has no positions",
        lambda c: "mla" not in c.mixers or c.rotary_percent == 0,
        lambda c: (
            "rotary_percent: expected 0.0 with mla in layer_pattern, whose layers have no rotary position embedding, "
            f"got {c.rotary_percent!r}"
        ),
    ),
)
"""Rules of multi-head latent attention."""

MODEL_RULES: tuple[Rule, ...] = (
    count("hidden_size"),
    count("num_layers"),
    *STORAGE_RULES,
    *OFFLOAD_LAYER_RULES,
    count("num_attention_heads"),
    flag("enable_hyper_connections"),
    flag("do_self_attention_hyper_connection"),
    flag("do_mlp_hyper_connection"),
    flag("add_bias_linear"),
    flag("use_flash_attn"),
    flag("untie_embeddings_and_output_weights"),
    count("num_residual_streams"),
    count("sinkhorn_iterations"),
    choice("sinkhorn_last", ("row", "column")),
    number("mhc_init_gating_factor", "(-inf, inf)"),
    number("mhc_epsilon", "[0, inf)"),
    flag("mhc_transpose_h_res"),
    choice("mhc_head", ("mean", "learned")),
    count("num_query_groups"),
    count("kv_channels"),
    count("ffn_hidden_size"),
    choice("activation", ACTIVATIONS),
    choice("impl", IMPLEMENTATIONS),
    Rule(
        "kernels support few streams",
        lambda c: c.impl != "triton" or not c.enable_hyper_connections or c.num_residual_streams <= MAX_KERNEL_STREAMS,
        lambda c: (
            f"num_residual_streams: expected at most {MAX_KERNEL_STREAMS} with impl='triton', got "
            f"{c.num_residual_streams}; impl='reference' supports any number"
        ),
    ),
    count("linear_num_key_heads"),
    count("linear_num_value_heads"),
    count("linear_key_head_dim"),
    count("linear_value_head_dim"),
    count("linear_conv_kernel_dim"),
    flag("linear_allow_neg_eigval"),
    Rule(
        "kda_lower_bound",
        lambda c: c.kda_lower_bound is None or number("kda_lower_bound", "[-5, 0)").holds(c),
        lambda c: f"kda_lower_bound: expected None or a number in [-5, 0), got {c.kda_lower_bound!r}",
    ),
    Rule(
        "key heads divide value heads",
        lambda c: c.linear_heads[1] % c.linear_heads[0] == 0,
        lambda c: (
            f"linear_num_value_heads: expected a multiple of linear_num_key_heads={c.linear_heads[0]}, got "
            f"{c.linear_heads[1]}"
        ),
    ),
    count("vocab_size"),
    count("seq_length"),
    number("rotary_base", "(0, inf)"),
    number("rotary_percent", "[0, 1]"),
    flag("qk_layernorm"),
    choice("qk_layernorm_scope", ("head", "projection")),
    flag("attention_output_gate"),
    flag("layernorm_zero_centered_gamma"),
    number("layernorm_epsilon", "(0, inf)"),
    Rule(
        "linear_norm_epsilon",
        lambda c: c.linear_norm_epsilon is None or number("linear_norm_epsilon", "(0, inf)").holds(c),
        lambda c: f"linear_norm_epsilon: expected None or a number in (0, inf), got {c.linear_norm_epsilon!r}",
    ),
    number("hidden_dropout", "[0, 1)"),
    number("init_method_std", "[0, inf)"),
    choice("params_dtype", DTYPES),
    flag("bf16"),
    Rule(
        "bf16 has float32 parameters",
        lambda c: not c.bf16 or c.params_dtype == "float32",
        lambda c: f"bf16: expected params_dtype='float32' (master weights), got {c.params_dtype!r}",
    ),
    count("seed", least=0),
    Rule(
        "seed fits 32 bits",
        lambda c: c.seed < 2**32,
        lambda c: f"seed: expected an integer < 2**32 (it is half of a Philox key), got {c.seed}",
    ),
    Rule(
        "heads divide width",
        lambda c: c.kv_channels is not None or c.hidden_size % c.num_attention_heads == 0,
        lambda c: (
            f"num_attention_heads: expected a divisor of hidden_size={c.hidden_size}, got "
            f"{c.num_attention_heads}; change either, or set the head width kv_channels"
        ),
    ),
    Rule(
        "rotary width is even",
        lambda c: c.rotary_dim % 2 == 0,
        lambda c: (
            "kv_channels, rotary_percent: expected an even number of turned channels (rotary embedding rotates "
            f"pairs), got {c.rotary_dim} of {c.head_dim}"
        ),
    ),
    Rule(
        "groups divide heads",
        lambda c: c.num_attention_heads % c.query_groups == 0,
        lambda c: (
            f"num_query_groups: expected a divisor of num_attention_heads={c.num_attention_heads}, got {c.query_groups}"
        ),
    ),
    Rule("layer_pattern", lambda c: not _pattern_error(c), _pattern_error),
    Rule(
        "kernels support narrow heads",
        lambda c: c.impl != "triton" or c.mixers <= SOFTMAX_MIXERS or max(c.linear_heads[2:]) <= MAX_KERNEL_CHANNELS,
        lambda c: (
            f"linear_key_head_dim, linear_value_head_dim: expected at most {MAX_KERNEL_CHANNELS} with impl='triton', "
            f"got {c.linear_heads[2]} and {c.linear_heads[3]}; impl='reference' supports any number"
        ),
    ),
    *LATENT_RULES,
    *EXPERT_RULES,
    *PIPELINE_RULES,
    *CONTEXT_RULES,
    *TENSOR_RULES,
    *FP8_RULES,
    *RECOMPUTE_RULES,
    flag("use_distributed_optimizer"),
    *OFFLOAD_RULES,
)
