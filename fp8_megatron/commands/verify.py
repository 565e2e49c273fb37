"""Run a verification card again and say within what it agrees, or make one.

    fp8-megatron verify benchmarks/cards/gpt_tiny_cpu.yaml
    fp8-megatron verify --make benchmarks/cards/gpt_345m.yaml

A card is a YAML file: flags of training without data, where they run, and what the run has shown. The run trains on
tokens that follow a rule, resumes from half of the steps, and converts the last checkpoint to Hugging Face.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from .. import __version__
from ..config.checks import check_config
from ..config.io import parse_config
from ..errors import UserError
from ..reporting.card import Agreement, Card, Result, compare, largest_difference, quoted, read_run
from ..reporting.tables import table_text
from .arguments import Parser, existing, output_folder, real
from .environment import run_environment, training_command
from .launch import gpus_for_ranks
from .program import exit_status, prepare_megatron, share_import_path, told_error

#: Flags of both runs.
_COMMON = ("--no-tensorboard", "--progress", "off", "--tokenizer-type", "NullTokenizer", "--data-path")
#: Tokens that the data have, their documents, and the length of each.
_TOKENS, _DOCUMENTS, _LENGTH = 128, 4096, 1024


def main(words: Sequence[str] | None = None, prog: str = "verify.py") -> int:
    """Exit status: 0, 1 if a card does not agree or a run fails, 2 after an error."""
    parser = Parser(prog=prog, description=__doc__)
    parser.add_argument("cards", nargs="+", type=existing, metavar="CARD", help="YAML files")
    parser.add_argument("--make", action="store_true", help="write what the runs show into the cards, and their pages")
    parser.add_argument("--output-dir", type=output_folder, default=Path("runs/cards"), help="of runs and their logs")
    limit = real(least=0.0, most=1.0)
    for name, default in (("loss", 0.01), ("speed", 0.1), ("memory", 0.05)):
        parser.add_argument(f"--{name}-limit", type=limit, default=default, help=f"relative (default: {default})")
    return exit_status(partial(run, parser.parse_args(words)), OSError)


def run(options: argparse.Namespace) -> int:
    """Run every card; the exit status."""
    share_import_path()
    cards = [Card.read(path) for path in options.cards]
    for card in cards:
        if not options.make and card.result is None:
            raise UserError(f"{card.path} has no result yet; make it with --make")
        check_config(parse_config([*card.flags, *_COMMON, "rule"]), card.ranks)
        if card.on_gpus and not gpus_for_ranks(card.ranks, "ranks"):
            raise UserError(f"{card.path} is of {card.ranks} GPUs, and this machine has none; run it where they are")
    succeeded = True
    for card in cards:
        print(f"{card.path}: trains, resumes and converts", flush=True)
        options.output_dir.mkdir(parents=True, exist_ok=True)
        now = measure(card, Path(tempfile.mkdtemp(prefix=f"{card.path.stem}_", dir=options.output_dir)))
        if options.make:
            replace(card, result=now).write()
            print(f"{card.path}: made; its page is {card.path.with_suffix('.md')}", flush=True)
            continue
        assert card.result is not None
        limits = {"loss": options.loss_limit, "speed": options.speed_limit, "memory": options.memory_limit}
        succeeded &= _tell(card, now, compare(card.result, now, **limits))
    return 0 if succeeded else 1


def measure(card: Card, folder: Path) -> Result:
    """Train, resume, convert in an empty folder, where logs stay. Raises `UserError` with a program's error."""
    from .parity_runs import origin  # imports matplotlib

    where = origin()
    checkpoints, data = str(folder / "checkpoints"), str(folder / "data" / "rule")
    write_tokens(data)
    half = str(parse_config(card.flags).train_iters(card.ranks) // 2)
    for name, flags in (
        ("run", ["--save", checkpoints, "--save-interval", half]),
        ("resumed", ["--load", checkpoints, "--ckpt-step", half]),
    ):
        words = [*card.flags, *_COMMON, data, "--output-dir", str(folder / name), *flags]
        _call(training_command(words, card.ranks, on_gpus=card.on_gpus), folder / f"{name}.log", card)
    converter = [sys.executable, "-m", f"{__package__}.convert_checkpoint", "--input", checkpoints, "--to", "hf"]
    log = folder / "conversion.log"
    _call([*converter, "--output", str(folder / "hf")], log, card)
    said = [line for line in log.read_text().splitlines() if line.startswith("agree: ")]
    for name in ("checkpoints", "data", "hf"):
        shutil.rmtree(folder / name, ignore_errors=True)
    losses, speed, peak = read_run(folder / "run")
    return Result(
        date=datetime.now(UTC).date().isoformat(),
        device=where["device"] if card.on_gpus else "cpu",
        versions={"fp8_megatron": __version__, **where["versions"]},
        losses=quoted(losses),
        tokens_per_second=round(speed, 1),
        peak_memory_gib=round(peak, 3) if card.on_gpus else 0.0,
        resumed=largest_difference(losses, read_run(folder / "resumed")[0]),
        conversion="; ".join(said).replace(f" on {folder / 'hf'}", "") or "not compared",
    )


def write_tokens(prefix: str) -> None:
    """Token files that are the same on any machine: of 5 tokens 3 follow from the one before, which is learnt fast."""
    import numpy as np

    prepare_megatron()
    from ..data.token_writer import DatasetWriter, TokenizedDocuments  # imports megatron-core

    Path(prefix).parent.mkdir(parents=True)
    random = np.random.RandomState(0)
    ids = random.randint(_TOKENS, size=(_DOCUMENTS, _LENGTH))
    follows = random.random_sample(ids.shape) < 0.6
    for column in range(1, _LENGTH):
        ids[:, column] = np.where(follows[:, column], (5 * ids[:, column - 1] + 7) % _TOKENS, ids[:, column])
    one = np.ones(_DOCUMENTS, dtype=np.int32)
    with DatasetWriter(prefix, np.uint16) as writer:
        writer.add(TokenizedDocuments(ids.ravel().astype(np.uint16), _LENGTH * one, one))
        writer.commit()


def _call(command: Sequence[str], log: Path, card: Card) -> None:
    environment = run_environment()
    if not card.on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode != 0:
        told = told_error(log.read_text(errors="replace"))
        raise UserError(f"{card.path}: {log.stem} ended with status {done.returncode}: {told}")


def _tell(card: Card, now: Result, found: Sequence[Agreement]) -> bool:
    """Print what agrees within what; whether all does."""
    assert card.result is not None
    rows = []
    for one in found:
        verdict = "not compared" if one.limit is None else f"{'within' if one.holds else 'BEYOND'} {100 * one.limit:g}%"
        rows.append((one.quantity, f"{one.card:,.4f}", f"{one.now:,.4f}", f"{100 * one.difference:+.3f}%", verdict))
    print(table_text(["", "card", "now", "largest difference", "limit"], rows, num_left=1))
    then, here = ({**of.versions, "device": of.device} for of in (card.result, now))
    changed = [f"{name} {then.get(name)} → {here[name]}" for name in here if then.get(name) != here[name]]
    agrees = all(one.holds for one in found)
    verdict = "agrees" if agrees else "does not agree"
    print(f"{card.path} {verdict} with its run of {card.result.date}; changed since: {', '.join(changed) or 'nothing'}")
    return agrees


if __name__ == "__main__":
    sys.exit(main())
