"""The widgets in a real browser: JupyterLab, Chromium, a mouse and a keyboard."""
