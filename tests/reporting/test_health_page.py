"""The health page: what it is made of, and what a browser without a network shows of it."""

from __future__ import annotations

import http.client
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8_megatron.cli import main
from fp8_megatron.reporting import health_page
from fp8_megatron.reporting.cast_statistics import CastName, CastStatistics, HealthSample
from fp8_megatron.reporting.health_page import page_data, render
from fp8_megatron.reporting.metrics_file import HEALTH_FILE, METRICS_FILE, QUANTITIES, ROLES, json_line

LAYERS = [f"decoder.layers.{n}.{name}" for n in range(3) for name in ("self_attention.linear_qkv", "mlp.linear_fc2")]
#: What saturates in the last samples of the run.
WORST = ("decoder.layers.1.mlp.linear_fc2", "grad_output")


def cast(layer: str, role: str, iteration: int) -> CastStatistics:
    bad = (layer, role) == WORST and iteration >= 30
    return CastStatistics(
        CastName(layer, role, "E5M2" if role == "grad_output" else "E4M3"),
        saturated=0.05 if bad else 0.0,
        underflowed=0.001,
        snr_db=None if role == "weight" else 9.0 if bad else 31.0,
        amax=3.0,
        amax_over_scale=8.0 if bad else 0.9,
        kurtosis=3.0 + iteration,
        mu=None,
        non_finite=0,
        lowest_exponent=-6,
        exponents=(0.1, 0.2, 0.4, 0.2, 0.1),
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Forty steps, of which one was skipped, and four samples."""
    folder = tmp_path / "a <b> run"
    folder.mkdir()
    with (folder / METRICS_FILE).open("w") as stream:
        for step in range(1, 41):
            loss = math.nan if step == 33 else 4.0 - step / 40
            record = {"kind": "train", "iteration": step, "loss": loss, "grad_norm": 1.0, "skipped_steps": step >= 33}
            stream.write(json_line({**record, "skipped_steps": int(step >= 33)}))
    with (folder / HEALTH_FILE).open("w") as stream:
        for step in (10, 20, 30, 40):
            casts = tuple(cast(layer, role, step) for layer in LAYERS for role in ROLES)
            stream.write(json_line(HealthSample(step, casts).row()))
        stream.write('{"kind": "health", "iteration": 41, "layers": []}\n[1, 2')
    events = [
        {"time": "2026-01-01T00:00:00.000+00:00", "iteration": 0, "kind": "start", "text": "training starts"},
        {"time": "2026-01-01T00:01:00.000+00:00", "iteration": 33, "kind": "skip", "text": "skipped </script><b>!"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_data_of_a_run(run: Path) -> None:
    data = page_data(run)
    assert data["name"] == "a <b> run" and data["skipped_steps"] == 1 and not data["live"]
    assert len(data["steps"]["loss"]) == 40 and data["steps"]["loss"][32] is None
    assert data["samples"] == [10, 20, 30, 40] and len(data["casts"]) == len(LAYERS) * len(ROLES)
    worst = data["casts"].index({"layer": WORST[0], "role": WORST[1], "format": "E5M2"})
    assert [row[worst] for row in data["quantities"]["saturated"]] == [0.0, 0.0, 0.05, 0.05]
    assert set(data["quantities"]) == set(QUANTITIES)
    assert data["exponents"][-1]["casts"][worst] == [-6, [0.1, 0.2, 0.4, 0.2, 0.1]]


def test_events_of_other_runs_are_left_out(run: Path) -> None:
    lines = [
        {"time": "2026-01-02", "iteration": 40, "kind": "stop", "text": "one", "run": "a"},
        {"time": "2026-01-03", "iteration": 0, "kind": "start", "text": "two", "run": "b"},
    ]
    with (run / "events.jsonl").open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)
    assert [event["text"] for event in page_data(run)["events"]] == ["two"]


def test_texts_of_a_run_end_no_element(run: Path) -> None:
    page = render(page_data(run))
    assert page.count("</script>") == render({"name": ""}).count("</script>")
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_long_runs_and_large_models_are_thinned_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest loss and the last sample stay."""
    monkeypatch.setattr(health_page, "MOST_STEPS", 10)
    monkeypatch.setattr(health_page, "MOST_CELLS", 2 * len(LAYERS) * len(ROLES))
    monkeypatch.setattr(health_page, "MOST_HISTOGRAMS", len(LAYERS) * len(ROLES))
    lines = (run / METRICS_FILE).read_text().splitlines()
    lines[16] = lines[16].replace('"loss": 3.575', '"loss": 9.5')
    (run / METRICS_FILE).write_text("\n".join(lines))
    data = page_data(run)
    assert len(data["steps"]["loss"]) <= 10 and max(filter(None, data["steps"]["loss"])) == 9.5
    assert data["steps"]["iteration"] == sorted(data["steps"]["iteration"])
    assert data["samples"] == [20, 40] and [entry["sample"] for entry in data["exponents"]] == [1]


def test_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "health.html")
    assert (run / "health.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{}/nothing"], "give the --output-dir of a run"),
        (["{}", "--port", "80"], "--port has no effect without --live; add it"),
        (["{}", "--live", "--output", "{}/x.html"], "--output has no effect with --live"),
        (["{}", "--live", "--port", "70000"], "70000 is out of range; give 0 to 65535"),
        (["{}", "--output", "{}"], "is a folder; give the path of a file"),
    ],
)
def test_errors_are_one_line(run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["health", *(word.format(run) for word in words)])
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1


