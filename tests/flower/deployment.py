"""A real deployment on this machine: a SuperLink and SuperNodes as processes of their own, on loopback."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from limits import HANG
from promptfed.clients.local import LocalClients
from promptfed.flower import certificates
from promptfed.flower.consortium import make_key
from promptfed.flower.site import SiteFolder
from promptfed.runs import config as C
from promptfed.runs import record
from promptfed.server import Plan, run
from promptfed.testing import Memory
from site_folders import consortium, site


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Process:
    """`promptfed flower ...`, or a script that ends in it, with its output in a file."""

    def __init__(self, log, *words, script=""):
        self.log = log
        command = [sys.executable, "-c", script] if script else [sys.executable, "-m", "promptfed", "flower"]
        with log.open("wb") as out:
            self.popen = subprocess.Popen([*command, *map(str, words)], stdout=out, stderr=subprocess.STDOUT)

    def said(self):
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern, times=1):
        """Until it has said so; -> how often it has."""
        until = time.monotonic() + HANG
        while len(found := re.findall(pattern, self.said())) < times:
            assert self.popen.poll() is None or re.search(pattern, self.said()), self.said()[-3000:]
            assert time.monotonic() < until, f"no {pattern} in {self.said()[-3000:]}"
            time.sleep(0.2)
        return len(found)

    def kill(self):
        """As if the machine had lost its power: a node's SuperNode first."""
        for pid in re.findall(r"its SuperNode is process (\d+)", self.said()):
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(HANG)

    def end(self):
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(40)
            except subprocess.TimeoutExpired:
                self.kill()


# What a faulty site's process does before it takes part: `answer` is put in front of its host's own.
FAULTY = """
import sys, time
import torch
from dataclasses import replace
from pathlib import Path
from promptfed.clients import wire
from promptfed.flower import site
true = site.SiteHost.__call__
def edited(answer, change):
    params, note = wire.unpack(answer.blobs[0])
    changed = {{name: change(p) if name.startswith("up/") else p for name, p in params.items()}}
    return replace(answer, blobs=[wire.pack(changed, note)])
def answer(self, request, blobs):
    task = request.task
{body}
    return true(self, request, blobs)
site.SiteHost.__call__ = answer
from promptfed.flower import node as flower_node
flower_node.run(site.SiteFolder.open(Path(sys.argv[1])), len(sys.argv) > 2)
"""


class Deployment:
    def __init__(self, folder, clients=3, insecure=False, **settings):
        self.folder, self.insecure, self.processes = folder, insecure, []
        self.port = free_port()
        self.server, _ = consortium(folder, clients, f"127.0.0.1:{self.port}", **settings)
        (folder / "logs").mkdir()
        if not insecure:
            certificates.make_authority(self.server / "tls", ["127.0.0.1"])
            make_key(self.server)
        self.sites = []
        for client in range(clients):
            at = site(self.server, folder, client, classes=[c for c in range(4) if c != client])
            if not insecure:
                (at / certificates.CA).write_bytes((self.server / "tls" / certificates.CA).read_bytes())
                certificates.make_pair(at)
            self.sites.append(at)

    def start(self, name, *words, script=""):
        process = Process(self.folder / "logs" / f"{name}-{len(self.processes)}.log", *words, script=script)
        self.processes.append(process)
        return process

    def flag(self):
        return ["--insecure"] if self.insecure else []

    def link(self, *more):
        process = self.start("link", "link", self.server, *self.flag(), *more)
        until = time.monotonic() + HANG
        while True:
            with socket.socket() as attempt:
                if attempt.connect_ex(("127.0.0.1", self.port)) == 0:
                    return process
            assert process.popen.poll() is None, process.said()
            assert time.monotonic() < until
            time.sleep(0.3)

    def admit(self, client):
        from promptfed.cli import flower as flower_commands

        flower_commands.admit(self.server, self.sites[client] / certificates.PUBLIC, client)

    def node(self, client, body=""):
        at = self.sites[client]
        if body:
            return self.start(f"node{client}", at, *self.flag(), script=FAULTY.format(body=body))
        return self.start(f"node{client}", "node", at, *self.flag())

    def submit(self, name):
        """-> the lines of the run"""
        from promptfed.cli import flower as flower_commands

        flower_commands.submit(self.server, name, self.insecure)
        return record.read_lines(self.server / "runs" / name)

    @contextmanager
    def submitted(self, name):
        """The same while something else is done. -> a dict, which has "lines" or "error" in the end"""
        found = {}

        def go():
            try:
                found["lines"] = self.submit(name)
            except BaseException as error:
                found["error"] = error

        thread = threading.Thread(target=go)
        thread.start()
        try:
            yield found
        finally:
            thread.join(HANG)
        assert not thread.is_alive()

    def change(self, **settings):
        """Another agreement, at the server and at all sites."""
        config = C.make(C.read(self.server / "consortium.toml"), C.undot(settings.items()))
        for at in (self.server, *self.sites):
            (at / "consortium.toml").write_text(C.dump(config.complete()))

    def close(self):
        for process in reversed(self.processes):
            process.end()


@contextmanager
def deployed(folder, **how):
    made = Deployment(folder, **how)
    try:
        yield made
    finally:
        made.close()


def reference(deployment, folder, rounds, absent=(), unheard=()):
    """The same federation in this process: hosts with the sites' own images behind the local engine.

    (round, client) pairs: those that are `absent` do not train, those `unheard` train and their answer is lost."""
    places = [SiteFolder.open(at) for at in deployment.sites]
    parts = [place.parts() for place in places]
    hosts = []
    for client, (place, part) in enumerate(zip(places, parts, strict=True)):
        hosts.append(replace(place, folder=folder / f"site{client}").host("reference", part))

    def ask(request, blobs):
        return hosts[request.clients[0].client](request, blobs)

    class Some(LocalClients):
        def train(self, sent, round, score, take, masks):
            there = {client: down for client, down in sent.items() if (round, client) not in absent}
            updates, scores = super().train(
                there, round, score, lambda u: u if (round, u.client) in unheard else take(u), masks
            )
            return [u for u in updates if (round, u.client) not in unheard], scores

    sizes = {client: len(part.federation.sites[client].train) for client, part in enumerate(parts)}
    recorder = Memory()
    first = parts[0]
    plan = Plan(rounds, 1.0, first.config.seed, pooled="never", secure=first.config.secure)
    try:
        run(first.method, first.model, first.init, Some(sizes, [ask]), plan, recorder)
    finally:
        for host in hosts:
            host.close()
    return recorder


class Recorder(threading.Thread):
    """Stands between a node and the SuperLink, and keeps every byte that leaves the node."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.to, self.left, self.listener = port, bytearray(), socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def run(self):
        while True:
            try:
                node, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.to))
            for source, target, keep in ((node, server, True), (server, node, False)):
                threading.Thread(target=self.pass_on, args=(source, target, keep), daemon=True).start()

    def pass_on(self, source, target, keep):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if keep:
                    self.left += data
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def state(deployment, name):
    from promptfed.clients.wire import unpack

    return unpack((deployment.server / "runs" / name / "checkpoint.safetensors").read_bytes())[0]


def numbers(deployment, name):
    return json.loads((deployment.server / "runs" / name / "result.json").read_text())


def mode(path):
    return Path(path).stat().st_mode & 0o777
