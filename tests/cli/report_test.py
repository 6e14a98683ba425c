"""The report of `tandem bench` in a real browser: on a desk, on a phone, and on paper. Ends with 77 where there is none."""
import re
import sys

import browser
from program import SMALL, ProgramTest, main

PLOTS = ["steps", "updates", "memory", "timeline"]
# Contents of a plot: its series, the values of each, and the colours on its canvas.
LOOK = """(() => {
  const canvas = document.getElementById("%s"), chart = canvas && Chart.getChart(canvas);
  if (!chart) return null;
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  const box = canvas.getBoundingClientRect();
  return {series: chart.data.datasets.map(d => d.label), values: chart.data.datasets.map(d => d.data.length),
          labels: chart.data.labels, colours: new Set(pixels).size, left: box.left, right: box.right, height: box.height};
})()"""


class Report(ProgramTest):
    @classmethod
    def setUpClass(cls):
        cls.browser = browser.Browser()
        cls.addClassCleanup(cls.browser.__exit__)

    def bench(self, *flags):
        out = self.root / "report"
        self.succeed(self.run_program("bench", "--model", "tiny-gpt2", *SMALL, "--steps", "1", *flags, "--out", out))
        return out / "report.html"

    def open(self, page):
        self.browser.open(page.as_uri())
        self.assertEqual(self.browser.complaints, [])
        self.assertEqual(self.browser.requests, [page.as_uri()])

    def look(self, plot):
        seen = self.browser.evaluate(LOOK % plot)
        self.assertIsNotNone(seen, plot)
        self.assertGreater(seen["colours"], 10, plot)
        return seen

    def test_it_has_its_plots_on_a_desk_on_a_phone_and_on_paper(self):
        page = self.bench("--policies", "host", "stream")
        for width, height, phone in [(1280, 900, False), (390, 844, True)]:
            self.browser.resize(width, height, phone)
            self.open(page)
            seen = {plot: self.look(plot) for plot in PLOTS}
            for plot, what in seen.items():
                self.assertGreaterEqual(what["left"], 0, plot)
                self.assertLessEqual(what["right"], width, plot)
                self.assertGreater(what["height"], 200, plot)
            self.assertEqual(seen["steps"]["series"], ["forward", "backward", "waiting for updates", "rest"])
            self.assertEqual(seen["steps"]["labels"], ["host, measured", "predicted", "stream, measured", "predicted"])
            self.assertEqual(seen["updates"]["series"], ["bound, nothing resident", "measured", "predicted"])
            self.assertEqual(seen["updates"]["values"], [51, 2, 2])
            self.assertEqual(seen["memory"]["labels"], ["host", "stream"])
            self.assertIn("forward", " ".join(self.browser.evaluate("report.timeline.map(s => s[1])")))
            self.assertLessEqual(self.browser.evaluate("document.documentElement.scrollWidth"), width)
        self.browser.resize(1280, 900)
        paper = self.browser.pdf()
        self.assertEqual(paper[:5], b"%PDF-")
        self.assertLessEqual(len(re.findall(rb"/Type /Page\b", paper)), 6)

    def test_a_sweep_has_a_plot_of_its_own(self):
        self.browser.resize(1280, 900)
        self.open(self.bench("--policies", "host", "stream", "--link-bandwidth", "1GB/s", "2GB/s", "--device-memory",
                             "2MiB", "24MiB"))
        seen = self.look("sweep")
        self.assertEqual(seen["series"], ["host", "stream"])
        self.assertEqual(len(seen["labels"]), 4)
        self.assertEqual(self.look("updates")["series"][:2], ["bound, link-bandwidth 1GB/s", "bound, link-bandwidth 2GB/s"])
        self.assertIn("does not fit", self.browser.evaluate("document.querySelector('table').innerText"))

    def test_what_goes_wrong_in_a_page_is_seen(self):
        """A damaged page: with a script that fails, and with something from a network."""
        text = self.bench("--policies", "host").read_text()
        for damage, seen in [("<script>missing();</script>", "missing is not defined"),
                             ("<img src='http://127.0.0.1:8/x.png'>", "Content Security Policy")]:
            self.browser.open(self.file("damaged.html", text.replace("</body>", damage + "</body>")).as_uri())
            self.assertIn(seen, " ".join(self.browser.complaints))


if __name__ == "__main__":
    if browser.find() is None:
        sys.exit(77)
    main()
