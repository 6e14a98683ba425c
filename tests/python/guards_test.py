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

    def test_an_array_of_resident_weights_keeps_the_engine(self):
        self.toy = None
        self.toy = toy.Toy("host", resident_layers=toy.LAYERS + 1)
        self.engine, self.stream = self.toy.engine, self.toy.stream
        self.engine_lives_as_long_as([self.engine.resident_weights("h.1.w1").numpy()])

    def engine_lives_as_long_as(self, arrays):
        """`arrays` has the only reference to one."""
        self.toy = self.engine = self.stream = None
        gc.collect()
        self.assertEqual(live()["engines"], 1)
        arrays[0].sum()
        arrays.clear()
        self.assertEqual(live()["engines"], 0)

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

    def test_resident_weights_stay_in_one_place(self):
        self.toy = None
        self.toy = toy.Toy("host", resident_layers=toy.LAYERS + 1)
        engine = self.engine = self.toy.engine
        view = engine.resident_weights("h.1.w1")
        self.assertEqual((view.shape, view.dtype, view.name), ((48, 37), "bf16", "h.1.w1"))
        weights = view.numpy()
        self.assertFalse(weights.flags.writeable)
        for _ in range(3):
            before = weights.copy()
            self.toy.step()
            engine.wait_for_weights(1, self.toy.stream)
            self.toy.stream.synchronize()
            self.assertFalse(np.array_equal(weights, before))
            self.assertTrue(np.array_equal(weights, toy.rounded(engine.read("h.1.w1"))))
            self.assertEqual(engine.resident_weights("h.1.w1").pointer, view.pointer)
        for call in (engine.close, lambda: engine.adopt(self.toy.plan)):
            with self.assertRaisesRegex(tandem.MisuseError, "1 array is over its weights; delete what was made of resident_weights"):
                call()
        del weights
        engine.adopt(self.toy.plan)
        engine.close()
        with self.assertRaisesRegex(tandem.MisuseError, "'h.1.w1' is used after the engine was closed"):
            view.numpy()
        del view, engine

    def test_weights_that_do_not_stay_have_no_place(self):
        self.toy = None
        self.toy = toy.Toy("host", resident_layers=0)
        self.engine = self.toy.engine
        with self.assertRaisesRegex(tandem.MisuseError, "resident"):
            self.engine.resident_weights("h.1.w1")

    def test_capsules_are_the_views_in_their_order(self):
        self.begin()
        weights = self.engine.fetch(0, self.stream)
        capsules = weights.capsules()
        self.assertEqual(len(capsules), len(weights.keys()))
        with self.assertRaisesRegex(tandem.MisuseError, f"{len(capsules)} arrays are of their memory"):
            weights.release()

        class Given:
            def __init__(self, capsule):
                self.capsule = capsule

            def __dlpack__(self, **_):
                return self.capsule

            def __dlpack_device__(self):
                return 1, 0
        for name, capsule in zip(weights.keys(), capsules, strict=True):
            self.assertIn("dltensor", repr(capsule))
            if weights[name].dtype == "f32":  # NumPy knows no bf16
                self.assertTrue(np.array_equal(np.from_dlpack(Given(capsule)), weights[name].numpy()))
        del capsules, capsule
        gc.collect()
        weights.release()
        with self.assertRaisesRegex(tandem.MisuseError, "after the weights of layer 'h.0' were released"):
            weights.capsules()
        self.engine.abort_step()

    def test_copy_in_fills_one_gradient(self):
        self.begin()
        gradients = self.engine.gradients(0, self.stream)
        for name in ("w2", "b1"):  # bf16, and fp32
            view = gradients[name]
            whole = view.numpy()
            values = (np.arange(whole.size) % 251).astype(whole.dtype)
            whole[...] = 0
            del whole
            gradients.copy_in(name, values.ctypes.data, values.nbytes)
            self.assertTrue(np.array_equal(view.copy().ravel(), values))
            with self.assertRaisesRegex(tandem.MisuseError, f"{values.nbytes - 1} bytes given, {values.nbytes} needed"):
                gradients.copy_in(name, values.ctypes.data, values.nbytes - 1)
        with self.assertRaisesRegex(tandem.MisuseError, "2 bytes given, 0 needed"):
            gradients.copy_in("still", values.ctypes.data, 2)
        gradients.commit()
        with self.assertRaisesRegex(tandem.MisuseError, "after the gradients of layer 'h.0' were released"):
            gradients.copy_in("w2", values.ctypes.data, values.nbytes)
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
        arrays = [array]
        del weights, array
        self.engine_lives_as_long_as(arrays)

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
