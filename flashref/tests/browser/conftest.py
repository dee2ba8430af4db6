"""One server and one browser for all tests of this folder.

Skipped where there is no Chromium or no playwright; FLASHREF_NEEDS_BROWSER=1, as in CI, makes that
a failure.
"""

import os
import shutil

import pytest

from flashref.tests.browser import lab


def absent(what):
    """Skip for want of something; where it must not be wanting, fail."""
    if os.environ.get("FLASHREF_NEEDS_BROWSER") == "1":
        pytest.fail(f"FLASHREF_NEEDS_BROWSER=1, but {what}")
    pytest.skip(what)


# for this folder, not for the session: playwright's event loop must not outlive it, since running
# notebooks needs one too
@pytest.fixture(scope="package")
def reader(repository, tmp_path_factory):
    """Return a reader in front of copies of the lessons."""
    if reason := lab.missing():
        absent(reason)
    from playwright.sync_api import sync_playwright

    folder = tmp_path_factory.mktemp("lessons")
    for name in ("notebooks", "figures"):
        shutil.copytree(repository / name, folder / name)
    with lab.server(folder) as (address, token), sync_playwright() as playwright:
        flags = {"executable_path": lab.chromium(), "args": lab.CHROMIUM_FLAGS}
        browser = playwright.chromium.launch(**flags)
        yield lab.Reader(browser, address, token)
        browser.close()
