"""Where a run starts: what it loads, whose checkpoints it continues, and which folders it refuses."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fp8_megatron.checkpoint import run_lock
from fp8_megatron.checkpoint.files import META, CheckpointError, RunLockError
from fp8_megatron.checkpoint.run_lock import LOCK, RunIdentity, RunLock, own_restart, saved_by
from fp8_megatron.config.io import config_text
from fp8_megatron.config.schema import CheckpointConfig
from fp8_megatron.device.processes import launch_id
from fp8_megatron.training import run_start
from fp8_megatron.training.run_start import RunStart, check_what_is_loaded, starting_run
from tests.harness.run_starts import A_RUN, OneRank, add_checkpoint
from tests.harness.tiny_gpt import GPT3_STYLE as MODEL
from tests.harness.tiny_gpt import tiny_config

ANOTHER = "b" * 16


def start(**settings: object) -> RunStart:
    """Start and end a run with these settings of `CheckpointConfig`."""
    values = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    with starting_run(CheckpointConfig(**values), OneRank()) as started:  # type: ignore[arg-type]
        assert (started.lock is None) == ("save" not in settings)
        return started


def test_a_run_from_scratch_draws_its_name(tmp_path: Path) -> None:
    first, second = start(save=tmp_path / "new"), start()
    assert first.source is None and not first.continues_save
    assert len({first.identity.run, second.identity.run, first.identity.token, second.identity.token}) == 4
    assert list((tmp_path / "new").iterdir()) == []


def test_a_resumed_run_keeps_its_name(tmp_path: Path) -> None:
    add_checkpoint(tmp_path, 20)
    for settings in ({}, {"save": tmp_path}, {"save": tmp_path / "other"}):
        resumed = start(load=tmp_path, **settings)
        assert resumed.identity.run == A_RUN and resumed.source is not None
        assert resumed.continues_save == (settings.get("save") == tmp_path)
    add_checkpoint(tmp_path / "old", 20, run=None)
    assert start(load=tmp_path / "old").identity.run != A_RUN
    assert start(load=tmp_path, finetune=True).identity.run != A_RUN


@pytest.mark.parametrize(
    "settings",
    [{}, {"finetune": True}, {"moe_use_upcycling": True}, {"load": "elsewhere"}],
    ids=["scratch", "finetune", "upcycling", "load"],
)
@pytest.mark.parametrize("whose", [A_RUN, None], ids=["named", "of an earlier version"])
def test_anothers_checkpoints_are_refused(tmp_path: Path, settings: dict, whose: str | None) -> None:
    add_checkpoint(tmp_path / "save", 10, run=whose)
    add_checkpoint(tmp_path / "save", 20, run=whose)
    add_checkpoint(tmp_path / "elsewhere", 20, run=ANOTHER)
    save = tmp_path / "save"
    given = {"save": save, **settings}
    if settings:
        given["load"] = tmp_path / settings.get("load", "save")
    with pytest.raises(CheckpointError) as error:
        start(**given)
    fix = f"give --load {save} to go on with it, another --save"
    for name in settings.keys() - {"load"}:
        fix = f"drop --{name.replace('_', '-')} to go on with it, give another --save"
    assert str(error.value) == (
        f"save({save}) holds checkpoints of another run (newest: iter_0000020 of run {whose or 'unknown'}); "
        f"{fix}, or --allow-foreign-checkpoints to save among them"
    )
    assert not (save / LOCK).exists()
    assert start(**given, allow_foreign_checkpoints=True).identity.run != A_RUN


def test_two_folders_of_one_run(tmp_path: Path) -> None:
    """Resumed from A into B, stopped, and resumed from A again."""
    add_checkpoint(tmp_path / "a", 10)
    add_checkpoint(tmp_path / "b", 20)
    assert start(load=tmp_path / "a", save=tmp_path / "b").identity.run == A_RUN
    add_checkpoint(tmp_path / "b", 30, run=ANOTHER)
    with pytest.raises(CheckpointError, match=f"iter_0000030 of run {ANOTHER}"):
        start(load=tmp_path / "a", save=tmp_path / "b")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"load": "missing"},
            r"load\(.*missing\) does not exist; give the folder that --save named; a run from scratch",
        ),
        ({"load": "empty"}, r"load\(.*empty\) holds no checkpoint; give the folder .*, or its iter_\* folder; a run"),
        ({"load": "file"}, r"load\(.*file\) is a file; give the folder"),
        ({"load": "model", "finetune": True}, r"load\(.*\) is a Hugging Face model; .* convert --input .*/model "),
        ({"pretrained_checkpoint": "model"}, r"pretrained_checkpoint\(.*model\) is a Hugging Face model; give what"),
        ({"load": "missing", "finetune": True}, r"finetune: load\(.*missing\) does not exist"),
        ({"load": "empty", "save": "empty", "finetune": True}, r"finetune: load\(.*empty\) holds no checkpoint"),
        ({"load": "empty", "save": "file"}, r"load\(.*empty\) holds no checkpoint"),
        (
            {"load": "empty", "save": "empty", "exit_on_missing_checkpoint": True},
            r"exit_on_missing_checkpoint: load\(.*empty\) holds no checkpoint",
        ),
        ({"load": "full", "ckpt_step": 5}, r"iteration 5 is no whole checkpoint under .*; there are: 20"),
        (
            {"load": "full/iter_0000020", "ckpt_step": 5},
            r"ckpt_step\(5\) is not the checkpoint that load\(.*20\) names",
        ),
        ({"load": "full/iter_0000005"}, r"iteration 5 is no whole checkpoint"),
    ],
)
def test_what_is_not_there(tmp_path: Path, settings: dict, expected: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    add_checkpoint(tmp_path / "full", 20)
    paths = ("load", "save", "pretrained_checkpoint")
    given = {name: tmp_path / value if name in paths else value for name, value in settings.items()}
    with pytest.raises(CheckpointError, match=expected) as error:
        start(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("exists", [False, True])
def test_the_first_start_of_a_job_that_resumes(tmp_path: Path, exists: bool, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    if exists:
        folder.mkdir()
    assert start(load=folder, save=folder).source is None
    assert caplog.messages == [f"no checkpoint under {folder}: starting from scratch"]


def test_a_checkpoints_own_folder_is_understood(tmp_path: Path) -> None:
    add_checkpoint(tmp_path, 10)
    folder = add_checkpoint(tmp_path, 20)
    for step in (None, 20):
        found = start(load=folder, ckpt_step=step, save=tmp_path)
        assert found.source is not None and found.continues_save
        assert (found.source.root, found.source.options.iteration) == (tmp_path, 20)
    (tmp_path / "best").symlink_to(folder)
    found = start(load=tmp_path / "best").source
    assert found is not None and (found.root, found.options.iteration) == (tmp_path, 20)
    nested = tmp_path / "iter_0000001"  # a folder of checkpoints that has such a name itself
    add_checkpoint(nested, 30)
    source = start(load=nested).source
    assert source is not None and source.root == nested


def test_a_renamed_checkpoint_is_named(tmp_path: Path) -> None:
    folder = add_checkpoint(tmp_path, 20).rename(tmp_path / "best")
    with pytest.raises(CheckpointError, match=r"best is one checkpoint under another name; give it the name of its it"):
        start(load=folder)


def test_a_restart_by_torchrun_goes_on_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_checkpoint(tmp_path / "save", 20, launch="job1")
    add_checkpoint(tmp_path / "base", 100, run=ANOTHER)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(CheckpointError, match="another run"):
        start(save=tmp_path / "save")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")  # another node's torchrun counted the restart
    assert own_restart(tmp_path / "save")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert not own_restart(tmp_path / "save")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert own_restart(tmp_path / "save") and not own_restart(tmp_path / "base")
    for settings in ({}, {"load": tmp_path / "base", "finetune": True}):
        started = start(save=tmp_path / "save", **settings)
        assert started.source is not None and started.source.root == tmp_path / "save" and started.continues_save
        assert not started.source.options.finetune and started.identity.run == A_RUN
    assert start(save=tmp_path / "new").source is None
    damaged = add_checkpoint(tmp_path / "save", 30, launch="job1")
    (damaged / META).write_text("{")
    assert own_restart(tmp_path / "save")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job2")
    with pytest.raises(CheckpointError, match="another run"):
        start(save=tmp_path / "save")


def test_launches_without_an_id_differ_by_torchruns_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launch_id() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert f":{os.getppid()}:" in (launch_id() or "") and launch_id() == launch_id()
    assert RunIdentity.drawn().launch == launch_id()


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"run": 1, "launch": [2]}', "\xff"])
def test_a_checkpoint_that_names_no_run(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / META).write_bytes(content.encode("latin-1"))
    assert saved_by(tmp_path) == (None, None)


def test_a_second_run_waits_and_then_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_start, "_WAIT_SECONDS", 0.5)
    monkeypatch.setattr(run_lock, "POLL_SECONDS", 0.1)
    other = RunLock(tmp_path, RunIdentity.drawn(ANOTHER))
    assert other.attempt() is None
    with pytest.raises(CheckpointError, match=rf"save\(.*\) is in use by process {os.getpid()} on .*; stop that run"):
        start(save=tmp_path)
    assert len([line for line in caplog.messages if f"run {ANOTHER}" in line and "waiting" in line]) == 1
    other.check()
    other.release()
    start(save=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_saved_while_it_was_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded is decided when the lock is held."""
    attempt = RunLock.attempt

    def others_first(self: RunLock) -> object:
        add_checkpoint(tmp_path, 20)
        return attempt(self)

    monkeypatch.setattr(RunLock, "attempt", others_first)
    started = start(load=tmp_path, save=tmp_path)
    assert started.identity.run == A_RUN and started.continues_save


