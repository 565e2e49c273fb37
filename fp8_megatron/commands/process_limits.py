"""Limits that the shell sets for this process (`ulimit`), checked before the work."""

from __future__ import annotations

import resource

from ..errors import UserError

#: A rank opens its token files, checkpoints' files and one connection for each peer.
_FEWEST_FILES = 256
#: A tiny model trains on a CPU in 2 GiB. With 1 GiB, the import of megatron-core stands still. CUDA needs far more.
_LEAST_ADDRESS_SPACE = 2 * 2**30


def check_process_limits() -> None:
    """Raise the number of open files as far as this process may, and check what is left of its limits.

    Raises:
        UserError: too few files, or too little address space, to import what training needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < _FEWEST_FILES:
        raise UserError(f"`ulimit -n` allows this process {hard} open files; raise it to {_FEWEST_FILES} or more")
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY and space < _LEAST_ADDRESS_SPACE:
        raise UserError(
            f"`ulimit -v` allows this process {space / 2**30:.1f} GiB of address space; raise it to "
            f"{_LEAST_ADDRESS_SPACE // 2**30} GiB or more, or give `ulimit -v unlimited`"
        )
