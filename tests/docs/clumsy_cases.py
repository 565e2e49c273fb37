"""The classes of mistakes and faults that the tests try, and how many cases each has.

``python -m tests.docs.clumsy_cases`` collects the tests and writes the table of docs/failures.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.docs.documents import ROOT

PAGE = ROOT / "docs" / "failures.md"
_TABLE = re.compile(r"(<!-- cases -->\n)(.*?)(<!-- /cases -->)", re.DOTALL)


@dataclass(frozen=True)
class CaseClass:
    """A class of mistakes or faults.

    Attributes:
        name: the row's title.
        end: what every case must come to; its tests fail on any other end.
        tests: files, or tests of a file as ``file::name``.
    """

    name: str
    end: str
    tests: tuple[str, ...]


CLASSES = (
    CaseClass(
        "two runs over one `--save`, holders that died, froze or woke up",
        "the second waits or is refused; no file is touched",
        (
            "tests/checkpoint/test_run_lock.py",
            "tests/checkpoint/test_two_runs.py",
            "tests/training/test_run_start.py::test_a_second_run_waits_and_then_refuses",
            "tests/training/test_run_start.py::test_a_run_that_saved_while_it_was_waited_for",
            "tests/checkpoint/test_saving.py::test_every_rank_learns_of_a_lost_lock",
            "tests/checkpoint/test_saving.py::test_a_run_that_lost_its_folder_saves_nothing_more",
        ),
    ),
    CaseClass(
        "another run's, another model's or another vocabulary's checkpoints",
        "refused by name",
        (
            "tests/training/test_run_start.py::test_anothers_checkpoints_are_refused",
            "tests/training/test_run_start.py::test_a_checkpoint_that_names_no_run",
            "tests/training/test_run_start.py::test_two_folders_of_one_run",
            "tests/checkpoint/test_damage.py::test_another_models_checkpoint",
            "tests/checkpoint/test_damage.py::test_settings_that_no_shape_shows",
            "tests/checkpoint/test_vocabulary.py::test_another_vocabulary_is_another_model",
            "tests/test_pretrain_gpt.py::test_checkpoint_of_another_shape",
            "tests/test_pretrain_gpt.py::test_another_models_checkpoint_is_refused_before_anything_starts",
        ),
    ),
    CaseClass(
        "`--load`, `--finetune`, `--ckpt-step` of what is not there",
        "refused, but for the first start of a job that resumes",
        (
            "tests/training/test_run_start.py::test_what_is_not_there",
            "tests/training/test_run_start.py::test_the_first_start_of_a_job_that_resumes",
            "tests/training/test_run_start.py::test_a_checkpoints_own_folder_is_understood",
            "tests/checkpoint/test_files.py::test_a_tracker_that_leads_nowhere",
            "tests/checkpoint/test_files.py::test_a_file_is_no_folder_of_checkpoints",
            "tests/checkpoint/test_files.py::test_an_iteration_that_is_not_there",
            "tests/checkpoint/test_files.py::test_the_format_before_is_named",
        ),
    ),
    CaseClass(
        "outputs that cannot be written: a file in the way, no permission, full or read-only disks",
        "refused before work, with path and free bytes",
        (
            "tests/config/test_folder_checks.py",
            "tests/commands/test_outputs.py",
            "tests/training/test_room.py",
            "tests/checkpoint/test_saving.py::test_a_full_disk_leaves_the_last_one",
            "tests/tools/test_preprocess_data.py::test_a_full_disk_in_the_middle_names_the_file",
            "tests/tools/test_preprocess_data.py::test_a_failed_overwrite_keeps_the_old_output",
            "tests/tools/test_convert_checkpoint.py::test_a_failure_in_the_middle_leaves_nothing",
        ),
    ),
    CaseClass(
        "settings: wrong type, empty, zero, negative, huge, not finite, other digits, unprintable",
        "one line that names the setting, or a run",
        (
            "tests/fuzz/test_settings.py",
            "tests/config/test_limits.py",
            "tests/commands/test_arguments.py",
            "tests/config/test_io.py::test_a_bad_flag_is_one_line",
            "tests/config/test_io.py::test_a_bad_file_is_named_with_key_and_value",
            "tests/config/test_io.py::test_what_is_no_file_of_text_is_named",
            "tests/commands/test_train.py::test_a_mistake_is_one_line_and_starts_nothing",
            "tests/commands/test_train.py::test_a_bad_flag_exits_with_status_2",
        ),
    ),
    CaseClass(
        "settings that contradict each other, or that a mode ignores",
        "one line with the values and the fix",
        (
            "tests/config/test_checks.py::test_what_cannot_work_is_one_line_with_its_values",
            "tests/config/test_checks.py::test_data_that_cannot_work",
            "tests/config/test_checks.py::test_a_setting_that_its_mode_does_not_read_is_refused",
            "tests/config/test_checks.py::test_a_blend_has_finite_weights",
            "tests/config/test_checks.py::test_a_split_has_finite_weights",
            "tests/config/test_io.py::test_a_flag_that_is_given_twice_counts_last_and_is_noted",
            "tests/test_pretrain_gpt.py::test_impossible_layouts",
        ),
    ),
    CaseClass(
        "text, token files and tokenizers: missing, empty, cut, garbage, of two data sets",
        "one line that names the file",
        (
            "tests/data/test_token_files.py",
            "tests/data/test_indexed.py",
            "tests/data/test_tokenizer.py::test_bad_models_are_named_with_a_fix",
            "tests/data/test_tokenizer.py::test_bad_settings_are_named_with_a_fix",
            "tests/data/test_tokenizer.py::test_garbage_in_a_hugging_face_folder_is_one_line",
            "tests/data/test_documents.py::test_a_malformed_line_is_named_or_skipped",
            "tests/data/test_documents.py::test_unusable_inputs_fail_before_reading",
            "tests/data/test_datasets.py::test_bad_blends",
            "tests/data/test_datasets.py::test_bad_settings",
            "tests/test_pretrain_gpt.py::test_bad_token_files",
            "tests/test_pretrain_gpt.py::test_files_of_two_datasets",
            "tests/tools/test_preprocess_data.py::test_a_malformed_line_stops_the_run_with_nothing_written",
            "tests/tools/test_preprocess_data.py::test_input_without_text_is_an_error",
        ),
    ),
    CaseClass(
        "Hugging Face folders: wrong types, contradictions, what is not implemented, damage",
        "one line; no output is left",
        (
            "tests/conversion/test_hugging_face.py::test_what_is_not_implemented_is_refused",
            "tests/conversion/test_hugging_face.py::test_unknown_missing_and_misshapen_tensors_are_named",
            "tests/conversion/test_hugging_face.py::test_damaged_folders_are_refused",
            "tests/conversion/test_hugging_face.py::test_values_that_do_not_fit_are_refused",
            "tests/conversion/test_hugging_face_fp8.py::test_other_quantizations_are_refused",
            "tests/tools/test_convert_checkpoint.py::test_wrong_commands",
            "tests/tools/test_convert_checkpoint.py::test_a_wrong_conversion_is_noticed",
            "tests/tools/test_convert_checkpoint.py::test_other_biases_of_attention_are_refused",
        ),
    ),
    CaseClass(
        "bytes of any file that a program reads: changed, doubled, left out, cut off",
        "one line that names the file, or a run that does not need them",
        (
            "tests/fuzz_files/test_damaged_files.py::test_many_damages",
            "tests/checkpoint/test_damage.py::test_every_damage_of_every_file_is_found",
            "tests/checkpoint/test_damage.py::test_an_older_one_is_taken_instead",
            "tests/checkpoint/test_damage.py::test_settings_that_cannot_be_read",
            "tests/checkpoint/test_saving.py::test_a_file_that_reads_back_differently_is_not_announced",
            "tests/test_pretrain_gpt.py::test_truncated_checkpoint",
        ),
    ),
    CaseClass(
        "kills while a checkpoint is written, replaced or removed",
        "the last announced checkpoint is whole",
        (
            "tests/checkpoint/test_kills.py",
            "tests/checkpoint/test_files.py::test_a_kill_while_replacing_leaves_the_old_one",
            "tests/checkpoint/test_files.py::test_what_was_cut_short_is_ignored_and_cleared",
            "tests/tools/test_preprocess_data.py::test_a_killed_worker_is_an_error_not_a_hang",
            "tests/tools/test_preprocess_data.py::test_sigterm_in_the_middle_leaves_nothing",
        ),
    ),
    CaseClass(
        "ranks that die, stop, raise, hang, diverge, or hold other bits",
        "every rank ends and names them; restarts are bounded",
        (
            "tests/watch/test_failures.py",
            "tests/watch/test_failures_end_to_end.py",
            "tests/watch/test_restarts.py",
            "tests/watch/test_restarts_end_to_end.py",
            "tests/watch/test_replica_hash.py",
            "tests/training/test_replica_check.py",
        ),
    ),
    CaseClass(
        "errors of the machine and of the program itself: memory, limits of the shell, interrupts",
        "one line, a status, and a log for the program's own",
        (
            "tests/commands/test_program.py",
            "tests/tools/test_preprocess_data.py::test_workers_are_bounded_by_cores_with_a_line",
            "tests/tools/test_preprocess_data.py::test_bad_flags_are_one_line",
        ),
    ),
)


@dataclass(frozen=True)
class Collected:
    """One test that was collected: its id, and whether it is slow."""

    node: str
    slow: bool


def collected(items: Sequence[pytest.Item]) -> list[Collected]:
    """The tests of a session, before any is left out."""
    return [Collected(item.nodeid, item.get_closest_marker("slow") is not None) for item in items]


def cases(of: CaseClass, found: Sequence[Collected]) -> tuple[int, int]:
    """(fast, slow) cases of a class. A test that loops over inputs has as many cases as inputs.

    Raises:
        LookupError: a test of the class is not among those that were found.
    """
    counts = [0, 0]
    for name in of.tests:
        mine = [one for one in found if re.split(r"\[", one.node)[0] == name or one.node.startswith(f"{name}::")]
        if not mine:
            raise LookupError(f"{name} is no test")
        for one in mine:
            counts[one.slow] += _inputs(one.node)
    return counts[0], counts[1]


def _inputs(node: str) -> int:
    """Inputs that one collected test tries."""
    from tests.fuzz import test_settings as settings
    from tests.fuzz_files import test_damaged_files as files

    loops = {
        "test_every_word_after_every_flag": len(settings.WORDS) + 3,
        "test_every_value_of_every_key": len(settings.YAML_VALUES) + len(settings.WORDS[::2]) + 3,
        "test_many_damages": files.NUM_DAMAGES,
    }
    return loops.get(node.split("::")[-1].split("[")[0], 1)


def table(found: Sequence[Collected]) -> str:
    """The table of all classes."""
    lines = ["| what is tried | how it ends | in `make test` | in `make test-slow` |", "| --- | --- | --- | --- |"]
    total = [0, 0]
    for one in CLASSES:
        counts = cases(one, found)
        total = [before + now for before, now in zip(total, counts, strict=True)]
        lines.append(f"| {one.name} | {one.end} | {counts[0]:,} | {counts[1]:,} |")
    lines.append(f"| all | | {total[0]:,} | {total[1]:,} |")
    return "\n".join(lines) + "\n"


def documented() -> dict[str, tuple[int, int]]:
    """(fast, slow) cases by class, as the page says."""
    found = _TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None, f"{PAGE} has no table of cases"
    rows = [line.strip("|").split("|") for line in found[2].splitlines()[2:]]
    numbers = {row[0].strip(): [int(cell.replace(",", "")) for cell in row[2:4]] for row in rows}
    return {name: (fast, slow) for name, (fast, slow) in numbers.items()}


class _Collector:
    """A plugin of pytest that keeps what is collected."""

    found: list[Collected]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.found = collected(items)


def _write() -> None:
    files = sorted({name.split("::")[0] for one in CLASSES for name in one.tests})
    collector = _Collector()
    options = ["--collect-only", "-qq", "-m", "", *files]
    assert pytest.main(options, plugins=[collector]) == 0
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLE.sub(lambda match: match[1] + table(collector.found) + match[3], text), encoding="utf-8")


if __name__ == "__main__":
    _write()
