"""The dashboard in a real browser: it loads, it moves, it tells, it recovers."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server.running import Local

from penstock.server.app import AppSettings

Pages = Callable[..., Any]

IS_ANSWERED = "() => document.querySelector('#chat-log .about')?.textContent.includes('cached')"
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>&lt;b&gt;'


@pytest.fixture(scope="module")
def load(server: Local) -> Iterator[None]:
    """Somebody else uses the server all the while."""
    is_over = threading.Event()

    def work(number: int) -> None:
        with server.client() as client:
            turn = 0
            while not is_over.is_set():
                turn += 1
                # By turns one that is known, and one that is new: something is always saved.
                name = turn if turn % 2 else turn % 10
                text = f"{name} {number} " + "the river and the gate " * 30
                body = {"prompt": text, "max_tokens": 8, "cache_salt": f"user {number}"}
                client.post("/v1/completions", json=body)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    yield
    is_over.set()
    for thread in threads:
        thread.join()


def is_serving(page: Any) -> None:
    page.wait_for_selector("#status[data-state=serving]")


def number_in(text: str) -> float:
    found = re.search(r"[\d,.]+", text)
    return float(found[0].replace(",", "")) if found else 0.0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_loads_and_its_numbers_move(server: Local, load: None, pages: Pages, theme: str) -> None:
    page = pages(server.url, theme=theme)
    is_serving(page)
    assert page.locator("html").get_attribute("data-theme") == theme
    page.wait_for_function("() => document.querySelector('#tiles .value').textContent !== '–'")
    saved = page.locator("#tiles dl", has_text="Tokens saved").locator(".value")
    before = saved.inner_text()
    page.wait_for_function(
        "([e, was]) => e.textContent !== was", arg=[saved.element_handle(), before]
    )
    vessels = page.locator("#tiers text.name").all_text_contents()
    assert vessels == ["Device", "DRAM", "Disk"]
    page.wait_for_function(
        "() => [...document.querySelectorAll('#tiers text')].some((t) => /B.s/.test(t.textContent))"
    )
    assert page.locator("#charts .chart").count() == 5
    assert "M" in page.locator("#charts .chart > svg path.line-0").nth(3).get_attribute("d")
    page.wait_for_selector("#sessions-rows .bar")
    assert page.locator("#settings-list details").count() >= 4


def test_the_theme_can_be_chosen_and_stays(server: Local, pages: Pages) -> None:
    page = pages(server.url, theme="light")
    is_serving(page)
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="dark and light").click()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert page.evaluate(ground) != light
    page.reload()
    is_serving(page)
    assert page.locator("html").get_attribute("data-theme") == "dark"


def test_a_requests_story_opens_by_keyboard(server: Local, load: None, pages: Pages) -> None:
    page = pages(server.url)
    page.wait_for_selector("#stories-rows button")
    page.locator("#stories-rows button").first.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="One request")
    dialog.wait_for()
    text = dialog.inner_text()
    assert "What it did in" in text
    assert "computed the prompt" in text
    assert re.search(r"First token after [\d.]+ m?s", text)
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")


def test_on_a_phone_nothing_sticks_out(server: Local, load: None, pages: Pages) -> None:
    page = pages(server.url, 390, 844, has_touch=True, is_mobile=True)
    is_serving(page)
    page.wait_for_selector("#stories-rows button")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    outside = page.evaluate(
        """[...document.querySelectorAll('#tiers text, .tile, .chart, button')]
        .filter((e) => e.checkVisibility())
        .map((e) => [e.getBoundingClientRect(), e.textContent])
        .filter(([box]) => box.left < -1 || box.right > 391)
        .map(([, text]) => text)"""
    )
    assert outside == []
    page.locator("#stories-rows button").first.tap()
    page.get_by_role("dialog", name="One request").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_chat_streams_and_shows_what_was_cached(server: Local, pages: Pages) -> None:
    page = pages(server.url)
    is_serving(page)
    box = page.get_by_label("Your message")
    box.fill("Tell me of the river, the gate, the stone and the wheel, all of them, and at length.")
    page.get_by_label("At most").fill("12")
    box.press("Enter")
    about = page.locator("#chat-log .about").first
    page.wait_for_function(
        "() => document.querySelector('#chat-log .about').textContent.includes('cached')"
    )
    assert "0 of" in about.inner_text()
    assert page.locator(".said.assistant").first.inner_text().strip()
    box.fill("And now again?")
    page.get_by_role("button", name="Send").click()
    page.wait_for_function(
        "() => document.querySelectorAll('#chat-log .about')[1]?.textContent.includes('cached')"
    )
    second = page.locator("#chat-log .about").nth(1).inner_text()
    assert number_in(second) > 0, second
    page.locator("#chat-log .about button").nth(1).click()
    page.get_by_role("dialog", name="One request").wait_for()


def test_a_chat_can_be_stopped(model: Path, pages: Pages) -> None:
    server = Local(model).start().slow_down(0.05)
    page = pages(server.url)
    try:
        is_serving(page)
        page.get_by_label("At most").fill("400")
        page.get_by_label("Your message").fill("Say much.")
        page.get_by_role("button", name="Send").click()
        page.wait_for_function(
            "() => document.querySelector('.said.assistant')?.textContent.length > 0"
        )
        page.get_by_role("button", name="Stop").click()
        page.wait_for_function(
            "() => document.querySelector('#chat-log .about').textContent === 'Stopped.'"
        )
        with server.client() as client:
            client.wait_idle()
    finally:
        page.close()
        server.stop()


def test_what_is_said_is_never_markup(server: Local, pages: Pages) -> None:
    with server.client() as client:  # an id may hold little, and a name anything
        body = {"prompt": HOSTILE, "max_tokens": 2, "cache_salt": HOSTILE}
        client.post("/v1/completions", json=body, headers={"X-Request-Id": HOSTILE})
    page = pages(server.url)
    is_serving(page)
    title = page.title()
    page.get_by_label("Your message").fill(HOSTILE)
    page.get_by_label("At most").fill("4")
    page.get_by_role("button", name="Send").click()
    page.wait_for_function("() => document.querySelector('#chat-log .about')?.textContent !== '…'")
    assert page.locator(".said.user").inner_text() == HOSTILE
    assert page.locator("#chat-log img, #chat-log script, #stories-rows img").count() == 0
    page.wait_for_selector("#stories-rows button")
    assert page.title() == title


def test_a_refused_chat_says_why(server: Local, pages: Pages) -> None:
    page = pages(server.url)
    is_serving(page)
    page.get_by_label("Your message").fill("river " * 2000)
    page.get_by_role("button", name="Send").click()
    page.wait_for_selector("#chat-log .about.bad")
    assert "No answer" in page.locator("#chat-log .about").inner_text()
    assert page.get_by_label("Your message").input_value().startswith("river")
    # The browser itself notes every answer of 400 in its console.
    assert [text for text in page.complaints if "400" not in text] == []
    page.complaints.clear()


def test_it_says_when_the_server_is_gone_and_recovers(model: Path, pages: Pages) -> None:
    first = Local(model).start()
    port = int(first.url.rpartition(":")[2])
    page = pages(first.url)
    is_serving(page)
    first.stop()
    page.wait_for_selector("#status[data-state=unreachable]")
    assert "has been unreachable since" in page.get_by_role("alert").inner_text()
    assert page.locator("body[data-stale]").count() == 1
    second = Local(model, port=port).start()
    try:
        is_serving(page)
        assert page.locator("#banner").is_hidden()
        assert page.locator("body[data-stale]").count() == 0
    finally:
        page.close()
        second.stop()
    # The browser itself notes every connection that was refused or cut.
    assert [text for text in page.complaints if "net::ERR" not in text] == []
    page.complaints.clear()


def test_a_key_is_asked_for(model: Path, pages: Pages) -> None:
    server = Local(model, settings=AppSettings(api_key="open sesame")).start()
    page = pages(server.url)
    try:
        dialog = page.get_by_role("dialog", name="requires a key")
        dialog.wait_for()
        page.get_by_label("Key", exact=True).fill("open barley")
        page.keyboard.press("Enter")
        page.get_by_text("This key is wrong.").wait_for()
        page.get_by_label("Key", exact=True).fill("open sesame")
        page.keyboard.press("Enter")
        is_serving(page)
        dialog.wait_for(state="hidden")
        page.get_by_label("Your message").fill("Hello")
        page.get_by_label("At most").fill("2")
        page.get_by_role("button", name="Send").click()
        page.wait_for_function(
            "() => document.querySelector('#chat-log .about')?.textContent.includes('cached')"
        )
        assert "sesame" not in page.content()
    finally:
        page.close()
        server.stop()
    assert [text for text in page.complaints if "401" not in text] == []
    page.complaints.clear()


def test_it_can_be_used_without_a_mouse(server: Local, load: None, pages: Pages) -> None:
    page = pages(server.url)
    page.wait_for_selector("#stories-rows button")
    reached = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
        if "chat-send" in reached:
            break
    assert {"skip", "theme", "chat-text", "chat-send"} <= reached
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, input, textarea, a, [role=img]')]
        .filter((e) => e.checkVisibility())
        .filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length || e.title))
        .map((e) => e.outerHTML)"""
    )
    assert unnamed == []


PAIRS = [
    (f"--{ink}", f"--{ground}")
    for ink, grounds in {
        "ink": ("card", "ground", "warn-ground", "bad-ground"),
        "quiet": ("card", "ground", "warn-ground", "bad-ground"),
        "bad": ("card", "bad-ground"),
        "strong": ("card", "ground", "on-strong"),
    }.items()
    for ground in grounds
]


def contrast(one: str, other: str) -> float:
    """As WCAG has it, of two colours like #17212b."""

    def light(colour: str) -> float:
        shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (
            share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4
            for share in shares
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    lights = sorted((light(one), light(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def test_contrast_is_enough(server: Local, pages: Pages) -> None:
    """Text on its ground, in both themes: 4.5 to 1, as WCAG asks."""
    for theme in ("light", "dark"):
        page = pages(server.url, theme=theme)
        is_serving(page)
        for ink, ground in PAIRS:
            style = "(name) => getComputedStyle(document.documentElement).getPropertyValue(name)"
            ratio = contrast(
                page.evaluate(style, ink).strip(), page.evaluate(style, ground).strip()
            )
            assert ratio >= 4.5, f"{theme}: {ink} on {ground} is {ratio:.2f}"
