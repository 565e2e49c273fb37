"""Take a picture of a run's health page: python -m tools.screenshot RUN --output docs/images/fp8_health.png

Needs playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from functools import partial

from fp8_megatron.commands.arguments import Parser, output_file, path
from fp8_megatron.commands.program import exit_status
from fp8_megatron.errors import UserError
from fp8_megatron.outputs import write_output
from fp8_megatron.reporting.health_page import page_data, render


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog="screenshot.py", description=__doc__)
    parser.add_argument("run", type=path, help="output folder of the run")
    parser.add_argument("--output", type=output_file, required=True, help="PNG file to write")
    parser.add_argument("--quantity", default="snr_db", help="what the heat map shows")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    return parser.parse_args(words)


def run(options: argparse.Namespace) -> int:
    """Write the picture; returns the exit status.

    Raises:
        UserError: there is no browser.
        ValueError: the folder is not of a run.
    """
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError as error:
        raise UserError(f"{error}; pip install playwright") from error
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except Error as error:
            raise UserError(
                f"no Chromium starts ({str(error).splitlines()[0]}); playwright install chromium"
            ) from error
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=options.theme)
        page.set_content(render(page_data(options.run)))
        page.select_option("#quantity", options.quantity)
        picture = page.screenshot(full_page=True)
        browser.close()
    write_output(options.output, picture, "--output")
    print(options.output)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after an error."""
    return exit_status(partial(run, parse_arguments(words)), ValueError)


if __name__ == "__main__":
    sys.exit(main())
