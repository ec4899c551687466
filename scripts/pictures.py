#!/usr/bin/env python3
"""Makes the pictures of the documents again: the page on a desk and on a phone, and what
`allspark bench --plot` draws.

usage: python scripts/pictures.py [--model smollm2] [--output docs/images]

Needs the installed package with its extra `dev`, and Chromium (scripts/setup.sh --slow).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from support.browser import By, Keys, WebDriverWait, chromium, resize, set_dark  # noqa: E402

QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a Python function that reverses a string, and explain it in a short list.",
)
# Name, width, height, and whether colours are dark.
SIZES = (("ui", 1280, 800, False), ("ui-phone", 390, 844, True))
_COMMAND = [sys.executable, "-m", "allspark.cli"]
_ANSWER_S = 300


@contextmanager
def served(model: str) -> Iterator[str]:
    """The address of a server of the model."""
    local = ["--server-name", "127.0.0.1", "--server-port", "0"]
    command = [*_COMMAND, "serve", f"{model}={Path(model).name}", *local]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if found := re.search(r" on (http://\S+:\d+)$", line):
                yield found[1]
                break
        else:
            raise RuntimeError(f"the server ended with status {server.wait()}")
    finally:
        server.terminate()
        server.wait()


def talk(driver: Any, url: str) -> None:
    """Asks the questions on the page."""
    driver.get(f"{url}/ui")

    def find(selector: str) -> Any:
        return driver.find_element(By.CSS_SELECTOR, selector)

    def wait(condition: Any) -> None:
        WebDriverWait(driver, _ANSWER_S, 0.05).until(lambda _: condition())

    wait(lambda: find("#model option").text != "")
    for field, value in (("max_tokens", "160"), ("temperature", "0")):
        find(f"#{field}").clear()
        find(f"#{field}").send_keys(value)
    for number, question in enumerate(QUESTIONS, 1):
        find("#prompt").send_keys(question, Keys.ENTER)
        wait(lambda n=number: len(driver.find_elements(By.CSS_SELECTOR, ".answer")) == n)
        wait(lambda: find("#send").text == "Send")


def photograph(model: str, folder: Path) -> None:
    """The same conversation in each of the sizes."""
    with served(model) as url, chromium() as driver:
        resize(driver, *SIZES[0][1:3])
        talk(driver, url)
        for name, width, height, is_dark in SIZES:
            resize(driver, width, height)
            set_dark(driver, is_dark)
            driver.save_screenshot(str(folder / f"{name}.png"))


def draw(model: str, folder: Path) -> None:
    """What `bench` draws."""
    sizes = ["-n", "16", "-c", "1", "4", "16", "--input-len", "64", "--output-len", "32"]
    plot = ["--plot", str(folder / "bench.png")]
    subprocess.run([*_COMMAND, "bench", "throughput", model, *sizes, *plot], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="smollm2", help="what `allspark serve` takes")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    photograph(options.model, options.output)
    draw(options.model, options.output)


if __name__ == "__main__":
    main()
