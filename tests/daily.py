"""Tests of which make test and make test-all run a part, so that they take at most 15 and 60 minutes on two cores.

make test: a fuzzer, another test or other parameters see the same. A number n: each n-th set of parameters runs, of
those that are not marked slow, in the order of collection. Choose one that shares no factor with the lengths of the
parameters. 0: none runs.

make test-all runs these whole, except slow tests of many parameters: each day has one half to one fourth of those
(SERIES), and another part of the longest (PARTS).
"""

import os
import random
from collections import Counter
from datetime import date

EVERY = {
    # Fuzzers of offload, pipelines and compositions draw these, among a hundred programs each.
    # Every combination of two takes a second or more, and each part is tested for itself every day.
    "tests/planner/test_memory.py::test_values_saved_in_8_bits_within_two_percent": 7,
    "tests/planner/test_memory.py::test_offloaded_activations_within_two_percent": 11,
    "tests/planner/test_budget_offload.py::test_values_move_to_the_host_where_that_is_faster": 7,
    "tests/test_activation_storage.py::test_layers_are_chosen": 3,
    "tests/test_fp8.py::test_a_linear_layer_and_its_gradients_are_products_of_quantised_arrays": 3,
    "tests/test_fp8.py::test_arrays_of_any_rank_and_size": 11,
    "tests/test_fp8.py::test_weights_and_their_gradients_are_rounded_to_the_type_of_the_input": 7,
    "tests/distributed_optimizer/test_master_weights.py::test_rounding_stored_weights_changes_nothing": 5,
    "tests/test_fp8.py::test_a_run_resumes_in_the_other_backend_with_fp8_and_not_without": 0,
    "tests/test_model.py::test_mhc_with_alpha_and_bias_zero_is_a_plain_network_that_normalises_half_the_streams": 3,
    "tests/test_activation_storage.py::test_both_backends_change_no_forward_and_have_the_gradients": 7,
    "tests/test_grouped_fp8.py::test_both_backends_have_the_gradients": 3,
    "tests/offload/test_lifetime.py::test_three_hundred_steps_leave_nothing": 0,
    "tests/offload/test_lifetime.py::test_thirty_managers_leave_nothing": 0,
    "tests/offload/test_lifetime.py::test_a_process_ends_and_forks_with_layers_away": 2,
    "tests/offload/test_lifetime.py::test_compiled_models_break_the_graph_at_offloaded_layers": 5,
    "tests/offload/test_lifetime.py::test_inference_mode_between_steps": 3,
    "tests/offload/test_holders.py::test_an_alias_stays_good": 5,
    "tests/offload/test_training.py::test_o4_blocks_that_are_recomputed_keep_to_n_and_one_layer": 11,
    "tests/offload/test_training.py::test_o11_training_with_recompute_and_microbatches": 17,
    "tests/offload/test_parameters.py::test_o3_ten_steps_are_those_without_offload_bit_by_bit": 3,
    "tests/offload/test_jax.py::test_the_program_moves_what_the_plan_says": 3,
    "tests/offload/test_jax.py::test_activations_move_as_the_plan_says": 3,
    "tests/pipeline/test_torch.py::test_any_schedule_over_any_split_computes_what_one_process_does": 0,
    "tests/pipeline/test_torch.py::test_four_ranks_compute_what_one_process_does": 0,
    "tests/context/test_training.py::test_c11_c12_torch_trains_as_one_process": 5,
    "tests/context/test_training.py::test_c11_replicas_of_ranks_train_as_one_process": 0,
    "tests/recompute/test_modules.py::test_r27_any_subset_of_modules_has_the_gradients_of_the_plain_model": 0,
    "tests/recompute/test_recompute_modules.py::test_a_model_of_others_has_the_same_gradients_and_saves_less": 4,
    "tests/recompute/test_recompute_modules.py::test_surroundings": 4,
    "tests/everywhere/test_examples.py::test_an_example_runs": 4,
    "tests/everywhere/test_examples.py::test_context_parallel_ranks_of_qwen_have_the_gradients_of_one_process": 0,
    "tests/everywhere/test_pipelines.py::test_two_ranks": 11,
    "tests/everywhere/test_pipelines.py::test_four_ranks": 11,
    "tests/everywhere/test_pipelines.py::test_wrapped_stages": 5,
    "tests/everywhere/test_pipelines.py::test_replicas": 5,
    "tests/offload/test_offload_modules.py::test_a_model_of_others_trains_as_without_offload": 5,
    "tests/recompute/test_recompute_modules.py::test_data_parallel_models": 3,
    "tests/recompute/test_recompute_modules_jax.py::test_a_model_has_the_same_gradients_and_saves_less": 3,
    "tests/recompute/test_recompute_modules_jax.py::test_transformations": 7,
    "tests/recompute/test_recompute_modules_jax.py::test_second_derivatives": 0,
    "tests/pipeline/test_torch.py::test_two_ranks_compute_what_one_process_does": 0,
    "tests/test_training.py::test_gradients_of_a_batch_of_any_size": 0,
    "tests/recompute/test_recompute.py::test_gradients_do_not_change_and_agree_between_the_backends": 0,
    "tests/test_composition.py::test_what_must_be_accepted_learns_as_plain": 13,
    "tests/test_composition.py::test_kernels_learn_as_plain": 0,
    "tests/test_composition.py::test_the_page_has_the_table_of_the_results": 0,
    "tests/kernels/test_library.py::test_an_operation_of_the_library": 4,
    "tests/offload/test_offload_modules_jax.py::test_training_is_bitwise_that_of_the_plain_model": 7,
    "tests/offload/test_offload_modules_jax.py::test_gradients_and_state": 0,
    "tests/offload/test_offload_modules_jax.py::test_transformations": 3,
    "tests/offload/test_offload_modules_jax.py::test_with_recompute": 2,
    "tests/offload/test_offload_modules.py::test_a_second_thread_is_refused": 5,
    # JAX compiles a program for each; PyTorch runs the same in make test, and JAX some of them.
    "tests/pipeline/jax_cases/gradients.py::test_equals_the_single_device_model": 9,
    "tests/pipeline/jax_cases/programs.py::test_a_slot_costs_its_slowest_rank": 0,
    "tests/context/isolation_jax_cases.py::test_kernels_keep_them_apart": 0,
    "tests/context/test_zigzag.py::test_jax_computes_what_pytorch_does_alone": 0,
    "tests/context/jax_cases.py::test_c11_c12_a_hybrid_model_over_ranks": 0,
    "tests/context/jax_cases.py::test_c5_products_need_not_wait_for_states": 0,
    "tests/context/jax_cases.py::test_c2_c3_kernels_over_ranks_are_the_reference_on_one": 0,
    "tests/context/jax_cases.py::test_c8_ranks_compute_what_one_process_hands_on": 2,
    "tests/context/jax_cases.py::test_c8_states_may_travel_in_bfloat16": 2,
    "tests/docs/test_derivatives.py::test_jax_has_second_derivatives_of_chunked_forms": 0,
    "tests/linear_attention/test_transformations.py::test_jax_maps_a_call_and_differentiates_it_twice": 2,
    "tests/offload/test_jax.py::test_gradients_outside_of_jit": 0,
    "tests/saving/test_output.py::test_a_sample_of_more_tokens_than_bytes": 2,
    "tests/test_training.py::test_twenty_steps_are_adamw_by_hand": 3,
    "tests/test_decoding.py::test_prefill_and_single_steps_are_the_whole_forward": 3,
    # Long beside what they see; other tests of make test see it in other places.
    "tests/recompute/test_blocks.py::test_r21_outside_the_scope_a_hook_tensor_without_gradient_ends_in_right_gradients": 5,  # noqa: E501
    "tests/recompute/test_reading.py::test_r08_inside_the_scope_never_a_crash": 2,
    "tests/offload/test_offload_modules_jax.py::test_what_an_optimizer_takes_besides_gradients_is_passed_on": 0,
    "tests/offload/test_offload_modules_jax.py::test_second_derivatives_of_moved_activations_are_an_error_of_jax": 0,
    "tests/everywhere/test_added_connections.py::test_jax_models_compute_what_they_did_under_jit": 0,
    "tests/context/test_context_parallel.py::test_c2_c3_kernels_over_ranks_are_the_reference_on_one": 5,
    "tests/context/test_context_parallel.py::test_c12_a_hybrid_model_over_ranks": 5,
    "tests/saving/test_runs.py::test_signal_saves_and_exits_cleanly": 3,
    "tests/kernels/test_delta_rule.py::test_parts_are_the_whole": 2,
    "tests/linear_attention/test_limits.py::test_gradients_of_a_narrow_gate_are_summed_wide": 2,
    "tests/linear_attention/test_delta_rule.py::test_gradients_are_those_of_finite_differences": 3,
    "tests/pipeline/test_user_stages.py::test_an_output_that_cannot_be_sent_is_refused_at_once": 3,
    "tests/docs/test_commands.py::test_plans_are_printed": 5,
    # Many combinations of few parts.
    "tests/families/test_mistakes.py::test_a_mistake_is_seen": 3,
    "tests/recompute/test_compiled.py::test_a_compiled_function_in_a_checkpoint_is_replayed": 2,
    "tests/planner/test_memory.py::test_every_kind_of_layer_type_and_mode_within_two_percent": 89,
    "tests/planner/test_memory.py::test_prediction_within_two_percent": 23,
    "tests/planner/test_planner.py::test_four_thousand_ranks_are_planned_quickly_and_shown_briefly": 0,
    "tests/planner/test_generate.py::test_it_is_the_best_of_all_tables_of_two_ranks": 5,
    "tests/planner/test_rank_peaks.py::test_ranks_stay_within_a_budget": 3,
    "tests/context/jax_cases.py::test_c2_c3_c4_ranks_compute_what_pytorch_does_alone": 3,
    "tests/context/isolation_jax_cases.py::test_numbers_that_are_not_finite_stay_in_their_sequence": 3,
    "tests/pipeline/jax_cases/programs.py::test_only_full_recompute_repeats_exchanges_of_tensor_parallel_ranks": 0,
    "tests/docs/test_notebooks.py::test_notebook_runs": 0,
    "tests/offload/test_jax.py::test_values_of_a_name_move": 11,
    "tests/pipeline/jax_cases/user_modules.py::test_transformations_that_return_parameters_as_they_were_are_accepted": 3,  # noqa: E501
    # One of several models, places or numbers of the same kind.
    "tests/everywhere/test_support_matrix.py::test_a_cell": 17,
    "tests/everywhere/support_cases_jax.py::test_a_cell": 17,
    "tests/linear_attention/test_not_finite.py::test_no_output_depends_on_later_numbers_that_are_not_finite": 5,
    "tests/families/test_exactness.py::test_equals_transformers": 3,
    "tests/families/test_generation.py::test_generates_what_transformers_generates": 5,
    "tests/parity/test_locate.py::test_a_bug_is_found_where_it_is": 3,
    "tests/parity/test_locate_features.py::test_a_supported_feature": 4,
    "tests/parity/test_locate_linen.py::test_linen": 2,
    "tests/recompute/test_any_graph.py::test_any_graph_has_the_gradients_of_the_plain_graph": 2,
    "tests/kernels/test_kernels.py::test_backends_agree_bitwise": 3,
    "tests/kernels/test_delta_rule.py::test_grouped_heads": 2,
    "tests/pipeline/test_training.py::test_torch_trains_through_a_pipeline_as_without": 3,
    "tests/context/test_isolation.py::test_numbers_that_are_not_finite_stay_in_their_sequence": 2,
    "tests/docs/test_call_paths.py::test_the_number_of_streams_passes_the_documented_modules": 2,
    "tests/recompute/test_recompute.py::test_both_backends_keep_the_same_values": 7,
    "tests/recompute/test_microbatches.py::test_r26_microbatches_in_flight_go_backward_in_any_order": 4,
    "tests/recompute/test_modules.py::test_r27_with_other_hooks_around_and_inside": 3,
    "tests/recompute/test_exceptions.py::test_r28_the_step_after_an_exception_in_the_model_is_right": 5,
    "tests/recompute/test_block_memory.py::test_r23_resident_streams_are_those_between_blocks": 4,
    "tests/saving/test_schema.py::test_impossible_contents_are_named": 3,
    "tests/saving/test_meshes.py::test_a_run_resumed_on_a_v_shaped_pipeline_has_the_moments_of_one_process": 3,
    "tests/saving/test_output.py::test_a_run_whose_output_closes_is_saved": 2,
    "tests/faults/test_fault_injection.py::test_a_real_run_is_broken_and_judged": 0,
    "tests/pipeline/test_launcher.py::test_what_all_refuse_is_said_once_and_what_one_refuses_is_said": 2,
    "tests/kernels/test_kernels.py::test_kernels_are_as_exact_as_their_type_allows": 8,
    "tests/kernels/test_delta_rule.py::test_parts_of_wide_heads": 0,
    "tests/kernels/test_delta_rule.py::test_backends_agree_bitwise": 2,
    "tests/kernels/test_delta_rule.py::test_no_output_knows_the_future": 3,
    "tests/kernels/test_delta_rule_seeds.py::test_offsets_are_64_bit": 2,
    "tests/docs/test_programs.py::test_programs_run_and_print_what_is_shown": 11,
    "tests/test_fp8.py::test_both_backends_have_the_gradients": 5,
    "tests/test_fp8.py::test_microbatches_are_quantised_alike_in_steps_gradients_and_validation": 0,
    "tests/pipeline/test_split_model.py::test_recompute_stays_when_the_model_is_split": 3,
    "tests/pipeline/test_split_model.py::test_a_buffer_that_the_code_around_the_cuts_changes_belongs_to_one_stage": 3,
    "tests/pipeline/test_split_model.py::test_what_stages_cannot_see_is_refused": 2,
    "tests/pipeline/test_split_found.py::test_what_stages_cannot_know_is_refused_by_name": 3,
    "tests/pipeline/test_split_enclosing_code.py::test_what_stages_cannot_repeat_is_refused_by_name": 3,
    "tests/recompute/test_users_code_jax.py::test_gradients_of_values_that_are_equal_for_all_samples": 5,
    "tests/recompute/test_users_code_jax.py::test_a_checkpoint_inside_of_another_operation_still_drops_its_values": 5,
    "tests/kernels/test_kernels.py::test_every_number_of_streams": 3,
    "tests/kernels/test_in_models.py::test_jax_transforms": 3,
    "tests/planner/test_budget.py::test_no_layout_of_a_pipeline_within_the_budget_recomputes_less": 5,
    "tests/planner/test_budget.py::test_layers_save_in_8_bits_where_that_is_faster": 5,
    "tests/planner/test_memory.py::test_fp8_within_two_percent": 17,
    "tests/test_composition.py::test_fp8_blocks_of_ranks_are_those_of_one_device": 0,
    "tests/planner/test_budget.py::test_no_layout_within_the_budget_recomputes_less": 5,
    "tests/planner/test_budget.py::test_a_deep_model_is_solved_within_two_percent_of_the_bound": 3,
    "tests/planner/test_budget.py::test_no_fixed_mode_is_better_at_equal_bytes": 5,
    "tests/planner/test_budget.py::test_a_layout_is_executed_in_both_backends": 3,
    "tests/test_amax_history.py::test_a_history_advances_once_per_step": 2,
    "tests/test_amax_history.py::test_both_backends_take_the_same_scales_and_gradients": 0,
    "tests/planner/test_rank_peaks.py::test_the_peak_of_a_rank_is_predicted_but_for_messages": 3,
    "tests/planner/test_search.py::test_less_memory_is_never_faster_and_is_named": 0,
    "tests/planner/test_budget.py::test_more_memory_is_never_refused": 0,
    "tests/planner/test_planner.py::test_bytes_on_the_wire_are_those_that_pytorch_sends": 2,
    "tests/recompute/test_recompute.py::test_table_in_the_docs_is_what_both_backends_keep": 0,
    "tests/context/test_wavefront.py::test_nobody_waits_for_a_rank_longer_than_asked": 0,
    "tests/context/test_context_parallel.py::test_c13_states_travel_meanwhile": 0,
    "tests/kernels/test_in_models.py::test_models_of_kernels_equal_the_reference": 2,
    "tests/offload/test_offload_modules_jax.py::test_gradients_of_the_input_alone": 0,
    "tests/tensor_parallel/test_memory.py::test_s1_the_memory_of_a_rank_within_two_percent": 11,
    "tests/pipeline/test_split_model.py::test_the_stages_compute_what_the_model_does": 2,
    "tests/pipeline/test_split_enclosing_code.py::test_losses_and_gradients_are_those_of_the_model": 2,
    "tests/distributed_optimizer/test_training.py::test_s2_torch_trains_as_with_an_unsharded_optimizer": 2,
    "tests/fuzz/test_fuzzers.py::test_a_leak_is_seen_in_a_long_run": 2,
    "tests/planner/test_search.py::test_nothing_faster_is_missed": 0,
    "tests/test_cli.py::test_torchrun_does_not_end_who_speaks_before_it_has": 0,
    "tests/test_architecture.py::test_missing_package_of_the_kernels_is_named": 3,
}
"""Number by test."""

