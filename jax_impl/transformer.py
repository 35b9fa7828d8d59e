"""The GPT model: embedding, layers of (mixer, MLP), norm, head; or one pipeline stage of it.

Between layers travel ``hidden_states`` [B, T, D], or with hyper-connections the residual streams
[B, T, S, D]. A layer's mixer and settings come from the configuration's layer pattern, so no code
here assumes that layers are alike. Module names are the parameters' canonical names; layers are
keyed by their global number.

Reference: Vaswani et al., arXiv 1706.03762, in its pre-norm, rotary, gated form (Touvron et al.,
arXiv 2302.13971).
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int, Integer

from diptych.plans.config import TransformerConfig
from diptych.plans.context.sequences import FLACPContext
from diptych.plans.model.parameters import attention_specs, embedding_spec, mlp_specs
from diptych.plans.model.philox import attention_site, mlp_site
from diptych.plans.model.sampling import check_inputs
from diptych.plans.schedule.partition import check_stage_ends, get_num_layers_to_build, get_transformer_layer_offset
from jax_impl.cache import AttentionState, DecodingCache, known_length, remembered_attention
from jax_impl.context_parallel import cp_attention
from jax_impl.documents import PackedDocuments, both_masks, pack_documents
from jax_impl.hyper_connections import DeferredMix, HyperConnectionModule
from jax_impl.linear_attention import GatedDeltaNet, KimiDeltaAttention
from jax_impl.modules import Linear, RMSNorm
from jax_impl.offload import fetched, offloads_layers, run_offloaded
from jax_impl.ops import (
    DropoutState,
    add_bias,
    at_least_float32,
    causal_attention,
    cross_entropy,
    dropout,
    dropout_state,
    fused_attention,
    gelu,
    linear,
    parameter,
    rotary_embedding,
    swiglu,
)
from jax_impl.recompute import checkpoint_blocks, name_value


class SelfAttention(nnx.Module):
    """Causal softmax attention with rotary positions and grouped queries.

    Args:
        config: the model's.
        layer_number: global number of the layer, from 0.
        name: canonical name.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, name: str) -> None:
        self.config, self.layer_number = config, layer_number
        specs = attention_specs(config)
        self.linear_qkv = Linear(config, f"{name}.linear_qkv", specs["linear_qkv"])
        self.linear_proj = Linear(config, f"{name}.linear_proj", specs["linear_proj"])

    def __call__(
        self,
        hidden_states: Float[Array, "b t d"],
        positions: Int[Array, " t"],
        attention_mask: Bool[Array, "b t t"] | None = None,
        sequences: PackedDocuments | FLACPContext | None = None,
        cache: DecodingCache | None = None,
    ) -> tuple[Float[Array, "b t d"], Array | None]:
        """Attended output [B, T, D] and the output projection's bias, not yet added."""
        batch, length, _ = hidden_states.shape
        heads, groups = self.config.num_attention_heads, self.config.query_groups
        qkv = add_bias(*self.linear_qkv(hidden_states))
        qkv = qkv.reshape(batch, length, heads + 2 * groups, self.config.head_dim)
        q, k, v = jnp.split(qkv, (heads, heads + groups), axis=2)
        q = rotary_embedding(q, positions, self.config.rotary_base)
        k = rotary_embedding(k, positions, self.config.rotary_base)
        attend = fused_attention if self.config.use_flash_attn else causal_attention
        if isinstance(sequences, FLACPContext):
            q, k, v = name_value(q, "q"), name_value(k, "k"), name_value(v, "v")
            attended = name_value(cp_attention(q, k, v, sequences, self.config.use_flash_attn), "core_attn")
        elif cache is None:
            attended = name_value(attend(q, k, v, both_masks(attention_mask, sequences)), "core_attn")
        else:
            past = cache.layers[self.layer_number]
            assert isinstance(past, AttentionState), "a cache is made for the model's own layers"
            attended, cache.layers[self.layer_number] = remembered_attention(q, k, v, past, cache.length)
        return self.linear_proj(attended.reshape(batch, length, -1))


