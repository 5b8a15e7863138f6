"""The C++ kernels' own threads, used without an OpenMP runtime, when the system refuses threads."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import specmemo_kernels

SOURCES = Path(specmemo_kernels.__file__).resolve().parents[1] / "csrc"
COMPILER = shutil.which("c++")

#: Counts how often each index runs. `pthread_create` of the program comes before the system's.
PROGRAM = r"""
#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

static int allowed = 0;
static int started = 0;

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* data) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (started == allowed) return EAGAIN;
  ++started;
  return create(thread, attributes, run, data);
}

static std::atomic<int> runs[100];

int main(int, char** arguments) {
  allowed = std::atoi(arguments[1]);
  const int threads = std::atoi(arguments[2]);
  for (auto loop : {specmemo::parallel_for, specmemo::parallel_parts}) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      started = 0;
      loop(100, threads, [](void*, int64_t index) { ++runs[index]; }, nullptr);
    }
  }
  for (auto& count : runs) {
    if (count != 6) return 1;
  }
  std::printf("%s, %d started\n", specmemo::thread_runtime(), started);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("threads")
    (folder / "main.cpp").write_text(PROGRAM)
    built = folder / "program"
    command = [str(COMPILER), "-std=c++17", "-O1", "-pthread", f"-I{SOURCES}", "-o", str(built)]
    subprocess.run([*command, str(folder / "main.cpp"), str(SOURCES / "threads.cpp"), "-ldl"], check=True)
    return built


@pytest.mark.skipif(
    COMPILER is None or not SOURCES.exists() or sys.platform != "linux", reason="needs Linux, a compiler, the sources"
)
@pytest.mark.parametrize(("allowed", "threads"), [(0, 8), (1, 8), (3, 8), (7, 8), (3, 70), (69, 70)])
def test_refused_threads_leave_the_work_to_the_others(program: Path, allowed: int, threads: int) -> None:
    """Each index runs once per loop, whichever thread fails to start, also with more threads than a loop has parts."""
    done = subprocess.run([program, str(allowed), str(threads)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"std::thread, {allowed} started\n"