PARTS = {
    "tests/fuzz/test_fuzzers.py::test_a_hundred_programs": 6,
    "tests/composition_jax_cases.py::test_what_must_be_accepted": 9,
    "tests/context/jax_cases.py::test_c11_c12_a_hybrid_model_over_ranks": 5,
    "tests/context/test_training.py::test_c11_c12_jax_trains_as_pytorch_in_one_process": 5,
    "tests/context/test_training.py::test_c11_c12_torch_trains_as_one_process": 5,
    "tests/context/test_wavefront.py::test_kernels_need_nothing_else": 3,
    "tests/context/wavefront_jax_cases.py::test_a_hybrid_model_over_ranks": 3,
    "tests/distributed_optimizer/test_plan.py::test_s2_memory_and_messages_are_the_predicted_ones": 3,
    "tests/distributed_optimizer/test_training.py::test_s2_jax_trains_as_with_an_unsharded_optimizer": 5,
    "tests/distributed_optimizer/test_training.py::test_s2_torch_trains_as_with_an_unsharded_optimizer": 5,
    "tests/docs/test_commands.py::test_benchmarks_run_when_made_small": 5,
    "tests/docs/test_commands.py::test_training_runs_when_made_small": 5,
    "tests/docs/test_notebooks.py::test_notebook_runs": 6,
    "tests/everywhere/support_cases_jax.py::test_a_cell": 5,
    "tests/everywhere/test_pipelines.py::test_four_ranks": 3,
    "tests/everywhere/test_support_matrix.py::test_a_cell": 5,
    "tests/faults/test_fault_injection.py::test_every_case_is_as_expected": 3,
    "tests/kernels/test_kernels.py::test_kernels_are_as_exact_as_their_type_allows": 3,
    "tests/offload/jax_cases.py::test_gradients_are_those_without_offload_in_more_ways": 6,
    "tests/offload/jax_cases.py::test_training_is_that_without_offload": 5,
    "tests/offload/test_jax.py::test_activations_move_as_the_plan_says": 5,
    "tests/offload/test_jax.py::test_gradients_are_those_without_offload_of_activations": 3,
    "tests/offload/test_jax_training.py::test_gradients_are_those_without_offload": 3,
    "tests/offload/test_jax_training.py::test_training_is_that_without_offload": 3,
    "tests/docs/test_programs.py::test_programs_run_and_print_what_is_shown": 3,
    "tests/offload/test_training.py::test_o11_training_with_recompute_and_microbatches": 5,
    "tests/parity/test_mutations.py::test_a_bug_is_located": 8,
    "tests/parity/test_functions.py::test_a_hundred_ulps_in_any_operation_are_detected": 5,
    "tests/parity/test_functions.py::test_correct_programs_raise_no_alarm": 3,
    "tests/pipeline/jax_cases/gradients.py::test_any_schedule_over_any_split_computes_what_one_device_does": 9,
    "tests/parity/test_pairs.py::test_the_verdicts_of_all_pairs": 3,
    "tests/pipeline/jax_cases/gradients.py::test_equals_the_single_device_model_in_more_ways": 8,
    "tests/pipeline/test_split_found.py::test_what_stages_cannot_know_is_refused_by_name": 3,
    "tests/planner/test_memory.py::test_every_kind_of_layer_type_and_mode_within_two_percent": 6,
    "tests/planner/test_memory.py::test_offloaded_activations_within_two_percent": 3,
    "tests/planner/test_memory.py::test_prediction_within_two_percent": 3,
    "tests/planner/test_memory.py::test_values_saved_in_8_bits_within_two_percent": 5,
    "tests/planner/test_rank_peaks.py::test_the_peak_of_a_rank_is_predicted_but_for_messages": 3,
    "tests/saving/test_runs.py::test_killed_fifteen_times_resumes_and_ends_the_same": 3,
    "tests/tensor_parallel/test_training.py::test_s1_jax_trains_as_pytorch_in_one_process": 8,
    "tests/tensor_parallel/test_training.py::test_s1_every_recompute_mode_has_the_gradients_of_one_process": 5,
    "tests/saving/test_meshes.py::test_histories_and_shards_of_the_optimizer_go_on_on_other_meshes_and_in_the_other_backend": 2,  # noqa: E501
    "tests/tensor_parallel/test_training.py::test_s1_torch_trains_as_one_process": 3,
    "tests/test_composition.py::test_kernels_learn_as_plain": 7,
    "tests/test_fp8.py::test_loss_curves_stay_within_the_spread_of_two_seeds": 5,
    "tests/offload/test_jax.py::test_values_of_a_name_move": 4,
    # Long tests of few or no parameters; shorter ones of the same subjects run every day.
    "tests/offload/test_jax_training.py::test_pipelines_of_several_devices": 2,
    "tests/pipeline/test_jax.py::test_more_pipelines_of_several_devices": 2,
    "tests/test_composition.py::test_jax_learns_as_plain_whatever_is_asked": 2,
    "tests/offload/test_jax_training.py::test_more_pipelines_of_several_devices": 2,
    "tests/test_cli.py::test_interpreted_kernels_run_in_a_pipeline": 2,
    "tests/test_machines.py::test_two_processes_of_jax_go_on_after_one_was_killed": 2,
    "tests/test_machines.py::test_two_nodes_start_again_after_a_rank_was_killed": 2,
    "tests/planner/test_search.py::test_a_thousand_ranks_are_searched_quickly": 2,
    "tests/docs/test_readme.py::test_commands_run_in_order_when_made_small": 2,
    "tests/docs/test_readme.py::test_commands_of_ranks_run_when_made_small": 2,
    "tests/context/test_context_parallel.py::test_more_in_jax": 2,
    "tests/context/test_wavefront.py::test_more_in_jax": 2,
    "tests/everywhere/test_support_matrix.py::test_more_cells_of_jax": 2,
    "tests/kernels/test_ahead.py::test_kernels_of_the_delta_rule_compile_for_every_type_and_width": 2,
    "tests/recompute/test_recompute.py::test_gradients_do_not_change_and_agree_between_the_backends": 2,
    "tests/context/test_isolation.py::test_more_isolation_in_jax": 2,
}
"""In how many parts make test-all runs a series of long cases that see nearly the same; also a single long test."""
SERIES = 2, 5, 10
"""Parameter sets from which on a slow test that PARTS does not name runs in two parts, in three, and in four."""