class MLP(nnx.Module):
    """Two linear maps around an activation function.

    Args:
        config: the model's.
        layer_number: global number of the layer, from 0.
        name: canonical name.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, name: str) -> None:
        specs = mlp_specs(config, layer_number)
        self.activation, self.impl = config.layer(layer_number).activation, config.impl
        self.linear_fc1 = Linear(config, f"{name}.linear_fc1", specs["linear_fc1"])
        self.linear_fc2 = Linear(config, f"{name}.linear_fc2", specs["linear_fc2"])

    def __call__(self, hidden_states: Float[Array, "b t d"]) -> tuple[Float[Array, "b t d"], Array | None]:
        """Output [B, T, D] and the second map's bias, not yet added."""
        inner = name_value(add_bias(*self.linear_fc1(hidden_states)), "fc1")
        activated = (swiglu if self.activation == "swiglu" else gelu)(inner, self.impl)
        return self.linear_fc2(name_value(activated, "activation"))


MIXER_MODULES = {"attention": SelfAttention, "gdn": GatedDeltaNet, "kda": KimiDeltaAttention}
"""Mixer names of the layer pattern and their modules."""


class TransformerLayer(nnx.Module):
    """Mixer and MLP, each normalised before and added back through mHC or a plain residual.

    Args:
        config: the model's.
        layer_number: global number of the layer, from 0.
    """

    def __init__(self, config: TransformerConfig, layer_number: int) -> None:
        self.config, self.layer_number = config, layer_number
        layer, name = config.layer(layer_number), f"decoder.layers.{layer_number}"
        self.self_attention_hyper_connection = (
            HyperConnectionModule(config, layer_number, f"{name}.self_attention_hyper_connection")
            if layer.self_attention_hyper_connection
            else None
        )
        self.input_layernorm = RMSNorm(config, f"{name}.input_layernorm")
        self.self_attention = MIXER_MODULES[layer.mixer](config, layer_number, f"{name}.self_attention")
        self.mlp_hyper_connection = (
            HyperConnectionModule(config, layer_number, f"{name}.mlp_hyper_connection")
            if layer.mlp_hyper_connection
            else None
        )
        self.pre_mlp_layernorm = RMSNorm(config, f"{name}.pre_mlp_layernorm")
        self.mlp = MLP(config, layer_number, f"{name}.mlp")

    def __call__(
        self,
        hidden_states: Float[Array, "b t *s d"],
        positions: Int[Array, " t"],
        state: DropoutState | None = None,
        attention_mask: Bool[Array, "b t t"] | None = None,
        sequences: PackedDocuments | FLACPContext | None = None,
        cache: DecodingCache | None = None,
    ) -> Float[Array, "b t *s d"]:
        """One layer.

        Args:
            hidden_states: [B, T, D], or residual streams [B, T, S, D] with hyper-connections.
            positions: of the tokens within their sequence. [T]
            state: rows of the batch for dropout; None: no dropout.
            attention_mask: see ops.causal_attention.
            sequences: documents in them, which are kept apart, or a part of sequences that ranks share; None: whole.
            cache: of the tokens before.
        """
        connection = self.self_attention_hyper_connection
        aggregated, mixed, h_post = self._read(connection, hidden_states)
        normed = name_value(self.input_layernorm(aggregated), "input_layernorm")
        output = name_value(
            add_bias(*self.self_attention(normed, positions, attention_mask, sequences, cache)), "attention_output"
        )
        site = attention_site(self.layer_number)
        hidden_states = self._write(connection, output, h_post, mixed, state, site)

        connection = self.mlp_hyper_connection
        aggregated, mixed, h_post = self._read(connection, hidden_states)
        normed = name_value(self.pre_mlp_layernorm(aggregated), "pre_mlp_layernorm")
        output = name_value(add_bias(*self.mlp(normed)), "mlp_output")
        return self._write(connection, output, h_post, mixed, state, mlp_site(self.layer_number))

    def _read(
        self, connection: HyperConnectionModule | None, hidden_states: Array
    ) -> tuple[Array, Array | DeferredMix, Array | None]:
        """What a sublayer reads, what it is added to, and with which weights (None: all 1)."""
        if connection is not None:
            return connection.read(hidden_states)
        if hidden_states.ndim == 4:
            mean = HyperConnectionModule.output_contract(hidden_states, self.config.num_residual_streams)
            return name_value(mean, "aggregated"), hidden_states, None
        return hidden_states, hidden_states, None

    def _write(
        self,
        connection: HyperConnectionModule | None,
        output: Array,
        h_post: Array | None,
        mixed: Array | DeferredMix,
        state: DropoutState | None,
        site: int | Array,
    ) -> Array:
        """Add a sublayer's output back: by its hyper-connection, or plainly, to every stream alike."""
        if connection is not None and h_post is not None:
            hidden_states = connection.apply_h_post_dropout_add((output, None), h_post, mixed, state, site)
        else:
            assert not isinstance(mixed, DeferredMix), "only a hyper-connection defers mixing"
            if state is not None:
                output = dropout(output, self.config.hidden_dropout, state, site)
            hidden_states = mixed + (output[..., None, :] if mixed.ndim == 4 else output)
        return name_value(hidden_states, "residual_streams")


