"""The faults that tests plant, one list: scripts/faults_page writes docs/faults.md from it."""

from dataclasses import dataclass

FAULTS = "tests/cli/test_faults.py"
STOP = "tests/cli/test_keep_stop.py"
RESTART = "tests/cli/test_keep_restart.py"
DISK = "tests/cli/test_keep_disk.py"
MEMBERS = "tests/cli/test_keep_members.py"
FULL = "tests/cli/test_disk.py"
MORE = "tests/cli/test_more_faults.py"
SPEECH = "tests/cli/test_prepare_speech.py"
DRILL = "tests/cli/test_drill.py"
DAMAGED = f"{DISK}::test_a_damaged_checkpoint_is_named_and_the_one_before_is_used"


@dataclass(frozen=True)
class Fault:
    """`test` is a pytest id: all cases of it, or one. `number` is that of the fault matrix."""

    number: str
    what: str
    then: str
    test: str


LIST = [
    # Before ranks train
    Fault(
        "F1", "the port of a launcher is taken", "named with the process that holds it",
        f"{FAULTS}::test_f1_a_taken_port_is_named_with_its_owner",
    ),
    Fault(
        "F1", "the usual port 29500 is taken", "our own launch asks for no fixed port",
        f"{FAULTS}::test_f1_our_own_launch_never_asks_for_a_fixed_port",
    ),
    Fault(
        "F2", "a lock file is left, its process id used again", "no obstacle: the lock counts",
        f"{FAULTS}::test_f2_a_lock_file_without_its_lock_is_no_obstacle",
    ),
    Fault(
        "F3", "two launches into one directory", "one trains, the other is refused",
        f"{FAULTS}::test_f3_of_two_launches_into_one_directory_one_is_refused",
    ),
    Fault(
        "F4", "ranks that never come", "listed after launch.start_s",
        f"{FAULTS}::test_f4_missing_ranks_are_listed",
    ),
    Fault(
        "F5", "an address that does not resolve", "named at once",
        f"{FAULTS}::test_f5_an_address_that_does_not_resolve",
    ),
    Fault(
        "F6", "a job that cannot be imported", "one message however many ranks",
        f"{FAULTS}::test_f6_a_broken_file_is_one_message_however_many_ranks",
    ),
    Fault(
        "F7", "junk in RANK, WORLD_SIZE, OMP_NUM_THREADS, SLURM_PROCID", "refused by name",
        f"{FAULTS}::test_f7_junk_in_the_environment_is_refused",
    ),
    Fault(
        "F8", "nccl or cuda asked for where there is none", "refused, not replaced",
        f"{FAULTS}::test_f8_what_is_not_here_is_refused_not_replaced",
    ),
    # Ranks that die
    Fault(
        "F9", "SIGKILL of rank 1", "all start again, no step lost or taken twice",
        f"{RESTART}::test_a_death_costs_no_step[f9_sigkill_of_rank_1]",
    ),
    Fault(
        "F10", "SIGKILL of rank 0", "all start again, no step lost or taken twice",
        f"{RESTART}::test_a_death_costs_no_step[f10_sigkill_of_rank_0]",
    ),
    Fault(
        "F9, F10", "SIGKILL of a rank under torchrun and mpirun", "all start again",
        f"{MEMBERS}::test_f9_f10_a_killed_rank_starts_again",
    ),
    Fault(
        "F11", "a segmentation fault", "its stack is in the log of its rank",
        f"{RESTART}::test_f11_the_stack_of_a_segfault_is_in_the_log",
    ),
    Fault(
        "F12", "an exception in one rank", "its rank and line come first, echoes are folded",
        f"{FAULTS}::test_f12_the_users_error_comes_first_and_the_echo_is_folded",
    ),
    Fault(
        "F13", "a rank leaves early with 0", "a failure, said so",
        f"{FAULTS}::test_f13_leaving_early_with_zero_is_a_failure",
    ),
    Fault(
        "F14", "an allocation that fails", "out of resources, with what to change",
        f"{FAULTS}::test_f14_an_allocation_that_fails_is_out_of_resources",
    ),
    Fault(
        "F15", "SIGKILL of the supervisor", "ranks and what they started are gone in a second",
        f"{FAULTS}::test_f15_ranks_die_with_a_killed_supervisor_within_a_second",
    ),
    Fault(
        "F15", "SIGKILL of torchrun", "ranks are gone",
        f"{FAULTS}::test_f15_ranks_die_with_a_killed_torchrun",
    ),
    Fault(
        "F16", "the same failure twice", "no third attempt; the evidence is kept",
        f"{RESTART}::test_f16_two_identical_failures_end_the_run",
    ),
    Fault(
        "F17", "a crash while ranks start again", "bounded",
        f"{RESTART}::test_f17_a_crash_while_ranks_start_again_is_bounded",
    ),
    Fault(
        "F17", "a hang while ranks start again", "ended by launch.start_s",
        f"{RESTART}::test_f17_a_hang_while_ranks_start_again_is_bounded",
    ),
    # Ranks that hang
    Fault(
        "F18", "SIGSTOP of a rank", "named as stopped, and killed",
        f"{FAULTS}::test_f18_a_stopped_rank_is_named_and_killed",
    ),
    Fault(
        "F18", "SIGSTOP of a rank, restarts allowed", "killed, and all start again",
        f"{RESTART}::test_f18_a_stopped_rank_is_killed_and_all_start_again",
    ),
    Fault(
        "F19", "a rank sleeps in its loss", "named with its line; stacks of all ranks are kept",
        f"{FAULTS}::test_f19_a_sleeping_rank_is_named_with_its_line",
    ),
    Fault(
        "F20", "a rank holds the interpreter in C code", "named with its line",
        f"{FAULTS}::test_a_rank_stuck_in_c_code_answers_too",
    ),
    Fault(
        "", "a pipeline's rank dies, raises or hangs", "named with stage and microbatch",
        "tests/cli/test_pipeline_faults.py::"
        "test_a_rank_that_fails_is_named_with_its_stage_and_microbatch",
    ),
    # Ranks that differ
    Fault(
        "F21", "one rank leaves a collective out", "named with the step, while it runs",
        f"{DRILL}::test_f21_a_collective_that_is_left_out_is_named_with_rank_and_step",
    ),
    Fault(
        "F22", "shapes that differ in a collective", "named with the line of the job",
        f"{DRILL}::test_f22_shapes_that_differ_are_named_with_the_users_line",
    ),
    Fault(
        "F23", "a stream that ends earlier on one rank", "all ranks end after the same step",
        "tests/ranks/test_batches.py::test_unequal_ends_are_agreed_by_all_ranks",
    ),
    Fault(
        "F23", "unequal shares of a step", "told as what holds the others up, with what to do",
        f"{DRILL}::test_f23_unequal_shares_of_a_step_are_told",
    ),
    Fault(
        "F24", "one rank is slow in backward", "named with the part within 20 steps of 50 ms",
        f"{DRILL}::test_f24_a_slow_rank_is_named_while_it_runs_and_in_the_report",
    ),
    Fault(
        "F25", "one rank stalls in every eighth step", "spikes, and no straggler",
        f"{DRILL}::test_f25_a_stall_now_and_then_is_a_spike_and_no_straggler",
    ),
    Fault(
        "F26", "the terminal's pipe is full, and nobody reads", "the run ends as if it were not",
        f"{DRILL}::test_f26_a_terminal_that_takes_no_more_holds_no_rank_up",
    ),
    Fault(
        "F26", "writes of tables and logs are slow", "no step waits for them; all are there",
        f"{DRILL}::test_f26_a_slow_disk_holds_no_step_up",
    ),
    # Asked to stop
    Fault(
        "F27", "SIGTERM, SIGUSR2 or Ctrl-C in a step", "a checkpoint; resumes without a step lost",
        f"{STOP}::test_f27_a_signal_during_a_step",
    ),
    Fault(
        "F28", "SIGTERM in evaluation, warm-up, step 1, a save", "the same",
        f"{STOP}::test_f28_wherever_it_is",
    ),
    Fault(
        "F28", "SIGTERM while data is prepared", "ends in order, nothing trained",
        f"{STOP}::test_f28_while_data_is_prepared",
    ),
    Fault(
        "F29", "stop signals to the loaders", "loaders ignore them, the save is written",
        f"{STOP}::test_f29_loaders_ignore_the_signals_that_stop_a_run",
    ),
    Fault(
        "F30", "a second signal during the save", "nothing is corrupted",
        f"{STOP}::test_f30_a_second_signal_corrupts_nothing",
    ),
    Fault(
        "F31", "SIGKILL at five places of a save", "the checkpoint before it is used",
        f"{STOP}::test_f31_sigkill_in_the_middle_of_a_save",
    ),
    Fault(
        "F32", "one rank alone gets SIGUSR2", "all stop at the same step",
        f"{STOP}::test_f32_one_rank_alone_is_asked",
    ),
    # Checkpoints and disks
    Fault(
        "F33, F34", "a full disk in a save, at once or in the background",
        "what was good stays; the next save is not tried",
        f"{DISK}::test_f33_f34_a_full_disk_ends_the_run_and_spares_what_was_good",
    ),
    Fault(
        "F33", "the same with checkpoint.on_error=continue", "trains on and says so",
        f"{DISK}::test_f33_on_request_the_run_trains_on_and_says_so",
    ),
    Fault("F35", "a truncated file", "named; the checkpoint before it is used",
          f"{DAMAGED}[f35_truncated]"),
    Fault("F36", "one bit flipped in weights", "named; the checkpoint before it is used",
          f"{DAMAGED}[f36_bit_in_weights]"),
    Fault("F37", "no manifest", "incomplete; the checkpoint before it is used",
          f"{DAMAGED}[f37_no_manifest]"),
    Fault("F37", "an edited manifest", "named; the checkpoint before it is used",
          f"{DAMAGED}[f37_edited_manifest]"),
    Fault(
        "F38", "other ranks or another strategy on resume", "the same samples and losses",
        f"{DISK}::test_f38_the_same_samples_and_losses_on_other_ranks_and_strategies",
    ),
    Fault(
        "F39", "another learning rate on resume", "shown, and asked for --allow-change",
        f"{DISK}::test_f39_what_changes_the_training_must_be_allowed",
    ),
    Fault(
        "F39", "another model on resume", "refused with both shapes",
        f"{DISK}::test_f39_another_model_is_refused_whatever_is_allowed",
    ),
    Fault(
        "F40", "checkpoint.dir is a file or a link", "found before ranks start",
        f"{DISK}::test_f40_a_place_that_cannot_be_written_is_found_before_ranks_start",
    ),
    Fault(
        "F40", "checkpoint.dir vanishes under the run", "said; a resume refuses to begin anew",
        f"{DISK}::test_f40_a_folder_that_vanishes_under_the_run",
    ),
    # Data and numbers
    Fault(
        "F41", "SIGKILL of a loader", "named with the samples it owed",
        f"{RESTART}::test_f41_a_dead_loader_is_named_with_its_samples",
    ),
    Fault(
        "F42", "a loader hangs", "named with the samples it owed after data.timeout_s",
        f"{RESTART}::test_f42_a_hanging_loader_is_named_with_its_samples",
    ),
    Fault(
        "F43", "audio that is corrupt, cut off, empty, silent, NaN, too long, of an absurd rate",
        "listed with its reason, the rest is prepared; beyond --max-rejects no manifest",
        f"{SPEECH}::test_f43_bad_audio_is_listed_and_beyond_the_quota_it_is_exit_4",
    ),
    Fault(
        "F43", "rows of a manifest that are damaged or lead out of their folder",
        "all are named at once with their lines",
        "tests/unit/test_speech_data.py::test_f43_every_bad_row_is_named_at_once_with_its_line",
    ),
    Fault(
        "F44", "SIGKILL of a preparation of audio at half way, and a torn file",
        "it resumes to the same bytes; no manifest lists what is not verified",
        f"{SPEECH}::test_f44_killed_at_half_way_it_resumes_to_the_same_bytes",
    ),
    Fault(
        "F45", "a NaN on one rank", "all ranks veto the step; no checkpoint holds a NaN",
        f"{DISK}::test_f45_no_checkpoint_holds_a_nan",
    ),
    # Files and names that lie
    Fault(
        "F46a", "a pickle in the place of a checkpoint", "refused, and does not run",
        f"{DISK}::test_f46a_a_pickle_is_refused_and_does_not_run",
    ),
    Fault(
        "F46b", "YAML that would import or run code", "refused",
        "tests/unit/test_config.py::test_yaml_that_would_run_code_is_refused",
    ),
    Fault(
        "F46c", "a run's name with shell, path and HTML in it", "never a path or a command",
        f"{FAULTS}::test_f46c_a_name_is_never_a_path_or_a_command",
    ),
    Fault(
        "F46d", "archives with ../, absolute paths, links and a bomb for a corpus",
        "refused; nothing of them is written",
        f"{SPEECH}::test_f46d_an_archive_is_refused_and_nothing_of_it_is_written",
    ),
    Fault(
        "F46e", "secrets in the environment", "in no file and no output",
        f"{FAULTS}::test_f46e_secrets_stay_out_of_every_file",
    ),
    Fault(
        "F46f", "commands and options in a hostfile", "refused with their line",
        "tests/unit/test_launch.py::test_f46f_a_hostfile_holds_names_and_nothing_else",
    ),
    # Disks and files that are lost elsewhere
    Fault(
        "", "the run's disk is full, then has room again", "rows wait for it, none is missing",
        f"{FULL}::test_space_that_comes_back_is_used_and_nothing_is_missing",
    ),
    Fault(
        "", "it stays full, checkpoint.on_error=continue", "trains on; says what is not written",
        f"{FULL}::test_a_disk_that_stays_full_costs_files_and_not_the_run",
    ),
    Fault(
        "", "it stays full, and a checkpoint is due", "ends as a failed checkpoint does",
        f"{FULL}::test_a_checkpoint_that_must_be_written_ends_the_run_as_such",
    ),
    Fault(
        "", "the file system becomes read-only", "trains on; says what is not written",
        f"{FULL}::test_a_disk_that_becomes_read_only_costs_files_and_not_the_run",
    ),
    Fault(
        "", "the run directory is deleted", "said; it is not made anew",
        f"{FULL}::test_a_run_directory_that_is_gone_ends_the_run_and_stays_gone",
    ),
    Fault(
        "", "no room for a run, a report or tokens", "plain errors",
        f"{FULL}::test_no_room_to_begin_with",
    ),
    Fault(
        "", "no room in TMPDIR", "a plain error",
        f"{FULL}::test_no_room_for_temporary_files_and_for_what_is_said",
    ),
    # The machine plays tricks
    Fault(
        "", "the clock is set by five hours, both ways", "no deadline, duration or blame changes",
        f"{MORE}::test_a_clock_that_is_set_by_hours_ends_nothing",
    ),
    Fault(
        "", "SIGSTOP of one of many ranks on 2 cores", "that one is named",
        f"{MORE}::test_of_many_ranks_the_one_that_was_stopped_is_named",
    ),
    Fault(
        "", "two runs at one fixed port", "the second is refused on all its ranks",
        f"{MORE}::test_two_runs_on_one_fixed_port",
    ),
    Fault(
        "", "escape sequences in names and exceptions", "shown, never acted upon",
        f"{MORE}::test_escapes_in_names_and_exceptions_reach_no_screen_and_no_page",
    ),
    Fault(
        "", "a text cell that a spreadsheet would compute", "a quote stands before it",
        "tests/unit/test_strange_text.py::test_a_text_is_never_a_formula_and_a_number_stays_one",
    ),
    Fault(
        "", "three converts of one checkpoint at once", "one writes it, the others say so",
        "tests/cli/test_checkpoints.py::"
        "test_of_three_converts_at_once_one_wins_and_the_others_say_so",
    ),
    Fault(
        "", "SIGKILL of a loader before step 1", "named; another attempt where one is allowed",
        f"{MORE}::test_a_loader_that_is_killed_at_its_start",
    ),
    Fault(
        "", "a resume of a run that is live on another host", "refused with process and host",
        f"{MORE}::test_a_run_that_is_live_on_another_machine_is_not_resumed",
    ),
    Fault(
        "", "a killed supervisor's temporary folders", "swept by the next run, and no others",
        "tests/unit/test_leftovers.py::test_folders_of_dead_supervisors_are_swept_and_no_others",
    ),
    Fault(
        "", "a stranger on the network gives orders", "refused and reported with the address",
        "tests/schedulers/test_strangers.py::test_b2_a_stranger_on_the_network_is_not_obeyed",
    ),
]  # fmt: skip

# Of the matrix, not shown by a test yet.
OPEN: dict[str, str] = {}
