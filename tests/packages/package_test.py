"""usage: package_test.py hierad|debian: the Debian packages, made, looked at by lintian, installed, run, upgraded, removed, purged.

hierad: that package alone, from the build that HIERAD_BIN_DIR belongs to, over this machine's own system (an overlay, thrown away),
        with the test engine for a worker.
debian: both, by tools/package, in a Debian of their own (debootstrap); with CUDA the machine's /usr/local is lent to it.

Takes root and mounts; exit status 77 says that they are not to be had here.
"""
import contextlib
import json
import os
import platform
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.realpath(os.path.join(HERE, "../.."))
sys.path.insert(0, os.path.join(HERE, "../e2e"))
import cluster

SKIPPED = 77
UNITS = ("hierad.service", "hierad-agent.service", "hierad-gpus.service")
# What is installed where, beside the programs.
FILES = ("usr/share/man/man1/hierctl.1.gz", "usr/share/bash-completion/completions/hierctl", "usr/share/zsh/vendor-completions/_hierctl",
         "usr/share/fish/vendor_completions.d/hierctl.fish", "usr/share/doc/hierad/copyright", "usr/share/doc/hierad/examples/quickstart.yaml",
         "etc/default/hierad-agent", "etc/hierad/hierad.yaml", "usr/bin/hierad-certs", "var/lib/hierad-runs")


def skip(why):
    print(f"not run here: {why}")
    sys.exit(SKIPPED)


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def run(*words, **options):
    done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200, **options)
    check(done.returncode == 0, f"{' '.join(map(str, words))}: exit status {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


@contextlib.contextmanager
def timed(what):
    begin = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - begin:.1f} s", flush=True)


# The packages.

def make(mode, folder):
    with timed("made"):
        if mode == "debian":
            run(os.path.join(SOURCE, "tools/package"), "--no-setup", "--out", folder)
        else:
            run(os.environ.get("CPACK", "cpack"), "-B", folder, "-D", "CPACK_COMPONENTS_ALL=hierad", cwd=os.path.dirname(cluster.BIN))
            shutil.rmtree(os.path.join(folder, "_CPack_Packages"))
    packages = sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".deb"))
    names = [os.path.basename(package).split("_")[0] for package in packages]
    check(names == (["hiera-worker", "hierad"] if mode == "debian" else ["hierad"]), f"packages {packages}")
    return packages


def lintian(packages):
    if shutil.which("lintian") is None:
        print("not run here, for want of it: lintian")
        return
    with timed("lintian"):
        done = subprocess.run(["lintian", "--allow-root", "--fail-on", "error,warning", "--tag-display-limit", "0", *packages], capture_output=True, text=True,
                              timeout=1200)
    check(done.returncode == 0, f"lintian: {done.stdout}{done.stderr}")


# A root of their own.

def mount(*words):
    run("mount", *words)


def overlay(folder):
    root = os.path.join(folder, "root")
    # Where / is an overlay itself, a second one's upper folders are on a tmpfs.
    for upper in ("disk", "memory"):
        base = os.path.join(folder, upper)
        os.mkdir(base)
        if upper == "memory":
            mount("-t", "tmpfs", "tmpfs", base)
        for name in ("upper", "work"):
            os.mkdir(os.path.join(base, name))
        os.makedirs(root, exist_ok=True)
        done = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={base}/upper,workdir={base}/work", root], capture_output=True,
                              text=True)
        if done.returncode == 0:
            break
    else:
        skip(f"no overlay may be mounted: {done.stderr.strip()}")
    if os.path.exists("/usr/bin/hierad"):
        skip("hierad is installed on this machine")
    return root


