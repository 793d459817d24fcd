"""The page in a browser, against a server that streams what it is told to, when it is told to, and the real one."""

import re
import threading

import pytest

from sigma0.ladder import Entropy, FidelityLadder
from tests.serve.conftest import served, two_rungs
from tests.serve.page.page_server import STORY, answer, ask, background, chunk, token

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.slow


@pytest.fixture
def opened(page, server):
    def opens(**about):
        server.about |= about
        page.goto(server.url)
        expect(page.locator("#model-line")).to_contain_text("pocket")
        return page

    return opens


def tokens(page):
    return page.locator("#conversation .token")


def finish(page, server, chunks=None, question="Does Anna sleep?"):
    chunks = answer(STORY) if chunks is None else chunks
    server.answers.append(chunks)
    ask(page, question)
    server.release(len(chunks))
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def status_noted(page):
    """The status that Chromium itself complains of, which is no fault of the page."""
    return re.search(r"\d{3}", page.complaints.pop()).group()


def overflows(page):
    return page.evaluate("() => document.documentElement.scrollWidth > innerWidth")


def test_tokens_come_one_by_one_and_the_figures_with_them(opened, server):
    page = opened()
    chunks = answer(STORY)
    server.answers.append(chunks)
    ask(page)
    compute, line = page.locator("#compute"), page.locator("#margins polyline")
    output = []
    for count in range(1, len(STORY) + 1):
        server.release()
        expect(page.locator("#compute-text")).to_contain_text(f"of {4 * count} passes")
        expect(tokens(page)).to_have_count(count)
        assert len(line.get_attribute("points").split()) == count
        output.append(compute.get_attribute("aria-valuetext"))
        expect(page.locator("#finished-answers p")).to_have_count(0)
    assert output == [
        "1 of 4 passes, 75 % saved",
        "5 of 8 passes, 38 % saved",
        "7 of 12 passes, 42 % saved",
        "8 of 16 passes, 50 % saved",
    ]
    expect(page.locator("#verdict")).to_be_hidden()
    server.release(2)
    expect(page.locator("#verdict")).to_have_text(re.compile("Confident: may still be wrong$"))
    expect(page.locator("#verdict-text")).to_have_text("All is well.")
    # the end's `passes` are of another kind than the meter's
    assert compute.get_attribute("aria-valuenow") == "8"
    expect(page.locator("#margins-text")).to_contain_text("least 0.20 at token 2")
    expect(page.locator("#collapse-text")).to_contain_text("highest 0.30")
    expect(page.locator("#finished-answers p")).to_have_text(
        ["Yes, Anna sleeps. Verdict: Confident; may still be wrong."]
    )


def test_depths_differ_in_colour_weight_and_words(opened, server):
    page = opened()
    finish(page, server)
    first, second, third, fourth = (tokens(page).nth(index) for index in range(4))
    assert len({background(item) for item in (first, second, third)}) == 3
    assert background(first) == background(fourth)
    weights = [item.evaluate("it => parseFloat(getComputedStyle(it).borderBottomWidth)") for item in (first, second)]
    assert weights[0] < weights[1]
    assert "depth 4 of 4" in second.get_attribute("title")
    assert "depth 4 of 4" in second.get_attribute("aria-label")
    page.get_by_label("Depth as numbers").check()
    assert second.evaluate("it => getComputedStyle(it, '::after').content") == '"4"'
    assert page.locator("#conversation .tokens").text_content() == "Yes, Anna sleeps.\n"


def is_green(colour):
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    return green > max(red, blue)


@pytest.mark.grid(fast=0, slow=2)
@pytest.mark.parametrize("door, word", [("converge", "Confident"), ("escalate", "Escalate"), ("abort", "Aborted")])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_doors_are_told_by_icon_and_word_and_none_as_being_right(opened, server, door, word, scheme):
    page = opened()
    page.emulate_media(color_scheme=scheme)
    finish(page, server, answer(STORY, door, "it did not converge."))
    expect(page.locator("#verdict")).to_contain_text(word)
    expect(page.locator("#verdict .door-icon")).not_to_be_empty()
    expect(page.locator("#verdict-text")).to_have_text("It did not converge.")
    foot = page.locator("#conversation .foot")
    assert ("Confident; may still be wrong" in foot.inner_text()) == (door == "converge")
    everything = page.locator("body").inner_text()
    assert not re.search("[✓✔☑✅]|correct|Converged|StepResult", everything), everything
    assert ("Confident" in everything) == ("◆" in everything) == (door == "converge")
    icon, text = page.locator("#verdict .door-icon"), page.locator("#verdict-text")
    colours = [it.evaluate("it => getComputedStyle(it).color") for it in (icon, foot, text)]
    assert not any(map(is_green, colours)) and (colours[0] == colours[2] or door != "converge")
    assert background(page.locator("#verdict")) != colours[0]


