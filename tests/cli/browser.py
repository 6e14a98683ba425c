"""A page in a real browser: Chromium without a window, spoken to through its debugging pipe."""
import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ["chromium", "chromium-browser", "google-chrome"]
SECONDS = 120


def find():
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page. What it did wrong is in `complaints`, what it asked for in `requests`."""

    def __init__(self):
        self.complaints, self.requests = [], []
        self._profile = tempfile.TemporaryDirectory(prefix="tandem-browser-")
        ours_in, its_out = os.pipe()
        its_in, ours_out = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
                 "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "about:blank"]
        # The browser reads its third file and writes to its fourth.
        script = f'exec "$0" "$@" 3<&{its_in} 4>&{its_out} 2>/dev/null'
        self._process = subprocess.Popen(["bash", "-c", script, find(), *flags], pass_fds=(its_in, its_out))
        os.close(its_in)
        os.close(its_out)
        self._in, self._out = ours_in, ours_out
        self._rest, self._next, self._session, self._loaded = b"", 0, None, False
        page = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._out)
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._in)
        self._profile.cleanup()

    def ask(self, method, **parameters):
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        text = memoryview(json.dumps(message).encode() + b"\0")
        while text:
            text = text[os.write(self._out, text):]
        while True:
            answer = self._read()
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def open(self, url):
        """Loads the page, and returns when it has loaded."""
        self._loaded = False
        self.complaints.clear()
        self.requests.clear()
        self.ask("Page.navigate", url=url)
        while not self._loaded:
            self._read()

    def evaluate(self, expression):
        """The value of JavaScript in the page."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"].get("description", "exception"))
        return result["result"].get("value")

    def resize(self, width, height, phone=False):
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1,
                 mobile=phone)

    def screenshot(self, whole=True):
        return base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def pdf(self):
        return base64.b64decode(self.ask("Page.printToPDF")["data"])

    def _read(self):
        end = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._in, 1 << 16)
            if not chunk:
                raise RuntimeError("the browser has ended")
            self._rest += chunk
        line, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event, what):
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = what["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled":
            self.complaints.append(f"{what['type']}: {[a.get('value') for a in what['args']]}")
        elif event == "Log.entryAdded":
            self.complaints.append(what["entry"]["text"])
