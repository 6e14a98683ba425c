"""`tandem report`: a run as one page that needs no network. Its scripts run under Node, and in a browser, where there is one."""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import browser  # noqa: E402
from program import SMALL, ProgramTest, main  # noqa: E402

PLOTS = ["loss", "norm", "lr", "rate", "memory", "bound"]
# A page without a browser: it notes what is drawn.
STAND_IN = """
const fs = require("fs"), page = fs.readFileSync(process.argv[2], "utf8"), drawn = {};
const scripts = [...page.matchAll(/<script>([\\s\\S]*?)<\\/script>/g)].map(m => m[1]);
const data = page.match(/<script type="application\\/json" id="report">([\\s\\S]*?)<\\/script>/)[1];
global.window = {innerWidth: 1280};
global.addEventListener = () => {};
global.document = {getElementById: id => page.includes(`id="${id}"`) ? {id, textContent: data, parentElement: {style: {}}} : null};
global.Chart = class { constructor(canvas, {data, options, plugins}) {
  const filter = ((options.plugins || {}).legend || {labels: {}}).labels?.filter || (() => true), names = [];
  const ctx = {save() {}, restore() {}, measureText: () => ({width: 40}), fillText: (text, x) => names.push([text, x])};
  const chart = {width: 800, chartArea: {right: 790}, ctx, data, getDatasetMeta: i => ({data: data.datasets[i].data.map(
    point => ({x: 780 * point.x, y: 50}))})};
  (plugins || []).forEach(plugin => plugin.afterDatasetsDraw(chart));
  drawn[canvas.id] = data.datasets.map((d, i) => ({label: d.label, data: d.data, names, legend: filter({datasetIndex: i}, data)}));
} };
(0, eval)(scripts.at(-1));
console.log(JSON.stringify(drawn));
"""
LOOK = """(() => {
  const canvas = document.getElementById("%s"), chart = canvas && Chart.getChart(canvas);
  if (!chart) return null;
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  const box = canvas.getBoundingClientRect();
  return {colours: new Set(pixels).size, left: box.left, right: box.right, height: box.height};
})()"""


