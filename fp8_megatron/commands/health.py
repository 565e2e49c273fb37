"""Show the FP8 health of a run as one HTML page: fp8-megatron health runs/x --output health.html

The page has a heat map of every layer's casts over time, the worst tensors, loss, gradient norm, skipped steps and
events. It opens without a network. --live serves it while the run goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..outputs import check_output_file, write_output
from ..reporting.health_page import page_data, render
from .arguments import Parser, nonempty, output_file, path, whole
from .program import exit_status

DEFAULT_PORT = 8808


def parse_arguments(words: Sequence[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog=prog, description=__doc__)
    parser.add_argument("run", type=path, help="output folder of the run")
    parser.add_argument("--output", type=output_file, help="HTML file to write (default: RUN/health.html)")
    parser.add_argument("--live", action="store_true", help="serve the page, with the run's newest data")
    parser.add_argument("--port", type=whole(least=0, most=65535), help=f"of --live (default: {DEFAULT_PORT}; 0: any)")
    parser.add_argument("--host", type=nonempty, help="address that --live listens at (default: this machine only)")
    options = parser.parse_args(words)
    if options.live and options.output is not None:
        parser.error("--output has no effect with --live; give one of them")
    for name in ("port", "host"):
        if getattr(options, name) is not None and not options.live:
            parser.error(f"--{name} has no effect without --live; add it")
    return options


def main(words: Sequence[str] | None = None, prog: str = "fp8-megatron health") -> int:
    """Exit status: 0, or 2 after an error."""
    return exit_status(partial(run, parse_arguments(words, prog)), ValueError)


def run(options: argparse.Namespace) -> int:
    """Write or serve the page; returns the exit status.

    Raises:
        UserError: the run cannot be read, the page cannot be written, or the port is in use.
        ValueError: the folder is not of a run.
    """
    try:
        data = page_data(options.run, live=options.live)
    except OSError as error:
        raise UserError(f"{error}; give a run that can be read") from error
    if options.live:
        return serve(options.run, options.host or "127.0.0.1", DEFAULT_PORT if options.port is None else options.port)
    output = options.output or options.run / "health.html"
    check_output_file(output, "--output")
    write_output(output, render(data).encode(), "--output")
    print(output)
    return 0


def serve(run: Path, host: str, port: int) -> int:
    """Serve the page of `run` until an interrupt.

    Raises:
        UserError: nobody can listen there.
    """
    try:
        server = ThreadingHTTPServer((host, port), partial(_Handler, run))
    except OSError as error:
        raise UserError(f"--port {port} of {host}: {error.strerror or error}; choose another --port") from error
    with server:
        print(f"http://{host}:{server.server_address[1]}/ (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page, and with its data alone."""

    def __init__(self, run: Path, *arguments: Any) -> None:
        self._run = run  # the base class handles the request in its constructor
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """``/`` is the page, ``/data.json`` its data."""
        if self.path not in ("/", "/data.json"):
            self.send_error(404)
            return
        try:
            data = page_data(self._run, live=True)
        except (OSError, ValueError) as error:
            self.send_error(503, explain=str(error))
            return
        is_page = self.path == "/"
        body = (render(data) if is_page else json.dumps(data, allow_nan=False)).encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{'text/html' if is_page else 'application/json'}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *unused: Any) -> None:
        """No line for a request."""


if __name__ == "__main__":
    sys.exit(main())