class TransformerBlock(nnx.Module):
    """The layers of one pipeline stage, and the final norm in the last.

    Args:
        config: the whole model's.
        pre_process, post_process: whether this is the first, the last stage.
        vp_stage: index of the virtual stage within its rank; None: 0.
        pp_rank: pipeline rank; None: 0.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> None:
        self.config, self.pre_process, self.post_process = config, pre_process, post_process
        self.vp_stage, self.pp_rank = vp_stage, pp_rank
        first = get_transformer_layer_offset(config, vp_stage, pp_rank)
        numbers = range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank))
        self.layers = nnx.Dict({str(number): TransformerLayer(config, number) for number in numbers})
        self.final_layernorm = RMSNorm(config, "decoder.final_layernorm") if post_process else None

    def __call__(
        self,
        hidden_states: Float[Array, "b t *s d"],
        positions: Int[Array, " t"],
        state: DropoutState | None = None,
        attention_mask: Bool[Array, "b t t"] | None = None,
        sequences: PackedDocuments | FLACPContext | None = None,
        cache: DecodingCache | None = None,
    ) -> Float[Array, "b t *streams d"]:
        """Run the stage's layers; expand to streams in the first stage, contract in the last."""
        streams, hyper = self.config.num_residual_streams, self.config.enable_hyper_connections
        if hyper and self.pre_process:
            hidden_states = HyperConnectionModule.input_expand(hidden_states, streams)

        hidden_states = name_value(hidden_states, "residual_streams")
        told = positions, state, attention_mask, sequences
        if cache is not None:  # nothing is kept for a backward
            for number in sorted(map(int, self.layers)):
                layer = self.layers[str(number)]
                layer = fetched(layer) if offloads_layers(self.config) else layer
                hidden_states = layer(hidden_states, *told, cache)
        elif offloads_layers(self.config):
            hidden_states = self._run_offloaded(hidden_states, told)
        else:

            def run(number: int, hidden_states: Array) -> Array:
                return self.layers[str(number)](hidden_states, *told)

            hidden_states = checkpoint_blocks(run, self.config, self.vp_stage, self.pp_rank)(hidden_states)
        if self.final_layernorm is None:
            return hidden_states
        if hyper:
            hidden_states = HyperConnectionModule.output_contract(hidden_states, streams)
        return self.final_layernorm(hidden_states)

    def _run_offloaded(self, hidden_states: Array, inputs: tuple) -> Array:
        """The layers, each fetched when the plan says so."""
        split = {int(number): nnx.split(layer, nnx.Param) for number, layer in self.layers.items()}

        def run(number: int, parameters: nnx.State, hidden_states: Array, inputs: tuple) -> Array:
            return nnx.merge(split[number][0], parameters)(hidden_states, *inputs)

        parameters = {number: params for number, (_, params) in sorted(split.items())}
        return run_offloaded(run, self.config, parameters, hidden_states, inputs, self.vp_stage, self.pp_rank)


class Embedding(nnx.Module):
    """A table with one vector a token: the input embedding, and an untied output layer.

    Args:
        config: the model's.
        name: canonical name.
    """

    def __init__(self, config: TransformerConfig, name: str) -> None:
        self.weight = parameter(config, f"{name}.weight", embedding_spec(config)["weight"])

    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """The tokens' vectors; NaN for an id that is no token."""
        known = (tokens >= 0) & (tokens < self.weight.shape[0])
        return jnp.where(known[..., None], self.weight[...][tokens], jnp.nan)


