"""The performance model in Python: what it says is what C++ says, and shows as tables and plots."""
import html.parser
import importlib.util
import unittest

import toy
from toy import tandem

GPU = "24gb-pcie4"


def blocks(count=8, width=2048):
    layout = tandem.ParameterLayout()
    for i in range(count):
        layout.add_layer(f"h.{i}").add("w1", (4 * width, width), gradient="bf16").add("w2", (width, 4 * width), gradient="bf16")
    return layout


class Tags(html.parser.HTMLParser):
    """Checks that tags close in the order in which they open."""

    def __init__(self):
        super().__init__()
        self.open, self.rows = [], 0

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.rows += tag == "tr"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag


def rows_of(shown):
    tags = Tags()
    tags.feed(shown._repr_html_())
    assert not tags.open
    return tags.rows


class Planning(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.layout = blocks()
        cls.options = tandem.OffloadOptions(device_memory="2GiB")
        cls.machine = tandem.profile(GPU)
        cls.choice = tandem.plan(cls.layout, cls.options, profile=cls.machine, tokens=4096)

    def test_the_choice_is_no_slower_than_any_policy(self):
        steps = [c.simulation.step_seconds for c in self.choice.candidates if c.fits and not c.simulation.given_up]
        self.assertGreater(len(steps), 2)
        self.assertLessEqual(self.choice.simulation.step_seconds, min(steps) * 1.001)
        self.assertTrue(self.choice.plan.chosen_by_auto)
        self.assertLessEqual(self.choice.plan.device_bytes, 2 << 30)

    def test_simulate_predicts_the_chosen_step(self):
        again = tandem.simulate(self.layout, self.choice.plan, self.machine, tokens=4096)
        self.assertAlmostEqual(again.step_seconds, self.choice.simulation.step_seconds, delta=0.02 * again.step_seconds)
        self.assertIn(again.bound_by, again.use)
        slow = tandem.simulate(self.layout, self.choice.plan, self.machine.with_link(1e9), tokens=4096)
        self.assertGreater(slow.step_seconds, again.step_seconds)

    def test_seconds_of_layers_are_taken_as_pairs(self):
        seconds = tandem._core.matrix_seconds(self.machine, self.layout, 4096)
        pairs = tandem.simulate(self.layout, self.choice.plan, self.machine, compute=[(s.forward, s.backward) for s in seconds])
        self.assertEqual(pairs.step_seconds, tandem.simulate(self.layout, self.choice.plan, self.machine, tokens=4096).step_seconds)
        for wrong in ({}, {"tokens": 1, "compute": []}):
            with self.assertRaises(tandem.MisuseError):
                tandem.simulate(self.layout, self.choice.plan, self.machine, **wrong)

    def test_an_engine_runs_the_chosen_plan(self):
        layout = toy.make_layout()
        device = tandem.open_device("host", memory="32MiB", threads=1, update_threads=1)
        options = tandem.OffloadOptions(device_memory="1MiB", max_micro_batches=2)
        choice = tandem.plan(layout, options, device=device, profile=self.machine, tokens=64)
        engine = tandem.OffloadEngine(device, layout, options, choice.plan)
        engine.initialize(toy.start)
        self.assertEqual(engine.plan.policy, choice.plan.policy)

    def test_what_does_not_fit_is_a_PlanError_with_a_table(self):
        with self.assertRaises(tandem.PlanError) as caught:
            tandem.plan(self.layout, self.options.replace(device_memory="1MiB"), profile=self.machine, tokens=4096)
        self.assertIn("total", caught.exception.table)

    def test_plans_are_read_field_by_field(self):
        plan = self.choice.plan
        self.assertEqual(sum(e.bytes for e in plan.entries if e.place == "device" and e.phase == "run"), plan.device_bytes)
        self.assertEqual(sum(s.end - s.begin for s in plan.subgroups), plan.shares.cpu + plan.shares.streamed + plan.shares.resident)
        self.assertIn("total", str(plan))
        self.assertIn(plan.policy, repr(plan))

    def test_they_show_as_tables(self):
        self.assertGreater(rows_of(self.choice), len(self.choice.candidates))
        self.assertGreater(rows_of(self.choice.plan), 4)
        self.assertGreater(rows_of(self.choice.simulation), 8)
        self.assertGreater(rows_of(self.machine), 20)

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "no matplotlib")
    def test_they_plot_themselves(self):
        import matplotlib
        matplotlib.use("agg")
        from matplotlib import pyplot
        for shown, label in ((self.choice, "seconds a step, predicted"), (self.choice.simulation, "% of the step")):
            axes = shown.plot()
            self.assertEqual(axes.get_xlabel(), label)
            self.assertGreater(len(axes.patches), 2)
        axes = self.choice.plan.plot()
        drawn = sum(bar.get_height() for bar in axes.patches) * 2**30
        self.assertAlmostEqual(drawn, sum(e.bytes for e in self.choice.plan.entries), delta=1024)
        axes.figure.canvas.draw()
        own = pyplot.subplots()[1]
        self.assertIs(self.choice.plot(own), own)
        pyplot.close("all")


class Profiles(unittest.TestCase):
    def test_shipped_ones_are_found_by_name(self):
        self.assertIn(GPU, tandem.shipped_profiles())
        with self.assertRaisesRegex(tandem.UsageError, GPU):
            tandem.profile("none")
        with self.assertRaises(tandem.InputError):
            tandem.profile("/nonexistent/profile.toml")

    def test_text_reads_back(self):
        machine = tandem.profile(GPU)
        again = tandem.parse_profile(machine.toml())
        self.assertEqual({k: f.value for k, f in again.figures.items()}, {k: f.value for k, f in machine.figures.items()})
        changed = machine.with_figure("link.to_device", 1e9)
        self.assertEqual((changed["link.to_device"].value, changed["link.to_device"].source), (1e9, "assumed"))
        self.assertNotEqual(machine["link.to_device"].value, 1e9)
        with self.assertRaises(KeyError):
            machine["link.sideways"]
        with self.assertRaises(tandem.UsageError):
            tandem.parse_profile("nothing = 1")

    def test_what_hears_of_progress_ends_a_calibration(self):
        device = tandem.open_device("host", memory="300MiB", threads=1, update_threads=1)
        heard = []

        def hear(what):
            heard.append(what)
            if len(heard) == 2:
                raise LookupError(what)

        with self.assertRaises(LookupError) as caught:
            tandem.calibrate(device, seconds_per_figure=0.01, progress=hear)
        self.assertEqual(caught.exception.args, (heard[1],))


if __name__ == "__main__":
    unittest.main()
