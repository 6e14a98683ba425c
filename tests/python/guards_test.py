"""Lifetimes: who keeps whom, that nothing is read after its release, and that nothing is left over."""
import gc
import os
import resource
import sys
import unittest

import toy
from toy import np, tandem

live = tandem._core._live


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Guards(unittest.TestCase):
    def setUp(self):
        gc.collect()
        self.assertEqual(set(live().values()), {0}, live())
        self.toy = toy.Toy()
        self.engine, self.stream = self.toy.engine, self.toy.stream
        self.addCleanup(self.nothing_is_left)

    def nothing_is_left(self):
        del self.toy, self.engine, self.stream
        gc.collect()
        self.assertEqual(set(live().values()), {0}, live())

    def begin(self):
        self.engine.begin_step(micro_batches=1)

    def first_layer_that(self, stays):
        """Index of a layer that stays on the device, or does not, and the name of its first parameter."""
        for i, layer in enumerate(self.toy.layout.layers):
            name = layer.parameters[0].full_name
            try:
                self.engine.resident_weights(name)
                there = True
            except tandem.MisuseError:
                there = False
            if there == stays:
                return i, name
        self.fail("no such layer")

    def test_resident_weights_have_one_address_and_follow_the_updates(self):
        self.toy = toy.Toy(policy="host", resident_layers=1)
        self.engine, self.stream = self.toy.engine, self.toy.stream
        resident, name = self.first_layer_that(stays=True)
        weights = self.engine.resident_weights(name)
        array = weights.numpy()
        self.assertFalse(array.flags.writeable)
        pointer = weights.pointer
        for _ in range(3):
            self.toy.step()
            self.engine.wait_for_weights(resident, self.stream)
            self.stream.synchronize()
            seen = array.copy()  # before `read`, which waits for updates
            self.assertTrue(np.array_equal(seen, toy.rounded(self.engine.read(name))))
            self.assertEqual(weights.pointer, pointer)
        self.assertEqual((weights.name, weights.shape, weights.dtype), (name, array.shape, "bf16"))
        with self.assertRaisesRegex(tandem.MisuseError, "cannot be moved to another plan: 1 array is"):
            self.engine.adopt(self.toy.plan)
        with self.assertRaisesRegex(tandem.MisuseError, "cannot be closed: 1 array is of its resident weights"):
            self.engine.close()
        del array
        self.engine.adopt(self.toy.plan)
        streamed, name = self.first_layer_that(stays=False)
        with self.assertRaisesRegex(tandem.MisuseError, "the plan does not keep them on the device"):
            self.engine.wait_for_weights(streamed, self.stream)
        with self.assertRaisesRegex(tandem.MisuseError, "the plan does not keep them on the device"):
            self.engine.resident_weights(name)
        self.engine.close()
        with self.assertRaisesRegex(tandem.MisuseError, "closed"):
            weights.numpy()

    def test_an_array_of_resident_weights_keeps_the_engine(self):
        self.toy = toy.Toy(policy="host", resident_layers=1)
        self.engine, self.stream = self.toy.engine, self.toy.stream
        _, name = self.first_layer_that(stays=True)
        array = self.engine.resident_weights(name).numpy()
        del self.engine, self.stream
        self.toy = None
        gc.collect()
        self.assertEqual(live()["engines"], 1)
        array.sum()
        del array
        self.assertEqual(live()["engines"], 0)
        self.engine = self.stream = None

    def test_a_view_is_refused_after_the_release(self):
        self.begin()
        with self.engine.fetch(0, self.stream) as weights:
            view = weights["w1"]
            self.assertTrue(weights.held)
        self.assertFalse(weights.held)
        for use in (view.numpy, view.copy, view.__dlpack__, view.__dlpack_device__, lambda: view.pointer, lambda: np.asarray(view),
                    lambda: weights["w1"]):
            with self.assertRaisesRegex(tandem.MisuseError, "after the weights of layer 'h.0' were released"):
                use()
        self.assertEqual((view.shape, view.dtype), ((48, 37), "bf16"))
        self.engine.abort_step()

    def test_a_view_is_refused_after_the_commit(self):
        self.begin()
        gradients = self.engine.gradients(3, self.stream)
        view = gradients["table"]
        gradients.commit()
        with self.assertRaisesRegex(tandem.MisuseError, "gradients of layer 'head' were released; use it before the commit"):
            view.numpy()
        with self.assertRaisesRegex(tandem.MisuseError, "committed twice"):
            gradients.commit()
        self.engine.abort_step()

    def test_a_guard_is_not_released_while_an_array_of_it_is_alive(self):
        self.begin()
        weights = self.engine.fetch(0, self.stream)
        array = weights["w1"].numpy()
        part = array[3:5]
        del array
        with self.assertRaisesRegex(tandem.MisuseError, r"weights of layer 'h.0' cannot be released: 1 array is of their memory"):
            weights.release()
        before = part.copy()
        self.assertTrue(np.array_equal(part, before))
        del part
        weights.release()
        gradients = self.engine.gradients(3, self.stream)
        array = gradients["table"].numpy()
        with self.assertRaisesRegex(tandem.MisuseError, "cannot be committed"):
            gradients.commit()
        del array
        gradients.commit()
        self.engine.abort_step()

    def test_the_end_of_a_with_block_refuses_an_array_that_is_left(self):
        self.begin()
        with self.assertRaisesRegex(tandem.MisuseError, "cannot be released"):
            with self.engine.fetch(0, self.stream) as weights:
                array = weights["b1"].numpy()
        del array
        weights.release()
        self.engine.abort_step()

    def test_by_force_an_array_stays_readable_and_keeps_the_engine(self):
        self.begin()
        weights = self.engine.fetch(0, self.stream)
        array = weights["w1"].numpy()
        weights.release(force=True)
        self.assertFalse(weights.held)
        self.engine.abort_step()
        del weights, self.engine, self.stream
        self.toy = None
        gc.collect()
        self.assertEqual(live()["engines"], 1)
        array.sum()
        del array
        self.assertEqual(live()["engines"], 0)
        self.engine = self.stream = None

    def test_a_view_keeps_its_guard_and_that_its_engine_device_and_stream(self):
        engine, stream = self.engine, self.stream
        self.begin()
        view = engine.fetch(0, stream)["w1"]
        self.assertEqual(engine.guards, 1)
        values = view.copy()
        self.toy = self.engine = self.stream = engine = stream = None
        gc.collect()
        self.assertEqual({k: v for k, v in live().items() if v}, {"devices": 1, "streams": 1, "engines": 1, "guards": 1})
        self.assertTrue(np.array_equal(view.numpy(), values))

    def test_a_guard_that_nothing_refers_to_is_released(self):
        self.begin()
        self.engine.fetch(0, self.stream)
        self.assertEqual(self.engine.guards, 0)
        self.engine.gradients(3, self.stream)  # not committed: the step is abandoned
        with self.assertRaisesRegex(tandem.MisuseError, "step"):
            self.engine.end_step()
        self.engine.begin_step(micro_batches=1)
        self.engine.abort_step()

    def test_a_released_guard_keeps_no_engine(self):
        self.begin()
        with self.engine.fetch(0, self.stream) as weights:
            view = weights["w1"]
        self.engine.abort_step()
        self.toy = self.engine = self.stream = None
        gc.collect()
        self.assertEqual(live()["engines"], 0)
        self.assertIn("released", repr(weights))
        self.assertIn("w1", repr(view))

    def test_a_closed_engine_gives_its_memory_back_and_is_refused(self):
        self.begin()
        device = self.toy.device
        with self.engine.fetch(0, self.stream):
            with self.assertRaisesRegex(tandem.MisuseError, "1 guards are held"):
                self.engine.close()
        self.assertGreater(device.allocated_bytes, 0)
        self.engine.close()
        self.assertEqual((device.allocated_bytes, self.engine.closed), (0, True))
        with self.assertRaisesRegex(tandem.MisuseError, "closed"):
            self.engine.state_digest()
        with toy.Toy(device=device).engine as other:
            other.state_digest()
        self.assertTrue(other.closed)

    def test_an_exception_that_passes_a_guard_abandons_the_step(self):
        before = self.engine.state_digest()
        for layer, ask in ((0, self.engine.fetch), (3, self.engine.gradients)):
            self.begin()
            with self.assertRaises(ZeroDivisionError):
                with ask(layer, self.stream) as guard:
                    array = guard[guard.keys()[0]].numpy()
                    1 / 0
            self.assertFalse(guard.held)
            self.assertGreater(array.size, 0)
            del array
            self.begin()  # drops the other
            self.engine.abort_step()
        self.assertEqual(self.engine.state_digest(), before)

    def test_a_builder_keeps_its_layout(self):
        layer = tandem.ParameterLayout().add_layer("a")
        for i in range(50):
            layer.add(f"p{i}", 7)

    def test_a_child_process_leaves_engine_and_streams_alone(self):
        self.begin()
        weights = self.engine.fetch(0, self.stream)
        child = os.fork()
        if child == 0:
            try:
                del weights
                self.toy = self.engine = self.stream = None
                gc.collect()
                os._exit(0)
            finally:
                os._exit(1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        weights.release()
        self.engine.abort_step()


class Leaks(unittest.TestCase):
    def test_a_thousand_steps_leave_nothing(self):
        trainer = toy.Toy()
        for _ in range(100):
            trainer.step()
        gc.collect()
        counted = live()
        references = [sys.getrefcount(o) for o in (trainer.engine, trainer.stream, trainer.device, trainer.layout)]
        memory = resident_bytes()
        for _ in range(1000):
            trainer.step()
        gc.collect()
        self.assertEqual(live(), counted)
        self.assertEqual([sys.getrefcount(o) for o in (trainer.engine, trainer.stream, trainer.device, trainer.layout)], references)
        self.assertLess(resident_bytes() - memory, 4 << 20)


if __name__ == "__main__":
    unittest.main()