CALIBRATION = {"answers": 2000, "auroc": 0.93, "calibration_error": 0.01}


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize(
    "calibration, verdict, end, output",
    [
        (None, {}, {}, "0.95, a score that was not calibrated"),
        (CALIBRATION, {}, {}, "0.95, calibrated on 2,000 answers"),
        (CALIBRATION, {"confidence": 0.99731}, {}, "0.9973, calibrated on 2,000 answers"),
        (CALIBRATION, {"confidence": 0.99997}, {}, "over 0.9999, calibrated on 2,000 answers"),
        (CALIBRATION, {"confidence": None}, {}, "not known"),
        (CALIBRATION, {"reason": "out_of_calibration"}, {}, "0.95, but out of calibration"),
        (CALIBRATION, {}, {"costs": [{"name": "pocket"}]}, "0.95"),
    ],
)
def test_the_confidence_is_told_with_what_it_is(opened, server, calibration, verdict, end, output):
    page = opened(confidence=calibration)
    chunks = answer(STORY)
    last = chunks[-2]["sigma0"]["choices"][0]
    last |= {"verdict": last["verdict"] | verdict} | end
    expect(page.locator("#verdict-details")).to_be_hidden()
    finish(page, server, chunks)
    expect(page.locator("#verdict-details dt")).to_have_text("Confidence")
    expect(page.locator("#verdict-details dd")).to_have_text(output)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#verdict-details")).to_be_hidden()


@pytest.mark.exhaustive
def test_examples_are_shown_and_asked_by_a_click(opened, server):
    story = "Mary went to the park. The hat is with Mary."
    examples = [f"{story} Where is the hat?", "<b>No question", "Who is it?", "A fourth?"]
    page = opened(knows="stories of hats", examples=examples)
    expect(page.locator("#knows")).to_have_text("pocket knows stories of hats.")
    buttons = page.get_by_role("group", name="Examples to ask").get_by_role("button")
    expect(buttons).to_have_text([examples[0], examples[1], examples[2]])
    expect(buttons.first.locator(".last-question")).to_have_text("Where is the hat?")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.locator("#welcome p, #welcome button, #welcome span").evaluate_all(CONTRAST) == []
    page.set_viewport_size({"width": 320, "height": 640})
    assert not overflows(page)
    chunks = answer(STORY)
    server.answers.append(chunks)
    buttons.first.click()
    server.release(len(chunks))
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    assert [item["content"] for item in server.asked[-1]["messages"]] == [examples[0]]
    expect(page.locator("#examples")).to_be_hidden()
    page.get_by_role("button", name="New chat").click()
    expect(buttons).to_have_count(3)


def test_a_model_that_says_nothing_of_itself_shows_no_examples(opened):
    page = opened(knows=None, examples=None)
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator("#knows")).to_be_hidden()
    expect(page.locator("#examples")).to_be_hidden()


def test_tokens_by_keyboard(opened, server):
    page = opened()
    finish(page, server)
    assert tokens(page).evaluate_all("all => all.filter(it => it.tabIndex === 0).length") == 1
    tokens(page).first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens(page).nth(1)).to_be_focused()
    details = page.locator("#token-details")
    expect(details).to_contain_text("4 of 4")
    expect(details).to_contain_text("full depth, without its rule being met")
    page.keyboard.press("End")
    expect(tokens(page).last).to_be_focused()
    expect(page.locator("#token-text")).to_have_text(".↵")
    page.keyboard.press("ArrowRight")
    expect(tokens(page).last).to_be_focused()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(tokens(page).first).to_have_attribute("aria-selected", "true")
    assert tokens(page).evaluate_all("all => all.filter(it => it.tabIndex === 0).length") == 1
    page.keyboard.press("Escape")
    expect(details).to_be_hidden()
    tokens(page).nth(2).click()
    expect(details).to_contain_text("2 of 4")


