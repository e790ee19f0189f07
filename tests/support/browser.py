"""Looks at a page in the headless browser of Qt, which comes as wheels."""

import json
import os
import subprocess
import sys
from pathlib import Path

SIZE = 1000, 6000
TIMEOUT_SECONDS = 600


class NoBrowser(Exception):
    """None starts; the text says why of each."""


def look(page: Path, screenshot: Path) -> tuple[str, str]:
    """The console of `page` and its DOM after its scripts, by Qt in a process of its own, or NoBrowser.

    Writes `screenshot`, a PNG of the upper `SIZE` pixels."""
    flags = {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": "--no-sandbox --disable-gpu"}
    command = [sys.executable, __file__, page.as_uri(), screenshot]
    settings = {"check": True, "capture_output": True, "text": True, "timeout": TIMEOUT_SECONDS}
    try:
        return json.loads(subprocess.run(command, env=os.environ | flags, **settings).stdout)
    except subprocess.CalledProcessError as error:
        raise NoBrowser((error.stderr.splitlines() or [str(error)])[-1]) from error


def _look_with_qt(url, screenshot):
    from PySide6.QtCore import QTimer, QUrl
    from PySide6.QtGui import QImage
    from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineSettings
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    console = []

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level, message, line, source):
            console.append(f"{source}:{line}: {message}")

    def shoot(dom, hidden, last=None):
        """A page is painted piece by piece while it loads, and as one when it is hidden and shown again."""
        image = view.grab().toImage()
        plain = QImage(image)
        plain.fill(image.pixel(0, 0))
        if hidden and image == plain:
            page.runJavaScript("document.documentElement.hidden = false", lambda _: shoot(dom, False))
        elif not hidden and image == last != plain:
            image.save(screenshot, "PNG")
            print(json.dumps(["\n".join(console), dom]))
            application.quit()
        else:
            QTimer.singleShot(100, lambda: shoot(dom, hidden, image))

    def hide(dom):
        page.runJavaScript("document.documentElement.hidden = true", lambda _: shoot(dom, True))

    application = QApplication([])
    view = QWebEngineView()
    page = Page(view)
    page.loadFinished.connect(lambda loaded: page.toHtml(hide) if loaded else application.exit(1))
    page.renderProcessTerminated.connect(lambda status, code: application.exit(1))
    page.settings().setAttribute(QWebEngineSettings.WebAttribute.ShowScrollBars, False)
    view.setPage(page)
    view.resize(*SIZE)
    view.show()
    view.load(QUrl(url))
    sys.exit(application.exec())


if __name__ == "__main__":
    _look_with_qt(*sys.argv[1:])
