"""The faults that scripts/mutants plants, part by part, each with the test that must see it."""

from typing import NamedTuple


class Fault(NamedTuple):
    """`old`, which the file has once, becomes `new`; `test` is the beginning of node ids."""

    name: str
    file: str
    old: str
    new: str
    test: str


# Tests that several faults share
PARITY = "tests/ranks/test_parity.py::test_two_ranks_equal_one"
EXCHANGES = "tests/ranks/test_audit.py::test_a_step_exchanges_as_often_as_it_must"
NAN = "tests/ranks/test_nan.py"
METRICS = "tests/ranks/test_metrics.py"
PLAIN_LOOP = "tests/ranks/test_verify.py::test_the_reference_is_what_a_plain_loop_computes"
PROVEN = "tests/ranks/test_verify.py::test_the_record_is_kept"
TIED = "tests/ranks/test_pipeline.py::test_tied_weights_are_summed_wherever_they_are_read"
DEATH = "tests/cli/test_keep_restart.py::test_a_death_costs_no_step[f12_exception]"
FOLDER = "tests/unit/test_checkpoint_folder.py"
ON_DISK = "tests/unit/test_checkpoint_saver.py::test_all_is_on_disk_before_the_folder_has_its_name"
RESTARTS = "tests/ranks/test_restarts.py"