def test_stop_ends_the_answer_and_leaves_the_part_so_far(opened, server):
    page = opened()
    server.answers.append(answer(STORY * 200))
    ask(page)
    server.release(2)
    expect(tokens(page)).to_have_count(2)
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".foot")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(page.locator("#error")).to_be_empty()
    server.release(len(STORY) * 200)
    assert server.hung_up.wait(60)
    assert tokens(page).count() == 2


def test_turns_are_sent_again_and_a_new_chat_forgets_them(opened, server):
    page = opened()
    finish(page, server)
    finish(page, server, question="And Ben?")
    assert [item["role"] for item in server.asked[1]["messages"]] == ["user", "assistant", "user"]
    assert server.asked[1]["messages"][1]["content"] == "Yes, Anna sleeps.\n"
    assert server.asked[1]["stream"] is True and server.asked[1]["stream_options"] == {"include_usage": True}
    page.get_by_role("button", name="New chat").click()
    expect(tokens(page)).to_have_count(0)
    expect(page.locator("#compute-text")).to_have_text("No passes yet.")
    finish(page, server)
    assert len(server.asked[2]["messages"]) == 1


def test_settings_make_the_request(opened, server):
    page = opened(ladder=["pocket", "pocket-large"])
    finish(page, server)
    assert server.asked[-1]["max_tokens"] == 256
    assert not {"sigma0", "reasoning_effort"} & set(server.asked[-1])
    page.get_by_label("When tokens stop").select_option("high")
    page.get_by_label("Max tokens").fill("12")
    finish(page, server)
    assert server.asked[-1]["reasoning_effort"] == "high" and server.asked[-1]["max_tokens"] == 12
    page.get_by_label("Skipped loops").select_option("verify")
    finish(page, server)
    assert server.asked[-1]["sigma0"] == {"exit": {"mode": "qexit", "q": 0.8, "after_exit": "verify"}}
    assert "reasoning_effort" not in server.asked[-1]
    page.get_by_label("Exit threshold").fill("0.25")
    page.get_by_label("Hand up").check()
    finish(page, server)
    expected = {"exit": {"mode": "qexit", "q": 0.25, "after_exit": "verify"}, "ladder": "token"}
    assert server.asked[-1]["sigma0"] == expected
    # the threshold of another rule, and never 0
    opened(exit={"mode": "margin", "theta": 0.9}, ladder=None)
    page.get_by_label("Exit threshold").fill("0")
    finish(page, server)
    assert server.asked[-1]["sigma0"] == {"exit": {"mode": "margin", "theta": 0.01}}
    expect(page.get_by_label("Hand up")).to_be_hidden()


def test_hand_ups_are_marked_and_counted(opened, server):
    page = opened(ladder=["pocket", "pocket-large"])
    parked = token(" Ben", 0, rung="pocket-large", reason=None, margin=None)
    finish(page, server, answer([STORY[0], STORY[1] | {"handed_up": "margin", "rung": "pocket-large"}, parked]))
    expect(page.locator("#hand-ups-text")).to_have_text("2 of 3 tokens, marked ↑, by pocket-large.")
    expect(page.locator("#conversation .handed-up")).to_have_count(2)
    tokens(page).nth(1).click()
    expect(page.locator("#token-details")).to_contain_text("Handed up formargin")
    tokens(page).nth(2).click()
    expect(page.locator("#token-details")).to_contain_text("no loops")


@pytest.mark.exhaustive
def test_the_end_settles_what_was_open(opened, server):
    page = opened()
    *chunks, end, usage = answer([token("Yes", 1, fate=None)])
    end["sigma0"]["choices"][0] |= {"fates": ["spiral"], "door": None, "door_text": None, "verdict": None}
    finish(page, server, [*chunks, end, usage])
    tokens(page).first.click()
    expect(page.locator("#token-details")).to_contain_text("spiralling")
    expect(page.locator("#verdict-text")).to_have_text("Verdicts are switched off on this server.")


def test_text_of_the_model_is_never_markup(opened, server):
    page = opened()
    finish(page, server, answer([token("<img src=x onerror=alert(1)>", 1), token(" <b>é</b> 漢", 2)]))
    expect(tokens(page).first).to_have_text("<img src=x onerror=alert(1)>")
    assert page.locator("#conversation img, #conversation b").count() == 0


