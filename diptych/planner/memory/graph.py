"""A model's operations as PyTorch's eager autograd runs them, with the bytes that each reads, writes and saves."""

from diptych.planner.memory import kernel_work
from diptych.planner.memory.kernel_work import KernelWork
from diptych.planner.memory.nodes import Layer, Node, Value, keep
from diptych.planner.memory.operations import PACKED_IN, OperationBuilder
from diptych.planner.memory.rule import RuleShape, rule_moved, rule_scratch
from diptych.plans.activation_storage import ACTIVATION_INPUT
from diptych.plans.config import ITEM_SIZES
from diptych.plans.model.delta_rule import SEGMENT_SIZE, chunk_flops
from diptych.plans.model.layers import LayerConfig


class GraphBuilder(OperationBuilder):
    """A builder of a model's operations for one batch; arguments as those of OperationBuilder."""

    def hidden(self) -> Value:
        """Return the value between two sublayers."""
        return self.activation("residual_streams", self.streams * self.config.hidden_size)

    def embedding(self) -> tuple[list[Node], Value]:
        """Return the operations from token ids to hidden states, and their output."""
        with self.in_region():
            embedded = self.activation("embedded", self.config.hidden_size)
        table = self.weights["embedding.weight"]
        is_summed = not self.config.untie_embeddings_and_output_weights and self.item == self.wide
        shared = table if is_summed else 0  # the sum of the head's gradient and the embedding's
        nodes = self.dropout_rows()
        item = ITEM_SIZES[self.config.params_dtype]
        embedded = self.regions.embed(nodes, embedded, table, shared, item)
        self.first_input = [embedded]
        if self.streams == 1 and not self.config.enable_hyper_connections:
            embedded.name = "residual_streams"
            return nodes, embedded
        x = self.hidden()
        return [*nodes, Node([embedded], [x])], x

    def head(self, x: Value) -> list[Node]:
        """Return the operations from hidden states to the loss."""
        config = self.config
        nodes = []
        if config.enable_hyper_connections:
            mean = self.activation("contracted", config.hidden_size)
            nodes += self._contraction(x, mean)
            x = mean
        normed = self.activation("final_layernorm", config.hidden_size)
        nodes += self._norm(x, normed, "decoder.final_layernorm", ())
        normed = self.regions.enter(nodes, normed)
        with self.in_region():
            logits = self.activation("logits", config.vocab_size)
            name = "output_layer" if config.untie_embeddings_and_output_weights else "embedding"
            nodes += self._linear(normed, logits, name, ())
            logits = self._cast(nodes, logits, self.wide, ())
            probabilities = self.coefficient("log_probabilities", config.vocab_size)
        loss = Value("loss", self.wide)
        self.regions.loss(nodes, logits, probabilities, loss)
        return nodes

    def _contraction(self, x: Value, contracted: Value) -> list[Node]:
        """Return the operations from the streams after the last layer to their mean or learned sum."""
        if self.config.mhc_head == "mean":
            return [Node([x], [contracted])]
        contracted.name = "aggregated"
        streams = self.streams
        phi = self.weights["decoder.hyper_connection_head.phi"]
        projected, h, sigmoids, weights = (self.coefficient("mhc internals", streams) for _ in range(4))
        nodes = [
            self._projection(x, projected, phi, ()),
            Node([projected], [h], [projected], backward_scratch=projected.size),
            Node([h], [weights, sigmoids], [sigmoids]),
        ]
        given = self._cast(nodes, weights, self.item, ())
        nodes.append(Node([x, given], [contracted], [x, given], flops=2 * x.size // self.item))
        return nodes

    def layer(self, number: int, x: Value) -> tuple[Layer, Value]:
        """Return one layer and its output."""
        layer = self.config.layer(number)
        prefix = f"decoder.layers.{number}"
        nodes: list[Node] = []
        ends = []
        layer_input = x
        mixer_norm, mlp_norm = layer.norm_names
        sublayers = (
            ("self_attention", mixer_norm, layer.self_attention_hyper_connection),
            ("mlp", mlp_norm, layer.mlp_hyper_connection),
        )
        inputs: list[Value] = []  # variables of the layer's forward, which the next sublayer sets anew
        outputs: list[Value] = []
        for sublayer, norm, hyper in sublayers:
            connection = f"{prefix}.{sublayer}_hyper_connection"
            aggregated, mixed, h_post = self._read(nodes, x, connection if hyper else None)
            normed = aggregated
            if layer.norm == "pre":
                normed = self._layer_norm(nodes, normed, prefix, norm)
            keep(nodes, *inputs)
            inputs = [aggregated, normed]
            output = self._sublayer(nodes, normed, f"{prefix}.{sublayer}", layer)
            keep(nodes, *outputs)
            if layer.norm == "post":
                output = self._layer_norm(nodes, output, prefix, norm)
            outputs = [output]
            x = self._write(nodes, output, mixed, h_post)
            ends.append(len(nodes))
        keep(nodes, *inputs, *outputs, layer_input, *self.first_input)
        return Layer(nodes, ends), x

    def _sublayer(self, nodes: list[Node], normed: Value, name: str, layer: LayerConfig) -> Value:
        """Append a mixer or an MLP, with the exchanges around it, and return its output."""
        normed = self.regions.enter(nodes, normed)
        with self.in_region():
            if name.endswith(".mlp"):
                output = (self._mixture_of_experts if layer.moe else self._mlp)(nodes, normed, name, layer)
                if layer.moe and self.config.moe_aux_loss_coeff:
                    self._aux_loss(nodes, normed, f"{name}.router")
            else:
                mixers = {"attention": self._attention, "mla": self._latent_attention}
                output = mixers.get(layer.mixer, self._delta_rule)(nodes, normed, name)
        if self.regions.size == 1:
            return output
        output = self.regions.leave(nodes, output)
        last = "linear_fc2" if name.endswith(".mlp") else "linear_proj"
        biased = self._biased(nodes, output, f"{name}.{last}", (), is_summed=True)
        if biased is not output:
            output.name = "region_output"
            biased.name = "mlp_output" if name.endswith(".mlp") else "attention_output"
        return biased

    def _read(self, nodes: list[Node], x: Value, connection: str | None) -> tuple[Value, Value, Value | None]:
        width = self.config.hidden_size
        if connection is not None:
            return self._hyper_connection(nodes, x, connection)
        if self.config.enable_hyper_connections:
            aggregated = self.activation("aggregated", width)
            nodes.append(Node([x], [aggregated], region=("aggregated",)))
            return aggregated, x, None
        return x, x, None

    def _hyper_connection(self, nodes: list[Node], x: Value, name: str) -> tuple[Value, Value, Value]:
        """Append a hyper-connection's read of the streams; return its output, the mixed streams and h_post."""
        streams = self.streams
        region = ("mixed",)
        count = streams * (streams + 2)
        square = streams * streams
        projected, rows, h = (self.coefficient("mhc internals", count) for _ in range(3))
        sigmoids = self.coefficient("mhc internals", 2 * streams)
        h_pre, h_post, h_res = (
            self.coefficient(n, w) for n, w in (("h_pre", streams), ("h_post", streams), ("h_res", square))
        )
        aggregated = self.activation("aggregated", self.config.hidden_size)
        mixed = Value("mixed", x.size)
        phi = self.weights[f"{name}.phi"]
        iterates = 2 * self.config.sinkhorn_iterations * square * self.tokens * self.wide
        own = len(nodes)
        nodes += [
            self._projection(x, projected, phi, region),
            Node([projected], [rows], [projected], region, backward_scratch=projected.size),
            Node([rows], [h], [], region),
            Node([h], [h_pre, h_post, sigmoids], [sigmoids], region),
            Node([h], [h_res], [h], region, forward_scratch=2 * h_res.size, backward_scratch=iterates),
        ]
        pre, res = (self._cast(nodes, h, self.item, region) for h in (h_pre, h_res))
        read = 2 * self.tokens * streams * self.config.hidden_size
        nodes += [
            Node([x, pre], [aggregated], [x, pre], region, flops=read),
            Node([x, res], [mixed], [x, res], region, flops=streams * read),
        ]
        for node in nodes[own:]:
            node.kernels = KernelWork()  # of the few launches that do the work of all
        nodes[own].kernels = kernel_work.mappings(*self._stream_sizes)
        nodes[-2].kernels = kernel_work.aggregate(*self._stream_sizes)  # the streams are mixed when they are written
        return aggregated, mixed, h_post

    @property
    def _stream_sizes(self) -> tuple[int, int, int, int, int]:
        """Tokens, streams, channels of a stream, and bytes of an element and of a coefficient."""
        return self.tokens, self.streams, self.config.hidden_size, self.item, self.wide

    def _projection(self, x: Value, projected: Value, phi: int, region: tuple[str, ...]) -> Node:
        """Return the projection of the streams, divided by their root mean square; phi: bytes of its weight."""
        rounded = 0 if self.item == self.wide else phi // 2
        scratch = projected.size + rounded
        saves = [x, projected]
        return Node([x], [projected], saves, region, phi, scratch, scratch, flops=self._product(phi))

    def _write(self, nodes: list[Node], output: Value, mixed: Value, h_post: Value | None) -> Value:
        """Append the addition of a sublayer's output to the residual, and return the new residual."""
        x = self.hidden()
        region = ("residual_streams",)
        dropout = self.config.hidden_dropout > 0
        own = len(nodes)
        is_mixed = h_post is not None
        h_post = None if h_post is None else self._cast(nodes, h_post, self.item, region)
        if h_post is None:
            source = output
            if dropout:
                source = self.activation("dropped out", self.config.hidden_size)
                scratch = self._dropout_scratch(output)
                nodes.append(Node([output], [source], [], region, 0, scratch, scratch))
            nodes.append(Node([source, mixed], [x], [], region, heir=mixed))
        elif dropout:
            expanded = Value("expanded", x.size)
            dropped = Value("dropped out", x.size)
            nodes.append(Node([output, h_post], [expanded], [output, h_post], region, backward_scratch=2 * x.size))
            scratch = self._dropout_scratch(expanded)
            nodes.append(Node([expanded], [dropped], [], region, 0, scratch, scratch))
            nodes.append(Node([dropped, mixed], [x], [], region, heir=mixed))
        else:
            nodes.append(Node([output, h_post, mixed], [x], [output, h_post], region))
        for node in nodes[own:] if is_mixed else ():
            node.kernels = KernelWork()
        if is_mixed:
            nodes[-1].kernels = kernel_work.write(*self._stream_sizes)
        return x

    def _attention(self, nodes: list[Node], normed: Value, name: str) -> Value:
        """Append softmax attention with its linear layers, and return its output."""
        config = self.config
        heads = config.num_attention_heads
        groups = config.query_groups
        width = config.head_dim
        qkv = self.activation("qkv", (heads + 2 * groups) * width)
        nodes += self._linear(normed, qkv, f"{name}.linear_qkv", ())
        turned = [self.activation(n, w * width) for n, w in (("q", heads), ("k", groups))]
        for value in turned:
            given = qkv
            if config.qk_layernorm:
                given = Value(value.name, value.size)
                nodes += self._norm(qkv, given, f"{name}.{value.name}_layernorm", ())
            angles = Value("rotary angles", self.length * config.rotary_dim * self.item)  # cosines and sines
            nodes.append(Node([given], [value, angles], [angles], (), 0, value.size, value.size))
        v = self.activation("v", groups * width)
        attended = self.activation("core_attn", heads * width)
        nodes.append(Node([qkv], [v]))
        self._core_attention(nodes, [*turned, v], attended, "attention")
        if config.attention_output_gate:
            gate = self._mapped(nodes, normed, "gate", heads * width, f"{name}.linear_gate")
            opened = Value("gate", attended.size)
            gated = Value("gated", attended.size)
            nodes.append(Node([gate], [opened], [opened]))
            nodes.append(Node([attended, opened], [gated], [attended, opened]))
            attended = gated
        output = self.activation("attention_output", config.hidden_size)
        nodes += self._linear(attended, output, f"{name}.linear_proj", ())
        keep(nodes, qkv, *turned, attended)
        return self._biased(nodes, output, f"{name}.linear_proj", ())

    def _latent_attention(self, nodes: list[Node], normed: Value, name: str) -> Value:
        """Append multi-head latent attention, and return its output."""
        config = self.config
        heads, _, key, value = config.attention_heads("mla")
        rank = config.kv_lora_rank or 0
        shared = config.qk_pos_emb_head_dim or 0
        q = self._mapped(nodes, normed, "q", heads * key, f"{name}.linear_q_proj")
        down = self._mapped(nodes, normed, "kv_latent", rank + shared, f"{name}.linear_kv_down_proj")
        latent = self.activation("normed latent", rank)
        nodes += self._norm(down, latent, f"{name}.kv_layernorm", ())
        up = self._mapped(nodes, latent, "keys and values", heads * (key - shared + value), f"{name}.linear_kv_up_proj")
        k = self.activation("k", heads * key)
        v = self.activation("v", heads * value)
        attended = self.activation("core_attn", heads * value)
        nodes.append(Node([up, down], [k]))
        nodes.append(Node([up], [v]))
        self._core_attention(nodes, [q, k, v], attended, "mla")
        output = self.activation("attention_output", config.hidden_size)
        nodes += self._linear(attended, output, f"{name}.linear_proj", ())
        keep(nodes, q, down, latent, up, k, attended)
        return self._biased(nodes, output, f"{name}.linear_proj", ())

    def _delta_rule(self, nodes: list[Node], normed: Value, name: str) -> Value:
        """Append a gdn or kda layer; its short convolution and its delta rule are one operation each."""
        heads, value_heads, key, value = self.config.linear_heads
        channels = 2 * heads * key + value_heads * value
        is_kda = f"{name}.linear_decay_up.weight" in self.weights
        qkv = self._mapped(nodes, normed, "qkv", channels, f"{name}.linear_qkv")
        conv = self.activation("short_conv", channels)
        ages = Value("tokens before", 8 * self.length)
        parameters = self.weights[f"{name}.conv1d.weight"]
        own = [ages, *self.rounded_weights(f"{name}.conv1d")]
        nodes.append(Node([qkv], [conv, *own], [qkv, *own], (), parameters, 3 * conv.size, 6 * conv.size))
        before = self._mapped(nodes, normed, "beta", value_heads, f"{name}.linear_beta")
        beta = self.coefficient("beta", value_heads)
        nodes.append(Node([self._cast(nodes, before, self.wide, ())], [beta], [beta]))
        gate_parameters = self.weights[f"{name}.decay_gate.A_log"] + self.weights[f"{name}.decay_gate.dt_bias"]
        if is_kda:
            down = self._mapped(nodes, normed, "g", value, f"{name}.linear_decay_down")
            g = self._mapped(nodes, down, "g", value_heads * key, f"{name}.linear_decay_up")
        else:
            a = self._cast(nodes, self._mapped(nodes, normed, "g", value_heads, f"{name}.linear_decay"), self.wide, ())
            biased, positive, g = (self.coefficient("g", value_heads) for _ in range(3))
            nodes.append(Node([a], [biased], []))
            nodes.append(Node([biased], [positive], [biased]))
            nodes.append(Node([positive], [g], [positive], (), gate_parameters))
        attended = self._rule(nodes, [conv, beta, g], gate_parameters if is_kda else 0)
        normed_out = Value("out_norm", attended.size)
        nodes += self._norm(attended, normed_out, f"{name}.out_norm", ())
        gate = normed
        if is_kda:
            gate = self._mapped(nodes, gate, "gate", value, f"{name}.linear_gate_down")
        gate = self._mapped(
            nodes, gate, "gate", attended.size // self.item // self.tokens, f"{name}.linear_gate{'_up' * is_kda}"
        )
        opened = Value("gate", attended.size)
        product = Value("gated", attended.size)
        nodes.append(Node([gate], [opened], [opened if is_kda else gate]))
        nodes.append(Node([normed_out, opened], [product], [normed_out, opened]))
        output = self.activation("attention_output", self.config.hidden_size)
        nodes += self._linear(product, output, f"{name}.linear_proj", ())
        keep(nodes, qkv, conv, beta, g, attended, opened, product)
        return self._biased(nodes, output, f"{name}.linear_proj", ())

    def _rule(self, nodes: list[Node], inputs: list[Value], parameters: int) -> Value:
        """Append the chunked delta rule, which saves its inputs and one state per segment."""
        _, value_heads, key, value = self.config.linear_heads
        shape = self.rule_shape(parameters)
        state = self.batch * value_heads * key * value * self.wide
        attended = self.activation("core_attn", value_heads * value)
        finals = Value("states", state)
        chunks = -(-self.length // shape.chunk)
        step = max(1, SEGMENT_SIZE // shape.chunk)
        saves = [*inputs, Value("states", (-(-chunks // step) - 1) * state)]
        forward, backward = rule_scratch(shape)
        writes = [attended, finals, *saves[3:]]
        flops = chunks * self.batch * value_heads * chunk_flops(shape.chunk, key, value)
        rule = Node(
            inputs, writes, saves, ("core_attn",), parameters, forward, backward, flops=flops, recomputed_flops=flops
        )
        rule.inner_moved = rule_moved(shape)
        rule.kernels = kernel_work.delta_rule(shape)
        nodes.append(rule)
        return attended

    def rule_shape(self, parameters: int) -> RuleShape:
        """Return the sizes of the chunked delta rule; only kda has parameters."""
        heads, value_heads, key, value = self.config.linear_heads
        kind = "kda" if parameters else "gdn"
        return RuleShape(kind, self.batch, self.length, heads, value_heads, key, value, self.item, self.wide)

    def _core_attention(self, nodes: list[Node], inputs: list[Value], attended: Value, mixer: str) -> None:
        """Append softmax attention of given queries, keys and values."""
        config = self.config
        region = ("core_attn",)
        heads, groups, key, value = config.attention_heads(mixer)
        scored, mixed_flops = (2 * self.tokens * self.length * heads * width for width in (key, value))
        if config.use_flash_attn:
            statistics = self.coefficient("attention statistics", config.num_attention_heads)
            saves = [*inputs, attended, statistics]
            writes = [attended, statistics]
            tile = self._attention_tile(self.length, self.length)
            scratch = 2 * tile + attended.size
            flops = scored + mixed_flops
            nodes.append(Node(inputs, writes, saves, region, 0, tile, scratch, flops=flops, recomputed_flops=scored))
            keep(nodes, *inputs)
            return
        operands = [*inputs]
        count = config.num_attention_heads
        for place, source in enumerate(inputs):
            is_view = (self.batch == 1 or groups == 1) and (place > 0 or groups == count)
            if not is_view:  # batch and heads become one dimension, which takes a copy
                operands[place] = Value(source.name, source.size)
                nodes.append(Node([source], [operands[place]], [], region))
        q, k, v = operands
        square = self.batch * config.num_attention_heads * self.length**2
        scores = Value("scores", square * self.item)
        weights = Value("attention_weights", square * self.item)
        mixed = Value("attention mixed", attended.size)
        share = count // groups  # the query heads of a group are rows of one product
        mask = Value("attention mask", self.length**2)
        bias = Value("attention mask", share * self.length**2 * self.item)
        nodes.append(Node([q, k], [mask, bias, scores], [q, k], region, flops=scored))
        cast = self._cast(nodes, scores, self.wide, region)
        softmax = weights if self.item == self.wide else Value("attention weights in float32", cast.size)
        nodes.append(Node([cast], [softmax], [softmax], region))
        if softmax is not weights:
            nodes.append(Node([softmax], [weights], [], region))
        product = attended if count == 1 else mixed
        nodes.append(Node([weights, v], [product], [weights, v], region, flops=mixed_flops))
        if product is mixed:  # the heads of a token become adjacent
            nodes.append(Node([mixed], [attended], [], region))
        keep(nodes, *inputs, mask, bias, scores)

    def _attention_tile(self, queries: int, keys: int) -> int:
        """Return the bytes of the tile of scores that PyTorch's fused CPU attention allocates, on one thread."""
        rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
        rounded = self.item if self.item < self.wide else 0
        return min(rows, queries) * min(512, keys) * (self.wide + rounded)

    def _mlp(self, nodes: list[Node], normed: Value, name: str, layer: LayerConfig) -> Value:
        """Append the MLP, and return its output."""
        region = ("mlp_output",)
        rows = self.weights[f"{name}.linear_fc1.weight"] // ITEM_SIZES[self.config.params_dtype]
        fc1 = self.activation("fc1", rows // self.config.hidden_size)
        nodes += self._linear(normed, fc1, f"{name}.linear_fc1", region)
        activated = self._activated(nodes, fc1, rows // self.config.hidden_size, layer)
        output = self.activation("mlp_output", self.config.hidden_size)
        nodes += self._linear(activated, output, f"{name}.linear_fc2", region)
        return self._biased(nodes, output, f"{name}.linear_fc2", region)

    def _activated(self, nodes: list[Node], fc1: Value, width: int, layer: LayerConfig) -> Value:
        """Append the activation function of an MLP, whose input has ``width`` entries a row, and return its output."""
        within = PACKED_IN[ACTIVATION_INPUT]
        if layer.storage is not None:
            activated = Value("activation", fc1.size // (1 if layer.activation == "gelu" else 2))
            nodes += self._packed_activation(fc1, activated, width, within)
            return activated
        is_gated = layer.activation != "gelu"
        kernels = kernel_work.activation(fc1.size // (2 if is_gated else 1) // self.item, is_gated, self.item)
        if not is_gated:
            activated = Value("activation", fc1.size)
            nodes.append(Node([fc1], [activated], [fc1], within, kernels=kernels))
            return activated
        activated = Value("activation", fc1.size // 2)
        silu = Value("silu of the gate", fc1.size // 2)
        gate, value = (Value("half of fc1", silu.size, is_view=True) for _ in range(2))
        nodes.append(Node([fc1], [gate, value], [], ("mlp_output",), kernels=KernelWork()))
        nodes.append(Node([gate], [silu], [fc1], within, kernels=KernelWork()))
        nodes.append(Node([silu, value], [activated], [silu, fc1], within, kernels=kernels))
        return activated

    def _mixture_of_experts(self, nodes: list[Node], normed: Value, name: str, layer: LayerConfig) -> Value:
        """Append the mixture of experts, and return its output."""
        config = self.config
        region = ("mlp_output",)
        experts = config.num_moe_experts or 0
        topk = config.moe_router_topk
        weights, chosen = self._router(nodes, normed, f"{name}.router", experts, topk)
        pairs = 8 * topk * self.tokens
        by_expert = Value("order of the experts", pairs)
        back = Value("order of the tokens", pairs)
        rows = self.activation("rows of the experts", topk * config.hidden_size)
        copies = Value("copies of the tokens", rows.size)
        nodes.append(Node([chosen], [by_expert], [], region, forward_scratch=2 * pairs))
        nodes.append(Node([normed], [copies], [], region))
        nodes.append(Node([copies, by_expert], [rows], [by_expert], region, backward_scratch=rows.size))
        width = layer.ffn_hidden_size * (2 if layer.activation == "swiglu" else 1)
        fc1 = self.activation("fc1", topk * width)
        self._grouped_linear(nodes, rows, fc1, f"{name}.experts.linear_fc1")
        activated = self._activated(nodes, fc1, width, layer)
        outputs = Value("outputs of the experts", rows.size)
        self._grouped_linear(nodes, activated, outputs, f"{name}.experts.linear_fc2")
        sorted_weights = self.coefficient("sorted weights of the experts", topk)
        nodes.append(Node([weights, by_expert], [sorted_weights], [by_expert], region))
        factors = self._cast(nodes, sorted_weights, self.item, region)
        weighted, ordered = (Value(n, rows.size) for n in ("weighted", "weighted, by token"))
        output = self.activation("mlp_output", config.hidden_size)
        nodes.append(Node([outputs, factors], [weighted], [outputs, factors], region, backward_scratch=rows.size))
        nodes.append(Node([weighted], [ordered, back], [back], region, backward_scratch=rows.size))
        nodes.append(Node([ordered], [output], [], region, alive=[weighted, back, normed]))
        if config.moe_shared_expert_intermediate_size is None:
            return output
        return self._with_shared_expert(nodes, normed, output, name, layer)

    def _router(self, nodes: list[Node], normed: Value, name: str, experts: int, topk: int) -> tuple[Value, Value]:
        """Append the router, and return the weights and the numbers of each token's experts."""
        region = ("mlp_output",)
        x = self._cast(nodes, normed, self.wide, region)
        logits, scores = (self.coefficient(n, experts) for n in ("router logits", "router scores"))
        weight = self.weights[f"{name}.weight"]
        nodes.append(Node([x], [logits], [x], region, weight, flops=self._product(weight), is_linear=True))
        nodes.append(Node([logits], [scores], [scores], region))
        chosen = Value("chosen experts", 8 * topk * self.tokens)
        nodes.append(Node([scores], [chosen], [], region, forward_scratch=2 * 8 * experts * self.tokens))
        weights = self.coefficient("weights of the experts", topk)
        nodes.append(Node([scores], [weights, chosen], [chosen], region))
        if self.config.moe_router_norm_topk_prob:
            normalised = self.coefficient("weights of the experts", topk)
            total = self.coefficient("their sums", 1)
            nodes.append(Node([weights], [normalised, total], [weights, total], region))
            weights = normalised
        scaled = self.coefficient("weights of the experts", topk)
        nodes.append(Node([weights], [scaled], [], region))
        if f"{name}.expert_bias" in self.weights:
            biased = self.coefficient("weights of the experts", topk)
            nodes.append(Node([scaled], [biased], [chosen], region, self.weights[f"{name}.expert_bias"]))
            scaled = biased
        return scaled, chosen

    def _aux_loss(self, nodes: list[Node], normed: Value, name: str) -> None:
        """Append the load-balancing loss of the tokens, which scores the experts again."""
        experts = self.config.num_moe_experts or 0
        x = self._cast(nodes, normed, self.wide, ())
        logits, scores, probabilities, factors = (self.coefficient("load-balancing loss", experts) for _ in range(4))
        total, aux_loss = (self.coefficient("load-balancing loss", 1) for _ in range(2))
        weight = self.weights[f"{name}.weight"]
        nodes += [
            Node([x], [logits], [x], (), weight, flops=self._product(weight), is_linear=True),
            Node([logits], [scores], [scores], forward_scratch=2 * 8 * experts * self.tokens),
            Node([scores], [probabilities, total], [scores, total]),
            Node([], [factors]),
            Node([probabilities, factors], [aux_loss], [factors]),
        ]

    def _with_shared_expert(
        self, nodes: list[Node], normed: Value, routed: Value, name: str, layer: LayerConfig
    ) -> Value:
        """Append the shared expert, its gate and the sum, and return the sum."""
        region = ("mlp_output",)
        shared = self._mlp(nodes, normed, f"{name}.shared_experts", layer)
        shared.name = "output of the shared expert"
        routed.name = "output of the experts"
        if self.config.moe_shared_expert_gate:
            gate, opened = (self.activation("gate of the shared expert", 1) for _ in range(2))
            nodes += self._linear(normed, gate, f"{name}.shared_expert_gate", region)
            gate = self._biased(nodes, gate, f"{name}.shared_expert_gate", region)
            gated = Value("gated shared expert", shared.size)
            nodes.append(Node([gate], [opened], [opened], region))
            nodes.append(Node([opened, shared], [gated], [opened, shared], region, backward_scratch=shared.size))
            shared = gated
        output = self.activation("mlp_output", self.config.hidden_size)
        nodes.append(Node([routed, shared], [output], [], region, heir=routed))
        return output