class GPTModel(nnx.Module):
    """A decoder-only language model, or one pipeline stage of it.

    Args:
        config: the whole model's.
        pre_process: build the embedding and take token ids (first stage).
        post_process: build final norm and head and give logits or the loss (last stage).
        vp_stage: index of the virtual stage within its rank; None: 0.
        pp_rank: pipeline rank; None: 0.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> None:
        self.config, self.pre_process, self.post_process = config, pre_process, post_process
        check_stage_ends(config, pre_process, post_process, vp_stage, pp_rank)
        tied = not config.untie_embeddings_and_output_weights
        # A last stage with a tied head holds a copy of the first stage's embedding, of equal value.
        self.embedding = Embedding(config, "embedding") if pre_process or (post_process and tied) else None
        self.decoder = TransformerBlock(config, pre_process, post_process, vp_stage, pp_rank)
        self.output_layer = Embedding(config, "output_layer") if post_process and not tied else None

    def __call__(
        self,
        inputs: Int[Array, "b t"] | Float[Array, "b t *s d"],
        targets: Int[Array, "b t"] | None = None,
        *,
        step: int | Integer[Array, ""] = 0,
        samples: Int[Array, "*b"] | None = None,
        positions: Int[Array, " t"] | None = None,
        attention_mask: Bool[Array, "b t t"] | None = None,
        document_starts: Array | None = None,
        cache: DecodingCache | None = None,
        cp_context: FLACPContext | None = None,
        training: bool = True,
    ) -> Array:
        """The loss, the logits, or what the next stage takes.

        Args:
            inputs: token ids [B, T] in the first stage, else the stage before's output.
            targets: the token after each of inputs. [B, T]
            step: training step, for dropout.
            samples: numbers of the sequences within the global batch, of rows or tokens; None: 0 .. B-1. [B] or [B, T]
            positions: of the tokens within their sequence; None: 0 .. T-1. [T]
            attention_mask: see ops.causal_attention.
            document_starts: where documents begin that know nothing of each other, see
                diptych.plans.model.documents; None: each sequence is one. [B, N] int32
            cache: of the tokens before, see cache.empty_cache; left as after these.
            cp_context: of ranks that share the sequences, end to end: B = 1, and positions have to be given.
            training: False turns dropout off.

        Returns:
            Last stage: mean loss in nats per token, or logits [B, T, V] without targets. Other
            stages: hidden states [B, T, D] or [B, T, S, D].

        Raises:
            ValueError: more than config.seq_length tokens, of the cache and given together. Where jax.jit traces the
                cache's length, logits are NaN instead.
        """
        batch, length = inputs.shape[:2]
        unfit = {"attention_mask": attention_mask, "document_starts": document_starts}
        read = known_length(cache), None if cache is None else cache.batch
        check_inputs(self.config.seq_length, (batch, length), *read, cp_context, positions, **unfit)
        if positions is None:
            positions = jnp.add(jnp.arange(length), 0 if cache is None else cache.length)
        sequences = cp_context or pack_documents(document_starts, inputs, "attention" in self.config.mixers)
        state = None
        if training and self.config.hidden_dropout > 0.0:
            samples = jnp.arange(batch) if samples is None else samples
            state = dropout_state(self.config.seed, step, samples, positions, self.config.seq_length)
        hidden_states = inputs
        if self.pre_process and self.embedding is not None:
            hidden_states = self.embedding(inputs).astype(self.config.compute_dtype)
        hidden_states = self.decoder(hidden_states, positions, state, attention_mask, sequences, cache)
        if cache is not None:
            cache.length += length
            hidden_states = jnp.where(cache.length <= self.config.seq_length, hidden_states, jnp.nan)
        head = self.output_layer or self.embedding
        if not self.post_process or head is None:
            return hidden_states
        logits = at_least_float32(linear(hidden_states, head.weight[...]))
        return logits if targets is None else cross_entropy(logits, targets)
