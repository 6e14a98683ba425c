"""A port whose connections are those to another port, with all that is sent cut into pieces of one to seven bytes."""
import random
import socket
import threading


class InPieces:
    def __init__(self, port, seed):
        self.target, self.random = ("127.0.0.1", port), random.Random(seed)
        self.pieces = 0
        self.sockets = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                here, _ = self.listener.accept()
            except OSError:  # closed
                return
            try:
                there = socket.create_connection(self.target)
            except OSError:  # nobody listens yet: whoever has connected tries again
                here.close()
                continue
            for end in (here, there):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sockets += [here, there]
            for ends in ((here, there), (there, here)):
                threading.Thread(target=self.carry, args=ends, daemon=True).start()

    def carry(self, source, target):
        try:
            while data := source.recv(1 << 16):
                while data:
                    size = self.random.randint(1, 7)
                    target.sendall(data[:size])
                    data = data[size:]
                    self.pieces += 1
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one side has ended
            self.cut([source, target])

    def cut(self, ends=None):
        """Ends connections, all where none are named."""
        for end in self.sockets if ends is None else ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:  # it has ended
                pass

    def close(self):
        self.listener.close()
        self.cut()
