"""Field cases and who carries them: each row leads to the tests that hold it, or to the later work that will, and why.

A case may be in both: the part of it that is built is held, the rest is named. Only ids stand here; what a case says is in its test's words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"(?<![a-z0-9])br[-_](\d{3})(?!\d)", re.IGNORECASE)

MANDATORY = (
    *("109", "110", "111", "112", "114", "119", "123", "125", "130", "132", "134", "135"),
    # What is measured, priced, timed and kept apart, as far as it is built.
    *("076", "078", "079", "080", "085", "091", "139", "146", "147", "148"),
)
"""These are held from the first spine on, whatever else waits."""

HELD: Mapping[str, tuple[str, ...]] = {
    # states, scripts, environments
    "001": (
        "adapters/test_cluster_port.py::test_its_usage_ends_with_the_site_s_own_end",
        "core/test_native.py::test_a_run_is_as_long_as_the_site_s_own_books_say",
        "core/test_slurm_parsers.py::test_br_001_completing_is_neither_queued_nor_over",
    ),
    "010": (
        "adapters/test_cluster_port.py::test_an_empty_listing_ends_nothing",
        "edges/test_agent_queue.py::test_what_the_scheduler_lost_before_it_began_is_given_up_and_what_it_forgot_while_running_is_not",
        "adapters/test_slurm_cluster.py::test_br_010_an_empty_queue_and_silent_books_are_no_end",
    ),
    "012": ("edges/test_agent_queue.py::test_what_the_scheduler_lost_before_it_began_is_given_up_and_what_it_forgot_while_running_is_not",),
    "023": ("core/test_scheduler_core.py::test_repeats_and_late_entries_change_nothing",),
    "033": (
        "core/test_jobfile.py::test_time_limits_are_read_as_slurm_reads_them",
        "core/test_jobfile.py::test_what_is_no_time_limit_is_refused",
        "core/test_slurm_parsers.py::test_a_time_limit_is_what_slurm_means_by_it",
        "core/test_slurm_parsers.py::test_br_033_what_is_no_time_limit_is_never_unlimited",
        "core/test_slurm_parsers.py::test_br_033_an_elapsed_time_keeps_its_fraction",
    ),
    "044": (
        "adapters/test_adapter_port.py::test_line_ends_of_another_system_are_no_part_of_what_a_script_says",
        "core/test_lint.py::test_br_044_a_directive_after_the_first_command_is_reported_and_one_in_a_text_is_not",
    ),
    "045": (
        "core/test_scheduler_core.py::test_a_request_that_contradicts_itself_is_refused",
        "adapters/test_process_containment.py::test_a_user_s_value_reaches_the_job_and_overrules_none_of_ours",
        "core/test_lint.py::test_br_045_an_exported_function_is_said_to_stay_behind",
    ),
    # a Slurm
    "002": (
        "core/test_slurm_parsers.py::test_every_state_of_slurm_has_one_phase_in_either_spelling",
        "core/test_slurm_parsers.py::test_br_002_a_state_of_the_future_is_unknown_with_a_warning",
    ),
    "003": ("core/test_slurm_parsers.py::test_br_003_who_cancelled_is_kept",),
    "005": ("adapters/test_slurm_cluster.py::test_br_005_a_query_that_this_slurm_does_not_know_ends_nothing",),
    "006": ("core/test_slurm_parsers.py::test_br_006_case_and_padding_change_no_state",),
    "007": (
        "core/test_slurm_parsers.py::test_br_007_a_state_that_was_cut_off_is_asked_for_again",
        "core/test_slurm_parsers.py::test_br_007_a_tres_that_was_cut_off_is_no_count",
    ),
    "009": ("adapters/test_slurm_cluster.py::test_br_009_br_011_what_has_left_the_queue_is_asked_of_the_books",),
    "011": ("adapters/test_slurm_cluster.py::test_br_009_br_011_what_has_left_the_queue_is_asked_of_the_books",),
    "013": (
        "core/test_slurm_parsers.py::test_br_013_an_old_job_of_another_user_with_this_id_is_not_ours",
        "adapters/test_slurm_cluster.py::test_a_native_id_that_was_given_out_again_is_another_job",
    ),
    "016": ("core/test_slurm_parsers.py::test_arrays_components_and_steps_are_told_apart",),
    "018": (
        "core/test_slurm_parsers.py::test_br_018_two_clusters_have_two_jobs_of_one_number",
        "core/test_slurm_parsers.py::test_the_answer_of_a_submit_is_an_id_and_a_cluster",
    ),
    "026": (
        "core/test_slurm_parsers.py::test_typed_and_untyped_entries_name_the_same_cards",
        "core/test_slurm_parsers.py::test_br_026_no_entry_for_cards_is_no_zero_and_a_fraction_bills",
    ),
    "027": ("core/test_slurm_parsers.py::test_br_027_a_cluster_that_counts_no_cards_in_tres_has_no_eight_free",),
    "029": (
        "core/test_slurm_parsers.py::test_br_029_totals_of_a_job_are_not_per_node",
        "core/test_slurm_request.py::test_br_029_cards_are_asked_for_per_node",
    ),
    "032": (
        "core/test_slurm_parsers.py::test_memory_has_its_unit_in_both_directions",
        "core/test_slurm_request.py::test_br_032_memory_has_its_unit_and_is_never_everything",
    ),
    "034": ("core/test_slurm_parsers.py::test_br_034_unlimited_is_not_zero_and_a_partition_says_its_own_default",),
    "036": (
        "core/test_slurm_parsers.py::test_br_036_what_a_user_writes_splits_no_record",
        "core/test_slurm_parsers.py::test_br_036_a_record_with_too_few_fields_is_told_by_its_id",
    ),
    "037": ("core/test_slurm_parsers.py::test_br_037_bytes_that_are_no_text_hide_no_other_line",),
    "042": (
        "core/test_slurm_parsers.py::test_what_a_node_state_offers",
        "core/test_slurm_parsers.py::test_br_042_a_planned_node_is_usable_and_has_nothing_free",
    ),
    "043": ("core/test_slurm_parsers.py::test_br_043_processors_are_told_from_cores",),
    "047": (
        "core/test_slurm_parsers.py::test_br_047_a_submit_without_an_id_has_none",
        "adapters/test_slurm_cluster.py::test_br_047_a_submit_without_an_id_is_not_known_to_have_been_taken",
    ),
    "072": (
        "core/test_slurm_parsers.py::test_br_072_what_the_owner_changed_of_our_job_is_told",
        "adapters/test_slurm_cluster.py::test_br_072_a_time_limit_that_the_owner_changed_is_told",
    ),
    "077": ("core/test_slurm_parsers.py::test_br_077_steps_are_no_jobs",),
    # a Kubernetes cluster
    "020": (
        "core/test_kubernetes_words.py::test_a_pod_that_lives_is_where_its_container_is",
        "core/test_kubernetes_words.py::test_a_run_begins_when_its_container_does",
        "adapters/test_kubernetes_cluster.py::test_an_image_that_cannot_be_pulled_is_starting_and_then_given_up_by_its_own_word",
    ),
    "022": (
        "core/test_kubernetes_words.py::test_a_pod_that_ended_says_why",
        "adapters/test_kubernetes_cluster.py::test_an_evicted_pod_is_no_success_and_no_fault_of_the_job",
        "adapters/test_kubernetes_cluster.py::test_a_finished_run_stays_what_it_was_whatever_its_pod_says_later",
        "core/test_kubernetes_words.py::test_times_of_the_year_1_are_unknown_and_their_end_is_still_an_end",
    ),
    "040": (
        "core/test_kubernetes_words.py::test_a_quantity_is_what_kubernetes_means_by_it",
        "core/test_kubernetes_words.py::test_what_is_no_quantity_is_refused_by_name_and_never_zero",
    ),
    "137": (
        "adapters/test_kubernetes_cluster.py::test_a_rotated_token_is_read_again_and_a_bad_one_changes_no_job",
        "adapters/test_slurm_ways.py::test_br_137_a_token_that_is_renewed_on_disk_is_read_again_and_a_bad_one_ends_nothing",
    ),
    "039": (
        "core/test_kubernetes_words.py::test_a_time_that_nobody_knows_is_none_and_no_number",
        "core/test_slurm_parsers.py::test_br_039_zero_minus_one_and_year_one_are_no_time",
    ),
    # submit, cancel, silence
    "046": (
        "adapters/test_cluster_port.py::test_a_submit_whose_answer_was_lost_is_found_by_its_tag",
        "adapters/test_adapter_port.py::test_a_second_start_is_the_first_one_again",
        "adapters/test_kubernetes_cluster.py::test_a_submit_whose_answer_was_lost_is_found_by_its_name_and_not_made_twice",
        "edges/test_agent_site.py::test_a_start_that_the_agent_could_not_write_down_is_found_and_told_once",
        "adapters/test_slurm_cluster.py::test_br_046_a_submit_whose_answer_was_lost_is_found_by_its_tag",
    ),
    "048": (
        "edges/test_agent_queue.py::test_a_stop_of_what_waits_is_said_once_it_can_surely_never_start",
        "core/test_scheduler_core.py::test_a_cancel_wins_over_a_start_that_has_not_happened",
        "edges/test_scheduler_service.py::test_a_cancel_wins_over_a_start_that_has_not_happened",
        "edges/test_agent_site.py::test_a_stop_that_comes_before_its_offer_leaves_a_tombstone",
    ),
    "049": (
        "core/test_scheduler_core.py::test_claim_and_withdrawal_meet_on_one_row",
        "edges/test_scheduler_service.py::test_a_cancel_of_a_waiting_job_acts_now",
        "edges/test_scheduler_store.py::test_a_cancel_racing_a_placement_leaves_one_truth",
    ),
    "050": (
        "core/test_scheduler_core.py::test_a_running_job_is_cancelled_when_its_processes_are_seen_gone",
        "core/test_scheduler_silence.py::test_a_stop_without_effect_becomes_an_incident",
    ),
    "052": (
        "edges/test_scheduler_service.py::test_a_cancel_while_the_site_is_away_waits_for_it_and_reaches_it_before_new_work",
        "core/test_scheduler_silence.py::test_a_cancel_of_what_cannot_be_reached_ends_the_job_at_that_date_only",
    ),
    "053": (
        "edges/test_scheduler_service.py::test_a_silent_site_changes_only_ages",
        "core/test_scheduler_silence.py::test_one_result_survives_in_every_order_of_arrival",
        "edges/test_scheduler_ways.py::test_br_053_work_of_a_silent_site_runs_again_and_one_result_counts",
        "core/test_metering_link.py::test_br_053_one_payer_per_result_of_a_job",
        "edges/test_metering_link.py::test_br_053_the_platform_pays_what_it_could_not_hear_and_the_tenant_the_one_result",
    ),
    "054": (
        "core/test_scheduler_silence.py::test_silence_is_counted_from_the_latest_of_office_deafness_and_growth",
        "edges/test_scheduler_ways.py::test_a_hub_that_is_deaf_runs_nothing_again_and_says_why",
        "core/test_link_site.py::test_silence_changes_nothing_but_itself",
        "edges/test_agent_process.py::test_with_hub_and_bus_gone_the_site_works_on_and_tells_it_all_afterwards",
        "edges/test_agent_silence.py::test_with_the_hub_gone_leased_work_ends_and_waiting_work_goes_on",
        "edges/test_agent_disks.py::test_a_machine_that_starts_with_no_network_at_all_works",
    ),
    "056": (
        "adapters/test_kubernetes_cluster.py::test_what_ended_and_was_cleaned_up_while_the_agent_was_away_is_unknown_and_not_run_again",
        "core/test_scheduler_silence.py::test_a_site_that_never_returns_leaves_its_job_lost_and_its_devices_counted",
        "edges/test_scheduler_ways.py::test_br_056_what_never_comes_back_is_lost_at_its_promised_date_and_refined_once",
        "core/test_scheduler_core.py::test_an_end_leads_where_its_outcome_and_cause_say",
        "edges/test_agent_process.py::test_an_agent_killed_and_started_again_loses_no_exit_code",
        "edges/test_agent_holding.py::test_an_end_that_nobody_told_is_told_by_an_agent_whose_journal_is_gone",
        "adapters/test_adapter_port.py::test_what_was_prepared_is_found_until_it_is_trimmed_or_fenced",
        "edges/test_metering_link.py::test_br_056_a_lost_attempt_costs_nobody_and_what_comes_later_is_an_adjustment",
    ),
    "058": (
        "edges/test_agent_holding.py::test_a_start_waits_until_those_that_it_comes_after_are_seen_gone",
        "edges/test_machines_line.py::test_what_was_fenced_while_its_node_was_away_never_starts_there",
        "edges/test_machines_line.py::test_a_stop_of_a_node_that_is_away_ends_it_when_it_returns_and_not_before",
        "edges/test_machines_line.py::test_a_node_taken_out_for_good_closes_its_work_with_nobody_knowing_how_it_ended",
        "edges/test_metering_native.py::test_books_that_differ_are_told_to_people_unasked_and_once_and_when_it_is_over",
    ),
    "060": (
        "core/test_scheduler_core.py::test_repeats_and_late_entries_change_nothing",
        "edges/test_agent_disks.py::test_work_offered_while_the_agent_stops_is_run_once_or_offered_again",
        "edges/test_agent_site.py::test_a_start_that_the_agent_could_not_write_down_is_found_and_told_once",
    ),
    "061": (
        "edges/test_scheduler_store.py::test_twenty_submits_of_one_key_make_one_job",
        "edges/test_scheduler_store.py::test_a_late_repeat_finds_the_job_in_its_final_state",
        "edges/test_scheduler_store.py::test_a_submit_whose_caller_hung_up_is_found_by_its_key",
        "edges/test_scheduler_service.py::test_the_same_key_gives_the_same_job_and_other_content_is_a_conflict",
    ),
    "062": (
        "core/test_scheduler_core.py::test_failures_of_sites_end_at_a_limit_and_preemption_is_none",
        "edges/test_machines_line.py::test_a_node_that_begins_nothing_is_set_aside_and_says_why",
    ),
    # placement, quota, freshness
    "066": (
        "core/test_link_keeper.py::test_what_runs_is_believed_only_at_head",
        "core/test_planner_rules.py::test_each_rule_rejects_with_its_numbers",
        "core/test_registry_core.py::test_an_older_inventory_changes_nothing",
        "core/test_scheduler_sight.py::test_live_means_taken_and_received_within_the_limit",
        "edges/test_scheduler_service.py::test_without_live_telemetry_there_is_no_work",
    ),
    "067": (
        "core/test_planner_rules.py::test_each_rule_rejects_with_its_numbers",
        "adapters/test_kubernetes_site.py::test_what_a_node_has_for_us_is_what_it_can_give_now",
        "adapters/test_kubernetes_site.py::test_a_node_that_refuses_what_it_had_room_for_is_set_aside",
    ),
    "069": ("core/test_planner_rules.py::test_parallel_reservations_never_pass_the_budget",),
    "070": (
        "edges/test_scheduler_store.py::test_reservations_equal_the_live_attempts_after_every_end",
        "edges/test_scheduler_service.py::test_a_restarted_scheduler_goes_on_where_it_was",
    ),
    "071": (
        "core/test_planner_rules.py::test_each_rule_rejects_with_its_numbers",
        "core/test_planner_rules.py::test_a_withdrawn_device_stays_counted_while_it_is_held",
    ),
    # metering and money
    "076": (
        "core/test_rating.py::test_br_076_three_attempts_each_once_with_its_payer",
        "edges/test_metering_store.py::test_a_job_placed_twice_shows_both_attempts_and_who_pays_which",
    ),
    "073": (
        "core/test_planner_rules.py::test_work_too_long_for_a_maintenance_window_reads_its_times_and_what_would_fit_or_goes_elsewhere",
        "core/test_slurm_parsers.py::test_br_073_a_maintenance_window_is_told_with_what_helps",
    ),
    "078": (
        "core/test_native.py::test_suspensions_are_cut_where_they_were_seen_and_as_long_as_the_books_say",
        "edges/test_agent_queue.py::test_suspended_time_is_cut_out_of_the_run",
        "core/test_rating.py::test_br_078_held_and_run_are_both_kept_and_the_agreement_says_which_costs",
        "core/test_rating.py::test_br_078_a_pause_that_was_open_when_the_host_died_ends_with_the_last_sign_of_life",
        "adapters/test_process_containment.py::test_after_a_reboot_the_end_is_the_last_sign_of_life_and_the_site_s_doing",
    ),
    "079": (
        "core/test_contracts.py::test_a_moment_without_an_offset_is_refused",
        "core/test_contracts.py::test_both_half_past_twos_of_a_night_are_two_moments",
        "core/test_metering_core.py::test_a_period_is_a_month_of_its_own_time_zone_half_open",
        "core/test_rating.py::test_br_079_an_hour_is_an_hour_whatever_the_wall_said",
    ),
    "080": ("core/test_rating.py::test_br_080_an_absurd_duration_is_quantity_zero_and_flagged",),
    # A second content supersedes the first only by a named person's decision; both stay on record (ADR 5).
    "085": (
        "core/test_metering_link.py::test_br_085_a_second_content_supersedes_the_first_by_a_person_s_decision_and_both_stay",
        "edges/test_metering_link.py::test_br_085_a_corrected_content_counts_by_a_person_s_word_and_the_first_stays_on_record",
        "core/test_metering_core.py::test_another_content_under_the_same_id_waits_and_the_first_stays",
        "edges/test_metering_store.py::test_late_repeated_and_disordered_news_lead_to_the_same_books",
    ),
    # Thousandths of a card, as the design has them: 0.858 card-hours for 0.857143; profile and count stay with the segment.
    "087": (
        "core/test_rating.py::test_br_087_a_slice_is_a_fraction_of_a_card",
        "core/test_sources_slices.py::test_br_087_slice_hours_are_thousandths_of_card_hours_and_keep_the_slice_s_name",
    ),
    "088": (
        "core/test_sources_exposition.py::test_a_slice_is_a_device_of_its_own_and_its_card_is_none_beside_it",
        "edges/test_sources_exporter.py::test_a_card_that_the_driver_says_is_cut_is_its_slices_and_whole_again_afterwards",
    ),
    "091": (
        "core/test_rating.py::test_br_091_rounded_lines_add_up_to_the_total",
        "core/test_metering_core.py::test_br_091_nothing_is_left_of_a_tenth_and_a_fifth_less_three_tenths",
    ),
    # calls of offerings: in DESIGN's words what nobody counted is unknown and waits, where the case would estimate; an agreement may allow that
    "092": (
        "core/test_calls_rules.py::test_br_092_what_an_answer_says_it_used_and_nothing_else",
        "core/test_calls_metering.py::test_br_092_who_pays_what_follows_from_how_it_ended",
        "core/test_calls_metering.py::test_br_092_a_stream_whose_tokens_nobody_counted_is_estimated_where_the_agreement_says_so",
        "journeys/test_endpoint.py::test_a_caller_who_hangs_up_stops_the_upstream_and_leaves_one_record",
    ),
    # nothing is tried twice, so one call is one attempt, and both parties' records carry its id
    "093": ("edges/test_calls_line.py::test_br_093_a_call_that_comes_twice_reaches_the_server_once",),
    # devices
    "094": (
        "edges/test_agent_telemetry.py::test_a_metric_that_cannot_be_read_is_none_and_the_others_stay",
        "edges/test_sources_exporter.py::test_unified_memory_is_told_as_such_with_the_host_s_size",
    ),
    "095": (
        "edges/test_agent_telemetry.py::test_a_metric_that_cannot_be_read_is_none_and_the_others_stay",
        "edges/test_sources_exporter.py::test_a_card_that_the_driver_says_is_cut_is_its_slices_and_whole_again_afterwards",
    ),
    "096": (
        "edges/test_agent_telemetry.py::test_one_lost_card_keeps_its_name_and_hides_no_other",
        "edges/test_agent_telemetry.py::test_a_driver_that_hangs_or_kills_its_reader_says_unknown_and_is_tried_again",
        "journeys/test_gpus.py::test_a_lost_card_sends_the_next_job_elsewhere_and_a_healed_one_takes_who_waited",
    ),
    "097": ("edges/test_agent_telemetry.py::test_a_driver_that_hangs_or_kills_its_reader_says_unknown_and_is_tried_again",),
    "101": (
        "edges/test_agent_telemetry.py::test_a_name_that_is_no_text_leaves_the_card_in_the_list",
        "edges/test_agent_telemetry.py::test_a_binding_of_another_version_answers_in_bytes_or_in_text",
        "core/test_house.py::test_the_deprecated_namesake_of_the_nvml_binding_is_not_installed_beside_it",
    ),
    "099": (
        "core/test_sources_xid.py::test_a_code_is_the_job_s_fault_or_the_card_s_and_an_unknown_one_drains_nothing",
        "core/test_sources_xid.py::test_the_owner_s_list_of_codes_that_drain_is_the_one_that_counts",
        "core/test_sources_xid.py::test_the_same_fault_on_three_cards_of_a_job_is_its_program_s_and_in_three_jobs_on_a_card_the_card_s",
        "core/test_sources_exposition.py::test_an_error_after_which_a_card_must_be_reset_takes_it_out_and_a_program_s_own_does_not",
    ),
    "100": (
        "core/test_sources_xid.py::test_a_line_of_the_kernel_names_the_card_the_code_and_the_process",
        "core/test_sources_xid.py::test_a_card_s_place_is_one_however_it_is_written",
    ),
    "104": (
        "core/test_sources_exposition.py::test_a_blank_value_is_unknown_with_its_cause_and_the_other_fields_stay",
        "edges/test_sources_exporter.py::test_what_stays_blank_or_gone_for_ten_minutes_is_told_and_what_a_card_does_not_know_is_not",
        "core/test_probe_drift.py::test_what_differs_from_the_declaration_is_told_with_its_numbers",
    ),
    "105": (
        "edges/test_agent_telemetry.py::test_a_metric_that_cannot_be_read_is_none_and_the_others_stay",
        "core/test_sources_use.py::test_what_could_not_be_read_is_in_no_mean_and_no_zero",
    ),
    "106": ("core/test_sources_use.py::test_an_energy_counter_that_begins_anew_goes_on_from_there",),
    # bus
    "109": (
        "edges/test_bus_faults.py::test_no_error_text_of_the_server_closes_the_bus_for_good",
        "edges/test_bus_credentials.py::test_credentials_are_renewed_before_they_end_and_no_message_is_lost",
    ),
    "110": (
        "edges/test_bus_port.py::test_a_message_too_large_with_its_headers_is_refused_and_the_bus_lives_on",
        "core/test_scheduler_core.py::test_a_request_that_contradicts_itself_is_refused",
    ),
    "111": (
        "core/test_link_keeper.py::test_a_sync_is",
        "edges/test_bus_faults.py::test_an_append_without_an_answer_is_a_maybe_and_its_repeat_is_stored_once",
        "edges/test_bus_memory.py::test_a_lost_acknowledgement_means_maybe_and_the_repeat_is_a_duplicate",
        "edges/test_lane_keeper.py::test_a_lost_answer_costs_a_repeat_and_doubles_nothing",
    ),
    "112": (
        "edges/test_store_relay.py::test_an_event_said_again_after_the_window_of_duplicates_is_applied_once",
        "edges/test_bus_memory.py::test_the_duplicate_window_counts_from_the_first_copy",
    ),
    "113": (
        "edges/test_bus_port.py::test_a_stream_keeps_each_message_once_and_a_duplicate_is_a_success",
        "edges/test_store_relay.py::test_an_answer_that_was_lost_is_asked_for_again_and_a_duplicate_is_a_success",
    ),
    # We watch no bucket and use no ordered consumer; freshness is by live telemetry (DESIGN 6), with the limit that the case asks for.
    "114": (
        "core/test_house.py::test_nothing_waits_on_what_is_blind_after_a_restart",
        "core/test_scheduler_sight.py::test_a_hub_that_hears_nothing_of_a_device_believes_nothing_of_it_within_five_seconds",
        "edges/test_bus_faults.py::test_a_killed_and_restarted_server_finds_subscriptions_services_and_consumers_again",
    ),
    "118": ("edges/test_bus_port.py::test_a_handler_that_hangs_is_given_up_and_the_message_comes_again",),
    "119": (
        "edges/test_bus_port.py::test_when_tries_end_the_message_becomes_a_dead_letter_and_the_next_is_handled",
        "edges/test_store_relay.py::test_an_event_that_is_never_handled_becomes_a_dead_letter_and_a_fault",
    ),
    "123": (
        "edges/test_bus_port.py::test_a_slow_handler_does_not_starve_the_others",
        "edges/test_lane_keeper.py::test_a_site_whose_entries_wait_delays_no_other",
    ),
    "125": (
        "core/test_trust_nats_jwt.py::test_br_125_a_name_that_could_bend_a_subject_gets_no_account",
        "edges/test_bus_port.py::test_what_is_no_subject_is_refused_before_it_is_sent",
        "edges/test_bus_port.py::test_user_text_never_becomes_a_subject_token",
        "edges/test_embedded_operator_bus.py::test_a_site_can_speak_and_hear_on_nothing_but_its_own_subjects",
    ),
    "126": (
        "edges/test_store_crash.py::test_a_folder_wiped_under_the_live_server_is_made_good",
        "edges/test_store_crash.py::test_a_server_that_comes_back_with_an_empty_folder_is_filled_and_consumers_go_on",
    ),
    "127": (
        "edges/test_bus_faults.py::test_a_killed_and_restarted_server_finds_subscriptions_services_and_consumers_again",
        "edges/test_store_relay.py::test_a_bus_that_is_away_costs_nothing_but_time",
    ),
    "128": (
        "core/test_trust_nats_jwt.py::test_br_128_a_service_is_answered_below_its_own_name_and_hears_no_other_inbox",
        "edges/test_embedded_operator_bus.py::test_a_site_can_speak_and_hear_on_nothing_but_its_own_subjects",
    ),
    "129": (
        "edges/test_bus_faults.py::test_a_server_that_comes_back_empty_gets_stream_and_consumer_again",
        "edges/test_store_relay.py::test_after_a_wipe_and_a_refill_nothing_is_applied_twice",
        "edges/test_store_crash.py::test_a_server_that_comes_back_with_an_empty_folder_is_filled_and_consumers_go_on",
    ),
    # database, traces, clocks
    "130": (
        "edges/test_store_pg.py::test_a_full_pool_answers_busy_within_its_budget_and_recovers",
        "edges/test_gateway.py::test_a_service_that_is_too_busy_is_said_to_be_with_the_time_to_ask_again",
    ),
    "132": (
        "edges/test_store_pg.py::test_a_caller_cancelled_near_commit_leaves_all_or_nothing",
        "edges/test_store_pg.py::test_a_commit_whose_answer_never_comes_is_a_maybe",
        "edges/test_scheduler_store.py::test_a_submit_whose_caller_hung_up_is_found_by_its_key",
    ),
    "134": (
        "core/test_observe.py::test_a_trace_goes_on_if_its_header_can_be_read_and_begins_anew_if_not",
        "core/test_observe.py::test_a_repeat_is_linked_to_its_cause_and_is_no_second_child",
        "edges/test_bus_rpc.py::test_a_bad_trace_header_is_a_new_trace_and_no_error",
        "edges/test_bus_rpc.py::test_a_trace_goes_on_however_its_header_is_spelt_and_foreign_baggage_goes_no_further",
    ),
    "135": (
        "core/test_observe.py::test_a_label_that_may_take_any_value_is_refused",
        "core/test_observe.py::test_too_many_series_end_in_one_that_says_so",
    ),
    "139": (
        "edges/test_scheduler_ways.py::test_br_139_two_copies_whose_clocks_differ_lose_no_job_and_number_no_settings_in_turns",
        "core/test_agent_core.py::test_an_attempt_has_one_anchor_and_the_last_segment_says_so",
        "edges/test_agent_alone.py::test_a_running_attempt_is_cut_at_each_border_that_it_slept_over_and_each_period_is_counted",
        "core/test_link_clocks.py::test_a_step_of_the_wall_clock_voids_what_was_known",
        "core/test_link_keeper.py::test_the_keepers_estimate_of_a_clock_holds_the_true_offset",
        "edges/test_lane_keeper.py::test_a_clock_that_is_far_off_is_reported_by_the_heartbeat_lane",
    ),
    # logs, secrets, tenants
    "140": (
        "core/test_agent_core.py::test_a_log_is_cut_between_characters",
        "core/test_agent_core.py::test_a_reader_who_follows_reads_every_character_once",
    ),
    "144": (
        "core/test_observe.py::test_a_secret_is_in_no_log_line",
        "journeys/test_secrets.py::test_a_value_of_the_environment_reaches_the_job_and_is_found_nowhere_else",
    ),
    "146": (
        "core/test_trust_rights.py::test_br_146_anothers_thing_and_an_unknown_id_read_the_same",
        "core/test_trust_rights.py::test_br_146_a_denial_does_not_depend_on_the_thing",
        "edges/test_scheduler_service.py::test_others_jobs_are_not_there",
        "edges/test_scheduler_service.py::test_a_site_owner_may_cancel_at_the_own_site_with_a_reason",
        "edges/test_incident_service.py::test_another_sites_incident_and_an_unknown_one_read_the_same",
        "journeys/test_isolation.py::test_another_tenants_job_answers_exactly_as_one_that_never_was",
    ),
    "147": (
        "core/test_trust_rights.py::test_br_147_a_list_is_cut_by_the_same_table_as_a_single_fetch",
        "edges/test_scheduler_store.py::test_what_lies_outside_the_scope_is_not_there",
        "edges/test_incident_store.py::test_a_list_is_cut_to_what_the_caller_may_see",
        "journeys/test_isolation.py::test_another_tenants_job_answers_exactly_as_one_that_never_was",
    ),
    "148": (
        "core/test_scheduler_core.py::test_what_cannot_be_believed_is_raised_for_quarantine",
        "core/test_agent_native_books.py::test_runs_of_ours_travel_whole_and_others_of_a_mapped_account_as_numbers",
        "edges/test_metering_native.py::test_a_mapped_account_that_is_used_beside_us_is_told_to_people_and_attributed_to_nobody",
        "core/test_slurm_parsers.py::test_br_148_a_tag_in_somebody_else_s_comment_is_a_comment",
        "adapters/test_slurm_cluster.py::test_work_by_hand_under_a_lent_account_is_told_and_not_ours",
    ),
}


@dataclass(frozen=True, slots=True)
class Later:
    """`room`: which later work builds it. `why`: one sentence."""

    room: str
    why: str


LATER: Mapping[str, Later] = {
    "071": Later("planner", "Two who preempt one victim need the planner's own preemption; quotas cut below use are held."),
    "084": Later("periods", "Late usage meets a closed period only when periods close."),
    "099": Later("compose", "Suspects among cards and jobs are shown with the incidents; what a code means and drains is held."),
    "100": Later("compose", "The kernel's log is read where an agent may; its lines and places are parsed."),
    "118": Later("compose", "The alarm on a pinned consumer is one of the alert rules; the deadline of a handler is held."),
    "128": Later("compose", "Outside subscribers get their accounts with the events that go out; sites and services are held."),
    "135": Later("compose", "The alert on an overflowing series is one of the alert rules; bounded labels are held."),
    "136": Later("compose", "Server-sent events come with the console; logs are asked for by offset until then."),
    "142": Later("sites", "Logs that rotate, or that their own job cuts short, get a generation with container runtimes."),
    "146": Later("compose", "There is no call that cancels several at once yet."),
}


@cache
def sources(file: str) -> Mapping[str, str]:
    """Test function → its own text, the tables of the file that it names, and the file's first words."""
    text = (TESTS / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines()

    def said(node: ast.stmt, first: int) -> str:
        return "\n".join(lines[first - 1 : node.end_lineno])

    tables: dict[str, str] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        tables.update({target.id: said(node, node.lineno) for target in targets if isinstance(target, ast.Name)})
    found = dict[str, str]()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = said(node, min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]))
            named = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            found[node.name] = "\n".join([ast.get_docstring(tree) or "", own, *(tables[name] for name in sorted(named & tables.keys()))])
    return found