def test_the_lock_is_released_after_an_error(tmp_path: Path) -> None:
    settings = CheckpointConfig(save=str(tmp_path))
    with pytest.raises(ZeroDivisionError), starting_run(settings, OneRank()) as started:  # type: ignore[arg-type]
        assert started.lock is not None and (tmp_path / LOCK).exists()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunLockError):
        started.lock.check()


def test_another_models_checkpoint_is_refused_before_there_is_a_model(tmp_path: Path) -> None:
    folder = add_checkpoint(tmp_path, 20)
    loading = CheckpointConfig(load=str(tmp_path))
    config = replace(tiny_config(MODEL), checkpoint=loading)
    check_what_is_loaded(config)  # it says nothing of its settings
    (folder / "config.yaml").write_text(config_text(config))
    check_what_is_loaded(config)
    wider = replace(config, model=replace(MODEL, hidden_size=256))
    for finetune in (False, True):
        with pytest.raises(CheckpointError) as error:
            check_what_is_loaded(replace(wider, checkpoint=replace(loading, finetune=finetune)))
        assert str(error.value) == (
            f"{folder} was saved with hidden_size(128), this run has hidden_size(256), another model; "
            "give --hidden-size 128, as in config.yaml there"
        )
    pretrained = CheckpointConfig(pretrained_checkpoint=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"num_layers"):
        check_what_is_loaded(replace(config, model=replace(MODEL, num_layers=3), checkpoint=pretrained))
    check_what_is_loaded(replace(wider, checkpoint=CheckpointConfig()))
    new = str(tmp_path / "new")
    check_what_is_loaded(replace(wider, checkpoint=CheckpointConfig(load=new, save=new)))
