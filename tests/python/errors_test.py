"""Exceptions: tandem's classes in Python, and those of Python functions back as they were."""
import inspect
import unittest

import toy
from toy import np, tandem


class Hierarchy(unittest.TestCase):
    def test_it_is_that_of_cpp(self):
        codes = {"UsageError": 2, "PlanError": 3, "InputError": 4, "DeviceError": 5, "PeerError": 5, "TrainingError": 6, "WriteError": 7,
                 "MisuseError": 1, "StalledError": 5}
        for name in codes:
            kind = getattr(tandem, name)
            self.assertTrue(issubclass(kind, tandem.Error) and inspect.getdoc(kind), name)
        self.assertTrue(issubclass(tandem.PeerError, tandem.DeviceError))
        self.assertTrue(issubclass(tandem.Error, RuntimeError))

    def test_each_carries_one_line_and_the_exit_code(self):
        layout, device = toy.make_layout(), tandem.open_device("host", memory="32MiB", threads=1)
        options = tandem.OffloadOptions(device_memory="64MiB")
        cases = [
            (tandem.UsageError, 2, lambda: tandem.OffloadOptions(policy="sideways")),
            (tandem.UsageError, 2, lambda: tandem.open_device("tpu")),
            (tandem.UsageError, 2, lambda: tandem.OffloadOptions(device_memory="2 Gi")),
            (tandem.UsageError, 2, lambda: tandem.OffloadOptions(state="fp8")),
            (tandem.UsageError, 2, lambda: tandem.OffloadOptions(device_memory=-1)),
            (tandem.PlanError, 3, lambda: tandem.make_plan(layout, options.replace(device_memory="8KiB"), device)),
            (tandem.InputError, 4, lambda: toy.Toy().engine.load("/nonexistent")),
            (tandem.DeviceError, 5, lambda: tandem.open_device("cuda:99")),
            (tandem.WriteError, 7, lambda: toy.Toy().engine.save("/proc/nowhere")),
            (tandem.MisuseError, 1, lambda: layout.tie("h.0.w1", "nothing")),
        ]
        for kind, code, call in cases:
            with self.subTest(kind.__name__), self.assertRaises(kind) as caught:
                call()
            self.assertIs(type(caught.exception), kind)
            self.assertEqual(caught.exception.exit_code, code)
            self.assertNotIn("\n", str(caught.exception))

    def test_a_plan_that_does_not_fit_has_its_table(self):
        layout, device = toy.make_layout(), tandem.open_device("host", memory="32MiB", threads=1)
        with self.assertRaises(tandem.PlanError) as caught:
            tandem.make_plan(layout, tandem.OffloadOptions(device_memory="8KiB"), device)
        self.assertIn("total", caught.exception.table)
        self.assertTrue(caught.exception.entries and caught.exception.entries[0].bytes > 0)

    def test_a_step_that_is_not_finite_stops_with_TrainingError(self):
        trainer = toy.Toy(on_nonfinite="stop")
        before = trainer.engine.state_digest()
        trainer.engine.begin_step(micro_batches=1, max_grad_norm=1.0)
        for i in reversed(range(len(trainer.layout))):
            with trainer.engine.gradients(i, trainer.stream) as gradients:
                for name in gradients:
                    if gradients[name] is not None:
                        gradients[name].numpy()[...] = np.nan if gradients[name].dtype == "f32" else 0x7FC0
        with self.assertRaises(tandem.TrainingError) as caught:
            trainer.engine.end_step()
        self.assertEqual(caught.exception.exit_code, 6)
        del before

    def test_wrong_keywords_and_types_are_TypeErrors(self):
        layer = tandem.ParameterLayout().add_layer("a")
        for call in (lambda: tandem.OffloadOptions(polcy="host"), lambda: layer.add("w", 3, decays=True), lambda: layer.add("w", "3"),
                     lambda: tandem.OffloadOptions(max_micro_batches="two"), lambda: toy.Toy().engine.begin_step(rate=1.0),
                     lambda: tandem.OffloadOptions(device_memory=1.5)):
            with self.assertRaises(TypeError) as caught:
                call()
            self.assertNotIn("incompatible", str(caught.exception))
        with self.assertRaises(IndexError):
            tandem.ParameterLayout().layer(0)


class Mine(Exception):
    pass


class Functions(unittest.TestCase):
    def test_what_initialize_calls_comes_back_as_it_is(self):
        trainer = toy.Toy()
        mine = Mine("mine", 7)

        def values(parameter):
            if parameter.full_name == "h.1.b1":
                raise mine
            return toy.start(parameter)

        with self.assertRaises(Mine) as caught:
            trainer.engine.initialize(values)
        self.assertIs(caught.exception, mine)
        with self.assertRaises(tandem.TrainingError):
            trainer.engine.state_digest()
        trainer.engine.initialize(toy.start)
        trainer.engine.state_digest()

    def test_a_function_cannot_call_the_engine_that_calls_it(self):
        trainer = toy.Toy()
        with self.assertRaisesRegex(tandem.MisuseError, "called by a function that it calls itself"):
            trainer.engine.initialize(lambda parameter: trainer.engine.read(parameter))

    def test_what_a_queued_function_raises_fails_its_stream_again_and_again(self):
        device = tandem.open_device("host", memory="32MiB", threads=1)
        stream = device.make_stream()
        mine = Mine("queued")

        def fail():
            raise mine

        seen = []
        stream.enqueue("first", lambda: seen.append(1))
        stream.enqueue("fail", fail)
        stream.enqueue("dropped", lambda: seen.append(2))
        for _ in range(3):
            with self.assertRaises(Mine) as caught:
                stream.synchronize()
            self.assertIs(caught.exception, mine)
        self.assertEqual(seen, [1])

    def test_queued_functions_run_in_order_between_the_engine_s_work(self):
        queued, plain = toy.Toy(), toy.Toy()
        plain.step(micro_batches=1)
        engine, stream = queued.engine, queued.stream
        engine.begin_step(lr=1e-2, max_grad_norm=1.0, micro_batches=1)
        for i in reversed(range(len(queued.layout))):
            weights, gradients = engine.fetch(i, stream), engine.gradients(i, stream)
            stream.enqueue("backward", lambda w=weights, g=gradients: toy.fill(w, g, 0))
            stream.synchronize()
            gradients.commit(stream)
            weights.release()
        engine.end_step()
        self.assertEqual(engine.state_digest(), plain.engine.state_digest())


if __name__ == "__main__":
    unittest.main()
