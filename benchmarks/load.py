"""Load: what 1,000 exports, 100 validated families and a day of profiling leave behind, and how soon a report opens.

    python benchmarks/load.py [--only exports,folders,families,days,report]

The first four run in a new process each, without torch, on a small ViT with random weights (96 pixels, four blocks).
Memory is what a process holds when its garbage is collected and given back, against that after the first rounds; the
bound is half of what would be left if every round kept the smallest of its results: its graph, its decoded images.
Days are simulated: 24 files of 10 ms are timed for an hour each by a clock of their own. The report has 500 variants
and is opened in headless Chromium, from a file; times are those that the browser itself counts from the beginning of
the navigation, the median of five windows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
COUNTS = {"exports": 1000, "folders": 500, "families": 100, "days": 1}
VARIANTS, WINDOWS = 500, 5
MAKE = "from helpers.families import make_family_and_elastic as make; from pathlib import Path; make(Path({!r}))"
TIMES = """() => {
  const [navigation] = performance.getEntriesByType("navigation");
  const [paint] = performance.getEntriesByName("first-contentful-paint");
  return { load: navigation.loadEventEnd, paint: paint.startTime, nodes: document.querySelectorAll("*").length };
}"""


def made(folder: Path) -> Path:
    """A family and an Elastic folder, with the model and images that they come from; made in a process of its own."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TESTS)!r}); " + MAKE.format(str(folder))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def left_by(load: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, TESTS / "helpers" / "load.py", load, folder, "--count", str(COUNTS[load])]
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def opened(scratch: Path) -> dict[str, float]:
    """Write the report of a large family, open it, and return what the browser counted, in milliseconds."""
    sys.path.insert(0, str(TESTS))
    from playwright.sync_api import sync_playwright

    from helpers.report_factory import make_manifest, make_search, make_sublayers, make_validation
    from snapvit_export.report.data import LoadedFamily, collect
    from snapvit_export.report.page import page

    manifest = make_manifest(VARIANTS, recipe={"search": make_search(), "sublayers": make_sublayers()})
    own = LoadedFamily(Path("here"), manifest, make_validation(manifest))
    path = scratch / "report.html"
    path.write_text(page(own, collect(own)), encoding="utf-8")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    times = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(WINDOWS):
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            window = context.new_page()
            window.goto(path.as_uri(), wait_until="load")
            window.wait_for_selector("html[data-drawn=yes]")
            drawn = window.evaluate("performance.now()")
            times.append({**window.evaluate(TIMES), "drawn": drawn})
            context.close()
        browser.close()
    found = {name: median(each[name] for each in times) for name in times[0]}
    return {**found, "bytes": path.stat().st_size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join([*COUNTS, "report"]))
    wanted = parser.parse_args().only.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        folder = made(Path(scratch) / "made") if set(wanted) & set(COUNTS) else Path(scratch)
        print("| load | rounds | took, s | memory, MB | most, MB | bound, MB | open files | mapped | temporary |")
        print("|---|---|---|---|---|---|---|---|---|")
        for load in [load for load in COUNTS if load in wanted]:
            left = left_by(load, folder)
            bound = left["unit_bytes"] * (2 if load == "days" else left["rounds"] / 2)
            print(
                f"| {load} | {left['rounds']} | {left['seconds']:.0f} | {left['grown_bytes'] / 1e6:+.1f} | "
                f"{left['most_bytes'] / 1e6:.0f} | {bound / 1e6:.0f} | {left['files']:+d} | {left['mapped']:+d} | "
                f"{left['temporary']} |",
                flush=True,
            )
        if "report" in wanted:
            found = opened(Path(scratch))
            print(
                f"\n{VARIANTS} variants: {found['bytes'] / 1e6:.1f} MB, {found['nodes']:.0f} elements; first paint "
                f"after {found['paint'] / 1000:.2f} s, loaded after {found['load'] / 1000:.2f} s, every plot drawn "
                f"after {found['drawn'] / 1000:.2f} s"
            )


if __name__ == "__main__":
    main()
