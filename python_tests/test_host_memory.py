"""Limits of control groups wherever they are mounted, and failed allocations in a limited address space."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from specmemo_kernels.planning.host_memory import host_free, host_memory

GIB = 2**30
#: A limit of version 1 that is none.
UNLIMITED = 9223372036854771712


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


def tree(root: Path, cgroup: str, mounts: str, files: dict[str, object]) -> Path:
    """A fake system with 64 GiB available, and this process in a control group."""
    proc = {
        "proc/meminfo": f"MemTotal: {128 * 2**20} kB\nMemAvailable: {64 * 2**20} kB",
        "proc/self/status": "VmSize: 1024 kB\nVmData: 512 kB",
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": mounts,
    }
    return write(root, proc | files)


def v2(folder: str, limit: object, used: int, inactive: int = 0) -> dict[str, object]:
    stat = f"anon 5\ninactive_file {inactive}\nactive_file 7"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": used, f"{folder}/memory.stat": stat}


def v1(folder: str, limit: object, used: int, inactive: int = 0) -> dict[str, object]:
    stat = f"inactive_file 1\ntotal_inactive_file {inactive}"
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": used,
        f"{folder}/memory.stat": stat,
    }


UNIFIED = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
HYBRID = (
    "31 24 0:27 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n"
    "32 31 0:28 / /sys/fs/cgroup/unified rw shared:10 - cgroup2 cgroup2 rw\n"
    "33 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:11 - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:30 / /sys/fs/cgroup/memory rw shared:12 - cgroup cgroup rw,memory"
)
TOP = "sys/fs/cgroup"
CASES = {
    "own group": ("0::/job", UNIFIED, v2(f"{TOP}/job", 8 * GIB, 3 * GIB, GIB), 6 * GIB, 8 * GIB),
    "a group above": (
        "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
        UNIFIED,
        v2(f"{TOP}/system.slice/slurmstepd.scope/job_7/step_0/user/task_0", "max", GIB)
        | v2(f"{TOP}/system.slice/slurmstepd.scope/job_7", 4 * GIB, 2 * GIB)
        | v2(f"{TOP}/system.slice", 32 * GIB, 3 * GIB),
        2 * GIB,
        4 * GIB,
    ),
    "the root of a namespace": ("0::/", UNIFIED, v2(TOP, 5 * GIB, GIB), 4 * GIB, 5 * GIB),
    "another group's limit": ("0::/a", UNIFIED, v2(f"{TOP}/b", GIB, 0) | v2(f"{TOP}/a", "max", 0), 64 * GIB, None),
    "a part is mounted": (
        "0::/docker/abc/inner",
        UNIFIED.replace(" / /sys", " /docker/abc /sys"),
        v2(f"{TOP}/inner", 3 * GIB, GIB) | v2(TOP, 8 * GIB, GIB),
        2 * GIB,
        3 * GIB,
    ),
    "a path from elsewhere": ("0::/../other", UNIFIED, v2(TOP, 7 * GIB, GIB), 6 * GIB, 7 * GIB),
    "another mount point": (
        "0::/job",
        UNIFIED.replace("/sys/fs/cgroup", "/run/my\\040groups"),
        v2("run/my groups/job", 2 * GIB, GIB),
        GIB,
        2 * GIB,
    ),
    "version 1": (
        "9:cpu,cpuacct:/\n7:memory:/slurm/uid_0/job_1\n0::/",
        HYBRID,
        v1(f"{TOP}/memory/slurm/uid_0/job_1", UNLIMITED, GIB)
        | v1(f"{TOP}/memory/slurm/uid_0", 6 * GIB, 2 * GIB, GIB)
        | v1(f"{TOP}/memory", UNLIMITED, 9 * GIB)
        | v1(f"{TOP}/cpu,cpuacct", GIB, GIB),
        5 * GIB,
        6 * GIB,
    ),
    "both versions": (
        "7:memory:/a\n0::/b",
        HYBRID,
        v1(f"{TOP}/memory/a", 6 * GIB, GIB) | v2(f"{TOP}/unified/b", 3 * GIB, GIB),
        2 * GIB,
        3 * GIB,
    ),
    "no memory controller": ("0::/user.slice", UNIFIED, {f"{TOP}/user.slice/cgroup.procs": "1"}, 64 * GIB, None),
}


@pytest.mark.parametrize("name", CASES)
def test_control_groups(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least that this process's group and its ancestors allow; other groups don't count."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    cgroup, mounts, files, free, limit = CASES[name]
    root = tree(tmp_path, cgroup, mounts, files)
    assert host_free(root) == free
    # The total is this machine's own.
    unlimited = host_memory(tmp_path / "nothing")
    assert host_memory(root) == (unlimited if limit is None else min(unlimited, limit))


def test_without_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    root = tree(tmp_path, "", "", {})
    (root / "proc/self/cgroup").unlink()
    assert host_free(root) == 64 * GIB


PROGRAM = """
import json, resource, sys, torch
from pathlib import Path
from tiny_models import VOCAB, tiny_model
import specmemo_kernels as sk
torch.set_num_threads(1)
model = tiny_model("llama", num_attention_heads=8, num_key_value_heads=8, head_dim=64, hidden_size=256)
handle = sk.patch(model, "prompt-lookup", tree=4, max_batch_size=4)
ids = torch.randint(3, VOCAB, (4, 300))
def run():
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
model.generate(ids[:, :9], attention_mask=torch.ones(4, 9, dtype=torch.int64), max_new_tokens=4, do_sample=False)
handle.release()
line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmSize"))
found = []
for spare in (0, 1, 2, 4, 8):
    resource.setrlimit(resource.RLIMIT_AS, (int(line.split()[1]) * 1024 + spare * 2**20, resource.RLIM_INFINITY))
    try:
        run()
        found.append("done")
    except Exception as error:
        found.append(type(error).__name__)
    handle.release()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
sk.unpatch(model)
print(json.dumps(found))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the size of a process is read from /proc")
@pytest.mark.slow
def test_a_tight_address_space() -> None:
    """With any limit, a call succeeds or raises an error that counts as out of memory."""
    folder = str(Path(__file__).parent)
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=folder, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    assert set(found) <= {"done", "OutOfMemoryError", "MemoryError"}
    assert "OutOfMemoryError" in found
