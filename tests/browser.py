"""Open built pages in Debian's Chromium: what it reports, what axe finds, how a page looks.

A `conftest.py` imports the fixtures from here: `from browser import chromium, open_page`. A page is
opened from its file, without a network but the loopback interface: by `open_page` in a new empty
profile, by `visit` in a tab that other pages have used.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Playwright, expect, sync_playwright

from labkit.launch.scripts import project_root

AXE = Path(__file__).parent / "site" / "vendor" / "axe.min.js"
MISSING = "There is no chromium on the PATH. On Debian: apt-get install chromium"
PATIENCE = 120_000  # milliseconds, for a machine that is busy
expect.set_options(timeout=PATIENCE)
# No display, no sandbox, no network but the loopback interface.
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
# The theme reads these names; a page without the theme follows prefers-color-scheme.
CHOOSE_THEME = "try {{ localStorage.mode = localStorage.theme = '{theme}' }} catch (error) {{}}"
# Runs before each page, because the tab may have shown another. A page without storage raises.
EMPTY_STORAGE = "try { localStorage.clear(); sessionStorage.clear() } catch (error) {}; "
# What axe counts as a violation that matters here. Those below are `minor`.
IMPACTS = ("critical", "serious", "moderate")
RUN_AXE = """async ([root, only]) => {
    // Without preload: axe would fetch style sheets, which a browser refuses for files.
    const options = {preload: false, rules: {"label-content-name-mismatch": {enabled: true}}};
    return (await axe.run(root, only ? {...options, runOnly: only} : options)).violations;
}"""
# The rules whose findings depend on the colors, and so on the theme.
OF_COLORS = ("color-contrast", "link-in-text-block")


@dataclass
class OpenedPage:
    """A page in the browser, with what it reported since it was opened."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def external(self) -> list[str]:
        """The addresses that the page asked for and that are no files of this machine."""
        return [one for one in self.requests if not one.startswith(("file:", "data:", "blob:"))]

    def weight(self) -> int:
        """The bytes of the page and of every file that it loaded, each counted once."""
        files = {unquote(urlsplit(one).path) for one in self.requests if one.startswith("file:")}
        return sum(Path(file).stat().st_size for file in files)

    def violations(self, root: str = "html", only: Sequence[str] | None = None) -> list[str]:
        """What axe-core finds below the selector `root`: `serious color-contrast: SELECTOR`.

        One sentence for each element, and only findings of impact moderate and above. `only` names
        the rules to check; without it, all of axe's are.
        """
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE.read_text())
        found: list[dict[str, Any]] = self.page.evaluate(RUN_AXE, [root, only])
        return [
            f"{rule['impact']} {rule['id']}: {' '.join(map(str, node['target']))}"
            for rule in found
            if rule["impact"] in IMPACTS
            for node in rule["nodes"]
        ]

    def says(self) -> str:
        """The sentence below a figure's drawing."""
        return self.page.locator(".figure-says").inner_text()

    def wider_by(self) -> int:
        """By how many pixels the whole page is wider than its window, and so scrolls sideways."""
        return self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )


OpenPage = Callable[..., OpenedPage]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """One browser for all tests; `open_page` gives each page an empty profile."""
    with sync_playwright() as playwright:
        browser = start_chromium(playwright)
        yield browser
        browser.close()


def start_chromium(playwright: Playwright) -> Browser:
    """Debian's Chromium, without a window."""
    executable = shutil.which("chromium")
    assert executable, MISSING
    return playwright.chromium.launch(executable_path=executable, headless=True, args=ARGUMENTS)


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[OpenPage]:
    """`open_page(path, width=1280, height=800, theme="light", javascript=True)` → OpenedPage.

    `path` is a file; `query` and `fragment` follow the ? and the # of its address. What a test
    opens is closed when it ends.
    """
    contexts = []

    def open_one(path: Path, *, query: str = "", fragment: str = "", **window: Any) -> OpenedPage:
        opened = _window(chromium, **window)
        contexts.append(opened.page.context)
        opened.page.goto(_address(path, query, fragment))
        return opened

    yield open_one
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def visit(chromium: Browser) -> Iterator[OpenPage]:
    """Like `open_page`, for many pages in turn: `visit(path, width=390, touch=True)` → OpenedPage.

    Visits to windows of one kind share a tab, which takes a third of the time. The storage is
    emptied before each page. The returned object is shared, too, and reports on the last visit
    only.
    """
    tabs: dict[tuple[tuple[str, Any], ...], OpenedPage] = {}

    def visit_one(path: Path, *, query: str = "", fragment: str = "", **window: Any) -> OpenedPage:
        kind = tuple(sorted(window.items()))
        if kind not in tabs:
            tabs[kind] = _window(chromium, before=EMPTY_STORAGE, **window)
            # Otherwise a file that an earlier page has left in memory might not be requested.
            session = tabs[kind].page.context.new_cdp_session(tabs[kind].page)
            session.send("Network.enable")
            session.send("Network.setCacheDisabled", {"cacheDisabled": True})
        opened = tabs[kind]
        opened.page.goto("about:blank")  # ends the page before, which may still report something
        opened.page.mouse.up()
        opened.page.mouse.move(0, 0)
        opened.errors.clear()
        opened.requests.clear()
        opened.page.goto(_address(path, query, fragment))
        return opened

    yield visit_one
    for opened in tabs.values():
        opened.page.context.close()


def _address(path: Path, query: str, fragment: str) -> str:
    after = (f"?{query}" if query else "") + (f"#{fragment}" if fragment else "")
    return path.resolve().as_uri() + after


def _window(
    chromium: Browser,
    *,
    before: str = "",
    width: int = 1280,
    height: int = 800,
    theme: Literal["light", "dark"] = "light",
    javascript: bool = True,
    touch: bool = False,
    reduced_motion: bool = False,
) -> OpenedPage:
    """A window with one empty tab, in an empty profile, which notes what its pages report.

    `before` is a script to run before each page.
    """
    context = chromium.new_context(
        viewport={"width": width, "height": height},
        color_scheme=theme,
        java_script_enabled=javascript,
        has_touch=touch,
        reduced_motion="reduce" if reduced_motion else "no-preference",
    )
    context.set_default_timeout(PATIENCE)
    context.add_init_script(before + CHOOSE_THEME.format(theme=theme))
    opened = OpenedPage(context.new_page())
    page = opened.page
    page.on("pageerror", lambda error: opened.errors.append(str(error)))
    page.on(
        "console",
        lambda message: opened.errors.append(message.text) if message.type == "error" else None,
    )
    page.on("request", lambda request: opened.requests.append(request.url))
    return opened


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder of the built book, `_build/html`."""
    folder = project_root() / "_build" / "html"
    assert (folder / "index.html").is_file(), "There is no built book: make html renders it."
    return folder
