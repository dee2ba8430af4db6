"""JupyterLab as a reader uses it: a server on copies of the lessons, and a page that clicks.

Needs jupyterlab, playwright, and a Chromium: the one that `CHROMIUM` names, or Debian's.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from urllib.parse import urlsplit

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM_FLAGS = [
    "--no-sandbox",  # root needs it, as in a container
    "--disable-dev-shm-usage",  # a container's is small
    "--disable-gpu",
    # what Chromium itself would send home
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
CONNECTED = """path => {
  const context = window.jupyterapp?.shell?.currentWidget?.context;
  return context?.path === path && context.isReady
    && context.sessionContext.session?.kernel?.connectionStatus === 'connected'; }"""
RESTORED = """() => {
  window.jupyterapp?.restored.then(() => { window.isRestored = true; });
  return window.isRestored; }"""
ASKS = "!!document.querySelector('.jp-Dialog')"  # as for a kernel that a notebook does not name
OPEN_NEXT = """async path => {
  const { commands, serviceManager, shell } = window.jupyterapp;
  shell.currentWidget?.dispose();  // and not close(), which would ask whether to save
  await serviceManager.sessions.shutdownAll();
  await commands.execute('docmanager:open', { path, factory: 'Notebook' }); }"""
# Lab's own promises are not awaited: some are never kept (a scroll that another one replaces, a
# cell of a notebook that was loaded again). What they would have told is looked for on the page.
RUN_TO = """([text, upto]) => {
  const { commands, shell } = window.jupyterapp;
  const notebook = shell.currentWidget.content;
  const at = notebook.widgets.findIndex(cell => cell.model.sharedModel.source.includes(text));
  if (at < 0) throw new Error(`no cell holds ${text}`);
  const asked = notebook.widgets.slice(upto ? 0 : at, at + 1);
  for (const cell of asked) if (cell.model.type === 'code') cell.model.executionCount = null;
  notebook.deselectAll();
  notebook.activeCellIndex = at;
  window.asked = { notebook, asked, at };
  (async () => {
    if (upto && at > 0) await commands.execute('notebook:run-all-above');
    await commands.execute('notebook:run-cell');
  })();
}"""
HAS_RUN = """() => {
  const { notebook, asked } = window.asked;
  return notebook.isDisposed || asked.every(cell => cell.model.type !== 'code'
    || (cell.model.executionCount !== null && cell.model.executionState !== 'running')); }"""
SHOW = """() => {
  const { notebook, at } = window.asked;
  if (notebook.isDisposed) return false;
  notebook.scrollToCell(notebook.widgets[at], 'start').catch(() => {});
  document.querySelector('[data-ran]')?.removeAttribute('data-ran');
  notebook.widgets[at].node.dataset.ran = 'here';
  return notebook.widgets[at].node.isConnected; }"""


def chromium():
    """Return the path of a Chromium, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


def missing():
    """Return what this suite needs and does not find, in words; None if all is there."""
    for module in ("jupyterlab", "playwright"):
        try:
            __import__(module)
        except ImportError:
            return f"{module} is not installed"
    if chromium() is None:
        return "there is no Chromium: install one, or let the variable CHROMIUM name it"
    return None