VARIABLE = "DIPTYCH_TEST_PART"
"""The environment variable that chooses the part: a number, or all. make test-all takes the number of the day."""


def choose_part(is_all: bool) -> str:
    """Choose the part for this process and those it starts, and return it; an empty one runs the series whole."""
    if is_all:
        os.environ.setdefault(VARIABLE, str(date.today().toordinal()))
    return os.environ.get(VARIABLE, "")


def of_other_parts(names: list[str], part: str, are_slow: list[bool]) -> list[bool]:
    """Return for each test of a collection whether another part has it.

    Args:
        names: of the tests, with parameters.
        part: number of the part; "" or "all": it has all tests.
        are_slow: for each test, whether make test leaves it out.
    """
    if part in ("", "all"):
        return [False] * len(names)
    tests = [name.split("[")[0] for name in names]
    lengths = Counter(test for test, is_slow in zip(tests, are_slow, strict=True) if is_slow)
    seen: Counter[tuple[str, bool]] = Counter()
    found = []
    for test, is_slow in zip(tests, are_slow, strict=True):
        series = test, is_slow or test in PARTS
        parts = PARTS.get(test, 1 + sum(is_slow and lengths[test] >= length for length in SERIES))
        found.append(seen[series] % parts != _index_of(test, int(part), parts))
        seen[series] += 1
    return found


def _index_of(test: str, number: int, parts: int) -> int:
    """Return which of a test's parts has a number.

    Of the numbers 0 to ``parts`` - 1, each has another part, and so on for every further ``parts`` numbers. Their order
    is drawn anew each time: in a fixed order, who tests every second day would never run half of the parts.
    """
    order = list(range(parts))
    random.Random(f"{test} {number // parts}").shuffle(order)
    return order[number % parts]


def left_out(names: list[str]) -> list[bool]:
    """Return for each test of a collection, by its name with parameters, whether make test leaves it out."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        test = name.split("[")[0]
        every = EVERY.get(test, 1)
        found.append(every == 0 or seen[test] % every != 0)
        seen[test] += 1
    return found
