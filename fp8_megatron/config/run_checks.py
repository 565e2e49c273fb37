"""Checks of a run's data, checkpoints and profile; `checks` calls them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

from .schema import Config, DataConfig
from .words import decimal, flag_name, shortened


def run_problems(config: Config) -> Iterator[str]:
    """One line for each problem: what cannot work, the values, the fix."""
    yield from _check_data(config)
    yield from _check_checkpoint(config)
    yield from _check_files(config)


def _check_data(config: Config) -> Iterator[str]:
    data, model = config.data, config.model
    sources = [
        name for name, given in (("data_path", data.data_path), ("train_data_path", data.train_data_path)) if given
    ]
    sources += ["mock_data"] if data.mock_data else []
    if len(sources) != 1:
        yield (
            f"exactly one of data_path, train_data_path and mock_data says where tokens come from, but "
            f"{f'{len(sources)} are given: ' + ' and '.join(sources) if sources else 'none is given'}; give one"
        )
    if not data.train_data_path and (data.valid_data_path or data.test_data_path):
        yield (
            f"valid_data_path({' '.join(data.valid_data_path)}) and test_data_path({' '.join(data.test_data_path)}) "
            f"go with train_data_path; give it instead of data_path, which split cuts"
        )
    yield from _check_blends(data)
    yield from _check_evaluation_data(config)
    yield from _check_validation_sets(config)
    yield from _check_conversations(data)
    yield from _check_fim(data)
    if data.tokenizer_kind == "NullTokenizer" or data.has_no_tokenizer:
        if model.vocab_size is None:
            reason = "mock_data" if data.mock_data else "tokenizer_type(NullTokenizer)"
            or_else = " or a tokenizer's files" if data.mock_data else ""
            yield f"{reason} needs vocab_size; give --vocab-size, e.g. 50304{or_else}"
    elif data.tokenizer_kind == "GPT2BPETokenizer":
        for name in ("vocab_file", "merge_file"):
            if getattr(data, name) is None:
                yield f"tokenizer_type(GPT2BPETokenizer) needs {name}; give {flag_name(name)}"
    elif data.tokenizer_model is None:
        yield f"tokenizer_type({data.tokenizer_kind}) needs tokenizer_model; give --tokenizer-model"


def _check_fim(data: DataConfig) -> Iterator[str]:
    if not data.fim_data:
        return
    if data.tokenizer_kind == "NullTokenizer":
        yield "fim_data cuts text, and tokenizer_type(NullTokenizer) has none; choose another --tokenizer-type"
    if data.fim_split_sample is not None and data.fim_fragment_rate is None:
        yield f"fim_split_sample({data.fim_split_sample}) needs fim_fragment_rate; give --fim-fragment-rate 0.5"


def _check_conversations(data: DataConfig) -> Iterator[str]:
    if not data.sft:
        return
    if data.mock_data:
        yield "sft reads conversations, and mock_data are random tokens; give --data-path, or drop one of them"
    elif data.tokenizer_kind != "HuggingFaceTokenizer":
        yield (
            f"sft writes conversations by the chat template of a Hugging Face tokenizer, not "
            f"tokenizer_type({data.tokenizer_kind}); give --tokenizer-type HuggingFaceTokenizer and its folder"
        )
    if data.sft_chat_template is not None and data.sft_tokenizer_prompt_format != "default":
        yield (
            f"sft_chat_template({data.sft_chat_template}) and "
            f"sft_tokenizer_prompt_format({data.sft_tokenizer_prompt_format}) both say how to write a conversation; "
            f"drop one"
        )


def _check_validation_sets(config: Config) -> Iterator[str]:
    training, paths = config.training, config.data.valid_data_path
    names = " ".join(training.validation_set_names)
    if training.full_validation and config.data.mock_data:
        yield "full_validation reads a validation split once, but random tokens have no end; drop it or mock_data"
    if training.full_validation and _weights(paths[:1]) and len(paths) > 1:
        yield (
            f"valid_data_path({shortened(' '.join(paths))}) has weights, but full_validation reads each file once; "
            f"give prefixes alone"
        )
    if training.multiple_validation_sets and not (training.full_validation and paths):
        missing = "valid_data_path" if training.full_validation else "full_validation"
        yield f"multiple_validation_sets needs {missing}; give {flag_name(missing)}"
    if names and not training.multiple_validation_sets:
        yield f"validation_set_names({names}) have no effect without multiple_validation_sets; give both"
    elif names and len(training.validation_set_names) != len(paths):
        yield (
            f"validation_set_names({names}) names {len(training.validation_set_names)}, but valid_data_path has "
            f"{len(paths)} files; give one name for each"
        )
    elif repeated := [name for name in training.validation_set_names if training.validation_set_names.count(name) > 1]:
        yield f"validation_set_names({names}) has {repeated[0]} twice; give each file a name of its own"


def _check_evaluation_data(config: Config) -> Iterator[str]:
    data, training = config.data, config.training
    cause, or_else = f"eval_interval({training.eval_interval})", "or --eval-interval 0"
    if training.skip_train:
        cause, or_else = "skip_train", ""
        if training.eval_iters == 0 and not training.full_validation:
            yield "skip_train with eval_iters(0) evaluates nothing; give --eval-iters or --full-validation"
        if config.checkpoint.load is None and config.checkpoint.pretrained_checkpoint is None:
            yield "skip_train evaluates a checkpoint; give --load"
    if data.train_data_path:
        if data.split != DataConfig().split:
            yield f"split({data.split}) cuts data_path, but train_data_path is given; drop split"
        if training.reads_validation_data and not data.valid_data_path:
            yield f"{cause} with train_data_path needs valid_data_path; give it {or_else}".rstrip()
        return
    weights = _weights(data.split.split(","))
    if len(weights) != 3 or min(weights) < 0 or weights[0] == 0 or not math.isfinite(sum(weights)):
        yield f"split({data.split}) is not three weights train,validation,test; write for example 969,31,0"
    elif data.data_path and training.reads_validation_data and weights[1] == 0:
        when = cause if training.skip_train else f"every {cause} steps"
        yield f"split({data.split}) leaves nothing to validate on {when}; raise its second weight, {or_else}".rstrip(
            ", "
        )


def _weights(words: Sequence[str]) -> list[float]:
    """The numbers that `words` write; empty if one is none."""
    try:
        return [decimal(word.strip()) for word in words]
    except ValueError:
        return []


def _check_blends(data: DataConfig) -> Iterator[str]:
    """Check the weights of blends, weight prefix weight prefix …, where the first word is a number."""
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        words = getattr(data, name)
        if len(words) == 1 and _weights(words[0].split()[:1]) and len(words[0].split()) > 1:
            yield f"{name}({shortened(words[0])}) is one word with spaces; drop the quotes around the blend"
        if len(words) < 2 or not _weights(words[:1]):
            continue
        weights = _weights(words[::2])
        if len(words) % 2 or not weights or min(weights) <= 0 or not sum(weights) < math.inf:
            yield (
                f"{name}({shortened(' '.join(words))}) is not a blend; give weight prefix weight prefix …, with finite "
                f"weights above 0"
            )


def _check_checkpoint(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.save is not None and checkpoint.save_retain_interval is not None and checkpoint.save_interval is None:
        yield (
            f"save_retain_interval({checkpoint.save_retain_interval}) chooses among the checkpoints of save_interval, "
            f"which is not given; give --save-interval"
        )
    yield from _check_non_persistent(config)
    if config.training.rollback_on_loss_spike and not checkpoint.save_optim:
        yield "rollback_on_loss_spike needs the whole state of a checkpoint; drop --no-save-optim"
    if config.training.rollback_on_loss_spike and (checkpoint.save is None or not checkpoint.saves_by_interval):
        missing = "save" if checkpoint.save is None else "save-interval"
        yield f"rollback_on_loss_spike needs checkpoints to go back to; give --{missing}"
    if config.training.rollback_on_loss_spike and config.training.loss_spike_threshold == 0:
        yield "rollback_on_loss_spike has no effect with loss_spike_threshold(0); give one above 0"
    if checkpoint.load is None:
        if checkpoint.finetune and checkpoint.pretrained_checkpoint is not None:
            yield (
                f"finetune takes weights from load, which is not given; drop it: from pretrained_checkpoint("
                f"{checkpoint.pretrained_checkpoint}) the run takes the weights alone"
            )
        elif checkpoint.finetune:
            yield "finetune takes weights from load, which is not given; give --load"
        if checkpoint.moe_use_upcycling and checkpoint.pretrained_checkpoint is None:
            yield "moe_use_upcycling takes weights from a checkpoint; give --load, or --pretrained-checkpoint"
        if checkpoint.use_checkpoint_args:
            yield "use_checkpoint_args takes settings from load, which is not given; give --load"
        if checkpoint.exit_on_missing_checkpoint:
            yield "exit_on_missing_checkpoint is about the folder of load, which is not given; give --load"
        if checkpoint.ckpt_step is not None:
            yield f"ckpt_step({checkpoint.ckpt_step}) names a checkpoint of load, which is not given; give --load"


def _check_non_persistent(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    interval = checkpoint.non_persistent_save_interval
    if interval is None or checkpoint.save is None:
        return
    for name in ("keep_last", "save_retain_interval"):
        value = getattr(checkpoint, name)
        if value is not None:
            yield (
                f"{name}({value}) and non_persistent_save_interval({interval}) both say which checkpoints are kept; "
                f"drop one"
            )


def _check_files(config: Config) -> Iterator[str]:
    path = config.parallel.nccl_communicator_config_path
    if path is not None and not os.path.isfile(path):
        yield f"nccl_communicator_config_path({path}) is not a file; give a YAML such as {{dp_cp: {{max_ctas: 8}}}}"


def profile_problems(config: Config, train_iters: int, world_size: int) -> Iterator[str]:
    """One line for each problem of the profiled steps and ranks of a run of `train_iters` steps."""
    profile = config.profile
    if not profile.profile:
        return
    start, end = profile.profile_step_start, profile.profile_step_end
    if not 1 <= start < end <= train_iters + 1:
        yield (
            f"profile_step_start({start}) and profile_step_end({end}) are not a range of steps within "
            f"train_iters({train_iters}); steps count from 1 and the end is not profiled itself"
        )
    elif profile.first_and_last(config.training.left_out) is None:
        yield (
            f"profile_step_start({start}) and profile_step_end({end}): iterations_to_skip leaves out all of these "
            f"steps; profile others"
        )
    bad = [rank for rank in profile.profile_ranks if not (rank.isdecimal() and rank.isascii() and len(rank) < 10)]
    if bad:
        yield f"profile_ranks({' '.join(bad)}) are not ranks; give numbers, e.g. --profile-ranks 0 1"
    elif all(int(rank) >= world_size for rank in profile.profile_ranks):
        yield (
            f"profile_ranks({' '.join(profile.profile_ranks)}): WORLD_SIZE({world_size}) has none of these ranks; give "
            f"ranks below {world_size}"
        )
