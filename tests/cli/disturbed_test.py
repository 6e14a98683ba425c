"""Runs that something comes in between of: files that change under them, other models, kills."""
import subprocess

from program import TEXT, ProgramTest, main, wait_for


class Data(ProgramTest):
    def test_data_that_is_cut_off_in_mid_run_ends_it_in_one_line(self):
        out = self.root / "run"
        self.text = self.file("cut.txt", TEXT)
        process = self.start(out, "--steps", "1000000", "--checkpoint-every", "5", "--log-every", "0", stderr=subprocess.PIPE)
        wait_for(lambda: (out / "checkpoints").is_dir() and self.checkpoints(out))
        self.file("cut.txt", TEXT[:1000])  # as an editor writes it: cut off, and filled anew
        _, stderr = process.communicate(timeout=120)
        self.refused(subprocess.CompletedProcess([], process.returncode, "", stderr), 4, "cut.txt", "changed since the start")
        self.succeed(self.run_program("digest", out))


if __name__ == "__main__":
    main()
