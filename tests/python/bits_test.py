"""A training in Python leaves the bits of the same training in C++, under every policy; state goes in and out bit by bit."""
import subprocess
import sys
import tempfile
import unittest

import toy
from toy import np, tandem

TWIN = sys.argv.pop(1)
POLICIES = ["host", "stream", "interleave:2", "auto"]
STEPS = 4


class Digests(unittest.TestCase):
    def test_python_and_cpp_have_one_digest_under_every_policy(self):
        cpp = subprocess.run([TWIN, *POLICIES], capture_output=True, text=True, check=True).stdout.split()
        python = []
        for policy in POLICIES:
            trainer = toy.Toy(policy)
            for _ in range(STEPS):
                self.assertFalse(trainer.step().skipped)
            python.append(trainer.engine.state_digest())
        self.assertEqual(len(python[0]), 32)
        self.assertEqual(set(python + cpp), {python[0]}, (python, cpp))

    def test_lion_has_one_digest_under_every_policy_and_no_second_moment(self):
        digests = set()
        for policy in POLICIES:
            trainer = toy.Toy(policy, state="lion")
            trainer.step()
            self.assertEqual(trainer.engine.plan.state, "lion")
            self.assertTrue(trainer.engine.read("h.1.w1", "m").any())
            self.assertFalse(trainer.engine.read("h.1.w1", "v").any())
            digests.add(trainer.engine.state_digest())
        self.assertEqual(len(digests), 1)

    def test_another_gradient_is_another_digest(self):
        digests = set()
        for lr in (1e-2, 1.0001e-2):
            trainer = toy.Toy()
            trainer.step(lr=lr)
            digests.add(trainer.engine.state_digest())
        self.assertEqual(len(digests), 2)

    def test_the_two_halves_of_the_end_have_the_bits_of_end_step(self):
        trainer, halves = toy.Toy(), toy.Toy()
        trainer.step(max_grad_norm=0.0)
        halves.engine.begin_step(micro_batches=1, lr=5.0)
        halves.pass_through(0)
        halves.engine.end_gradients()
        self.assertFalse(halves.engine.skip().step)
        halves.engine.begin_step(micro_batches=toy.MICRO_BATCHES, lr=5.0)
        for micro in range(toy.MICRO_BATCHES):
            halves.pass_through(micro)
        norm = halves.engine.end_gradients()
        self.assertGreater(norm, 0)
        self.assertEqual(halves.engine.update(lr=1e-2).step, 1)
        self.assertEqual(halves.engine.state_digest(), trainer.engine.state_digest())


class OpenSteps(unittest.TestCase):
    def test_an_open_step_has_the_bits_of_one_whose_number_is_known(self):
        known, opened = toy.Toy(max_micro_batches=3), toy.Toy(max_micro_batches=3)
        known.step()
        opened.engine.begin_step(lr=1e-2, max_grad_norm=1.0, micro_batches=3, open_ended=True)
        for micro in range(toy.MICRO_BATCHES):
            opened.engine.begin_micro_batch(last=micro + 1 == toy.MICRO_BATCHES)
            opened.pass_through(micro)
        opened.engine.end_step()
        self.assertEqual(opened.engine.state_digest(), known.engine.state_digest())

    def test_what_has_no_gradient_stays_as_it_is(self):
        trainer = toy.Toy()
        before = trainer.engine.read("h.1.w1")
        trainer.engine.begin_step(micro_batches=1, absent="skip", lr=1e-2)
        for layer in (3, 1):
            with trainer.engine.fetch(layer, trainer.stream) as weights, \
                    trainer.engine.gradients(layer, trainer.stream) as gradients:
                toy.fill(weights, gradients, 0)
                if layer == 1:
                    gradients.leave_out("w1")
        trainer.engine.end_step()
        np.testing.assert_array_equal(trainer.engine.read("h.1.w1"), before)
        self.assertEqual(trainer.engine.missed_updates("h.1.w1"), 1)
        self.assertEqual(trainer.engine.missed_updates("h.1.b1"), 0)
        self.assertEqual(trainer.engine.missed_updates("h.2.b1"), 1)
        with self.assertRaisesRegex(tandem.UsageError, "'refuse', 'zero', 'skip'"):
            trainer.engine.begin_step(absent="none")

    def test_weights_in_fp32_are_seen_as_such(self):
        device = tandem.open_device("host", memory="32MiB", threads=1, update_threads=1)
        layout = tandem.ParameterLayout()
        layout.add_layer("a", uses=2).add("norm", (3, 1, 2, 1, 1, 5), weight="f32").add("w", (4, 4))
        plan = tandem.make_plan(layout, tandem.OffloadOptions(), device)
        engine = tandem.OffloadEngine(device, layout, tandem.OffloadOptions(), plan)
        engine.initialize(lambda p: np.full(p.count, 1 / 3, np.float32))
        stream = device.make_stream()
        engine.begin_step(lr=1e-2)
        for _ in range(2):
            with engine.fetch(0, stream) as weights, engine.gradients(0, stream) as gradients:
                self.assertEqual((weights["norm"].dtype, weights["w"].dtype), ("f32", "bf16"))
                self.assertEqual(weights["norm"].shape, (3, 1, 2, 1, 1, 5))
                self.assertEqual(weights["norm"].copy().flat[0], np.float32(1 / 3))
                for name in gradients:
                    gradients[name].numpy()[...] += 1
        self.assertEqual(engine.end_step().gradient_norm, 2 * np.sqrt(46))


