"""One configuration a rule of plans/config that breaks it, and what must be said."""

from diptych.plans.config import DataConfig, TrainConfig, TransformerConfig
from diptych.plans.schedule.named import build_schedule

MODEL = {"hidden_size": 32, "num_layers": 4, "num_attention_heads": 4}

TWO_RANKS = {"pipeline_model_parallel_size": 2}
FULL_BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}
SELECTIVE = {"recompute_granularity": "selective"}
MHC = {**SELECTIVE, "enable_hyper_connections": True, "recompute_hyper_connections": True}

BROKEN = {
    (TransformerConfig, "hidden_size"): ({"hidden_size": 0}, r"hidden_size: expected an integer >= 1, got 0"),
    (TransformerConfig, "num_layers"): ({"num_layers": -1}, r"num_layers: expected an integer >= 1, got -1"),
    (TransformerConfig, "num_attention_heads"): ({"num_attention_heads": 1.5}, r"num_attention_heads: .* got 1\.5"),
    (TransformerConfig, "num_residual_streams"): ({"num_residual_streams": 0}, r"num_residual_streams: .* >= 1, got 0"),
    (TransformerConfig, "sinkhorn_iterations"): ({"sinkhorn_iterations": 0}, r"sinkhorn_iterations: .* >= 1, got 0"),
    (TransformerConfig, "sinkhorn_last"): ({"sinkhorn_last": "both"}, r"sinkhorn_last: .*'row', 'column'.*'both'"),
    (TransformerConfig, "mhc_init_gating_factor"): (
        {"mhc_init_gating_factor": float("nan")},
        r"mhc_init_gating_factor: expected a number in \(-inf, inf\), got nan",
    ),
    (TransformerConfig, "num_query_groups"): ({"num_query_groups": 0}, r"num_query_groups: .* >= 1, got 0"),
    (TransformerConfig, "kv_channels"): ({"kv_channels": True}, r"kv_channels: expected an integer >= 1, got True"),
    (TransformerConfig, "ffn_hidden_size"): ({"ffn_hidden_size": -8}, r"ffn_hidden_size: .* got -8"),
    (TransformerConfig, "impl"): ({"impl": "cuda"}, r"impl: .*'auto', 'reference', 'triton'.* got 'cuda'"),
    (TransformerConfig, "fp8"): ({"fp8": True}, r"fp8: expected None, 'e4m3' or 'hybrid', got True"),
    (TransformerConfig, "fp8_recipe"): (
        {"fp8_recipe": "blocks"},
        r"fp8_recipe: .*'current', 'delayed', 'blockwise'.*'blocks'",
    ),
    (TransformerConfig, "fp8_amax_history_len"): (
        {"fp8": "e4m3", "fp8_recipe": "delayed", "fp8_amax_history_len": 0},
        r"fp8_amax_history_len: expected an integer >= 1, got 0",
    ),
    (TransformerConfig, "fp8_amax_history_len <= 2**24"): (
        {"fp8": "e4m3", "fp8_recipe": "delayed", "fp8_amax_history_len": 2**24 + 1},
        r"fp8_amax_history_len: expected at most 2\*\*24 steps, which float32 counts exactly, got 16777217",
    ),
    (TransformerConfig, "fp8_amax_history_len needs delayed"): (
        {"fp8": "e4m3", "fp8_amax_history_len": 4},
        r"fp8_amax_history_len: expected 16, the default, without fp8_recipe='delayed', got 4",
    ),
    (TransformerConfig, "activation_storage"): (
        {"activation_storage": "int8"},
        r"activation_storage: expected one of \(None, 'fp8'\), got 'int8'",
    ),
    (TransformerConfig, "activation_storage_layers"): (
        {"activation_storage": "fp8", "activation_storage_layers": "0,x"},
        r"activation_storage_layers: expected numbers of layers such as 0-3,7, got '0,x'",
    ),
    (TransformerConfig, "fp8_recipe needs fp8"): (
        {"fp8_recipe": "blockwise"},
        r"fp8_recipe: expected 'current', the default, without fp8, got 'blockwise'; give fp8",
    ),
    (TransformerConfig, "fp8 adds up in float32"): (
        {"fp8": "e4m3", "params_dtype": "float64"},
        r"fp8: expected None with params_dtype='float64', .* added up in float32, got 'e4m3'",
    ),
    (TransformerConfig, "fp8_recipe current needs ranks in step"): (
        {"fp8": "hybrid", "context_parallel_size": 2, "cp_exchange": "pipelined"},
        r"fp8_recipe: expected 'delayed' or 'blockwise' with cp_exchange='pipelined', got 'current'",
    ),
    (TransformerConfig, "kernels support few streams"): (
        {"impl": "triton", "num_residual_streams": 9, "enable_hyper_connections": True},
        r"num_residual_streams: expected at most 8 with impl='triton', got 9; impl='reference' supports any number",
    ),
    (TransformerConfig, "kernels support narrow heads"): (
        {"impl": "triton", "linear_value_head_dim": 257, "layer_pattern": "kda"},
        r"linear_value_head_dim: expected at most 256 with impl='triton', got \d+ and 257; impl='reference' .*",
    ),
    (TransformerConfig, "activation"): ({"activation": "relu"}, r"activation: .*'swiglu', 'gelu'.* got 'relu'"),
    (TransformerConfig, "vocab_size"): ({"vocab_size": 0}, r"vocab_size: .* got 0"),
    (TransformerConfig, "seq_length"): ({"seq_length": 0}, r"seq_length: .* got 0"),
    (TransformerConfig, "rotary_base"): ({"rotary_base": 0.0}, r"rotary_base: .*\(0, inf\), got 0\.0"),
    (TransformerConfig, "rotary_percent"): ({"rotary_percent": 1.5}, r"rotary_percent: .*\[0, 1\], got 1\.5"),
    (TransformerConfig, "layernorm_epsilon"): ({"layernorm_epsilon": 0.0}, r"layernorm_epsilon: .*\(0, inf\)"),
    (TransformerConfig, "linear_norm_epsilon"): (
        {"linear_norm_epsilon": 0.0},
        r"linear_norm_epsilon: expected None or a number in \(0, inf\), got 0\.0",
    ),
    (TransformerConfig, "kv_lora_rank"): ({"kv_lora_rank": 0}, r"kv_lora_rank: .* >= 1, got 0"),
    (TransformerConfig, "qk_head_dim"): ({"qk_head_dim": 0}, r"qk_head_dim: .* >= 1, got 0"),
    (TransformerConfig, "qk_pos_emb_head_dim"): ({"qk_pos_emb_head_dim": 0}, r"qk_pos_emb_head_dim: .* >= 1, got 0"),
    (TransformerConfig, "v_head_dim"): ({"v_head_dim": 0}, r"v_head_dim: .* >= 1, got 0"),
    (TransformerConfig, "mla_norm_epsilon"): (
        {"mla_norm_epsilon": 0.0},
        r"mla_norm_epsilon: expected None or a number in \(0, inf\), got 0\.0",
    ),
    (TransformerConfig, "mla has widths"): (
        {"layer_pattern": "mla", "rotary_percent": 0.0, "kv_lora_rank": 8},
        r"kv_lora_rank, .*: expected integers with mla in layer_pattern='mla', got 8, None, None, None",
    ),
    (TransformerConfig, "mla has no positions"): (
        {
            "layer_pattern": "mla",
            "kv_lora_rank": 8,
            "qk_head_dim": 4,
            "qk_pos_emb_head_dim": 2,
            "v_head_dim": 4,
        },
        r"rotary_percent: expected 0\.0 with mla in layer_pattern, .*, got 1\.0",
    ),
    (TransformerConfig, "num_moe_experts"): ({"num_moe_experts": 0}, r"num_moe_experts: .* >= 1, got 0"),
    (TransformerConfig, "moe_router_topk"): ({"moe_router_topk": 0}, r"moe_router_topk: .* >= 1, got 0"),
    (TransformerConfig, "moe_ffn_hidden_size"): ({"moe_ffn_hidden_size": 0}, r"moe_ffn_hidden_size: .* >= 1, got 0"),
    (TransformerConfig, "moe_shared_expert_intermediate_size"): (
        {"moe_shared_expert_intermediate_size": 0},
        r"moe_shared_expert_intermediate_size: .* >= 1, got 0",
    ),
    (TransformerConfig, "moe_router_score_function"): (
        {"moe_router_score_function": "tanh"},
        r"moe_router_score_function: expected one of .*'softmax', 'sigmoid'.* got 'tanh'",
    ),
    (TransformerConfig, "moe_router_num_groups"): (
        {"moe_router_num_groups": 0},
        r"moe_router_num_groups: .* >= 1, got 0",
    ),
    (TransformerConfig, "moe_router_group_topk"): (
        {"moe_router_group_topk": 0},
        r"moe_router_group_topk: .* >= 1, got 0",
    ),
    (TransformerConfig, "moe_router_topk_scaling_factor"): (
        {"moe_router_topk_scaling_factor": 0.0},
        r"moe_router_topk_scaling_factor: .*\(0, inf\), got 0\.0",
    ),
    (TransformerConfig, "moe_aux_loss_coeff"): (
        {"moe_aux_loss_coeff": -0.1},
        r"moe_aux_loss_coeff: .*\[0, inf\), got -0\.1",
    ),
    (TransformerConfig, "pipelined without moe_aux_loss_coeff"): (
        {"moe_aux_loss_coeff": 0.1, "cp_exchange": "pipelined", "context_parallel_size": 2},
        r"moe_aux_loss_coeff: expected 0\.0 with cp_exchange 'pipelined', .* got 0\.1; choose another",
    ),
    (TransformerConfig, "layers of experts have experts"): (
        {"layer_pattern": "attention+moe"},
        r"num_moe_experts: expected a number with moe in layer_pattern='attention\+moe', got None",
    ),
    (TransformerConfig, "experts have layers"): (
        {"num_moe_experts": 4},
        r"num_moe_experts, moe_aux_loss_coeff: expected None and 0\.0 without moe in layer_pattern, got 4 and 0\.0; .*",
    ),
    (TransformerConfig, "experts suffice"): (
        {"num_moe_experts": 4, "moe_router_topk": 5, "layer_pattern": "attention+moe"},
        r"moe_router_topk: expected at most num_moe_experts=4, got 5",
    ),
    (TransformerConfig, "groups of experts"): (
        {
            "layer_pattern": "attention+moe",
            "num_moe_experts": 8,
            "moe_router_topk": 5,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
        },
        r"moe_router_num_groups, moe_router_group_topk: expected None, or groups of .* got 4 and 2",
    ),
    (TransformerConfig, "a gate needs a shared expert"): (
        {"moe_shared_expert_gate": True},
        r"moe_shared_expert_gate: expected False without moe_shared_expert_intermediate_size, got True",
    ),
    (TransformerConfig, "mhc_epsilon"): ({"mhc_epsilon": -1.0}, r"mhc_epsilon: .*\[0, inf\), got -1\.0"),
    (TransformerConfig, "mhc_head"): (
        {"mhc_head": "sum"},
        r"mhc_head: expected one of .*'mean', 'learned'.* got 'sum'",
    ),
    (TransformerConfig, "qk_layernorm_scope"): (
        {"qk_layernorm_scope": "heads"},
        r"qk_layernorm_scope: expected one of .*'head', 'projection'.* got 'heads'",
    ),
    (TransformerConfig, "hidden_dropout"): ({"hidden_dropout": -0.1}, r"hidden_dropout: .*\[0, 1\), got -0\.1"),
    (TransformerConfig, "init_method_std"): ({"init_method_std": -1.0}, r"init_method_std: .*\[0, inf\)"),
    (TransformerConfig, "params_dtype"): ({"params_dtype": "int8"}, r"params_dtype: expected one of .* got 'int8'"),
    (TransformerConfig, "bf16 has float32 parameters"): (
        {"bf16": True, "params_dtype": "float64"},
        r"bf16: expected params_dtype='float32' .* got 'float64'",
    ),
    (TransformerConfig, "pipeline_model_parallel_size"): (
        {"pipeline_model_parallel_size": 0},
        r"pipeline_model_parallel_size: .* got 0",
    ),
    (TransformerConfig, "virtual_pipeline_model_parallel_size"): (
        {"virtual_pipeline_model_parallel_size": 0},
        r"virtual_pipeline_model_parallel_size: .* >= 1, got 0",
    ),
    (TransformerConfig, "seed"): ({"seed": -1}, r"seed: expected an integer >= 0, got -1"),
    (TransformerConfig, "seed fits 32 bits"): ({"seed": 2**32}, r"seed: expected an integer < 2\*\*32"),
    (TransformerConfig, "heads divide width"): (
        {"num_attention_heads": 5},
        r"num_attention_heads: expected a divisor of hidden_size=32, got 5; .* kv_channels",
    ),
    (TransformerConfig, "rotary width is even"): (
        {"kv_channels": 6, "rotary_percent": 0.5},
        r"kv_channels, rotary_percent: expected an even number of turned channels .* got 3 of 6",
    ),
    (TransformerConfig, "groups divide heads"): ({"num_query_groups": 3}, r"num_query_groups: expected a divisor .* 3"),
    (TransformerConfig, "linear_num_key_heads"): ({"linear_num_key_heads": 0}, r"linear_num_key_heads: .* >= 1, got 0"),
    (TransformerConfig, "linear_num_value_heads"): (
        {"linear_num_value_heads": 0},
        r"linear_num_value_heads: .* >= 1, got 0",
    ),
    (TransformerConfig, "linear_key_head_dim"): ({"linear_key_head_dim": 0}, r"linear_key_head_dim: .* >= 1, got 0"),
    (TransformerConfig, "linear_value_head_dim"): (
        {"linear_value_head_dim": 0},
        r"linear_value_head_dim: .* >= 1, got 0",
    ),
    (TransformerConfig, "linear_conv_kernel_dim"): (
        {"linear_conv_kernel_dim": 0},
        r"linear_conv_kernel_dim: .* >= 1, got 0",
    ),
    (TransformerConfig, "linear_allow_neg_eigval"): (
        {"linear_allow_neg_eigval": 2},
        r"linear_allow_neg_eigval: expected .* got 2",
    ),
    (TransformerConfig, "kda_lower_bound"): (
        {"kda_lower_bound": 0.5},
        r"kda_lower_bound: expected None or a number in \[-5, 0\), got 0.5",
    ),
    (TransformerConfig, "key heads divide value heads"): (
        {"linear_num_key_heads": 2, "linear_num_value_heads": 5},
        r"linear_num_value_heads: expected a multiple of linear_num_key_heads=2, got 5",
    ),
    (TransformerConfig, "layer_pattern"): ({"layer_pattern": "mamba"}, r"layer_pattern: expected a mixer .* 'mamba'"),
    (TransformerConfig, "virtual stages need a pipeline"): (
        {"virtual_pipeline_model_parallel_size": 2},
        r"virtual_pipeline_model_parallel_size: expected None with pipeline_model_parallel_size=1, got 2",
    ),
    (TransformerConfig, "context_parallel_size"): (
        {"context_parallel_size": 0},
        r"context_parallel_size: expected an integer >= 1, got 0",
    ),
    (TransformerConfig, "tensor_model_parallel_size"): (
        {"tensor_model_parallel_size": 0},
        r"tensor_model_parallel_size: expected an integer >= 1, got 0",
    ),
    (TransformerConfig, "sequence_parallel"): (
        {"sequence_parallel": 1},
        r"sequence_parallel: expected True or False, got 1",
    ),
    (TransformerConfig, "ranks divide num_attention_heads"): (
        {"tensor_model_parallel_size": 3},
        r"num_attention_heads: expected a multiple of tensor_model_parallel_size=3 heads, got 4",
    ),
    (TransformerConfig, "ranks share num_query_groups"): (
        {"tensor_model_parallel_size": 4, "num_attention_heads": 24, "num_query_groups": 6, "hidden_size": 48},
        r"num_query_groups: expected a multiple or a divisor of tensor_model_parallel_size=4, .* got 6",
    ),
    (TransformerConfig, "ranks divide linear_num_value_heads"): (
        {
            "tensor_model_parallel_size": 2,
            "layer_pattern": "kda",
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
        },
        r"linear_num_value_heads: expected a multiple of tensor_model_parallel_size=2 heads, got 3",
    ),
    (TransformerConfig, "ranks share linear_num_key_heads"): (
        {
            "tensor_model_parallel_size": 4,
            "layer_pattern": "gdn",
            "linear_num_key_heads": 6,
            "linear_num_value_heads": 12,
        },
        r"linear_num_key_heads: expected a multiple or a divisor of tensor_model_parallel_size=4, .* got 6",
    ),
    (TransformerConfig, "ranks divide ffn_hidden_size"): (
        {"tensor_model_parallel_size": 2, "layer_pattern": "attention,attention+ffn=31"},
        r"ffn_hidden_size: expected a multiple of tensor_model_parallel_size=2 inner channels in every layer, got 31",
    ),
    (TransformerConfig, "ranks divide moe_shared_expert_intermediate_size"): (
        {
            "tensor_model_parallel_size": 2,
            "moe_shared_expert_intermediate_size": 9,
            "layer_pattern": "attention+moe",
            "num_moe_experts": 4,
        },
        r"moe_shared_expert_intermediate_size: expected a multiple of tensor_model_parallel_size=2 .*, got 9",
    ),
    (TransformerConfig, "ranks divide vocab_size"): (
        {"tensor_model_parallel_size": 2, "vocab_size": 257},
        r"vocab_size: expected a multiple of tensor_model_parallel_size=2 token ids, got 257",
    ),
    (TransformerConfig, "sequence parallelism needs ranks"): (
        {"sequence_parallel": True},
        r"sequence_parallel: expected False without tensor parallelism, .* got True; give tensor_model_parallel_size",
    ),
    (TransformerConfig, "ranks divide tokens"): (
        {"sequence_parallel": True, "tensor_model_parallel_size": 4, "seq_length": 10},
        r"seq_length: expected a multiple of tensor_model_parallel_size=4 with sequence_parallel, got 10",
    ),
    (TransformerConfig, "cp_exchange"): ({"cp_exchange": "tree"}, r"cp_exchange: expected one of .* got 'tree'"),
    (TransformerConfig, "cp_truncate_ranks"): (
        {"cp_truncate_ranks": 0, "cp_exchange": "ring"},
        "cp_truncate_ranks: expected an integer >= 1, got 0",
    ),
    (TransformerConfig, "cp_truncate_ranks needs ring"): (
        {"cp_truncate_ranks": 2},
        "cp_truncate_ranks: expected None unless cp_exchange is 'ring', got 2 with 'all_gather'",
    ),
    (TransformerConfig, "cp_transition_rank"): (
        {"cp_transition_rank": 0},
        "cp_transition_rank: expected an integer >= 1, got 0",
    ),
    (TransformerConfig, "cp_transition_rank needs all_gather"): (
        {"cp_transition_rank": 4, "cp_exchange": "scan"},
        "cp_transition_rank: expected None unless cp_exchange is 'all_gather', got 4 with 'scan'",
    ),
    (TransformerConfig, "pipelined without pipeline_model_parallel_size"): (
        {"cp_exchange": "pipelined", "context_parallel_size": 2, "pipeline_model_parallel_size": 2, "num_layers": 4},
        "pipeline_model_parallel_size: expected 1 with cp_exchange 'pipelined', which defines its own order .*, got 2",
    ),
    (TransformerConfig, "pipelined without cp_attention_layout"): (
        {"cp_exchange": "pipelined", "context_parallel_size": 2, "cp_attention_layout": "zigzag"},
        "cp_attention_layout: expected 'contiguous' with cp_exchange 'pipelined', whose ranks .*, got 'zigzag'",
    ),
    (TransformerConfig, "pipelined without enable_tensor_offload"): (
        {"cp_exchange": "pipelined", "context_parallel_size": 2, "enable_tensor_offload": True},
        "enable_tensor_offload: expected False with cp_exchange 'pipelined', whose order of layers .*, got True",
    ),
    (TransformerConfig, "pipelined without enable_activation_offload"): (
        {"cp_exchange": "pipelined", "context_parallel_size": 2, "enable_activation_offload": True},
        "enable_activation_offload: expected False with cp_exchange 'pipelined', whose order of layers .*, got True",
    ),
    (TransformerConfig, "kernels exchange exact states"): (
        {"cp_transition_rank": 4, "impl": "triton"},
        "expected None with impl='triton', got None and 4; impl='reference' supports them",
    ),
    (TransformerConfig, "cp_wire_dtype"): ({"cp_wire_dtype": "int8"}, r"cp_wire_dtype: expected one of .* got 'int8'"),
    (TransformerConfig, "cp_attention_layout"): (
        {"cp_attention_layout": "striped"},
        r"cp_attention_layout: expected one of .* got 'striped'",
    ),
    (TransformerConfig, "stages divide layers"): (
        {"pipeline_model_parallel_size": 3},
        r"num_layers: expected layers that divide evenly over 3 pipeline ranks .* got 4; choose another number of",
    ),
    (TransformerConfig, "num_layers_in_first_pipeline_stage"): (
        {"num_layers_in_first_pipeline_stage": 0},
        r"num_layers_in_first_pipeline_stage: .* >= 1, got 0",
    ),
    (TransformerConfig, "num_layers_in_last_pipeline_stage"): (
        {"num_layers_in_last_pipeline_stage": 1.5},
        r"num_layers_in_last_pipeline_stage: .* got 1\.5",
    ),
    (TransformerConfig, "pipeline_model_parallel_layout"): (
        {"pipeline_model_parallel_layout": 3},
        r"pipeline_model_parallel_layout: expected stages as a string, .* got 3",
    ),
    (TransformerConfig, "pipeline_schedule"): (
        {"pipeline_schedule": "2f2b"},
        r"pipeline_schedule: expected one of .* got '2f2b'",
    ),
    (TransformerConfig, "microbatch_group_size_per_vp_stage"): (
        {"microbatch_group_size_per_vp_stage": 0},
        r"microbatch_group_size_per_vp_stage: .* >= 1, got 0",
    ),
    (TransformerConfig, "pipeline_timeout"): ({"pipeline_timeout": 0.0}, r"pipeline_timeout: .*\(0, inf\), got 0\.0"),
    (TransformerConfig, "uneven splits need a pipeline"): (
        {"num_layers_in_first_pipeline_stage": 2},
        r"num_layers_in_first_pipeline_stage=2: expected a pipeline to split, got pipeline_model_parallel_size=1",
    ),
    (TransformerConfig, "a layout excludes other split settings"): (
        {**TWO_RANKS, "pipeline_model_parallel_layout": "Ett|ttL", "account_for_loss_in_pipeline_split": True},
        r"pipeline_model_parallel_layout: expected None with account_for_loss_in_pipeline_split=True, got 'Ett\|ttL'",
    ),
    (TransformerConfig, "counted ends exclude explicit layer counts"): (
        {**TWO_RANKS, "account_for_loss_in_pipeline_split": True, "num_layers_in_last_pipeline_stage": 1},
        r"expected False if that stage's number of layers is given, got num_layers_in_last_pipeline_stage=1",
    ),
    (TransformerConfig, "schedule fits the stages"): (
        {**TWO_RANKS, "pipeline_schedule": "none"},
        r"pipeline_schedule: expected one of .* with 2 pipeline ranks, got 'none'",
    ),
    (TransformerConfig, "pipeline_schedule_file"): (
        {**TWO_RANKS, "pipeline_schedule": "1f1b", "pipeline_schedule_file": build_schedule("1f1b", 2, 2)},
        r"pipeline_schedule: expected None beside pipeline_schedule_file, got '1f1b'",
    ),
    (TransformerConfig, "V-shaped placement has both ends on one rank"): (
        {
            **TWO_RANKS,
            "virtual_pipeline_model_parallel_size": 2,
            "pipeline_schedule": "zb-v",
            "num_layers_in_last_pipeline_stage": 2,
        },
        r"num_layers_in_last_pipeline_stage: expected None with schedule 'zb-v', where the first rank holds the first",
    ),
    (TransformerConfig, "recompute_layout"): (
        {"recompute_layout": "full,layernorm+norms"},
        r"recompute_layout: expected blocks such as .* got 'layernorm\+norms'",
    ),
    (TransformerConfig, "recompute_layout replaces the other settings"): (
        {"recompute_layout": "none*4", "recompute_granularity": "selective", "recompute_mlp": True},
        r"recompute_layout: expected None with recompute_granularity, recompute_mlp, got 'none\*4'",
    ),
    (TransformerConfig, "recompute_granularity"): (
        {"recompute_granularity": "some"},
        r"recompute_granularity: .* 'some'",
    ),
    (TransformerConfig, "recompute_method"): (
        {"recompute_method": "all"},
        r"recompute_method: expected one of .* 'all'",
    ),
    (TransformerConfig, "recompute_num_layers"): (
        {**FULL_BLOCK, "recompute_num_layers": -1},
        r"recompute_num_layers: expected an integer >= 0, got -1",
    ),
    (TransformerConfig, "recompute_num_layers within the rank"): (
        {**FULL_BLOCK, "recompute_num_layers": 3, "pipeline_model_parallel_size": 2},
        r"recompute_num_layers: expected at most the 2 layers of a pipeline rank, got 3",
    ),
    (TransformerConfig, "mhc_recompute_layer_num"): (
        {**MHC, "mhc_recompute_layer_num": 0},
        r"mhc_recompute_layer_num: expected an integer >= 1, got 0",
    ),
    (TransformerConfig, "mhc blocks within a stage"): (
        {**MHC, "mhc_recompute_layer_num": 3, "pipeline_model_parallel_size": 2},
        r"mhc_recompute_layer_num: expected at most the 2 layers of a stage, got 3",
    ),
    (TransformerConfig, "mhc block length needs mhc recompute"): (
        {"mhc_recompute_layer_num": 2},
        r"mhc_recompute_layer_num: expected None without recomputed hyper-connections, got 2; add recompute_hyper",
    ),
    (TransformerConfig, "mhc recompute needs mHC"): (
        {"recompute_granularity": "selective", "recompute_hyper_connections": True},
        r"enable_hyper_connections: expected True to recompute hyper-connections, got False",
    ),
    (TransformerConfig, "recompute_activation_function_num_layers"): (
        {"recompute_activation_function": True, "recompute_activation_function_num_layers": 1.5},
        r"recompute_activation_function_num_layers: expected an integer >= 0, got 1\.5",
    ),
    (TransformerConfig, "recompute_activation_function_num_layers within the rank"): (
        {"recompute_activation_function": True, "recompute_activation_function_num_layers": 5},
        r"recompute_activation_function_num_layers: expected at most the 4 layers of a pipeline rank, got 5",
    ),
    (TransformerConfig, "activation count needs activation recompute"): (
        {"recompute_activation_function_num_layers": 2},
        r"recompute_activation_function_num_layers: expected None without recompute_activation_function, got 2",
    ),
    (TransformerConfig, "activation recompute beside full needs block"): (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_activation_function": True},
        r"recompute_method: expected 'block' with recompute_activation_function, got 'uniform'",
    ),
    (TransformerConfig, "full and activation layers fit"): (
        {**FULL_BLOCK, "recompute_activation_function": True, "recompute_activation_function_num_layers": 2},
        r"recompute_activation_function_num_layers: expected at most the 1 layers that recompute_num_layers=3 leaves",
    ),
    (TransformerConfig, "activation is selected once"): (
        {**SELECTIVE, "recompute_modules": ("activation",), "recompute_activation_function": True},
        r"recompute_modules: expected no 'activation' with recompute_activation_function",
    ),
    (TransformerConfig, "recompute_modules"): (
        {**SELECTIVE, "recompute_modules": ("moe",)},
        r"recompute_modules: expected a tuple of names out of .*'core_attn'.* got \('moe',\)",
    ),
    (TransformerConfig, "modules are named once"): (
        {**SELECTIVE, "recompute_modules": ("mlp", "mlp")},
        r"recompute_modules: expected each name once, got \('mlp', 'mlp'\)",
    ),
    (TransformerConfig, "modules need selective"): (
        {"recompute_mlp": True},
        r"recompute_granularity: expected 'selective' with recompute_mlp, got None",
    ),
    (TransformerConfig, "selective needs modules"): (
        SELECTIVE,
        r"recompute_modules: expected at least one of .* got none",
    ),
    (TransformerConfig, "full needs a method"): (
        {"recompute_granularity": "full"},
        r"recompute_method: expected 'uniform' or 'block' with full recompute, got None",
    ),
    (TransformerConfig, "method needs full"): (
        {**SELECTIVE, "recompute_modules": ("mlp",), "recompute_method": "block"},
        r"recompute_granularity: expected 'full' with recompute_method or recompute_num_layers, got 'selective'",
    ),
    (TransformerConfig, "uniform chunks have layers"): (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 0},
        r"recompute_num_layers: expected at least 1 layer per chunk with method uniform, got 0",
    ),
    **{
        (TransformerConfig, flag): ({flag: "false"}, rf"{flag}: expected True or False, got 'false'")
        for flag in (
            "enable_hyper_connections",
            "bf16",
            "do_self_attention_hyper_connection",
            "do_mlp_hyper_connection",
            "add_bias_linear",
            "use_flash_attn",
            "qk_layernorm",
            "mhc_transpose_h_res",
            "moe_shared_expert_gate",
            "moe_router_norm_topk_prob",
            "moe_router_enable_expert_bias",
            "attention_output_gate",
            "layernorm_zero_centered_gamma",
            "recompute_hyper_connections",
            "recompute_pre_mlp_layernorm",
            "recompute_mlp",
            "recompute_activation_function",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "deallocate_pipeline_outputs",
            "overlap_p2p_comm",
            "variable_seq_lengths",
            "calculate_per_token_loss",
            "untie_embeddings_and_output_weights",
        )
    },
    (DataConfig, "data_path"): ({"data_path": "text"}, r"data_path: expected a pathlib\.Path or None, got 'text'"),
    (TrainConfig, "train_iters fits 32 bits"): ({"train_iters": 2**32}, r"train_iters: expected an integer < 2\*\*32"),
    (DataConfig, "validation_fraction"): ({"validation_fraction": 1.0}, r"validation_fraction: .*\(0, 1\), got 1\.0"),
    (DataConfig, "data_seed"): ({"data_seed": -1}, r"data_seed: .* got -1"),
    (DataConfig, "data_seed fits 32 bits"): ({"data_seed": 2**32}, r"data_seed: expected an integer < 2\*\*32"),
    (DataConfig, "reset_attention_mask"): (
        {"reset_attention_mask": 1},
        "reset_attention_mask: expected True or False, got 1",
    ),
    (TrainConfig, "train_iters"): ({"train_iters": 0}, r"train_iters: .* got 0"),
    (TrainConfig, "global_batch_size"): ({"global_batch_size": 0}, r"global_batch_size: .* got 0"),
    (TrainConfig, "micro_batch_size"): ({"micro_batch_size": 0}, r"micro_batch_size: .* >= 1, got 0"),
    (TrainConfig, "microbatches divide the batch"): (
        {"micro_batch_size": 3},
        r"micro_batch_size: expected a divisor of global_batch_size=8, got 3",
    ),
    (TrainConfig, "lr"): ({"lr": 0.0}, r"lr: expected a number in \(0, inf\), got 0\.0"),
    (TrainConfig, "min_lr"): ({"min_lr": -1e-9}, r"min_lr: .*\[0, inf\), got -1e-09"),
    (TrainConfig, "lr_warmup_iters"): ({"lr_warmup_iters": -1}, r"lr_warmup_iters: .* >= 0, got -1"),
    (TrainConfig, "adam_beta1"): ({"adam_beta1": 1.0}, r"adam_beta1: .*\[0, 1\), got 1\.0"),
    (TrainConfig, "adam_beta2"): ({"adam_beta2": -0.1}, r"adam_beta2: .*\[0, 1\)"),
    (TrainConfig, "adam_eps"): ({"adam_eps": 0.0}, r"adam_eps: .*\(0, inf\)"),
    (TrainConfig, "weight_decay"): ({"weight_decay": -0.1}, r"weight_decay: .*\[0, inf\)"),
    (TrainConfig, "clip_grad"): ({"clip_grad": float("inf")}, r"clip_grad: .*\[0, inf\), got inf"),
    (TrainConfig, "eval_interval"): ({"eval_interval": -1}, r"eval_interval: .* >= 0, got -1"),
    (TransformerConfig, "use_distributed_optimizer"): (
        {"use_distributed_optimizer": "yes"},
        r"use_distributed_optimizer: expected True or False, got 'yes'",
    ),
    (TransformerConfig, "enable_tensor_offload"): (
        {"enable_tensor_offload": 1},
        r"enable_tensor_offload: expected True or False, got 1",
    ),
    (TransformerConfig, "tensor_offload_pin_memory"): (
        {"tensor_offload_pin_memory": "no"},
        r"tensor_offload_pin_memory: expected True or False, got 'no'",
    ),
    (TransformerConfig, "tensor_offload_num_prefetch_layers"): (
        {"tensor_offload_num_prefetch_layers": -1},
        r"tensor_offload_num_prefetch_layers: expected an integer >= 0, got -1",
    ),
    (TransformerConfig, "enable_activation_offload"): (
        {"enable_activation_offload": None},
        r"enable_activation_offload: expected True or False, got None",
    ),
    (TransformerConfig, "activation_offload_layers"): (
        {"activation_offload_layers": "0"},
        r"activation_offload_layers: expected None without enable_activation_offload, got '0'",
    ),
    (TransformerConfig, "activation_offload_min_bytes"): (
        {"activation_offload_min_bytes": -1},
        r"activation_offload_min_bytes: expected an integer >= 0, got -1",
    ),
    (TrainConfig, "eval_iters"): ({"eval_iters": 0}, r"eval_iters: .* got 0"),
    (TrainConfig, "min_lr below lr"): ({"lr": 1e-5}, r"min_lr: expected at most lr=1e-05, got 0\.0001; lower min_lr"),
}