class Report(ProgramTest):
    def run_of(self, steps, *flags):
        out = self.root / "run"
        self.succeed(self.train("--steps", steps, "--eval-data", self.held_out(), "--eval-every", "2", "--out", out, *flags))
        return out

    def drawn(self, page):
        script = self.file("stand-in.js", STAND_IN)
        result = subprocess.run(["node", script, page], capture_output=True, text=True, timeout=60)
        return json.loads(self.succeed(result).stdout)

    def test_a_page_of_its_own(self):
        out = self.run_of("5")
        said = self.succeed(self.run_program("report", out)).stdout
        self.assertEqual(said, f"{out}/report.html: 5 steps\n")
        page = (out / "report.html").read_text()
        for plot in PLOTS:
            self.assertIn(f'<canvas id="{plot}"', page)
        shown = re.sub(r"<script[\s\S]*", "", page)
        self.assertNotRegex(shown, r"(?:src|href)=")
        self.assertIn("default-src 'none'", shown)
        self.assertIn('name="viewport"', shown)
        summary = self.summary(out)
        self.assertIn(summary["state_digest"], shown)
        best = min((m["eval_loss"], m["step"]) for m in self.metrics(out) if "eval_loss" in m)
        self.assertIn(f"<td>{best[0]:.4f}, step {best[1]}</td>", shown)

    def test_the_first_command_and_each_resume(self):
        out = self.run_of("2")
        self.succeed(self.run_program("train", "--resume", out, "--steps", "3"))
        self.succeed(self.run_program("train", "--resume", out, "--steps", "4"))

        def shown():
            self.succeed(self.run_program("report", out))
            rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td></tr>", (out / "report.html").read_text())
            return [(name, value) for name, value in rows if name == "command" or name.startswith("resumed")]

        rows = shown()
        self.assertEqual([name for name, _ in rows], ["command", "resumed after step 2", "resumed after step 3"])
        self.assertRegex(rows[0][1], " train --model tiny-gpt2 .*--steps 2 ")
        self.assertTrue(rows[1][1].endswith(f" train --resume {out} --steps 3"), rows[1])
        self.assertTrue(rows[2][1].endswith(f" train --resume {out} --steps 4"), rows[2])
        (out / "summary.json").unlink()  # the folder of a run that trains has none
        self.assertEqual(shown(), rows)
        other = self.root / "other"
        self.succeed(self.train("--steps", "1", "--out", other))
        (other / "commands.jsonl").unlink()  # older versions wrote none
        self.succeed(self.run_program("train", "--resume", other, "--steps", "2"))
        out = other
        self.assertEqual([name for name, _ in shown()], ["command", "resumed after step 1"])

    @unittest.skipUnless(shutil.which("node"), "needs Node")
    def test_it_draws_what_the_run_has_measured(self):
        out = self.run_of("5", "--grad-accum", "2")
        self.succeed(self.run_program("report", out))
        drawn, metrics = self.drawn(out / "report.html"), self.metrics(out)
        self.assertEqual(list(drawn), PLOTS)
        series = {d["label"]: d["data"] for plot in drawn.values() for d in plot}
        for label, key, scale in [("training", "loss", 1), ("gradient norm", "grad_norm", 1), ("learning rate", "lr", 1),
                                  ("tokens a second", "tokens_per_second", 1), ("device, held", "device_bytes", 1 << 20)]:
            self.assertEqual(series[label], [{"x": m["step"], "y": m[key] / scale} for m in metrics], label)
        self.assertEqual(series["evaluation"], [{"x": m["step"], "y": m["eval_loss"]} for m in metrics if "eval_loss" in m])
        self.assertEqual([d["label"] for d in drawn["memory"]], ["device, held", "device, planned", "host, planned", "host, peak"])
        self.assertAlmostEqual(sum(series["share of the steps"]), 100.0)

    @unittest.skipUnless(shutil.which("node"), "needs Node")
    def test_a_long_run_that_has_not_ended(self):
        """Points of its plots are means, gaps stay gaps, and a line that is just being written does not count."""
        out = self.root / "run"
        lines = [{"step": n, "loss": None if n == 7 else n / 2, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 5.0,
                  "device_bytes": n, "bound_by": "CPU" if n % 3 else "compute"} for n in range(1, 3001)]
        self.file("run/metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3001, "lo')
        self.succeed(self.run_program("report", out, "--out", self.root / "page.html"))
        drawn = self.drawn(self.root / "page.html")
        loss = drawn["loss"][0]["data"]
        self.assertEqual((len(loss), loss[0], loss[3]), (1500, {"x": 2, "y": 0.75}, {"x": 8, "y": 4.0}))
        self.assertEqual([round(share, 6) for share in drawn["bound"][0]["data"]], [66.666667, 33.333333])
        page = (self.root / "page.html").read_text()
        self.assertIn("3000, and the run has not ended", page)
        self.assertIn("the mean of 2 steps", page)

    @unittest.skipUnless(shutil.which("node"), "needs Node")
    def test_the_page_of_bench(self):
        """A legend names what is drawn alone, points have the names of their policies, and no digest is cut off."""
        out = self.root / "bench"
        bench = ["bench", "--model", "tiny-gpt2", *SMALL, "--policies", "host", "stream"]
        self.succeed(self.run_program(*bench, "--profile", "12gb-pcie4", "--out", out))
        updates = self.drawn(out / "report.html")["updates"]
        self.assertEqual([d["label"] for d in updates if d["legend"]], ["bound, nothing resident", "predicted"])
        names = dict(updates[0]["names"])
        self.assertEqual(set(names), {"host", "stream"})
        for x in names.values():
            self.assertTrue(0 <= x <= 790 - 40, names)
        self.succeed(self.run_program(*bench, "--steps", "1", "--out", self.root / "measured"))
        page = (self.root / "measured" / "report.html").read_text()
        digest = json.loads((self.root / "measured" / "report.json").read_text())["policies"][0]["state_digest"]
        shown = re.sub(r"<script[\s\S]*", "", page)
        self.assertIn(f"measured: <code>{digest}</code></p>", shown)
        self.assertEqual(shown.count(digest), 1)
        self.assertIn("<th>tokens/s</th>", shown)

    def test_json(self):
        out = self.run_of("2")
        said = json.loads(self.succeed(self.run_program("report", out, "--json")).stdout)
        self.assertEqual((said["report"], said["steps"], said["best"]["step"]), (f"{out}/report.html", 2, 2))

    def test_refused(self):
        out = self.run_of("2")
        self.refused(self.run_program("report", self.root / "none"), 4, "no run")
        self.refused(self.run_program("report", self.root), 4, "no run")
        self.file("begun/metrics.jsonl", "")
        self.refused(self.run_program("report", self.root / "begun"), 4, "no step yet")
        self.refused(self.run_program("report", out, "--out", self.root / "not" / "there.html"), 7, "there.html")
        mine = self.file("mine.html", "<p>mine</p>")
        self.refused(self.run_program("report", out, "--out", mine), 7, "no report of tandem")
        self.assertEqual(mine.read_text(), "<p>mine</p>")
        self.refused(self.run_program("report", out, "--out", out), 7, "no report of tandem")
        for _ in range(2):  # an earlier report is replaced
            self.succeed(self.run_program("report", out))

    def test_names_are_no_html(self):
        out = self.root / "<b>&run"
        self.succeed(self.train("--steps", "1", "--out", out))
        self.succeed(self.run_program("report", out))
        self.assertIn("&lt;b&gt;&amp;run</h1>", (out / "report.html").read_text())

    @unittest.skipUnless(browser.find(), "needs a browser")
    def test_on_a_desk_and_on_a_phone(self):
        page = self.run_of("6") / "report.html"
        self.succeed(self.run_program("report", page.parent))
        with browser.Browser() as seen:
            for width, height, phone in [(1280, 900, False), (390, 844, True)]:
                seen.resize(width, height, phone)
                seen.open(page.as_uri())
                self.assertEqual((seen.complaints, seen.requests), ([], [page.as_uri()]))
                for plot in PLOTS:
                    look = seen.evaluate(LOOK % plot)
                    self.assertGreater(look["colours"], 5, plot)
                    self.assertGreaterEqual(look["left"], 0, plot)
                    self.assertLessEqual(look["right"], width, plot)
                self.assertLessEqual(seen.evaluate("document.documentElement.scrollWidth"), width)


if __name__ == "__main__":
    main()