def debian(folder):
    root = os.path.join(folder, "root")
    if shutil.which("debootstrap") is None:
        skip("debootstrap is missing")
    with open("/etc/os-release") as file:
        release = dict(re.findall(r'^(\w+)="?([^"\n]*)', file.read(), re.M))
    if release.get("ID") != "debian":
        skip("the packages fit the distribution that they are built on, and the root here is Debian's")
    with timed("debootstrap"):
        run("debootstrap", "--variant=minbase", "--include=ca-certificates", release["VERSION_CODENAME"], root)
    for name in ("sources.list", "sources.list.d", "apt.conf.d", "auth.conf.d"):
        source, target = f"/etc/apt/{name}", f"{root}/etc/apt/{name}"
        if os.path.isdir(source):
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif os.path.exists(source):
            shutil.copy2(source, target)
    shutil.copy2("/etc/resolv.conf", f"{root}/etc/resolv.conf")
    if os.path.isdir("/usr/local/cuda"):
        mount("--rbind", "/usr/local", f"{root}/usr/local")
        shutil.copytree("/etc/ld.so.conf.d", f"{root}/etc/ld.so.conf.d", dirs_exist_ok=True)
    return root


class Root:
    def __init__(self, path):
        self.path = path
        mount("-t", "proc", "proc", f"{path}/proc")
        mount("-t", "tmpfs", "tmpfs", f"{path}/dev/shm")

    def __call__(self, *words, user="root"):
        return run("chroot", f"--userspec={user}", self.path, *words,
                   env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp", "LANG": "C", "DEBIAN_FRONTEND": "noninteractive"})

    def at(self, name):
        return os.path.join(self.path, name)

    def start(self):
        """hierad as its unit starts it: no option, settings as installed. The unit's folders are systemd's to make."""
        for name, mode in (("var/lib/hierad", 0o700), ("run/hierad", 0o755)):
            os.makedirs(self.at(name), exist_ok=True)
            os.chmod(self.at(name), mode)
        with open(self.at("lib/systemd/system/hierad.service")) as file:
            command = re.search(r"^ExecStart=(.*)$", file.read(), re.M)[1].split()
        log = self.at("tmp/hierad.log")
        with open(log, "a") as out:
            self.hierad = subprocess.Popen(["chroot", self.path, *command], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        cluster.wait_for(lambda: self.hierad.poll() is not None or subprocess.run(["chroot", self.path, "hierctl", "version"], capture_output=True).returncode == 0,
                         lambda: "hierad answers\n" + cluster.read_text(log), 30)
        check(self.hierad.poll() is None, cluster.read_text(log))

    def stop(self):
        self.hierad.terminate()
        check(self.hierad.wait(60) == 0, "hierad ends cleanly")

    def job(self, name, steps):
        path = f"tmp/{name}.yaml"
        with open(self.at(path), "w") as file:
            file.write(cluster.JOB.format(name=name, steps=steps, every=10, ranks=2, seed=1, keep=2, attempts=3, backoff=0.1, source="npy", path="\n  path: /tmp/train.npy"))
        return json.loads(self("hierctl", "submit", "/" + path, "-o", "json", user="nobody"))["job"]["id"]


def install(root, mode, packages):
    os.makedirs(root.at("tmp/packages"), exist_ok=True)
    for package in packages:
        shutil.copy(package, root.at("tmp/packages"))
    names = [f"/tmp/packages/{os.path.basename(package)}" for package in packages]
    with timed("installed"):
        if mode == "debian":
            root("apt-get", "update")
            root("apt-get", "install", "-y", "--no-install-recommends", "-o", "DPkg::Options::=--force-unsafe-io", *names)
        else:
            root("dpkg", "--force-unsafe-io", "-i", *names)   # whose dependencies are there: it was built here
    return names


def work(root, mode, names):
    for name in FILES:
        check(os.path.exists(root.at(name)), f"{name} is installed")
    for unit in UNITS:
        check(os.path.exists(root.at(f"lib/systemd/system/{unit}")), f"{unit} is installed")
    if mode != "debian":
        shutil.copy(cluster.TEST_WORKER, root.at("usr/bin/hiera-worker"))
    for program in ("hierad", "hierad-agent", "hierctl"):
        root(program, "--version")
    if mode == "debian":
        root("hiera-worker", "--version")
        libraries = root("ldd", "/usr/bin/hiera-worker")
        check(re.search(r"libtorch_cpu\.so => /usr/lib/hierad/", libraries) and "not found" not in libraries, libraries)
    cluster.write_npy(root.at("tmp/train.npy"))
    with timed("ran"):
        root.start()
        engine = "job" if mode == "debian" else "job-step20"
        first = root.job(engine, 20)
        root("hierctl", "wait", first)
        folder = root.at(json.loads(root("hierctl", "describe", first, "-o", "json"))["job"]["run_folder"].lstrip("/"))
        check(os.stat(os.path.join(folder, "exported/model.safetensors")).st_uid == pwd.getpwnam("nobody").pw_uid, f"ranks are of who has submitted: {folder}")
        # An upgrade in the midst of a job: its ranks go on, and the new hierad takes them back.
        second = root.job(engine, 2000 if mode == "debian" else 400)
        cluster.wait_for(lambda: json.loads(root("hierctl", "describe", second, "-o", "json"))["job"]["state"] == "RUNNING", "the second job runs", 60)
        root("dpkg", "--force-unsafe-io", "-i", *names)
        root.stop()
        root.start()
        root("hierctl", "wait", second)
        job = json.loads(root("hierctl", "describe", second, "-o", "json"))["job"]
        check(int(job["attempt"]) == 1, f"one attempt outlives the upgrade: {job}")
        root.stop()


def take_away(root, mode):
    if mode != "debian":
        os.remove(root.at("usr/bin/hiera-worker"))
    with open(root.at("etc/default/hierad-agent"), "a") as file:
        file.write("# changed\n")
    wants = "etc/systemd/system/multi-user.target.wants"   # as systemctl enable leaves it
    os.makedirs(root.at(wants), exist_ok=True)
    os.symlink("/lib/systemd/system/hierad.service", root.at(f"{wants}/hierad.service"))
    packages = ["hiera-worker", "hierad"] if mode == "debian" else ["hierad"]
    root("dpkg", "--force-unsafe-io", "-r", *packages)
    for name in ("usr/bin/hierad", "usr/bin/hierctl", "usr/bin/hiera-worker", "usr/lib/hierad", "lib/systemd/system/hierad.service"):
        check(not os.path.exists(root.at(name)), f"{name} is gone once removed")
    check(os.path.exists(root.at("var/lib/hierad/hierad.db")) and os.path.exists(root.at("etc/default/hierad-agent")), "removal keeps state and settings")
    root("dpkg", "-P", *packages)
    for name in ("var/lib/hierad", "etc/default/hierad-agent", "etc/hierad", "usr/share/doc/hierad"):
        check(not os.path.exists(root.at(name)), f"{name} is gone once purged")
    check(not os.path.lexists(root.at(f"{wants}/hierad.service")), "a service that was enabled is not once purged")
    check(os.listdir(root.at("var/lib/hierad-runs")), "what was trained is there still")


def inside(mode, folder):
    # /proc as the new process identifiers have it, before any program looks.
    mount("-t", "proc", "proc", "/proc")
    packages = make(mode, os.path.join(folder, "packages"))
    lintian(packages)
    root = Root(overlay(folder) if mode == "hierad" else debian(folder))
    if mode == "hierad":
        mount("-t", "tmpfs", "tmpfs", root.at(os.environ["HIERAD_DEPS"].lstrip("/")))   # what the packages need is in them
    names = install(root, mode, packages)
    work(root, mode, names)
    take_away(root, mode)


def main(mode):
    if os.geteuid() != 0:
        skip("only root installs packages")
    if not os.path.exists("/var/lib/dpkg/status") or platform.machine() != "x86_64":
        skip("this machine is not a Debian on x86-64")
    space = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
    if subprocess.run([*space, "mount", "-t", "proc", "proc", "/proc"], capture_output=True).returncode != 0:
        skip("no mounts are allowed here")
    folder = tempfile.mkdtemp(prefix="hierad-package-", dir="/tmp")
    os.mkdir(os.path.join(folder, "packages"))
    try:
        return subprocess.run([*space, sys.executable, os.path.abspath(__file__), mode, folder]).returncode
    finally:
        if not os.environ.get("HIERAD_KEEP"):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        inside(*sys.argv[1:])
    elif len(sys.argv) == 2 and sys.argv[1] in ("hierad", "debian"):
        sys.exit(main(sys.argv[1]))
    else:
        sys.exit(__doc__)
