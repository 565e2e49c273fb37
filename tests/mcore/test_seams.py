"""What is needed of megatron-core's inside is looked for, and what is missing is named in one line."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import megatron.core
import pytest
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.transformer.transformer_config import TransformerConfig

import fp8_megatron
from fp8_megatron.errors import UserError
from fp8_megatron.mcore import seams
from fp8_megatron.moe import megatron as mixture


def test_a_missing_name_is_one_line_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    seams.check()
    monkeypatch.delattr(p2p_communication, "_p2p_ops")
    with pytest.raises(UserError) as caught:
        seams.check()
    assert str(caught.value) == (
        f"megatron-core {megatron.core.__version__} has no megatron.core.pipeline_parallel.p2p_communication._p2p_ops, "
        "which fp8_megatron needs; pip install 'megatron-core>=0.16.1,<0.20'"
    )


def test_a_renamed_argument_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p_communication.P2PCommunicator, "_communicate", lambda self, tensor_send_next: None)
    with pytest.raises(UserError, match=r"has no argument tensor_send_prev of .*P2PCommunicator\._communicate, which"):
        seams.check()


def test_the_fix_is_what_the_package_requires() -> None:
    requirement = seams.REQUIREMENT
    assert f'"{requirement}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


def test_every_private_name_that_is_imported_is_looked_for() -> None:
    needed = [*seams.NEEDED.items(), *mixture.NEEDED.items()]
    listed = {(module, name.split(".")[0]) for module, names in needed for name in names}
    found = {
        (node.module.removeprefix("megatron.core."), alias.name)
        for path in Path(fp8_megatron.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core.")
        for alias in node.names
        if alias.name.startswith("_")
    }
    assert found and found <= listed


def test_a_configuration_without_graphs_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, **seams.without_cuda_graphs())
