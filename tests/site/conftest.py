"""The fixtures of the browser tests; see tests/browser.py."""

from browser import chromium, open_page, site, visit

__all__ = ["chromium", "open_page", "site", "visit"]
