"""Launchers that are here start ranks which train to the bits of one process: torchrun and mpirun, where they are installed, and
processes with the environment of Open MPI's and Slurm's."""
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from program import PROGRAM, ProgramTest, main  # noqa: E402

VENV = pathlib.Path(PROGRAM).resolve().parent / "torch-venv" / "bin"
TOKEN = {"TANDEM_TOKEN": "a secret of the tests"}


def found(name):
    return shutil.which(name) or shutil.which(name, path=str(VENV))


def free_port():
    with socket.socket() as socket_of_it:
        socket_of_it.bind(("127.0.0.1", 0))
        return socket_of_it.getsockname()[1]


class LaunchersTest(ProgramTest):
    def setUp(self):
        super().setUp()
        self.words = ["train", "--model", "tiny-gpt2", "--data", self.text, "--device", "host", "--threads", "1", "--update-threads",
                      "1", "--seq-len", "16", "--grad-accum", "2", "--steps", "2"]
        one = self.root / "one"
        self.succeed(self.run_program(*self.words, "--out", one))
        self.digest = self.summary(one)["state_digest"]
        self.out = self.root / "out"

    def program(self):
        return [str(word) for word in [PROGRAM, *self.words, "--out", self.out]]

    def check(self):
        summary = self.summary(self.out)
        self.assertEqual((summary["processes"], summary["state_digest"]), (2, self.digest))

    def by(self, *launcher):
        done = subprocess.run([*launcher, *self.program()], capture_output=True, text=True, timeout=120,
                              env={**self.environment(), **TOKEN})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check()

    @unittest.skipUnless(found("torchrun"), "there is no torchrun")
    def test_torchrun(self):
        self.by(found("torchrun"), "--no-python", "--nnodes", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
                "--master-port", str(free_port()))

    @unittest.skipUnless(found("mpirun"), "there is no mpirun")
    def test_mpirun(self):
        self.by(found("mpirun"), "--allow-run-as-root", "--oversubscribe", "-np", "2", "-x", f"MASTER_PORT={free_port()}", "-x",
                "TANDEM_TOKEN")

    def in_environments(self, *places):
        processes = [subprocess.Popen(self.program(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                      env={**self.environment(), **TOKEN, **place}) for place in places]
        for process in processes:
            errors = process.communicate(timeout=120)[1]
            self.assertEqual(process.returncode, 0, errors)
        self.check()

    def test_the_environment_of_open_mpi(self):
        port = str(free_port())
        self.in_environments(*({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank,
                                "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": port} for rank in "01"))

    def test_the_environment_of_slurm(self):
        port = str(free_port())
        self.in_environments(*({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_NODES": "1",
                                "MASTER_PORT": port} for rank in "01"))


if __name__ == "__main__":
    main()