def test_a_busy_server_is_told_of_and_the_question_comes_back(opened, server):
    page = opened()
    server.refusal = (503, {"error": {"message": "the queue is full", "type": "server_error"}})
    ask(page)
    expect(page.get_by_role("alert")).to_have_text(re.compile("^the queue is full. The server is busy: wait"))
    expect(page.get_by_role("textbox", name="Question")).to_have_value("Does Anna sleep?")
    assert status_noted(page) == "503"
    server.refusal = None
    finish(page, server)
    expect(page.get_by_role("alert")).to_be_empty()


@pytest.mark.parametrize(
    "chunks, alert, text",
    [
        ([answer(STORY)[0], {"error": {"message": "out of pages"}}], "out of pages. Send again", "Yes"),
        pytest.param([chunk({"tokens": []}, "Yes")], "broke off before its end", "Yes", marks=pytest.mark.exhaustive),
    ],
)
def test_a_stream_that_ends_in_an_error_or_not_at_all_keeps_what_came_before(opened, server, chunks, alert, text):
    page = opened()
    finish(page, server, chunks)
    expect(page.get_by_role("alert")).to_contain_text(alert)
    expect(page.locator("#conversation .tokens")).to_have_text(text)
    expect(page.locator(".foot")).to_contain_text("broken off")


def test_a_key_is_asked_for_only_when_it_is_wanted(page, server):
    server.key = "secret"
    page.goto(server.url)
    expect(page.get_by_role("alert")).to_contain_text("API key below")
    field = page.get_by_label("API key")
    expect(field).to_be_focused()
    assert field.get_attribute("type") == "password"
    field.fill("secret")
    field.press("Enter")
    expect(field).to_be_hidden()
    expect(page.locator("#model-line")).to_contain_text("pocket")
    finish(page, server)
    expect(tokens(page)).to_have_count(len(STORY))
    assert page.evaluate("() => localStorage.length + sessionStorage.length + document.cookie.length") == 0
    assert status_noted(page) == "401"


def test_dark_and_light(opened, server):
    page = opened()
    grounds = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        grounds[scheme] = background(page.locator("body"))
    assert grounds == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}
    page.get_by_role("button", name="Use light colours").click()
    assert background(page.locator("body")) == grounds["light"]
    page.get_by_role("button", name="Use dark colours").click()
    assert background(page.locator("body")) == grounds["dark"]


# the contrast of what is drawn: the canvas resolves whatever form a colour was computed to
CONTRAST = """all => all.filter(it => it.offsetParent && it.textContent.trim()).map(it => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  const brush = canvas.getContext("2d", {willReadFrequently: true});
  const layers = [];
  for (let at = it; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
  const light = colours => {
    for (const colour of colours) { brush.fillStyle = colour; brush.fillRect(0, 0, 1, 1); }
    const parts = [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3).map(part => part / 255);
    const [r, g, b] = parts.map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [low, high] = [light(layers), light([...layers, getComputedStyle(it).color])].sort((a, b) => a - b);
  return [it.id || it.className || it.tagName, (high + 0.05) / (low + 0.05)];
}).filter(([, ratio]) => ratio < 4.5)"""


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(opened, server, scheme):
    page = opened(total_loops=8)
    page.emulate_media(color_scheme=scheme)
    chunks = answer([token(f" word{depth}", depth) for depth in range(9)])
    for item in chunks:
        item["sigma0"]["total_loops"] = 8
    finish(page, server, chunks)
    expect(page.locator("#conversation .token.shade-7")).to_have_count(1)
    tokens(page).first.click()
    everything = "h1, h2, p, dt, dd, label, output, summary, .hint, .token, .count, button:enabled, select, article"
    assert page.locator(everything).evaluate_all(CONTRAST) == []


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("width", [320, 480, 1280])
def test_nothing_reaches_beyond_the_screen(opened, server, width):
    page = opened(model="pocket-with-quite-a-long-name", ladder=["pocket", "pocket-large"])
    page.set_viewport_size({"width": width, "height": 640})
    if page.locator("#settings").get_attribute("open") is None:
        page.locator("summary").click()
    finish(page, server, answer([token("x" * 300, 1), *STORY]), question="y" * 200)
    assert not overflows(page)
    tokens(page).nth(1).click()
    expect(page.locator("#token-details")).to_be_visible()
    assert not overflows(page)


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("motion, moves", [("reduce", False), ("no-preference", True)])
def test_nothing_moves_where_that_is_not_wanted(opened, server, motion, moves):
    page = opened()
    page.emulate_media(reduced_motion=motion)
    server.answers.append(answer(STORY))
    ask(page)
    server.release()
    expect(tokens(page)).to_have_count(1)
    assert (tokens(page).first.evaluate("it => getComputedStyle(it).animationName") != "none") is moves
    assert (page.locator("#compute .fill").evaluate("it => getComputedStyle(it).transitionDuration") != "0s") is moves
    server.release(len(STORY) + 1)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_events_may_be_cut_anywhere(opened):
    page = opened()
    text = ': hello\r\nevent: x\r\ndata: {"a":\r\ndata: 1}\r\n\r\ndata:two\n\ndata: three\r\rdata: [DONE]'
    result = page.evaluate(
        """async text => {
          const { EventParser } = await import("/page/stream.js");
          const read = size => {
            const parser = new EventParser(), events = [];
            for (let at = 0; at < text.length; at += size) events.push(...parser.push(text.slice(at, at + size)));
            return [...events, ...parser.end()];
          };
          return [1, 2, 3, 7, 1000].map(read);
        }""",
        text,
    )
    assert result == [['{"a":\n1}', "two", "three", "[DONE]"]] * 5


