"""The Debian package in a clean root: installed by dpkg, it serves a request with splice-tiny, and is removed without a trace.

Needs a package (SPLICE_DEB, or what ./dev deb left in build/), root, and mmdebstrap with a reachable mirror. The root has dpkg and
adduser and no systemd: the unit is checked by systemd-analyze from outside, and its command is run by the test, as its user."""
import glob
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import tools

PACKAGE = os.environ.get("SPLICE_DEB") or next(iter(sorted(glob.glob(str(tools.ROOT / "build" / "splice_*.deb")))), "")
# Where many runs share one: a tar of what `mmdebstrap --variant=minbase --include=adduser` makes.
BASE = os.environ.get("SPLICE_DEB_BASE", "")
PROGRAMS = ["splice", "splice-router", "splice-prefill", "splice-decode", "splice-kvstore"]

if not PACKAGE:
    tools.skip("no package: ./dev deb makes it, or set SPLICE_DEB")
if os.geteuid() != 0 or not shutil.which("mmdebstrap"):
    tools.skip("a clean root needs root and mmdebstrap")


def output(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def allowed_calls(name):
    """System calls of one of systemd's sets, and of those in it."""
    sets, current = {}, None
    for line in output("systemd-analyze", "syscall-filter").splitlines():
        if line.startswith("@"):
            current = sets.setdefault(line.strip(), set())
        elif line.startswith("    ") and not line.strip().startswith("#"):
            current.add(line.strip())

    def members(of):
        return set().union(*(members(m) if m.startswith("@") else {m} for m in sets[of]))
    return members(name)


class DebTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.folder.name) / "root"
        begin = time.monotonic()
        base = BASE or str(pathlib.Path(cls.folder.name) / "base.tar")
        if not BASE:
            made = subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", "--include=adduser", "bookworm", base],
                                  capture_output=True, text=True)
            if made.returncode != 0:
                cls.folder.cleanup()
                tools.skip(f"mmdebstrap: {made.stderr.strip().splitlines()[-1]}")
        cls.root.mkdir()
        output("tar", "-C", str(cls.root), "-xf", base, "--exclude=./dev/*")
        # Programs find their libraries by /proc/self/exe; maintainer scripts write to /dev/null.
        output("mknod", "-m", "666", str(cls.root / "dev" / "null"), "c", "1", "3")
        output("mount", "--bind", "/proc", str(cls.root / "proc"))
        print(f"clean root: {time.monotonic() - begin:.0f} s", file=sys.stderr)
        shutil.copy(PACKAGE, cls.root / "splice.deb")
        cls.before = cls.files()
        cls.installed = cls.inside("dpkg", "--install", "/splice.deb")

    @classmethod
    def tearDownClass(cls):
        output("umount", str(cls.root / "proc"))  # else the folder must stay
        cls.folder.cleanup()

    @classmethod
    def inside(cls, *command, **options):
        return output("chroot", str(cls.root), "/usr/bin/env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", *command, **options)

    @classmethod
    def files(cls):
        """Files of the root, without dpkg's own records and what adduser leaves."""
        found = {str(path.relative_to(cls.root)) for top in cls.root.iterdir() if top.name not in ("proc", "dev", "run")
                 for path in (top, *top.rglob("*"))}
        return {f for f in found if not f.startswith(("var/lib/dpkg/", "var/log/", "var/cache/")) and
                not re.fullmatch(r"etc/(passwd|group|shadow|gshadow|subuid|subgid)-?", f)}

    def test_1_what_it_says_about_itself(self):
        fields = dict(line.split(": ", 1) for line in output("dpkg-deb", "--field", PACKAGE).splitlines() if not line.startswith(" "))
        version = re.search(r"^project\(splice VERSION ([\d.]+)", (tools.ROOT / "CMakeLists.txt").read_text(), re.M).group(1)
        self.assertEqual((fields["Package"], fields["Version"]), ("splice", version))
        for package in ("libc6 (>= ", "libstdc++6 (>= ", "libgcc-s1", "adduser"):
            self.assertIn(package, fields["Depends"])
        self.assertNotIn("grpc", fields["Depends"], "it is inside")
        listing = output("dpkg-deb", "--contents", PACKAGE)
        owners = {line.split()[1] for line in listing.splitlines()}
        self.assertEqual(owners, {"root/root"})
        self.assertEqual(self.inside("dpkg", "--verify", "splice"), "")
        self.assertIn("/etc/splice/splice.env", self.inside("dpkg-query", "--show", "--showformat=${Conffiles}", "splice"))
        self.assertIn("name a model in /etc/splice/splice.env", self.installed)
        for name in ("copyright", "NOTICE", "changelog.gz", "libraries/libgrpc29", "libraries/libssl3"):
            self.assertTrue((self.root / "usr/share/doc/splice" / name).is_file(), name)

    def test_2_every_program_finds_its_libraries(self):
        for program in PROGRAMS:
            self.assertRegex(self.inside(program, "--version"), r"^\d+\.\d+\.\d+\S*( \S+)*\n$")
            libraries = self.inside("ldd", f"/usr/lib/splice/bin/{program}")
            self.assertNotIn("not found", libraries)
            self.assertIn("/usr/lib/splice/", libraries)
            self.assertTrue((self.root / f"usr/share/man/man1/{program}.1.gz").exists())

    def test_3_the_unit_is_valid_and_hardened(self):
        if not shutil.which("systemd-analyze"):
            self.skipTest("no systemd-analyze")
        unit = (self.root / "usr/lib/systemd/system/splice.service").read_text()
        # The unit alone: the root has no systemd, whose units it orders itself after.
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", f"--root={self.root}",
                               "splice.service"], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr.strip()), (0, ""))
        score = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager",
                                str(self.root / "usr/lib/systemd/system/splice.service")], capture_output=True, text=True).stdout
        exposure = float(re.search(r"Overall exposure level for splice\.service: ([\d.]+)", score).group(1))
        print(f"systemd-analyze security: exposure {exposure}", file=sys.stderr)
        self.assertLess(exposure, 3)
        stop = int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M).group(1))
        self.assertGreaterEqual(stop, 30 + 2 + 5)

    def test_4_its_service_answers_a_request(self):
        unit = (self.root / "usr/lib/systemd/system/splice.service").read_text()
        settings = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', (self.root / "etc/splice/splice.env").read_text(), re.M))
        http_port, grpc_port = free_port(), free_port()
        command = re.search(r"^ExecStart=(.*)$", unit, re.M).group(1)
        command = command.replace("${SPLICE_MODEL}", settings["SPLICE_MODEL"]).replace("$SPLICE_ARGS", settings["SPLICE_ARGS"])
        command = command.replace("127.0.0.1:8000", f"127.0.0.1:{http_port}").replace("127.0.0.1:8001", f"127.0.0.1:{grpc_port}")
        shutil.copytree(tools.ROOT / "models" / "splice-tiny", self.root / settings["SPLICE_MODEL"].lstrip("/"))
        user, = re.findall(r"^User=(\w+)$", unit, re.M)
        uid, gid = self.inside("id", "-u", user).strip(), self.inside("id", "-g", user).strip()
        # Finds what the unit's filter would refuse. Frequent calls are left out: they are in every program.
        trace = pathlib.Path(self.folder.name) / "calls"
        strace = ["strace", "-f", "-qq", "--seccomp-bpf", "-e", "trace=!read,write,futex,epoll_wait,poll,clock_nanosleep,madvise,"
                  "recvmsg,sendmsg,epoll_ctl,sched_yield", "-o", str(trace)] if shutil.which("strace") else []
        process = subprocess.Popen([*strace, "chroot", f"--userspec={uid}:{gid}", str(self.root), "/usr/bin/env", "-i",
                                    *command.split(), "--kv-bytes", "256MiB"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, start_new_session=True)
        try:
            ready = next((line for line in process.stdout if line.startswith("ready ")), None)
            if ready is None:
                self.fail(process.stderr.read())
            connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "The capital of", "max_tokens": 8,
                                                                      "temperature": 0}))
            answer = json.loads(connection.getresponse().read())
            connection.close()
            self.assertEqual(answer["usage"]["completion_tokens"], 8)
            served = process.pid
            if strace:
                served = int(pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
            self.assertRegex(pathlib.Path(f"/proc/{served}/status").read_text(), rf"Uid:\t{uid}\t{uid}")
            os.kill(served, signal.SIGTERM)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            code = process.wait(timeout=45)
            process.stdout.close()
            process.stderr.close()
        self.assertEqual(code, 0)
        if strace and shutil.which("systemd-analyze"):
            calls = set(re.findall(r"^\d+ +(\w+)\(", trace.read_text(), re.M)) - {"chroot"}
            self.assertGreater(len(calls), 30)
            self.assertEqual(calls - allowed_calls(re.search(r"^SystemCallFilter=(\S+)$", unit, re.M).group(1)), set())
        self.assertTrue((self.root / "var/lib/splice/chunks").is_dir())

    def test_5_settings_survive_and_a_purge_leaves_nothing(self):
        settings = self.root / "etc/splice/splice.env"
        settings.write_text(settings.read_text() + "# mine\n")
        self.inside("dpkg", "--install", "/splice.deb")
        self.assertIn("# mine\n", settings.read_text())
        self.inside("dpkg", "--remove", "splice")
        self.assertIn("# mine\n", settings.read_text())
        self.inside("dpkg", "--purge", "splice")
        self.assertEqual(self.files() - self.before, set())
        self.assertIn("splice:", (self.root / "etc/passwd").read_text())


if __name__ == "__main__":
    unittest.main()
