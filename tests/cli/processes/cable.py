"""Two machines, which are network namespaces of this one, and a cable between them that delays, loses and overtakes packets, and can
be cut.

A machine has one interface besides its loopback: a TUN device, whose packets come to the test as they are. No kernel module for a bad
network is needed, and no right that a user namespace does not give.
"""
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU = 0x8913, 0x8914, 0x8916, 0x891C, 0x8922
IFF_UP = 0x1
TCP, RST = 6, 0x04
MTU = 576  # the least that IPv4 promises: a message takes many packets
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def up(control, name):
    flags = struct.unpack("16xh", fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("16sh", name, 0))[:18])[0]
    fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh", name, flags | IFF_UP))


def address_request(name, address):
    return struct.pack("16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(address))


def inside(channel, address, command):
    """Runs in a machine: gives the end of its cable away, waits until it lies, and becomes the command."""
    tun = os.open("/dev/net/tun", os.O_RDWR)
    name = b"cable0"
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", name, IFF_TUN | IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        up(control, b"lo")
        fcntl.ioctl(control, SIOCSIFADDR, address_request(name, address))
        fcntl.ioctl(control, SIOCSIFNETMASK, address_request(name, "255.255.255.0"))
        fcntl.ioctl(control, SIOCSIFMTU, struct.pack("16si", name, MTU))
        up(control, name)
    with socket.socket(fileno=channel) as to_test:
        socket.send_fds(to_test, [b"cable"], [tun])
        os.close(tun)
        to_test.recv(1)
    os.execvp(command[0], command)


def in_a_namespace(*words):
    return ["unshare", "--user", "--map-root-user", "--net", *words]


def why_not():
    """The reason why this machine lets nobody make two of it; None where it does."""
    try:
        done = subprocess.run(in_a_namespace(sys.executable, "-c", f"import os; os.open('/dev/net/tun', {os.O_RDWR})"),
                              capture_output=True, text=True, timeout=20)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no network namespace"])[-1]


def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def reset_for(packet):
    """The packet by which a router that takes a TCP packet no more ends its connection; None where it is none, or says nothing that can
    be answered."""
    header = (packet[0] & 0x0F) * 4
    if packet[0] >> 4 != 4 or packet[9] != TCP or len(packet) < header + 20:
        return None
    source, target = packet[12:16], packet[16:20]
    from_port, to_port, _, acknowledged, _, flags = struct.unpack("!HHIIBB", packet[header:header + 14])
    if flags & RST or not flags & 0x10:
        return None
    segment = bytearray(struct.pack("!HHIIBBHHH", to_port, from_port, acknowledged, 0, 5 << 4, RST, 0, 0, 0))
    pseudo = target + source + struct.pack("!BBH", 0, TCP, len(segment))
    segment[16:18] = struct.pack("!H", checksum(pseudo + segment))
    ip = bytearray(struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(segment), 0, 0, 64, TCP, 0, target, source))
    ip[10:12] = struct.pack("!H", checksum(ip))
    return bytes(ip + segment)


class Cable:
    """Carries packets between two ends, each after a time of its own, so that some overtake others; loses some."""

    def __init__(self, ends, seed, longest_delay=0.002, lost=0.005):
        self.ends, self.random = ends, random.Random(seed)
        self.longest_delay, self.lost = longest_delay, lost
        self.carried = self.dropped = 0
        self.cut_by = None  # "reset": what still comes is answered as a firewall does; "silence": with nothing
        self.ended = False
        for end in ends:
            os.set_blocking(end, False)
        self.thread = threading.Thread(target=self.carry)
        self.thread.start()

    def cut(self, by):
        self.cut_by = by

    def close(self):
        self.ended = True
        self.thread.join()
        for end in self.ends:
            os.close(end)

    def carry(self):
        under_way = []
        while not self.ended:
            wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.1
            for end in select.select(self.ends, [], [], min(wait, 0.1))[0]:
                for packet in self.packets_of(end):
                    self.take(packet, end, under_way)
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(under_way)
                self.put(end, packet)

    def packets_of(self, end):
        while True:
            try:
                packet = os.read(end, 2 * MTU)
            except BlockingIOError:
                return
            except OSError:  # the machine is gone
                time.sleep(0.001)
                return
            if not packet:
                return
            yield packet

    def take(self, packet, end, under_way):
        other = self.ends[1] if end == self.ends[0] else self.ends[0]
        if self.cut_by:
            answer = reset_for(packet) if self.cut_by == "reset" else None
            if answer:
                self.put(end, answer)
        elif self.random.random() < self.lost:
            self.dropped += 1
        else:
            self.carried += 1
            due = time.monotonic() + self.random.uniform(0.0, self.longest_delay)
            heapq.heappush(under_way, (due, self.carried, other, packet))

    def put(self, end, packet):
        try:
            os.write(end, packet)
        except OSError:  # the machine is gone
            pass


class TwoMachines:
    """Runs one command on each, with an environment, once the cable lies between them."""

    def __init__(self, commands, environments, seed):
        self.processes, ends, channels = [], [], []
        for command, environment, address in zip(commands, environments, ADDRESSES):
            ours, theirs = socket.socketpair()
            words = [sys.executable, __file__, str(theirs.fileno()), address, *map(str, command)]
            self.processes.append(subprocess.Popen(in_a_namespace(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                                   env=environment, pass_fds=[theirs.fileno()]))
            theirs.close()
            channels.append(ours)
            ends += socket.recv_fds(ours, 16, 1)[1]
        self.cable = Cable(ends, seed)
        for channel in channels:
            channel.send(b"!")
            channel.close()

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()
        self.cable.close()


if __name__ == "__main__":
    inside(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
