"""A server with traffic for the dashboard: make demo-dashboard, then open the address it prints.

    python demo/dashboard.py [--port 8000] [--seconds S] [--pictures DIR]

Runs `penstock serve` with small tiers, and a few clients that chat about a few documents, until
Ctrl-C or for --seconds. With --pictures it also takes screenshots of the page in Chromium:
docs/pictures/dashboard-*.png are made this way.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from openai import APIError, OpenAI
from texts import logbook

NUM_PEOPLE = 3
NUM_DOCUMENTS = 12
NUM_ENTRIES = 30
QUESTIONS = ("What is it about?", "Tell me more.", "Why?", "And then?", "Say it in one sentence.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000, help="0 picks a free port")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="needs Chromium")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        tiers = ("--device-kv-gib", "0.08", "--kv-offloading-size", "0.15")
        disk = ("--disk-path", folder, "--disk-size", "1")
        serve = (sys.executable, "-m", "penstock", "serve", "--json", "--port", str(options.port))
        server = subprocess.Popen([*serve, *tiers, *disk], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            if not ready:
                return server.wait()
            watch(json.loads(ready)["url"], options.seconds, options.pictures)
        except KeyboardInterrupt:
            pass
        finally:
            server.terminate()
            server.wait()
    return 0


def watch(url: str, seconds: float, pictures: Path | None) -> None:
    is_over = threading.Event()
    people = [
        threading.Thread(target=chat, args=(url, number, is_over.is_set))
        for number in range(NUM_PEOPLE)
    ]
    for person in people:
        person.start()
    print(f"The dashboard is at {url}/ (press Ctrl-C to stop)", file=sys.stderr)
    try:
        end = time.monotonic() + seconds
        if pictures is not None:
            is_over.wait(min(seconds, 150))
            take_pictures(url, pictures)
        else:
            while time.monotonic() < end:
                is_over.wait(1)
    finally:
        is_over.set()
        for person in people:
            person.join()


def chat(url: str, number: int, is_over: Callable[[], bool]) -> None:
    """One client: asks a few questions about a document, then takes another."""
    rng = random.Random(number)
    with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        while not is_over():
            about = "".join(islice(logbook(rng.randrange(NUM_DOCUMENTS)), NUM_ENTRIES))
            messages = [{"role": "user", "content": f"{about}\n\n{rng.choice(QUESTIONS)}"}]
            for _ in range(rng.randint(2, 4)):
                if is_over():
                    return
                try:
                    answer = client.chat.completions.create(
                        model="smollm2-135m",
                        messages=messages,  # type: ignore[arg-type]
                        max_tokens=rng.choice((12, 24, 40)),
                        user=f"person {number}",
                    )
                except APIError:
                    time.sleep(1)
                    continue
                text = answer.choices[0].message.content
                messages.append({"role": "assistant", "content": text})
                messages.append({"role": "user", "content": rng.choice(QUESTIONS)})


def take_pictures(url: str, folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, size, theme in (
            ("light", (1280, 900), "light"),
            ("dark", (1280, 900), "dark"),
            ("phone", (390, 844), "light"),
        ):
            page = browser.new_page(
                viewport={"width": size[0], "height": size[1]}, color_scheme=theme
            )
            page.goto(url)
            page.wait_for_selector("#stories-rows button")
            page.wait_for_timeout(3000)
            page.screenshot(path=folder / f"dashboard-{name}.png", full_page=name != "phone")
            if name == "light":
                rows = page.locator("#stories-rows tr", has=page.locator(".bar .host, .bar .disk"))
                (rows if rows.count() else page.locator("#stories-rows tr")).first.locator(
                    "button"
                ).click()
                page.wait_for_timeout(500)
                page.locator("dialog#story").screenshot(path=folder / "dashboard-request.png")
                page.keyboard.press("Escape")
                page.get_by_label("Your message").fill("What is a penstock?")
                page.get_by_label("At most").fill("40")
                for turn in range(2):
                    page.get_by_role("button", name="Send").click()
                    page.wait_for_function(
                        "(n) => [...document.querySelectorAll('#chat-log .about')]"
                        "[n]?.textContent.includes('cached')",
                        arg=turn,
                        timeout=120_000,
                    )
                    page.get_by_label("Your message").fill("And what is it for?")
                page.locator("#chat").screenshot(path=folder / "dashboard-chat.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