@contextlib.contextmanager
def server(folder):
    """Run JupyterLab on a folder, with settings of its own; yield (its address, its token)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own, token = folder / ".jupyter", secrets.token_hex(16)
    names = ("CONFIG_DIR", "RUNTIME_DIR", "DATA_DIR")
    env = {f"JUPYTER_{name}": str(own / name.lower()) for name in names}
    env |= {
        f"JUPYTERLAB_{name}_DIR": str(own / name.lower()) for name in ("SETTINGS", "WORKSPACES")
    }
    env |= {"IPYTHONDIR": str(own / "ipython"), "JUPYTER_TOKEN": token}
    # a first start asks whether to fetch news from the net; the answer is a setting
    news = own / "settings" / "@jupyterlab" / "apputils-extension"
    news.mkdir(parents=True)
    (news / "notification.jupyterlab-settings").write_text(
        '{"fetchNews": "false", "checkForUpdates": false}'
    )
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
        *(f"--ServerApp.root_dir={folder}", "--ServerApp.log_level=WARN"),
        *("--LabApp.expose_app_in_browser=True", "--JupyterNotebookApp.expose_app_in_browser=True"),
        "--LabApp.extension_manager=readonly",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | env
    with open(own / "log", "w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            if process.poll() is not None:
                raise RuntimeError(f"JupyterLab ended: {(own / 'log').read_text()[-2000:]}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/api/status?token={token}", timeout=5).close()
                break
            time.sleep(0.25)
        else:
            raise TimeoutError("JupyterLab did not answer within a minute")
        yield address, token
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Reader:
    """Somebody at a screen: opens notebooks, runs cells, uses widgets.

    Attributes
    ----------
    page : playwright page
    errors : list of str
        What went wrong in the page's own scripts.
    elsewhere : list of str
        Addresses on other hosts that the page asked for.
    """

    def __init__(self, browser, address, token):
        self.address, self.token = address, token
        self.errors, self.elsewhere = [], []
        self.page = browser.new_page(viewport={"width": 1280, "height": 1000})
        self.page.set_default_timeout(30_000)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self._note(request.url))
        self.page.on("websocket", lambda socket: self._note(socket.url))

    def _note(self, url):
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob", "about"):
            if parts.netloc != urlsplit(self.address).netloc:
                self.elsewhere.append(url)

    def open(self, path, view="lab/tree"):
        """Open a notebook in JupyterLab, or in Notebook 7 (view="notebooks"); await its kernel."""
        here = f"{self.address}/{view.split('/')[0]}/"
        if view == "lab/tree" and self.page.url.startswith(here):
            self.page.evaluate(OPEN_NEXT, path)  # far quicker than to load the page again
        else:
            self.page.goto(f"{self.address}/{view}/{path}?token={self.token}")
            self.page.wait_for_function(RESTORED)
        self.page.wait_for_function(f"path => {ASKS} || ({CONNECTED})(path)", arg=path)
        if self.page.evaluate(ASKS):
            raise RuntimeError(f"{path}: {self.page.locator('.jp-Dialog').inner_text()}")

    def execute(self, text, upto=True):
        """Run the first cell that holds `text`, and those above it; bring it into sight."""
        for _ in range(3):  # Notebook 7 may load the notebook again while it starts
            self.page.evaluate(RUN_TO, [text, upto])
            self.page.wait_for_function(HAS_RUN, timeout=60_000)
            if self.page.evaluate(SHOW):
                return
        raise RuntimeError(f"the notebook was loaded again each time {text!r} was run")

    def run(self, text, upto=True):
        """Run the first cell that holds `text`, and those above it; return its widget."""
        self.execute(text, upto)
        return Widget(self.page, self.page.locator("[data-ran] .jp-OutputArea-output .widget-vbox"))


class Widget:
    """A widget on the page, found and used as a reader does: by the labels that stand there."""

    def __init__(self, page, root):
        self.page, self.root = page, root.first
        self.root.locator("img").wait_for(timeout=60_000)

    @property
    def text(self):
        """What the line below the picture says."""
        return self.root.locator("[role=status]").text_content()

    @property
    def alert(self):
        """The sentence in place of a picture."""
        return self.root.locator("[role=alert]").text_content()

    @property
    def picture(self):
        """The picture's bytes, as the page has them."""
        return self.root.locator("img").get_attribute("src")

    @property
    def places(self):
        """Where the widget's three rooms begin and how high they are; (x, y, width, height)."""
        script = """root => [root, ...root.children].map(e => {
          const r = e.getBoundingClientRect(), top = root.getBoundingClientRect().top;
          return [r.x, r.y - top, r.width, r.height].map(Math.round); })"""
        return self.root.evaluate(script)

    def control(self, label):
        """Return the box of the control with this label."""
        named = self.page.locator(f".widget-label:text-is('{label}')")
        return self.root.locator(".widget-inline-hbox", has=named)

    def handle(self, label):
        """Return the handle of a slider."""
        return self.control(label).locator(".noUi-handle")

    def button(self, name):
        """Return a button."""
        return self.root.get_by_role("button", name=name, exact=True)

    def press(self, label, *keys):
        """Move a slider by the keyboard alone."""
        self.handle(label).focus()
        for key in keys:
            self.page.keyboard.press(key)

    def drag(self, label, share):
        """Drag a slider's handle with the mouse to a share of its way, 0 to 1."""
        handle, way = (
            self.control(label).locator(name).bounding_box()
            for name in (".noUi-handle", ".noUi-base")
        )
        y = handle["y"] + handle["height"] / 2
        self.page.mouse.move(handle["x"] + handle["width"] / 2, y)
        self.page.mouse.down()
        self.page.mouse.move(way["x"] + share * way["width"], y, steps=4)
        self.page.mouse.up()

    def choose(self, label, option):
        """Choose from a list by the keyboard-operable element itself."""
        self.control(label).locator("select").select_option(label=option)

    def type(self, label, text):
        """Write into a field, and leave it with Enter."""
        field = self.control(label).locator("input")
        field.fill(text)
        field.press("Enter")
