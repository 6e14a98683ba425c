"""A run on a terminal: its live line shows whole fields alone, what matters most first, and history stays above it."""
import fcntl
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import termios

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import PROGRAM, SMALL, ProgramTest, main  # noqa: E402

COLOUR = re.compile(r"\x1b\[\d*m")
FIELD = {"step": r"step \d+/\d+", "loss": r"loss \d+\.\d{4}", "eval": r"eval \d+\.\d{4}", "ETA": r"ETA \d+:\d\d:\d\d",
         "saving": r"saving \d+%", "rate": r"[\d.]+k? tok/s", "seconds": r"\d+\.\d{3} s", "norm": r"norm [\d.]+",
         "lr": r"lr [\d.e-]+", "update": r"update [\d.]+ s exposed"}
ORDER = list(FIELD)


class OnATerminal(ProgramTest):
    def watch(self, *arguments, columns=80, code=0, **variables):
        """All that the run writes to a terminal of so many columns."""
        ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {k: v for k, v in self.environment().items() if k != "NO_COLOR"}
        process = subprocess.Popen([PROGRAM, "train", "--model", "tiny-gpt2", "--data", str(self.text), *SMALL,
                                    *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=its, stderr=its if code else subprocess.PIPE,
                                   env={**environment, "TERM": "xterm", **variables})
        os.close(its)
        written = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the program has closed the other end
                break
            if not piece:
                break
            written += piece
        os.close(ours)
        errors = process.communicate(timeout=120)[1]
        self.assertEqual(process.returncode, code, errors)
        return written.decode().replace("\r\n", "\n")

    def drawn(self, written):
        """Live lines as drawn, and the lines that stay, both without colours."""
        live, kept = [], []
        for line in COLOUR.sub("", written).split("\n"):
            parts = line.split("\r\x1b[K")
            live += [part for part in parts[1:-1] if part]
            if parts[-1]:
                kept.append(parts[-1])
        return live, kept

    def fields(self, line):
        """Kinds of the fields of a line, each of which must be whole."""
        kinds = []
        for text in re.sub(r"^step +", "step ", line).split("  "):  # step numbers are padded
            (kind,) = [k for k, pattern in FIELD.items() if re.fullmatch(pattern, text)] or self.fail(f"no field: {text!r}")
            kinds.append(kind)
        self.assertEqual(kinds, sorted(kinds, key=ORDER.index), line)
        return kinds

    def test_whole_fields_within_the_width_and_what_matters_first(self):
        for columns, least in [(40, 2), (60, 4), (80, 6), (120, 8)]:
            with self.subTest(columns=columns):
                live, _ = self.drawn(self.watch("--steps", "12", "--eval-data", self.held_out(), "--eval-every", "4",
                                                columns=columns))
                self.assertGreaterEqual(len(live), 11)
                for line in live:
                    self.assertLess(len(line), columns)
                    self.assertGreaterEqual(len(self.fields(line)), least, line)
                self.assertEqual(self.fields(live[5])[:2], ["step", "loss"])
                if columns >= 80:
                    self.assertEqual(self.fields(live[5])[:4], ["step", "loss", "eval", "ETA"])

    def test_a_wide_one_has_room_for_a_bar(self):
        live, _ = self.drawn(self.watch("--steps", "4", columns=200))
        for line in live:
            self.assertRegex(line, r"^\[=* *\]  step")

    def test_an_evaluation_has_a_line_of_its_own(self):
        _, kept = self.drawn(self.watch("--steps", "6", "--eval-data", self.held_out(), "--eval-every", "2"))
        evaluations = [line for line in kept if line.startswith("eval")]
        self.assertEqual([re.fullmatch(r"eval loss \d+\.\d{4} after step (\d)", line)[1] for line in evaluations], ["2", "4", "6"])

    def test_log_every_leaves_lines(self):
        def steps(*flags):
            return [int(re.match(r"step +(\d+)", line)[1]) for line in self.drawn(self.watch("--steps", "10", *flags))[1]
                    if line.startswith("step")]
        self.assertEqual(steps("--log-every", "4"), [4, 8, 10])
        self.assertEqual(steps(), [10])  # the last state of the live line
        self.assertEqual(steps("--log-every", "0"), [])
        self.assertEqual(len(self.drawn(self.watch("--steps", "10", "--log-every", "4"))[0]), 7)

    def test_colours_unless_they_are_not_wanted(self):
        self.assertRegex(self.watch("--steps", "2"), COLOUR)
        self.assertNotRegex(self.watch("--steps", "2", NO_COLOR="1"), COLOUR)
        self.assertRegex(self.watch("--steps", "2", NO_COLOR=""), COLOUR)
        self.assertNotIn("\x1b", self.watch("--steps", "2", TERM="dumb"))

    def test_a_warning_does_not_stand_behind_the_live_line(self):
        written = self.watch("--steps", "40", "--lr", "1e38", code=6)  # steps are skipped until the run ends
        _, kept = self.drawn(written)
        warnings = [line for line in kept if "skipped: its gradient" in line]
        self.assertGreaterEqual(len(warnings), 10)
        for line in warnings:
            self.assertTrue(line.startswith("tandem: warning: step"), line)

    def test_in_a_pipe_each_step_has_a_plain_line(self):
        result = self.succeed(self.train("--steps", "3", "--eval-data", self.held_out(), "--eval-every", "2"))
        self.assertNotIn("\x1b", result.stdout)
        lines = [line for line in result.stdout.splitlines() if line.startswith(("step", "eval"))]
        self.assertEqual([line[:4] for line in lines], ["step", "step", "eval", "step", "eval"])
        self.assertEqual(self.fields(lines[0]), ["step", "loss", "ETA", "rate", "seconds", "norm", "lr", "update"])


if __name__ == "__main__":
    main()