def names(text: str) -> set[str]:
    return set(NAMED.findall(text))


@pytest.mark.parametrize("case", sorted(HELD))
def test_a_case_that_is_held_is_named_by_each_test_that_holds_it(case: str) -> None:
    for node in HELD[case]:
        file, _, function = node.partition("::")
        assert (TESTS / file).is_file(), f"there is no {file}"
        assert function in sources(file), f"{file} has no {function}"
        assert function.startswith("test_")
        assert case in names(sources(file)[function]), f"{node} does not say that it holds BR-{case}"


@pytest.mark.parametrize("case", MANDATORY)
def test_what_the_spine_must_hold_it_holds(case: str) -> None:
    assert HELD.get(case), f"BR-{case} has no test"


def test_every_case_that_a_test_names_is_in_the_table() -> None:
    for path in sorted(TESTS.rglob("test_*.py")):
        if path == Path(__file__):
            continue
        named = names(path.read_text(encoding="utf-8"))
        assert named <= HELD.keys(), f"{path.name} names {sorted(named - HELD.keys())}"


@pytest.mark.parametrize("case", sorted(LATER))
def test_what_comes_later_says_where_and_why(case: str) -> None:
    later = LATER[case]
    assert later.room in {"link", "sites", "compose", "planner", "periods"}
    assert later.why.endswith(".")
