"""A substitute for a training rank: it connects to the other ranks, exchanges messages with them, and ends.

It uses only the standard library, so that it starts in hundredths of a second. It reads its plan from the environment.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

PLAN = "DIPTYCH_FUZZ_PLAN"
PHASES = ("start", "meeting", "joined", "message 1", "message 2", "end")


def main() -> int:
    """Run the plan; return the exit code."""
    plan = json.loads(os.environ[PLAN])
    rank = int(os.environ["RANK"])
    if plan["grandchild"] == rank:
        child = subprocess.Popen(["sleep", "300"], stdin=subprocess.DEVNULL)
        with open(f"{plan['folder']}/grandchild", "w") as file:
            file.write(str(child.pid))
    try:
        return _take_part(plan, rank, int(os.environ["WORLD_SIZE"]))
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"rank {rank}: expected the others to answer within {plan['timeout']:g} s: {error}", file=sys.stderr)
        return 1


def _take_part(plan: dict, rank: int, size: int) -> int:
    from parity.cli.processes import end_with_parent, report_joined

    end_with_parent()
    reach = {phase: lambda phase=phase: _strike(plan, rank, phase) for phase in PHASES}
    reach["start"]()
    reach["meeting"]()
    links = _meet(rank, size, plan["timeout"])
    report_joined()
    reach["joined"]()
    for number in (1, 2):
        reach[f"message {number}"]()
        _exchange(links)
    time.sleep(plan["seconds"])
    _exchange(links)
    reach["end"]()
    return 0


def _strike(plan: dict, rank: int, phase: str) -> None:
    """Execute the faults that the plan has for this rank in a phase."""
    for fault in plan["faults"]:
        if (fault["rank"], fault["when"]) != (rank, phase):
            continue
        if fault["kind"] == "hang":
            while True:
                time.sleep(1.0)
        if fault["kind"] == "exit":
            os._exit(3)
        if fault["kind"] == "pause":
            pid = os.getpid()
            subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -CONT {pid}"], start_new_session=True)
            os.kill(pid, signal.SIGSTOP)
            continue
        os.kill(os.getpid(), getattr(signal, fault["kind"]))
        time.sleep(0.05)


def _meet(rank: int, size: int, timeout: float) -> list[socket.socket]:
    """Return the links of rank 0 to all other ranks, or the link to rank 0."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    end = time.monotonic() + timeout
    if rank == 0:
        with socket.create_server(address) as server:
            links = []
            while len(links) < size - 1:
                server.settimeout(max(0.01, end - time.monotonic()))
                links.append(server.accept()[0])
        for link in links:
            link.settimeout(timeout)
        _exchange(links)
        return links
    while True:
        try:
            link = socket.create_connection(address, timeout=timeout)
            break
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.005)
    _exchange([link])
    return [link]


def _exchange(links: list[socket.socket]) -> None:
    """Send a message on every link, and wait for its answer."""
    for link in links:
        link.sendall(b"x")
    for link in links:
        if link.recv(1) != b"x":
            raise ConnectionResetError("a rank is gone")


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
