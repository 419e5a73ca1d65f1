"""The page in headless Chromium: a chat, by keyboard alone, with a key, in both colour schemes."""

import asyncio
import contextlib
import os
import pathlib
import re
import shutil

import pytest
import pytest_asyncio
from server_fakes import byte_tokenizer, serving

from jaxserve.observation import EngineState, PrefixNode, SequenceRecord, StepRecord

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH (apt-get install chromium)"),
]

ROOMY = {"max_model_len": 4096, "max_request_tokens": 4096}
STATE = EngineState(
    now_s=9.0,
    sequences=[
        SequenceRecord("chatcmpl-8a1f02", "running", 1.2, 300, 256, 321, 21, 256, 21, 0),
        SequenceRecord("chatcmpl-77c0de", "compiling", 0.2, 40, 0, 0, 0, 64, 0, 0),
    ],
    steps=[
        StepRecord("mixed", 1.0, 1.06, None, 2, 64, 64),
        *(
            StepRecord("decode", 1.07 + i / 100, 1.079 + i / 100, 0.0006, 3, 3, 4)
            for i in range(20)
        ),
    ],
    num_prefix_pages=40,
    prefix_nodes=[
        PrefixNode(3, 0, 12, 2, [1] * 16), PrefixNode(4, 3, 12, 2, [2] * 16),
        PrefixNode(5, 4, 3, 0, [3] * 16), PrefixNode(6, 4, 1, 1, [4] * 16),
    ],
)  # fmt: skip
CONTRAST = """() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = channels(color).slice(0, 3).map((c) => c / 255)
      .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if ((channels(color)[3] ?? 1) === 1) return color;
    }
  };
  const poor = [];
  for (const e of document.querySelectorAll("body *")) {
    const says = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!says || !e.getClientRects().length || e.disabled) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(`${e.tagName} ${e.className}: ${e.textContent}`);
  }
  return poor;
}"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    async with playwright.async_playwright() as api:
        chromium = await api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        await chromium.close()


@contextlib.asynccontextmanager
async def opened(browser, served, **options):
    """The page of a server; anything that it asks of another host, or logs as an error, fails."""
    context = await browser.new_context(viewport={"width": 1280, "height": 900}, **options)
    context.set_default_timeout(10_000)
    page = await context.new_page()
    asked, faults = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    await page.goto(served.url + "/")
    try:
        yield page
        others = [u for u in asked if not u.startswith((served.url + "/", "data:"))]
        assert not others, f"asked of other hosts: {others}"
        assert not faults
    finally:
        await context.close()


async def shown(page, selector: str, pattern: str) -> str:
    """The text of what `selector` finds, once it matches."""
    async with asyncio.timeout(10):
        while not re.search(pattern, text := await page.text_content(selector) or ""):
            await asyncio.sleep(0.02)
    return text


async def look(page, name: str) -> None:
    """Keeps a picture where $JAXSERVE_SCREENSHOTS says."""
    if folder := os.environ.get("JAXSERVE_SCREENSHOTS"):
        await page.screenshot(path=pathlib.Path(folder) / f"{name}.png", full_page=True)


async def open_settings(page) -> None:
    await page.wait_for_selector("#control-priority", state="attached")
    await page.evaluate("document.querySelectorAll('details').forEach((d) => d.open = true)")


def slow(engine) -> None:
    engine.step_s = 0.02
    engine.state = STATE


async def focused(page) -> str:
    return await page.evaluate("document.activeElement.id || document.activeElement.textContent")


async def test_a_chat_streams_with_its_speed_and_goes_on_from_what_was_said(browser):
    async with (
        serving(set_up=slow, info=ROOMY) as served,
        opened(browser, served) as page,
    ):
        await page.fill("#prompt", "First")
        await page.click("#send")
        await shown(page, "#speed", r"\d+ tokens · [\d.]+ tokens/s · first after \d+ ms")
        assert await page.is_disabled("#send")
        await look(page, "chat")
        await page.click("#stop")
        await shown(page, ".message.assistant .who", "ended by you")
        async with asyncio.timeout(5):
            while served.engine.running:
                await asyncio.sleep(0.01)
        assert served.engine.aborted, "the engine was told"
        told = await page.text_content(".message.assistant .text")
        served.engine.step_s = 0
        await open_settings(page)
        await page.fill("#control-max_tokens", "7")
        await page.fill("#prompt", "Second")
        await page.keyboard.press("Enter")
        await shown(page, ".message.assistant:last-child .who", "ended by length")
        assert await page.text_content("#speed") != ""
        prompt = bytes(served.engine.requests[-1].token_ids).decode("latin1")
        assert len(prompt) > len("FirstSecond") + len(told)
        assert await page.text_content("#error") == ""


async def test_a_new_chat_knows_nothing_of_the_one_that_it_ends(browser):
    async with serving(set_up=slow, info=ROOMY) as served, opened(browser, served) as page:
        await page.fill("#prompt", "First")
        await page.keyboard.press("Enter")
        await shown(page, "#speed", r"tokens/s")
        await page.click("#clear")
        await page.wait_for_selector("#send:not(:disabled)")
        assert await page.text_content("#messages") == ""
        assert await page.text_content("#speed") == ""
        await page.fill("#prompt", "Second")
        await page.keyboard.press("Enter")
        await shown(page, "#speed", r"tokens/s")
        prompt = byte_tokenizer().decode(served.engine.requests[-1].token_ids)
        assert "Second" in prompt
        assert "First" not in prompt
        served.engine.die()
        await shown(page, ".message.assistant .who", "ended by an error")
        await page.fill("#prompt", "Third")
        await page.keyboard.press("Enter")
        await shown(page, "#error", r"\w")
        assert await page.text_content("#speed") == "", "no token came, none is awaited"


async def test_every_control_reaches_the_request(browser):
    async with serving(info=ROOMY) as served, opened(browser, served) as page:
        await open_settings(page)
        for name, text in {
            "max_tokens": "6", "temperature": "0.5", "top_k": "7", "seed": "4",
            "stop": "zzz\nyyy", "logit_bias": '{"65": -5}', "allowed_token_ids": "65, 66",
            "min_p": "0.1", "top_logprobs": "2",
        }.items():  # fmt: skip
            await page.fill(f"#control-{name}", text)
        await page.select_option("#control-ignore_eos", "true")
        await page.select_option("#control-logprobs", "true")
        await page.fill("#system", "Be brief.")
        await page.fill("#prompt", "Hi")
        await page.keyboard.press("Enter")
        await shown(page, ".message.assistant summary", "Log-probabilities")
        [request] = served.engine.requests
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (6, 0.5, 7)
        assert (sampling.seed, sampling.min_p, sampling.logprobs) == (4, 0.1, 2)
        assert sampling.logit_bias == {65: -5.0}
        assert sampling.allowed_token_ids == (65, 66)
        await page.click("#reset")
        await page.select_option("#control-stream", "false")
        await page.fill("#control-max_tokens", "5")
        await page.fill("#control-prompt_logprobs", "1")
        await page.fill("#prompt", "Whole")
        await page.keyboard.press("Enter")
        await shown(page, "#speed", r"5 tokens in")
        assert await page.locator(".message.assistant:last-child summary").count() == 1
        await page.fill("#control-logit_bias", "{oops")
        await page.fill("#prompt", "x")
        await page.keyboard.press("Enter")
        await shown(page, "#error", "logit_bias: is no JSON")
        await page.fill("#control-logit_bias", "")
        await page.fill("#control-top_p", "7")
        await page.keyboard.press("Tab")
        await page.click("#send")
        await shown(page, "#error", "top_p")
        assert len(served.engine.requests) == 2


async def test_the_keyboard_is_enough(browser):
    async with (
        serving(set_up=slow, info=ROOMY, api_key=("secret",)) as served,
        opened(browser, served) as page,
    ):
        press = page.keyboard.press
        assert await focused(page) == "prompt"
        await page.keyboard.type("Hello")
        await press("Enter")
        await shown(page, "#error", "API key is missing")
        assert await focused(page) == "key", "where the key is to be typed"
        await page.keyboard.type("secret")
        await press("Enter")
        await shown(page, "#health", "running")
        stops: list[str] = []
        for _ in range(40):
            await press("Tab")
            stops.append(await focused(page))
            outline = await page.evaluate(
                "(() => { const s = getComputedStyle(document.activeElement);"
                " return s.outlineStyle + ' ' + s.outlineWidth; })()"
            )
            if await page.evaluate("document.activeElement === document.body"):
                break
            assert outline == "solid 3px", f"{stops[-1]} shows no focus"
            if stops[-1] == "Sampling":
                await press("Enter")
                assert await page.evaluate("document.getElementById('settings').open")
        order = [s for s in stops if s in ("clear", "messages", "prompt", "send", "Sampling")]
        assert order == ["clear", "messages", "prompt", "send", "Sampling"]
        assert {"system", "control-max_tokens", "control-temperature", "pause"} <= set(stops)
        await page.focus("#prompt")
        await press("Control+a")
        await page.keyboard.type("Hello again")
        await press("Enter")
        await shown(page, "#speed", r"tokens/s")
        await press("Escape")
        await shown(page, ".message.assistant:last-child .who", "ended by you")
        assert await focused(page) == "prompt"


async def test_the_rate_says_its_scale(browser):
    looks = 0

    async def answer(route) -> None:
        nonlocal looks
        looks += 1
        state = await (await route.fetch()).json()
        state["now_s"] = looks
        state["stats"]["generated_tokens"] = 50 * min(looks, 2)
        await route.fulfill(json=state)

    async with serving(set_up=slow, info=ROOMY) as served, opened(browser, served) as page:
        await page.route("**/engine_state", answer)
        await page.reload()
        await shown(page, "#rate-text", r"^top: 50 tokens/s$")
        await page.unroute_all(behavior="wait")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_engine_is_shown_and_all_is_legible_and_labelled(browser, scheme):
    async with (
        serving(set_up=slow, info=ROOMY) as served,
        opened(browser, served, color_scheme=scheme) as page,
    ):
        await page.fill("#prompt", "Hi")
        await page.keyboard.press("Enter")
        await shown(page, "#health", "running")
        await shown(page, "#queue", "chatcmpl-8a1f02running1.2 s")
        await shown(
            page, "#steps-text", "21 steps: 20 decode, 1 mixed; median 9.00 ms a step, 0.60 ms"
        )
        await shown(page, "#pages-text", r"1 in use 0 cached, 63 free of 64")
        await shown(page, "#prefix-text", "40 pages in the tree; shown: the 4 most often")
        tree = await page.text_content("#prefixes")
        assert tree.startswith(
            "12 hits · 32 tokens in 2 pages, held by 23 hits · 16 tokens in 1 page"
        )
        assert await page.locator("#prefixes ul ul li").count() == 2
        assert await page.locator("#steps rect").count() == 42
        await open_settings(page)
        assert await page.evaluate(CONTRAST) == []
        nameless = await page.evaluate(
            "[...document.querySelectorAll('input, select, textarea')]"
            ".filter((e) => !e.labels.length).map((e) => e.id)"
        )
        assert nameless == []
        images = page.locator("[role=img]")
        for i in range(await images.count()):
            assert await images.nth(i).get_attribute("aria-label")
        await look(page, scheme)
        for width in (1280, 360):
            await page.set_viewport_size({"width": width, "height": 800})
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await page.click("#pause")
        assert await page.get_attribute("#pause", "aria-pressed") == "true"