# fmt: off
FAULTS = (
    # What a step computes
    Fault(
        "scale-without-dp-degree", "paceline/train/feed.py",
        "self.plan.batch.dp / units,", "1 / units,", PARITY,
    ),
    Fault(
        "units-of-one-rank-only", "paceline/train/feed.py",
        "        dist.all_reduce(units)\n", "", PROVEN,
    ),
    Fault(
        "bad-loss-keeps-a-finite-gradient", "paceline/strategies/base.py",
        "return loss_sum * (scale + (value - value))", "return loss_sum * scale",
        f"{NAN}::test_one_rank_stops_both_and_nothing_is_applied[inf]",
    ),
    Fault(
        "bad-step-is-applied", "paceline/strategies/engine.py",
        "if math.isfinite(norm.item()):", "if True:",
        f"{NAN}::test_one_rank_stops_both_and_nothing_is_applied[grad]",
    ),
    Fault(
        "clip-scales-up-too", "paceline/strategies/engine.py",
        "excess = ((norm + TINY) / self.clip).clamp(min=1.0)",
        "excess = (norm + TINY) / self.clip", PLAIN_LOOP,
    ),
    Fault(
        "warm-up-begins-at-zero", "paceline/strategies/optim.py",
        "return optim.lr * step / schedule.warmup_steps",
        "return optim.lr * (step - 1) / schedule.warmup_steps", "tests/unit/test_optim.py",
    ),
    Fault(
        "norms-and-biases-decay", "paceline/strategies/optimizers.py",
        "decay = 0.0 if is_vector else optim.weight_decay", "decay = optim.weight_decay",
        "tests/unit/test_optim.py",
    ),
    Fault(
        "fp16-loss-is-not-scaled", "paceline/strategies/engine.py",
        "return scale if self.scaler is None else scale * self.scaler.value", "return scale",
        "tests/ranks/test_fp16.py::test_fp16_learns_what_fp32_learns",
    ),
    Fault(
        "generators-are-restored-in-part", "paceline/data/rng.py",
        '    torch.set_rng_state(states["torch_cpu"])\n', "", DEATH,
    ),
    # Strategies
    Fault(
        "last-microbatch-is-not-exchanged", "paceline/strategies/engine.py",
        "if number < len(batches) else nullcontext()",
        "if number <= len(batches) else nullcontext()", PARITY,
    ),
    Fault(
        "every-microbatch-is-exchanged", "paceline/strategies/ddp_engine.py",
        "self.num_exchanged = per_step if static else 0",
        "self.num_exchanged = 10**9", EXCHANGES,
    ),
    Fault(
        "hook-sums-and-does-not-divide", "paceline/strategies/ddp_engine.py",
        "small = (gradients / dist.get_world_size()).to(dtype)", "small = gradients.to(dtype)",
        "tests/ranks/test_hooks.py::test_a_hook_sends_less_and_learns_the_same[bf16]",
    ),
    Fault(
        "norm-of-own-shards-only", "paceline/strategies/gather.py",
        "    dist.all_reduce(square, group=shards)\n", "", PARITY,
    ),
    Fault(
        "fsdp-sums-in-the-compute-type", "paceline/strategies/fsdp.py",
        "reduce_dtype=torch.float32)", "reduce_dtype=compute)",
        "tests/ranks/test_audit.py::test_types_on_the_wire_of_a_sharded_run",
    ),
    Fault(
        "zero3-never-frees-its-blocks", "paceline/strategies/fsdp.py",
        '"reshard_after_forward": reshards,', '"reshard_after_forward": False,', EXCHANGES,
    ),
    Fault(
        "zero1-deals-to-who-has-most", "paceline/strategies/zero.py",
        "rank = loads.index(min(loads))", "rank = loads.index(max(loads))",
        "tests/unit/test_strategies.py::test_deal_is_torchs_own",
    ),
    Fault(
        "adamw-keeps-one-moment", "paceline/strategies/optimizers.py",
        '"exp_avg": (*parameter.shape,), "exp_avg_sq": (*parameter.shape,)}',
        '"exp_avg": (*parameter.shape,)}',
        "tests/unit/test_strategies.py::test_ddp_holds_16_bytes_a_parameter",
    ),
    Fault(
        "batchnorm-buffers-drift-apart", "paceline/strategies/engine.py",
        "        self.buffers.agree()\n", "",
        "tests/ranks/test_batchnorm.py::test_two_ranks_equal_one_where_statistics_are_shared",
    ),
    # Pipelines
    Fault(
        "copies-of-a-weight-are-not-summed", "paceline/strategies/pipeline/engine.py",
        "        self.line.holdings.sum_copies()\n", "", TIED,
    ),
    Fault(
        "copies-of-a-weight-count-twice", "paceline/strategies/pipeline/holdings.py",
        "if holders[name][0] == here:", "if here in holders[name]:", TIED,
    ),
    Fault(
        "pipelines-sum-and-do-not-divide", "paceline/strategies/pipeline/engine.py",
        "bucket_mb, divisor=size)", "bucket_mb)",
        "tests/ranks/test_pipeline.py::test_two_pipelines_of_two_ranks[ddp]",
    ),
    Fault(
        "dualpipe-takes-one-microbatch-for-all", "paceline/strategies/pipeline/dualpipe.py",
        "microbatches[action.microbatch]", "microbatches[0]", TIED,
    ),
    Fault(
        "dualpipe-stages-lie-the-other-way", "paceline/schedules/orders.py",
        "return down, up\n", "return up, down\n",
        "tests/unit/test_pipeline_schedules.py::test_actions_run_where_their_stage_lies",
    ),
    Fault(
        "1f1b-runs-one-forward-more-ahead", "paceline/schedules/orders.py",
        "return _alternate(rounds, warmup=num_ranks - 1 - rank)",
        "return _alternate(rounds, warmup=num_ranks - rank)", "tests/unit/test_pipeline_torch.py",
    ),
    Fault(
        "bubble-formula-off-by-one", "paceline/schedules/formulas.py",
        "idle_s = (shape.ranks - 1 + short) * each_s", "idle_s = (shape.ranks + short) * each_s",
        "tests/unit/test_pipeline_formulas.py",
    ),
    Fault(
        "simulated-link-carries-two-at-once", "paceline/schedules/simulate.py",
        "start = max(ready_at, self.link_free_at.get((rank, home), 0.0))", "start = ready_at",
        "tests/unit/test_pipeline_simulate.py",
    ),
    # Data
    Fault(
        "cursor-begins-a-sample-late", "paceline/data/cursor.py",
        "first = self.start + step", "first = 1 + self.start + step", "tests/unit/test_cursor.py",
    ),
    Fault(
        "every-rank-reads-the-first-share", "paceline/data/cursor.py",
        "(a * self.dp + self.dp_rank)", "(a * self.dp)", "tests/unit/test_cursor.py",
    ),
    Fault(
        "order-is-no-permutation", "paceline/data/cursor.py",
        "    while np.any(outside := value >= size):\n"
        "        value = np.where(outside, _feistel(value, keys, half_bits), value)\n"
        "    return value.astype(np.int64)",
        "    return (value % np.uint64(size)).astype(np.int64)", "tests/unit/test_cursor.py",
    ),
    Fault(
        "resumed-run-reads-from-the-begin", "paceline/train/worker.py",
        "place.rank, history.start_position, ", "place.rank, 0, ", DEATH,
    ),
    Fault(
        "position-of-the-step-before-is-kept", "paceline/train/history.py",
        "(step - self.start.first_step + 1) * size", "(step - self.start.first_step) * size", DEATH,
    ),
    Fault(
        "loaders-are-seeded-by-their-count", "paceline/data/loader.py",
        "seed_rng(self.picks.seed, place)", "seed_rng(self.picks.seed, index)",
        "tests/unit/test_loader.py",
    ),
    Fault(
        "targets-are-the-inputs", "paceline/data/packing.py",
        "targets_BT = tokens_BT1[:, 1:].long()", "targets_BT = tokens_BT1[:, :-1].long()",
        "tests/unit/test_lm.py::test_targets_are_shifted_once",
    ),
    Fault(
        "documents-run-into-each-other", "paceline/data/tokenizer.py",
        "tokens[-1] = BYTE_END", "tokens[-1] = 10", "tests/unit/test_text.py",
    ),
    Fault(
        "documents-see-each-other", "paceline/workloads/lm/attend.py",
        "return (is_same_BTT & is_past_TT)[:, None]",
        "return (is_same_BTT | is_past_TT)[:, None] & is_past_TT", "tests/unit/test_documents.py",
    ),
    Fault(
        "loss-crosses-the-end-of-a-document", "paceline/data/packing.py",
        'batch["positions"][:, 1:] > 0', 'batch["positions"][:, 1:] >= 0',
        "tests/unit/test_documents.py",
    ),
    Fault(
        "shards-of-another-tokenizer-pass", "paceline/data/text.py",
        "if manifest.tokenizer_sha256 != asked.sha256:", "if not manifest.tokenizer_sha256:",
        "tests/unit/test_tokenizers.py",
    ),
    Fault(
        "validation-stands-in-training-too", "paceline/data/shards.py",
        'elif given == "train" and digest[:16] in kept_apart:',
        'elif given == "test" and digest[:16] in kept_apart:', "tests/unit/test_sources.py",
    ),
    Fault(
        "validation-gets-the-share-of-training", "paceline/data/shards.py",
        'return "val" if draw < val_fraction else "train"',
        'return "train" if draw < val_fraction else "val"', "tests/unit/test_text.py",
    ),
    # Checkpoints and other files
    Fault(
        "checksum-of-a-file-is-not-compared", "paceline/checkpoint/folder.py",
        "        if found != wanted:\n", "        if not found:\n",
        f"{FOLDER}::test_any_bit_that_flips_is_seen",
    ),
    Fault(
        "checksum-of-a-tensor-is-not-compared", "paceline/checkpoint/tensors.py",
        "if digest.hexdigest() != part.xxh3:", "if not part.xxh3:",
        f"{FOLDER}::test_the_newest_sound_one_is_used_and_the_damage_told",
    ),
    Fault(
        "tensors-are-not-synced", "paceline/checkpoint/tensors.py",
        "        os.fsync(file.fileno())\n        file_sum", "        file_sum", ON_DISK,
    ),
    Fault(
        "folder-has-its-name-before-its-manifest", "paceline/checkpoint/folder.py",
        "        os.rename(temporary, final)\n        sync_directory(self.root)\n",
        "        (temporary / MANIFEST).unlink()\n        os.rename(temporary, final)\n"
        "        seal(manifest).save(final / MANIFEST)\n        sync_directory(self.root)\n",
        ON_DISK,
    ),
    Fault(
        "the-newest-are-pruned", "paceline/checkpoint/folder.py",
        "for step in (s for s in self.folder.steps() if s <= newest):",
        "for step in sorted(s for s in self.folder.steps() if s <= newest):",
        f"{FOLDER}::test_old_ones_go_and_the_best_stays",
    ),
    Fault(
        "seal-is-not-looked-at", "paceline/checkpoint/folder.py",
        "if manifest.seal != _sum(manifest) or manifest.step != step:",
        "if manifest.step != step:", f"{FOLDER}::test_an_edited_manifest_is_refused",
    ),
    Fault(
        "damage-that-another-rank-found-is-ignored", "paceline/checkpoint/restore.py",
        "if _all_agree(not problems, device):", "if not problems:", "tests/ranks/test_restore.py",
    ),
    Fault(
        "other-shapes-are-loaded", "paceline/checkpoint/pieces.py",
        "        if kept[name] != held[name]\n", "        if len(kept[name]) != len(held[name])\n",
        "tests/cli/test_keep_disk.py::test_f39_another_model_is_refused_whatever_is_allowed",
    ),
    Fault(
        "checkpoint-is-a-step-late", "paceline/train/keeper.py",
        "step % config.every == 0", "step % config.every == 1", DEATH,
    ),
    Fault(
        "file-is-written-over-in-place", "paceline/records/files.py",
        "            os.replace(temporary, path)\n",
        "            path.write_bytes(raw)\n            os.unlink(temporary)\n",
        "tests/unit/test_rundir.py",
    ),
    Fault(
        "old-result-is-not-migrated", "paceline/records/recorded.py",
        'return body | {"window": window and window | {"warmup": "fixed"}}', "return body",
        "tests/unit/test_old_runs.py::test_a_report_is_written",
    ),
    # What is recorded
    Fault(
        "loss-is-left-a-sum", "paceline/train/ledger.py",
        "row.loss, row.count = (loss_sum / count if count else math.nan), count",
        "row.loss, row.count = (loss_sum if count else math.nan), count", PLAIN_LOOP,
    ),
    Fault(
        "two-columns-change-places", "paceline/train/ledger.py",
        '"lr": row.lr,\n            "grad_norm": row.grad_norm,',
        '"lr": row.grad_norm,\n            "grad_norm": row.lr,', PLAIN_LOOP,
    ),
    Fault(
        "late-vetoes-are-lost", "paceline/train/ledger.py",
        "self._late_vetoes.append((step, math.isfinite(row.own_loss or 0.0)))", "pass",
        f"{NAN}::test_a_bad_loss_whose_gradient_is_cut_off_is_noticed",
    ),
    Fault(
        "stand-in-sample-is-counted", "paceline/train/evaluation.py",
        "        if len(ids):\n",
        "        if len(ids := ids if len(ids) else np.zeros(1, int)):\n",
        f"{METRICS}::test_three_ranks_of_which_one_runs_out",
    ),
    Fault(
        "items-come-in-the-order-of-ranks", "paceline/train/evaluation.py",
        "order = np.argsort(np.concatenate([ids for ids, _ in parts]))",
        "order = np.arange(sum(len(ids) for ids, _ in parts))",
        f"{METRICS}::test_two_ranks_find_what_one_process_finds",
    ),
    Fault(
        "patience-starts-anew-on-resume", "paceline/train/history.py",
        "self.best, self.num_worse = kept.best, kept.num_worse", "self.best = kept.best",
        f"{METRICS}::test_it_stops_when_nothing_improves_and_counts_on_after_a_resume",
    ),
    Fault(
        "nan-is-the-best", "paceline/train/keeper.py",
        "if math.isfinite(value) and (", "if (",
        "tests/unit/test_metrics.py::test_the_best_is_by_its_direction_and_never_not_a_number",
    ),
    Fault(
        "mean-loss-is-accepted", "paceline/train/first_batch.py",
        "abs(self.whole - self.parts) > FAR * self.size",
        "abs(self.whole - self.parts) < FAR * self.size",
        "tests/ranks/test_first_batch.py::test_a_mean_is_refused",
    ),
    # Ranks and their supervisor
    Fault(
        "a-beat-counts-as-progress", "paceline/launch/deadlines.py",
        "self._moved_at[rank] if beat.step else self._beaten_at[rank]", "self._beaten_at[rank]",
        "tests/unit/test_launch.py"
        "::test_a_rank_that_stands_still_is_overdue_though_its_thread_beats",
    ),
    Fault(
        "others-live-on-after-a-failure", "paceline/launch/supervisor.py",
        'return f"rank {failed[0].rank} has failed"', 'return ""',
        f"{RESTARTS}::test_all_start_again_though_the_peer_is_busy[exception]",
    ),
    Fault(
        "one-restart-too-many", "paceline/launch/attempts.py",
        "if restarts >= launch.max_restarts:", "if restarts > launch.max_restarts:",
        f"{RESTARTS}::test_restarts_are_counted",
    ),
    Fault(
        "an-echo-is-blamed", "paceline/launch/ending.py",
        "own = [v for v in errors if not _is_echo(v)]", "own = errors",
        "tests/unit/test_report.py::test_a_users_error_comes_before_its_echo",
    ),
    Fault(
        "two-outcomes-share-an-exit-code", "paceline/errors.py",
        'STALL = "stall", 6,', 'STALL = "stall", 5,', "tests/unit/test_errors.py",
    ),
    # Figures and verdicts
    Fault(
        "t-quantile-of-one-side", "paceline/stats/intervals.py",
        "reach = _student(1 - (1 - confidence) / 2, noise.freedom)",
        "reach = _student(confidence, noise.freedom)",
        "tests/unit/test_stats_verdicts.py::test_interval_of_a_rate_is_students",
    ),
    Fault(
        "window-begins-with-the-warm-up", "paceline/stats/figures.py",
        'steady = steady[count_warmup(steady.column("step_s")) :]', "steady = steady[0:]",
        "tests/unit/test_stats_figures.py",
    ),
    Fault(
        "neighbours-count-as-independent", "paceline/stats/steady.py",
        "_autocorrelation(means) > 2 / num_blocks**0.5", "_autocorrelation(means) > 2",
        "tests/unit/test_stats_steady.py",
    ),
    Fault(
        "slower-is-called-faster", "paceline/stats/standings.py",
        'return Verdict("faster" if gain > 0 else "slower")',
        'return Verdict("faster" if gain < 0 else "slower")', "tests/unit/test_stats_verdicts.py",
    ),
    Fault(
        "cells-run-in-blocks", "paceline/sweep/runner.py",
        "    for repeat in range(1, phase.repeats + 1):\n"
        "        cells = [record.cell(name) for name in phase.cells]\n"
        '        random.Random(f"{record.seed}/{phase.name}/{repeat}").shuffle(cells)\n'
        "        yield from (Turn(phase.name, cell, repeat) for cell in cells)",
        "    for name in phase.cells:\n        for repeat in range(1, phase.repeats + 1):\n"
        "            yield Turn(phase.name, record.cell(name), repeat)",
        "tests/unit/test_sweep_asked.py::test_repeats_are_interleaved_and_shuffled_by_the_seed",
    ),
    Fault(
        "samples-of-one-microbatch-are-compared", "paceline/bench/equal.py",
        'batch.global_size, "ranks"', 'batch.grad_accum, "ranks"',
        "tests/unit/test_bench_targets.py::test_unequal_work_is_seen",
    ),
    Fault(
        "proof-tolerates-a-thousandth", "paceline/verify/judge.py",
        "TOLERANCE = 1e-5", "TOLERANCE = 1e-3",
        "tests/ranks/test_verify.py::test_each_check_can_fail[loss]",
    ),
    Fault(
        "broken-engine-is-not-broken", "paceline/verify/trial.py",
        "WRONG_SCALE if name == BROKEN else 1.0", "1.0", PROVEN,
    ),
    Fault(
        "one-process-takes-the-samples-of-one-rank", "paceline/verify/subject.py",
        "batch.grad_accum * batch.dp)", "batch.grad_accum)",
        "tests/ranks/test_verify_job.py::test_batches_by_length_are_the_same_on_ranks",
    ),
    Fault(
        "dropout-is-drawn-by-each-rank", "paceline/verify/trial.py",
        "            seed_rng(content_sum(batch))\n", "",
        "tests/ranks/test_verify_job.py::test_each_check_can_fail",
    ),
    Fault(
        "a-nan-is-passed-over", "paceline/verify/judge.py",
        "    if not math.isfinite(apart) or not math.isfinite(whole):\n",
        "    if math.isinf(apart):\n",
        "tests/ranks/test_verify_job.py::test_each_check_can_fail[norm]",
    ),
    Fault(
        "a-loss-in-chunks-forgets-its-last-ones", "paceline/kernels/cross_entropy.py",
        "range(0, len(x_ND), chunk)", "range(0, len(x_ND) - chunk + 1, chunk)",
        "tests/unit/test_causal_lm.py::test_a_loss_in_chunks_is_the_same",
    ),
    Fault(
        "fp16-is-held-against-the-fp32-peak", "paceline/machine/datasheets.py",
        '"fp16": self.fp16,', '"fp16": self.fp32,', "tests/unit/test_datasheets.py",
    ),
    Fault(
        "all-to-all-has-a-wrong-answer", "paceline/check/answers.py",
        "place_at_sender = index % case.chunk + case.rank * case.chunk",
        "place_at_sender = index % case.chunk", "tests/unit/test_answers.py",
    ),
    Fault(
        "wrong-collectives-pass", "paceline/check/collectives.py",
        "wrong = result != expected  #", "wrong = result.isnan()  #",
        "tests/ranks/test_collectives.py::test_a_wrong_answer_names_its_rank",
    ),
    Fault(
        "report-does-not-escape", "paceline/report/html.py",
        "autoescape=True", "autoescape=False", "tests/unit/test_report.py::test_names_are_escaped",
    ),
    # Weights gathered in fp8
    Fault(
        "gathered-in-fp8-unmarked", "paceline/strategies/fp8.py",
        "layer.is_gathered = plan.fp8.gathers_fp8", "layer.is_gathered = False",
        "tests/ranks/test_fp8.py::test_layers_know_whether_their_weights_are_gathered_and_freed",
    ),
    Fault(
        "uneven-rows-gathered-in-fp8", "paceline/plan/fp8.py",
        "if layer.shape[0] % ranks", "if False",
        "tests/unit/test_gpu_plan.py::test_weights_that_cannot_travel_in_fp8_do_not",
    ),
    Fault(
        "weight-turned-in-forward", "paceline/kernels/fp8.py",
        "turn(weight_FD._data, g)", "turn(weight_FD._data, weight_FD._data)",
        "tests/unit/test_kernels.py::test_a_weight_gathered_in_fp8_has_torchaos_numbers",
    ),
)
# fmt: on