class Values(unittest.TestCase):
    def setUp(self):
        self.toy = toy.Toy()

    def test_state_goes_out_and_in_bit_by_bit(self):
        self.toy.step()
        digest = self.toy.engine.state_digest()
        copied = toy.Toy("host")
        for parameter in self.toy.layout.owned_parameters:
            for array in ("master", "m", "v"):
                values = self.toy.engine.read(parameter, array)
                self.assertEqual((values.dtype, values.shape), (np.float32, parameter.shape))
                copied.engine.write(parameter.full_name, values, array)
        copied.engine.set_step(self.toy.engine.step)
        self.assertEqual(copied.engine.state_digest(), digest)

    def test_weights_are_the_masters_rounded_to_bf16(self):
        self.toy.step()
        master = self.toy.engine.read("h.1.w1")
        with self.toy.engine.evaluation(), self.toy.engine.fetch(1, self.toy.stream) as weights:
            self.assertEqual(weights["w1"].dtype, "bf16")
            self.assertTrue(np.array_equal(np.asarray(weights["w1"]), toy.rounded(master)))
            self.assertEqual(weights["w1"].copy().dtype, np.uint16)
            self.assertFalse(weights["w1"].numpy().flags.writeable)

    def test_fp32_gradients_come_by_dlpack_without_a_copy(self):
        engine = self.toy.engine
        engine.begin_step(micro_batches=1)
        with engine.gradients(3, self.toy.stream) as gradients:
            view = gradients["table"]
            self.assertEqual((view.shape, view.dtype, view.__dlpack_device__()), ((48, 37), "f32", (1, 0)))
            array = np.from_dlpack(view)
            self.assertEqual(array.ctypes.data, view.pointer)
            self.assertFalse(array.any(), "sums begin at zero")
            array[:] = 2.5
            self.assertEqual(view.copy().sum(), 2.5 * 48 * 37)
            del array
            engine_gradients = gradients["table"].numpy().copy()
        self.assertEqual(engine_gradients[0, 0], 2.5)
        engine.abort_step()

    def test_bf16_arrays_are_taken_by_dlpack_and_widened_exactly(self):
        engine = self.toy.engine
        with engine.evaluation():
            with engine.fetch(1, self.toy.stream) as weights:
                bf16 = weights["w2"]
                other = toy.Toy()
                other.engine.write("h.1.w2", bf16)
                expected = toy.widened(bf16.copy())
                del bf16
        self.assertTrue(np.array_equal(other.engine.read("h.1.w2"), expected))

    def test_arrays_of_other_types_and_sizes_are_refused_in_one_line(self):
        engine = self.toy.engine
        before = engine.state_digest()
        for wrong in (np.zeros((48, 37)), np.zeros((48, 37), np.uint16), np.zeros((37, 48), np.float32).T, [0.0] * 1776, "w"):
            with self.assertRaisesRegex(TypeError, r"\Awrite 'h.1.w1': a dense, row-major array of f32 or bf16[^\n]+\Z"):
                engine.write("h.1.w1", wrong)
        with self.assertRaisesRegex(tandem.MisuseError, "5 elements given, 1776 needed"):
            engine.write("h.1.w1", np.zeros(5, np.float32))
        self.assertEqual(engine.state_digest(), before)

    def test_initial_values_come_from_arrays_a_function_or_pieces(self):
        expected = self.toy.engine.state_digest()
        arrays = {p.full_name: toy.start(p).reshape(p.shape) for p in self.toy.layout.owned_parameters}
        pieces = []

        def piece(parameter, first, count):
            pieces.append(count)
            return toy.start(parameter)[first:first + count]

        for call, values in (("initialize", arrays), ("initialize_pieces", piece), ("initialize", toy.start)):
            self.toy.engine.write("h.1.w1", np.ones(1776, np.float32))
            self.assertNotEqual(self.toy.engine.state_digest(), expected)
            getattr(self.toy.engine, call)(values)
            self.assertEqual(self.toy.engine.state_digest(), expected)
        self.assertEqual(sum(pieces), self.toy.layout.parameter_count)
        for broken, message in (({**arrays, "h.9.w1": 1}, "no parameter 'h.9.w1'"), ({"h.0.w1": arrays["h.0.w1"]}, "no array for")):
            with self.assertRaisesRegex(tandem.MisuseError, message):
                self.toy.engine.initialize(broken)

    def test_checkpoints_and_other_plans_keep_the_bits(self):
        trainer = self.toy
        trainer.step()
        digest = trainer.engine.state_digest()
        with tempfile.TemporaryDirectory() as folder:
            path = trainer.engine.save(folder)
            self.assertEqual(path.name, "step-00000001")
            other = toy.Toy("host")
            self.assertEqual(other.engine.load(folder), path)
            self.assertEqual((other.engine.step, other.engine.state_digest()), (1, digest))
        plan = tandem.make_plan(trainer.layout, trainer.options.replace(policy="stream"), trainer.device)
        trainer = toy.Toy("stream", spare_device_memory="256KiB", spare_host_memory="256KiB")
        trainer.step()
        plan = tandem.make_plan(trainer.layout, trainer.options.replace(policy="interleave:2", spare_device_memory=0,
                                                                        spare_host_memory=0), trainer.device)
        trainer.engine.adopt(plan)
        self.assertEqual(trainer.engine.plan.policy, "interleave:2")
        self.assertEqual(trainer.engine.state_digest(), digest)

    def test_counters_and_reports_tell_what_was_done(self):
        report = self.toy.step()
        counters = self.toy.engine.counters
        trained = sum(p.count for p in self.toy.layout.owned_parameters if p.options.trainable)
        self.toy.engine.wait()
        counters = self.toy.engine.counters
        self.assertEqual(counters.parameters_updated_cpu + counters.parameters_updated_streamed, trained)
        self.assertEqual((report.step, report.skipped, self.toy.engine.step), (1, False, 1))
        self.assertGreater(report.gradient_norm, 0)
        self.assertGreater(counters.busy.compute, 0)


if __name__ == "__main__":
    unittest.main()
