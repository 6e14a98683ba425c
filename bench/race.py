"""Contestants that all exist at once and take turns, so that each pair of measurements sees the same machine."""
import json
import subprocess

import harness


class Contestant:
    """A program that says "ready", then answers each line with one line."""

    def __init__(self, name, command, environment):
        self.name, self.seconds = name, []
        self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=environment)

    def expect(self):
        line = self.process.stdout.readline()
        if not line:
            raise harness.BenchError(f"{self.name} ended with {self.process.wait()}")
        return line.strip()

    def ask(self, request):
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return json.loads(self.expect())

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Race:
    """Contestants by name; `commands` are started one after another, because making the data is work too."""

    def __init__(self, commands, environment=harness.QUIET):
        self.contestants = {}
        try:
            for name, command in commands.items():
                self.contestants[name] = Contestant(name, command, environment)
                self.contestants[name].expect()
                harness.say(f"{name} is ready")
        except Exception:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def run(self, turns, warm_up, check=lambda contestants: None, measured=lambda contestant: None):
        """`check` is called with all contestants after the warm-up, `measured` with one after each of its steps that counts."""
        for turn in range(warm_up + turns):
            for contestant in self.contestants.values():
                seconds = contestant.ask("step")
                if turn >= warm_up:
                    contestant.seconds.append(seconds)
                    measured(contestant)
            if turn + 1 == warm_up:
                check(self.contestants.values())

    def seconds(self, name):
        return self.contestants[name].seconds

    def facts(self, name):
        return self.contestants[name].ask("facts")

    def close(self):
        for contestant in self.contestants.values():
            contestant.close()
