// Selects one of the compiled instruction sets, and reads the size of L1 and the generation of the CPU.
#include <unistd.h>

#if defined(SPECMEMO_ARM64) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(SPECMEMO_ARM64) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace specmemo {

#ifdef SPECMEMO_ARM64
extern const Kernels kernels_neon, kernels_neonbf16;
#else
extern const Kernels kernels_baseline;
#endif
#ifdef SPECMEMO_X86
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512bf16;
#endif

namespace {

struct Choice {
  const Kernels* runnable[4];
  const char* names[4];
  int count = 0;
  const Kernels* chosen = nullptr;

  void add(const Kernels& k, bool runs) {
    if (!runs) return;
    runnable[count] = &k;
    names[count++] = k.name;
  }

  bool use(const char* name) {
    for (int i = 0; i < count; ++i)
      if (std::strcmp(names[i], name) == 0) {
        chosen = runnable[i];
        return true;
      }
    return false;
  }
};

#ifdef SPECMEMO_ARM64
bool has_bf16() {  // bfdot
#if defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16, which older headers lack
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has != 0;
#else
  return false;
#endif
}
#endif

Choice make_choice() {
  Choice choice;
#ifdef SPECMEMO_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  // On an Intel Emerald Rapids the dot products of bfloat16 are slower than float32 products: a linear layer of 32 rows
  // takes 1.5 times as long, attention over 25 to 64 nodes 1.3 to 1.6 times. Other Intel CPUs weren't measured.
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16"), intel = __builtin_cpu_is("intel");
  choice.add(kernels_avx512bf16, bf16 && !intel);
  choice.add(kernels_avx512, avx512);
  choice.add(kernels_avx512bf16, bf16 && intel);
  choice.add(kernels_avx2, avx2);
#endif
#ifdef SPECMEMO_ARM64
  choice.add(kernels_neonbf16, has_bf16());
  choice.add(kernels_neon, true);
#else
  choice.add(kernels_baseline, true);
#endif
  choice.chosen = choice.runnable[0];
  const char* forced = std::getenv("SPECMEMO_CPU_ISA");
  if (forced != nullptr && forced[0] != '\0' && !choice.use(forced)) {
    std::string message = std::string("SPECMEMO_CPU_ISA is '") + forced + "', this machine can run";
    for (int i = 0; i < choice.count; ++i) message += (i == 0 ? " " : ", ") + std::string(choice.names[i]);
    throw std::invalid_argument(message);
  }
  return choice;
}

Choice& choice() {
  static Choice made = make_choice();
  return made;
}

}  // namespace

const Kernels& kernels() { return *choice().chosen; }

const char* const* available_isas(int* count) {
  *count = choice().count;
  return choice().names;
}

bool use_isa(const char* name) { return choice().use(name); }

int zen() {
#ifdef SPECMEMO_X86
  static const int generation = [] {
    __builtin_cpu_init();
    if (!__builtin_cpu_is("amd") || !__builtin_cpu_supports("avx512bf16")) return 0;
    return __builtin_cpu_is("amdfam19h") ? 4 : 5;  // Zen 3 is of family 19h too, without these instructions
  }();
  return generation;
#else
  return 0;
#endif
}

int64_t l1_bytes() {
  static const int64_t bytes = [] {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    const int64_t size = sysconf(_SC_LEVEL1_DCACHE_SIZE);
    if (size >= 16 << 10) return size;  // less is implausible
#endif
    return int64_t{32} << 10;
  }();
  return bytes;
}

}  // namespace specmemo
