"""The GPT model, or one pipeline stage of it: embedding, layers of (mixer, MLP), final norm, output head.

Layers receive and return ``hidden_states`` [B, T, D], or the residual streams [B, T, S, D] with hyper-connections. The
layer pattern of the configuration gives each layer its mixer and settings, so layers can differ. Names of modules are
the canonical names of parameters. Layers are keyed by their global number.

Reference: Vaswani et al., arXiv 1706.03762, in its pre-norm, rotary, gated form (Touvron et al., arXiv 2302.13971).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diptych.plans.config import TransformerConfig
from diptych.plans.context.sequences import FLACPContext
from diptych.plans.model.parameters import embedding_spec
from diptych.plans.model.philox import attention_site, mlp_site
from diptych.plans.model.sampling import check_inputs
from diptych.plans.recompute import RecomputeBlock, recompute_blocks
from diptych.plans.schedule.partition import check_stage_ends, get_num_layers_to_build, get_transformer_layer_offset
from diptych.plans.tensor_parallel import check_parts
from reference_torch.aux_loss import AuxLossSum, join_aux_loss, split_aux_loss
from reference_torch.cache import DecodingCache, cached_length
from reference_torch.documents import pack_documents
from reference_torch.forward_context import ForwardContext
from reference_torch.hyper_connections import DeferredMix, HyperConnectionHead, HyperConnectionModule
from reference_torch.linear_attention import GatedDeltaNet, KimiDeltaAttention
from reference_torch.mlp import MLP, MixtureOfExperts
from reference_torch.modules import RMSNorm
from reference_torch.ops import (
    DropoutState,
    add_bias,
    at_least_float32,
    dropout,
    dropout_state,
    linear,
    parameter,
)
from reference_torch.recompute import BlockRecomputation, name_value, run_block
from reference_torch.self_attention import LatentAttention, SelfAttention
from reference_torch.tensor_parallel import UNSHARDED, TensorParallel

MIXER_MODULES = {"attention": SelfAttention, "mla": LatentAttention, "gdn": GatedDeltaNet, "kda": KimiDeltaAttention}
"""Mixer names of the layer pattern and their modules."""


class TransformerLayer(nn.Module):
    """A mixer and a feed-forward sublayer, which is an MLP or a mixture of experts.

    Each sublayer has a norm before or after it, and a hyper-connection or a plain residual around it.

    Args:
        config: configuration of the model.
        layer_number: global index of the layer, from 0 (Megatron-core's layer_number counts from 1).
    """

    def __init__(self, config: TransformerConfig, layer_number: int) -> None:
        super().__init__()
        self.config = config
        self.layer_number = layer_number
        layer = config.layer(layer_number)
        name = f"decoder.layers.{layer_number}"
        self.self_attention_hyper_connection = (
            HyperConnectionModule(config, layer_number, f"{name}.self_attention_hyper_connection")
            if layer.self_attention_hyper_connection
            else None
        )
        mixer_norm, mlp_norm = layer.norm_names
        setattr(self, mixer_norm, RMSNorm(config, f"{name}.{mixer_norm}"))
        # Every mixer is named as attention is in Megatron-core, so that checkpoints have one name for it.
        self.self_attention = MIXER_MODULES[layer.mixer](config, layer_number, f"{name}.self_attention")
        self.mlp_hyper_connection = (
            HyperConnectionModule(config, layer_number, f"{name}.mlp_hyper_connection")
            if layer.mlp_hyper_connection
            else None
        )
        setattr(self, mlp_norm, RMSNorm(config, f"{name}.{mlp_norm}"))
        self.mlp = (MixtureOfExperts if layer.moe else MLP)(config, layer_number, f"{name}.mlp")

    def forward(
        self,
        hidden_states: Float[Tensor, "b t *s d"],
        context: ForwardContext,
    ) -> Float[Tensor, "b t *s d"]:
        """Run one layer.

        Args:
            hidden_states: [B, T, D], or residual streams [B, T, S, D] with hyper-connections.
            context: context of the forward pass.

        Returns:
            Hidden states of the same shape.
        """
        hidden_states = name_value(hidden_states, "residual_streams")
        recompute = context.recompute
        ranks = context.tensor_parallel
        connection = self.self_attention_hyper_connection
        aggregated, mixed, h_post = self._read(connection, hidden_states, recompute)
        normed = self._norm("input_layernorm", aggregated, recompute)
        output, bias = self.self_attention(ranks.enter(normed), context)
        output = name_value(add_bias(ranks.leave(output), bias), "attention_output")
        output = self._norm("post_attention_layernorm", output, recompute)
        site = attention_site(self.layer_number)
        hidden_states = recompute(
            "residual_streams", self._write, connection, output, h_post, mixed, context.dropout, site
        )
        recompute.discard_consumed(keep=hidden_states)

        connection = self.mlp_hyper_connection
        aggregated, mixed, h_post = self._read(connection, hidden_states, recompute)
        normed = self._norm("pre_mlp_layernorm", aggregated, recompute)
        # Without sequence parallelism, enter moves no data, so it runs inside the recomputed call, which then saves
        # only normed. aux_loss below reads normed before enter, so its gradient is not summed over ranks;
        # replicated_input multiplies it by their number instead.
        normed = ranks.enter(normed) if ranks.sequence_parallel else normed
        output = recompute("mlp_output", self._mlp_output, normed, recompute.nested_in("mlp_output"), ranks)
        if ranks.size > 1:  # outside of what is recomputed, so that backward does not sum over ranks again
            output = name_value(add_bias(ranks.leave(output), self.mlp.output_bias), "mlp_output")
        if context.aux_loss is not None and isinstance(self.mlp, MixtureOfExperts):
            aux_loss = self.mlp.aux_loss(ranks.replicated_input(normed), context.sequences)
            context.aux_loss.add(ranks.replicated_output(aux_loss))
        output = self._norm("post_mlp_layernorm", output, recompute)
        site = mlp_site(self.layer_number)
        hidden_states = recompute(
            "residual_streams", self._write, connection, output, h_post, mixed, context.dropout, site
        )
        recompute.discard_consumed(keep=hidden_states)
        return hidden_states

    def _norm(self, name: str, x: Tensor, recompute: BlockRecomputation) -> Tensor:
        """Apply a norm by name, if the layer has it: a layer has norms either before or after its sublayers."""
        norm = getattr(self, name, None)
        return x if norm is None else name_value(recompute(name, norm, x), name)

    def _mlp_output(self, normed: Tensor, recompute: BlockRecomputation, ranks: TensorParallel) -> Tensor:
        """Return the output [B, T, D] of the MLP with its bias; with several ranks, a partial sum without the bias."""
        if not ranks.sequence_parallel:  # otherwise forward has entered the region
            normed = ranks.enter(normed)
        output = self.mlp(normed, recompute, ranks.size)
        return name_value(output if ranks.size > 1 else add_bias(output, self.mlp.output_bias), "mlp_output")

    def _read(
        self, connection: HyperConnectionModule | None, hidden_states: Tensor, recompute: BlockRecomputation
    ) -> tuple[Tensor, Tensor | DeferredMix, Tensor | None]:
        """Return a sublayer's input, the residual that its output is added to, and h_post (None: all weights are 1)."""
        if connection is not None:
            # Recompute cannot drop the streams while a view of them exists, which a merged gradient needs.
            merge = "residual_streams" not in recompute.dropped
            manager = recompute.manager_for("aggregated")
            return connection.read(hidden_states, manager, merge_residual_gradient=merge)
        if hidden_states.dim() == 4:
            streams = self.config.num_residual_streams
            mean = recompute("aggregated", HyperConnectionModule.output_contract, hidden_states, streams)
            return name_value(mean, "aggregated"), hidden_states, None
        return hidden_states, hidden_states, None

    def _write(
        self,
        connection: HyperConnectionModule | None,
        output: Tensor,
        h_post: Tensor | None,
        mixed: Tensor | DeferredMix,
        state: DropoutState | None,
        site: int,
    ) -> Tensor:
        """Add the output of a sublayer to the residual: by its hyper-connection, or equally to every stream."""
        if connection is not None and h_post is not None:
            hidden_states = connection.apply_h_post_dropout_add((output, None), h_post, mixed, state, site)
        else:
            assert not isinstance(mixed, DeferredMix), "only a hyper-connection defers mixing"
            if state is not None:
                output = dropout(output, self.config.hidden_dropout, state, site)
            hidden_states = mixed + (output[..., None, :] if mixed.dim() == 4 else output)
        return name_value(hidden_states, "residual_streams")


class TransformerBlock(nn.Module):
    """The layers of one pipeline stage; the last stage also has the final norm.

    Offload observes the layers by hooks (``offload/observe.py``), so ``forward`` does not name it.

    Args:
        config: configuration of the whole model.
        pre_process: this is the first stage.
        post_process: this is the last stage.
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
        super().__init__()
        self.config = config
        self.pre_process = pre_process
        self.post_process = post_process
        first = get_transformer_layer_offset(config, vp_stage, pp_rank)
        numbers = range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank))
        self.blocks = recompute_blocks(config, vp_stage, pp_rank)
        self.layers = nn.ModuleDict({str(number): TransformerLayer(config, number) for number in numbers})
        learned = post_process and config.enable_hyper_connections and config.mhc_head == "learned"
        self.hyper_connection_head = HyperConnectionHead(config, "decoder.hyper_connection_head") if learned else None
        self.final_layernorm = RMSNorm(config, "decoder.final_layernorm") if post_process else None

    def forward(
        self,
        hidden_states: Float[Tensor, "b t *s d"],
        context: ForwardContext,
    ) -> Float[Tensor, "b t *streams d"]:
        """Run the layers of the stage; the first stage expands to streams, the last contracts them.

        Args:
            hidden_states: embedded tokens in the first stage, else the output of the previous stage. [B, T, D], or
                residual streams [B, T, S, D] with hyper-connections after the first stage.
            context: context of the forward pass.

        Returns:
            Hidden states of the last stage [B, T, D], else the input of the next stage.
        """
        streams = self.config.num_residual_streams
        hyper = self.config.enable_hyper_connections
        if hyper and self.pre_process:
            hidden_states = HyperConnectionModule.input_expand(hidden_states, streams)
        hidden_states = name_value(hidden_states, "residual_streams")
        recomputes = self.training and context.cache is None  # a replay would add its tokens to the cache again
        for block in self.blocks:

            def run(hidden_states: Tensor, recompute: BlockRecomputation, block: RecomputeBlock = block) -> Tensor:
                for number in block.layers:
                    hidden_states = self.layers[str(number)](hidden_states, context._replace(recompute=recompute))
                return hidden_states

            hidden_states = run_block(block, run, hidden_states, recomputes)
        if self.final_layernorm is None:
            return hidden_states
        if self.hyper_connection_head is not None:
            hidden_states = self.hyper_connection_head(hidden_states)
        elif hyper:
            hidden_states = HyperConnectionModule.output_contract(hidden_states, streams)
        return self.final_layernorm(hidden_states)


class Embedding(nn.Module):
    """A table of one vector per token id, for the input embedding and for an untied output layer.

    Args:
        config: configuration of the model.
        name: canonical name of the module.
    """

    def __init__(self, config: TransformerConfig, name: str) -> None:
        super().__init__()
        self.weight = parameter(config, f"{name}.weight", embedding_spec(config)["weight"])

    def forward(
        self, tokens: Int[Tensor, "b t"], tensor_parallel: TensorParallel = UNSHARDED
    ) -> Float[Tensor, "b t2 d"]:
        """Return the vectors of the tokens [B, T, D], or of this rank's tokens, see TensorParallel.embed.

        Raises:
            IndexError: a token id is outside the vocabulary.
        """
        return tensor_parallel.embed(tokens, self.weight)


class GPTModel(nn.Module):
    """A decoder-only language model, or one pipeline stage of it.

    Args:
        config: configuration of the whole model.
        pre_process: build the embedding and take token ids; True for the first stage.
        post_process: build final norm and head and return logits or the loss; True for the last stage.
        vp_stage: index of the virtual stage within its rank; None: 0.
        pp_rank: pipeline rank; None: 0.

    Raises:
        ValueError: pre_process or post_process does not fit the stage.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.pre_process = pre_process
        self.post_process = post_process
        check_parts(config)
        check_stage_ends(config, pre_process, post_process, vp_stage, pp_rank)
        tied = not config.untie_embeddings_and_output_weights
        # With a tied head, the last stage holds a copy of the first stage's embedding.
        self.embedding = Embedding(config, "embedding") if pre_process or (post_process and tied) else None
        self.decoder = TransformerBlock(config, pre_process, post_process, vp_stage, pp_rank)
        self.output_layer = Embedding(config, "output_layer") if post_process and not tied else None

    def forward(
        self,
        inputs: Int[Tensor, "b t"] | Float[Tensor, "b p *s d"],
        targets: Int[Tensor, "b t"] | None = None,
        *,
        step: int = 0,
        samples: Int[Tensor, "*b"] | None = None,
        positions: Int[Tensor, " t"] | None = None,
        attention_mask: Bool[Tensor, "b t t"] | None = None,
        document_starts: Tensor | None = None,
        cache: DecodingCache | None = None,
        cp_context: FLACPContext | None = None,
        tensor_parallel: TensorParallel = UNSHARDED,
        training: bool = True,
    ) -> Tensor:
        """Return the loss, the logits, or the hidden states for the next stage.

        Args:
            inputs: token ids [B, T] in the first stage, else the output of the previous stage.
            targets: the token after each of inputs. [B, T]
            step: training step, for dropout.
            samples: global index of each sequence, or of each token's sequence; None: 0 .. B-1. [B] or [B, T]
            positions: positions of the tokens within their sequence; None: 0 .. T-1, after the cached tokens. [T]
            attention_mask: see ops.causal_attention.
            document_starts: first token of each document; attention and state do not cross documents. See
                diptych.plans.model.documents. None: each sequence is one document. [B, N] int32
            cache: state of the previous tokens, see cache.empty_cache; changed in place to include these tokens.
            cp_context: context of the ranks that share the concatenated sequences. Needs B = 1 and positions.
            tensor_parallel: the ranks that share the layers; the model has the configuration rank_config of
                diptych.plans.tensor_parallel. With sequence parallelism, hidden states are those of this rank's tokens.
            training: False turns dropout off, as does ``model.eval()``.

        Returns:
            Mean loss in nats per token, in training with the load-balancing loss, or logits [B, T, V] without targets.
            Before the last stage: hidden states; with moe_aux_loss_coeff as aux_loss.join_aux_loss returns them.

        Raises:
            ValueError: arguments do not fit together, or the cached and the given tokens exceed config.seq_length.
            IndexError: on a CPU, a token or target is no token id.
        """
        batch, length = inputs.shape[:2]
        length *= 1 if self.pre_process else tensor_parallel.token_parts  # later stages receive this rank's tokens
        masks = {"attention_mask": attention_mask, "document_starts": document_starts}
        cached_batch = None if cache is None else cache.batch
        seq_length = self.config.seq_length
        check_inputs(seq_length, (batch, length), cached_length(cache), cached_batch, cp_context, positions, **masks)
        if positions is None:
            positions = torch.arange(length, device=inputs.device) + (0 if cache is None else cache.length)
        # pack_documents reads only the shape and the device of tokens.
        tokens = inputs if inputs.shape[1] == length else inputs.new_empty((batch, length))
        sequences = cp_context or pack_documents(document_starts, tokens, self.config.has_softmax)
        state = None
        if training and self.training and self.config.hidden_dropout > 0.0:
            state = self._dropout_state(step, samples, positions, inputs, tensor_parallel)
        aux_loss = self._aux_loss(training)
        context = ForwardContext(positions, state, attention_mask, sequences, cache, aux_loss, tensor_parallel)
        hidden_states = self.decoder(self._first_hidden_states(inputs, aux_loss, tensor_parallel), context)
        if cache is not None:
            cache.length += length
        return self._output(hidden_states, targets, aux_loss, tensor_parallel)

    def _dropout_state(
        self,
        step: int,
        samples: Tensor | None,
        positions: Tensor,
        inputs: Tensor,
        tensor_parallel: TensorParallel,
    ) -> DropoutState | None:
        """Return the dropout state of this rank's tokens."""
        if samples is None:
            samples = torch.arange(len(inputs), device=inputs.device)
        state = dropout_state(self.config.seed, step, samples, positions, self.config.seq_length)
        return tensor_parallel.local_dropout_state(state)

    def _output(
        self,
        hidden_states: Tensor,
        targets: Tensor | None,
        aux_loss: AuxLossSum | None,
        tensor_parallel: TensorParallel,
    ) -> Tensor:
        """Return the input of the next stage, or the logits or the loss of the last one."""
        head = self.output_layer or self.embedding
        if not self.post_process or head is None:
            return hidden_states if not self.config.moe_aux_loss_coeff else _joined(hidden_states, aux_loss)
        logits = at_least_float32(linear(tensor_parallel.enter(hidden_states), head.weight))
        if targets is None:
            return tensor_parallel.gather_logits(logits)
        return self._loss(logits, targets, aux_loss, tensor_parallel)

    def _first_hidden_states(
        self, inputs: Tensor, aux_loss: AuxLossSum | None, tensor_parallel: TensorParallel
    ) -> Tensor:
        """Return the embedded tokens, or the hidden states of the previous stage without its load-balancing loss."""
        if self.pre_process and self.embedding is not None:
            return self.embedding(inputs, tensor_parallel).to(getattr(torch, self.config.compute_dtype))
        if not self.config.moe_aux_loss_coeff:
            return inputs
        streams = self.config.num_residual_streams if self.config.enable_hyper_connections else None
        hidden_states, before = split_aux_loss(inputs, streams)
        if aux_loss is not None:
            aux_loss.add(before)
        return hidden_states

    def _loss(
        self, logits: Tensor, targets: Tensor, aux_loss: AuxLossSum | None, tensor_parallel: TensorParallel
    ) -> Tensor:
        """Return the mean loss per token, with the load-balancing loss if it was collected."""
        loss = tensor_parallel.cross_entropy(logits, targets)
        total = None if aux_loss is None else aux_loss.close()
        if total is None:
            return loss
        return loss + self.config.moe_aux_loss_coeff * tensor_parallel.mean(total).to(loss.dtype)

    def _aux_loss(self, training: bool) -> AuxLossSum | None:
        """Return an empty sum of load-balancing losses, or None if this call does not compute them."""
        return AuxLossSum() if self.config.moe_aux_loss_coeff and training and self.training else None


def _joined(hidden_states: Tensor, aux_loss: AuxLossSum | None) -> Tensor:
    """Return the output of a stage with a load-balancing loss: hidden states and the sum of the losses so far."""
    return join_aux_loss(hidden_states, None if aux_loss is None else aux_loss.close())
