"""usage: as_unit.py UNIT COMMAND...: runs it with a unit's capabilities, system calls, address families, /proc and system folders, as
systemd would.

What takes systemd itself (devices, control groups) is not done here.
"""
import ctypes
import errno
import functools
import os
import re
import socket
import subprocess
import sys

PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, CLONE_NEWNS = 24, 38, 0x20000
ALLOW, EQUAL = 0x7FFF0000, 4
CAPABILITIES = ("CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST "
                "NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE "
                "SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM "
                "BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE").split()


def settings(unit):
    """{key: [values in their order]}"""
    found = {}
    with open(unit) as file:
        for key, value in re.findall(r"^(\w+)=(.*)$", file.read(), re.M):
            found.setdefault(key, []).append(value)
    return found


@functools.cache
def calls(name):
    """The system calls of a group, by systemd's own list."""
    if not name.startswith("@"):
        return frozenset([name])
    text = subprocess.run(["systemd-analyze", "syscall-filter", "--no-pager", name], check=True, capture_output=True, text=True).stdout
    return frozenset().union(*(calls(line.strip()) for line in text.splitlines()[1:] if line.strip() and not line.strip().startswith("#")))


def allowed_calls(unit):
    # systemd always adds @default, and what its own start of the program takes.
    allowed = set(calls("@default")) | {"execve"}
    for value in settings(unit)["SystemCallFilter"]:
        names = frozenset().union(*(calls(name) for name in value.lstrip("~").split()))
        allowed = allowed - names if value.startswith("~") else allowed | names
    return allowed


def mounts(configured, libc):
    """Its own /proc and system folders that it may only read, in a space of its own."""
    if libc.unshare(CLONE_NEWNS) != 0:
        sys.exit("as_unit.py: no mounts of its own are allowed")
    steps = [["--make-rprivate", "/"]]
    if configured["ProtectProc"] == ["invisible"]:
        steps.append(["-t", "proc", "-o", "hidepid=invisible", "proc", "/proc"])
    if configured["ProtectSystem"] == ["full"]:
        for folder in ("/usr", "/etc"):
            steps += [["--bind", folder, folder], ["-o", "remount,bind,ro", folder]]
    for step in steps:
        subprocess.run(["mount", *step], check=True)


def restrict(unit):
    configured = settings(unit)
    allowed = sorted(allowed_calls(unit))
    libc = ctypes.CDLL(None, use_errno=True)
    mounts(configured, libc)
    seccomp = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    seccomp.seccomp_init.restype = ctypes.c_void_p
    kept = configured["CapabilityBoundingSet"][0].split()
    for number, name in enumerate(CAPABILITIES):
        if "CAP_" + name not in kept:
            libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        sys.exit("as_unit.py: no_new_privs is refused")

    class Comparison(ctypes.Structure):
        _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]

    refuse = 0x00050000 | errno.EPERM
    families = ctypes.c_void_p(seccomp.seccomp_init(ALLOW))
    number = seccomp.seccomp_syscall_resolve_name(b"socket")
    kept_families = [getattr(socket, name) for name in configured["RestrictAddressFamilies"][0].split()]
    for family in range(64):
        if family not in kept_families:
            if seccomp.seccomp_rule_add(families, 0x00050000 | errno.EAFNOSUPPORT, number, 1, Comparison(0, EQUAL, family, 0)) != 0:
                sys.exit("as_unit.py: libseccomp refuses a rule")
    system_calls = ctypes.c_void_p(seccomp.seccomp_init(refuse))
    for name in allowed:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            seccomp.seccomp_rule_add(system_calls, ALLOW, number, 0)
    for filters in (families, system_calls):
        if seccomp.seccomp_load(filters) != 0:
            sys.exit("as_unit.py: the kernel refuses the filter")


if __name__ == "__main__":
    restrict(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
