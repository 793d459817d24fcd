"""The page in a real browser on the real server and the real model: a question typed, tokens watched as they come."""

import re
import threading
from contextlib import nullcontext

import pytest

from sigma0.ladder import Entropy, FidelityLadder
from tests.calibrated import calibrated
from tests.serve.conftest import served, two_rungs
from tests.serve.page.test_page import ask, background

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.slow

QUESTION = "Mary went to the kitchen. John went to the garden. The cup was taken by Mary. Where is the cup?"


@pytest.fixture(scope="module")
def live(pocket):
    with served(pocket, ladder=FidelityLadder(two_rungs(pocket), policy=Entropy(above=0.0))) as server:
        yield server


@pytest.fixture
def opened(page, live):
    """The page of the live server, in a scheme."""

    def opens(scheme="light", server=live):
        page.emulate_media(color_scheme=scheme)
        page.goto(server.url)
        expect(page.locator("#model-line")).to_contain_text("pocket")
        return page

    return opens


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tokens_come_one_by_one_and_a_verdict_at_the_end(opened, live, scheme):
    page = opened(scheme)
    tokens, compute = page.locator("#conversation .token"), page.locator("#compute")
    live.service.held.tokens = threading.Semaphore(0)
    try:
        ask(page, QUESTION)
        output = []
        for count in (1, 2, 3):
            live.service.held.tokens.release()
            expect(tokens).to_have_count(count)
            expect(page.locator("#compute-text")).to_contain_text(f"of {6 * count} passes")
            output.append(compute.get_attribute("aria-valuetext"))
        assert len(set(output)) == 3, "the meter moves with every token"
        expect(page.locator("#verdict")).to_be_hidden()
    finally:
        waiting, live.service.held.tokens = live.service.held.tokens, None
        waiting.release(100)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(page.locator("#verdict")).to_be_visible()
    asked = [{"role": "user", "content": QUESTION}]
    answer = live.client.chat.completions.create(model="pocket", messages=asked, max_tokens=256)
    said = answer.choices[0].message.content
    # white space stands beside the tokens
    assert "".join(tokens.all_text_contents()) == said.replace(" ", "")
    assert said.strip() in page.locator("#conversation").inner_text()
    choice = answer.model_extra["sigma0"]["choices"][0]
    depths = [int(item.get_attribute("data-depth")) for item in tokens.all()]
    assert depths == choice["depths"][: len(depths)]
    assert choice["door_text"].startswith("converge: confidence 0.")
    expect(page.locator("#verdict-text")).to_contain_text("Confidence 0.")
    expect(page.locator("#verdict-details")).to_contain_text(str(choice["verdict"]["confidence"])[:4])
    colours = tokens.evaluate_all("all => all.map(it => getComputedStyle(it).backgroundColor)")
    assert len(set(zip(depths, colours, strict=True))) == len(set(colours)) == len(set(depths)) > 1
    assert (background(page.locator("body")) == "rgb(255, 255, 255)") == (scheme == "light")


def test_hand_ups_are_counted_and_marked(opened):
    page = opened()
    page.get_by_label("Hand up").check()
    ask(page, QUESTION)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    marked = page.locator("#conversation .token.handed-up")
    assert marked.count() > 0
    expect(page.locator("#hand-ups-text")).to_contain_text(str(marked.count()))


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("current", [True, False])
def test_a_question_that_is_not_of_the_calibration_ends_under_no_open_door(opened, live, pocket, current):
    """By the shipped calibration, and by one that knows nothing but one question."""
    with (
        nullcontext(live)
        if current
        else served(calibrated(pocket, [[{"role": "user", "content": QUESTION}]])) as server
    ):
        page = opened("light", server)
        for question, word in ((QUESTION, "Confident"), ("Who is the president?", "Escalate")):
            page.get_by_role("button", name="New chat").click()
            ask(page, question)
            expect(page.get_by_role("button", name="Send")).to_be_enabled()
            expect(page.locator("#verdict .door-word")).to_contain_text(word)
            expect(page.locator("#conversation .foot")).to_contain_text(word)
        expect(page.locator("#verdict-text")).to_contain_text("It is unlike what its confidence was calibrated on")
        expect(page.locator("#verdict-details")).to_contain_text("but out of calibration")
        assert not re.search("[◆✓✔✅]|Confident", page.locator("body").inner_text())


def test_a_routed_answer_keeps_its_depths(opened, live, monkeypatch):
    monkeypatch.setenv("SIGMA0_ROUTING", "1")
    page = opened()
    ask(page, "Lisa, oh no, where where?")
    expect(page.locator("#conversation .answer:not(.writing)")).to_have_count(1)
    expect(page.locator("#conversation .token.handed-up").first).to_be_visible()
    expect(page.locator("#compute")).to_have_attribute("aria-valuetext", re.compile(r"\d+ of \d+ passes"))