def test_every_control_has_a_name(opened):
    page = opened(ladder=["pocket", "pocket-large"])
    named = "all => all.filter(it => !it.labels?.length && !it.getAttribute('aria-label') && !it.textContent.trim())"
    assert page.locator("button, input, select, textarea").evaluate_all(f"{named}.map(it => it.id)") == []
    assert page.get_by_role("log").get_attribute("aria-live") == "polite"


QUESTION = "Mary went to the kitchen. John went to the garden. The cup was taken by Mary. Where is the cup?"


@pytest.fixture(scope="module")
def live(pocket):
    with served(pocket, ladder=FidelityLadder(two_rungs(pocket), policy=Entropy(above=0.0))) as server:
        yield server


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tokens_of_a_real_model_come_one_by_one_and_a_verdict_at_the_end(page, live, scheme):
    page.emulate_media(color_scheme=scheme)
    page.goto(live.url)
    expect(page.locator("#model-line")).to_contain_text("pocket")
    compute = page.locator("#compute")
    live.service.held.tokens = threading.Semaphore(0)
    try:
        ask(page, QUESTION)
        output = []
        for count in (1, 2, 3):
            live.service.held.tokens.release()
            expect(tokens(page)).to_have_count(count)
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
    assert "".join(tokens(page).all_text_contents()) == said.replace(" ", "")
    assert said.strip() in page.locator("#conversation").inner_text()
    choice = answer.model_extra["sigma0"]["choices"][0]
    depths = [int(item.get_attribute("data-depth")) for item in tokens(page).all()]
    assert depths == choice["depths"][: len(depths)]
    assert choice["door_text"].startswith("converge: confidence 0.")
    expect(page.locator("#verdict-text")).to_contain_text("Confidence 0.")
    expect(page.locator("#verdict-details")).to_contain_text(str(choice["verdict"]["confidence"])[:4])
    colours = tokens(page).evaluate_all("all => all.map(it => getComputedStyle(it).backgroundColor)")
    assert len(set(zip(depths, colours, strict=True))) == len(set(colours)) == len(set(depths)) > 1
    assert (background(page.locator("body")) == "rgb(255, 255, 255)") == (scheme == "light")


def test_a_routed_answer_keeps_its_depths(page, live, monkeypatch):
    monkeypatch.setenv("SIGMA0_ROUTING", "1")
    page.goto(live.url)
    expect(page.locator("#model-line")).to_contain_text("pocket")
    ask(page, "Lisa, oh no, where where?")
    expect(page.locator("#conversation .answer:not(.writing)")).to_have_count(1)
    expect(page.locator("#conversation .token.handed-up").first).to_be_visible()
    expect(page.locator("#compute")).to_have_attribute("aria-valuetext", re.compile(r"\d+ of \d+ passes"))