@pytest.fixture
def server(run: Path) -> Iterator[int]:
    """The port of `health --live`."""
    words = [sys.executable, "-m", "fp8_megatron.cli", "health", str(run), "--live", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline()
            assert address.startswith("http://127.0.0.1:"), address
            yield int(address.split(":")[2].split("/")[0])
        finally:
            process.kill()


def test_live_data_is_the_runs_newest(run: Path, server: int) -> None:
    def get(path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", server, timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()

    status, page = get("/")
    assert status == 200 and b"<!doctype html>" in page
    with (run / METRICS_FILE).open("a") as stream:
        stream.write(json_line({"kind": "train", "iteration": 41, "loss": 1.0, "grad_norm": 1.0}))
    status, text = get("/data.json")
    data = json.loads(text)
    assert status == 200 and data["live"] and data["steps"]["iteration"][-1] == 41
    assert get("/../../etc/passwd")[0] == 404


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium: Playwright's own, or the system's. Without one the tests are skipped, unless BROWSER_TESTS
    is set (`.ci/run`)."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with playwright.sync_playwright() as driver:
        try:
            opened = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as error:
            assert os.environ.get("BROWSER_TESTS") != "required", error
            pytest.skip(f"no Chromium (playwright install chromium): {str(error).splitlines()[0]}")
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A laptop's window. An error of the script or the console fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    yield opened
    context.close()
    assert not problems


def colours(page: Any) -> int:
    """How many colours the heat map has."""
    script = """() => { const c = document.getElementById('heat');
      const d = c.getContext('2d').getImageData(160, 0, c.width - 160, c.height).data, found = new Set();
      for (let i = 0; i < d.length; i += 4) if (d[i + 3] == 255) found.add((d[i] << 16) | (d[i + 1] << 8) | d[i + 2]);
      return found.size; }"""
    return int(page.evaluate(script))


def test_a_browser_shows_the_page_offline(run: Path, page: Any) -> None:
    output = run / "health.html"
    assert main(["health", str(run)]) == 0
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.context.set_offline(True)
    page.goto(output.as_uri())
    assert len(requests) == 1 and requests[0].startswith("file:"), "nothing is fetched beside the page"
    assert page.inner_text("h1") == "a <b> run"
    assert "iteration 40, loss 3.0000, 1 skipped steps, 4 samples of 24 casts" in page.inner_text("#status")
    assert page.locator("#curves path").count() == 2
    assert page.locator("#curves line[data-event=skip]").count() == 1
    assert "skipped </script><b>!" in page.inner_text("#events")
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), "it fits into the window"
    # The one cast that saturates leads the table, and stands out in the map.
    first = page.locator("#worst tbody tr").first
    assert first.inner_text().split("\t")[:3] == ["1 fc2 output grad", "E5M2", "5.0%"]
    assert colours(page) >= 2
    page.select_option("#quantity", "kurtosis")
    assert colours(page) >= 4
    assert "Worst tensors by kurtosis, iteration 40" in page.inner_text("#worst-title")


def test_cells_roles_and_themes(run: Path, page: Any) -> None:
    page.set_content(render(page_data(run)))
    box = page.locator("#heat").bounding_box()
    row = (LAYERS.index(WORST[0]) * len(ROLES) + ROLES.index(WORST[1]) + 0.5) * (box["height"] - 12) / 24 + 6
    # The third of the samples at 10, 20, 30 and 40, on an axis from 1 to 40 that starts at 150.
    page.mouse.move(box["x"] + 150 + 29 / 39 * (box["width"] - 166), box["y"] + row)
    tip = page.inner_text("#tip")
    assert tip == "decoder.layers.1.mlp.linear_fc2 output grad (E5M2), iteration 30: saturated 5.0%"
    page.mouse.down()
    page.mouse.up()
    assert page.inner_text("#one-title") == "Exponents of 1 fc2 output grad, iteration 30"
    assert page.locator("#one rect[data-exponent]").count() == 5
    assert page.locator("tr.chosen").count() == 1
    page.click("#roles button:has-text('output grad')")
    assert page.locator("#worst tbody tr", has_text="output grad").count() == 0
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_run_without_samples_has_curves(run: Path, page: Any) -> None:
    (run / HEALTH_FILE).unlink()
    page.set_content(render(page_data(run)))
    assert page.locator("#curves path").count() == 2
    assert "No casts were sampled yet" in page.inner_text("#none")


def test_a_live_page_follows_the_run(run: Path, server: int, page: Any) -> None:
    page.goto(f"http://127.0.0.1:{server}/")
    assert "live" in page.inner_text("#status")
    with (run / METRICS_FILE).open("a") as stream:
        stream.write(json_line({"kind": "train", "iteration": 77, "loss": 1.0, "grad_norm": 1.0}))
    page.wait_for_function("document.getElementById('status').textContent.startsWith('iteration 77')", timeout=30_000)
