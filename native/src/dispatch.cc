// Which instruction sets this build has, which of them this machine runs, and which one to use.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels.h"

namespace toque {

namespace scalar {
extern const KernelTable kTable;
}
#if defined(TOQUE_HAVE_X86)
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
#endif
#if defined(TOQUE_HAVE_EMULATED)
namespace avx512_emulated {
extern const KernelTable kTable;
}
#endif

namespace {

struct Cpu {
  bool avx2 = false, avx512 = false;
};

#if defined(TOQUE_HAVE_X86)
// Asks cpuid what the processor can do and XCR0 what the operating system saves on a context switch: without
// the second, the first is not usable.
Cpu detect() {
  Cpu cpu;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return cpu;
  const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, f16c = c >> 29 & 1;
  if (!osxsave) return cpu;
  unsigned xcr0, xcr0_high;
  __asm__("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
  const bool saves_ymm = (xcr0 & 0x06) == 0x06, saves_zmm = (xcr0 & 0xe6) == 0xe6;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return cpu;
  const bool avx2 = b >> 5 & 1, bmi2 = b >> 8 & 1;
  const bool f = b >> 16 & 1, dq = b >> 17 & 1, cd = b >> 28 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1;
  const bool vbmi = c >> 1 & 1, vnni = c >> 11 & 1;
  unsigned max_subleaf = a;
  bool bf16 = false;
  if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) bf16 = a >> 5 & 1;
  cpu.avx2 = saves_ymm && fma && f16c && avx2 && bmi2;
  cpu.avx512 = cpu.avx2 && saves_zmm && f && dq && cd && bw && vl && vbmi && vnni && bf16;
  return cpu;
}
#else
Cpu detect() { return {}; }
#endif

struct Candidate {
  const KernelTable* table;
  bool supported;
  bool automatic;  // may be chosen without being asked for
};

// Best first.
constexpr int kMaxCandidates = 4;
int candidates(Candidate (&list)[kMaxCandidates]) {
  static const Cpu cpu = detect();
  int n = 0;
#if defined(TOQUE_HAVE_X86)
  list[n++] = {&avx512::kTable, cpu.avx512, true};
  list[n++] = {&avx2::kTable, cpu.avx2, true};
#endif
#if defined(TOQUE_HAVE_EMULATED)
  list[n++] = {&avx512_emulated::kTable, cpu.avx2, false};
#endif
  list[n++] = {&scalar::kTable, true, true};
  return n;
}

}  // namespace

int supported_tables(const KernelTable* (&tables)[kMaxTables]) {
  Candidate list[kMaxCandidates];
  int n = candidates(list), count = 0;
  for (int i = 0; i < n; ++i) {
    if (list[i].supported) tables[count++] = list[i].table;
  }
  return count;
}

const KernelTable& kernel_table(const char* name) {
  std::string wanted = name != nullptr ? name : "", from = "isa";
  if (wanted.empty()) {
    const char* forced = std::getenv("TOQUE_ISA");
    wanted = forced != nullptr ? forced : "";
    from = "TOQUE_ISA";
  }
  Candidate list[kMaxCandidates];
  int n = candidates(list);
  std::string available;
  for (int i = 0; i < n; ++i) {
    if (!list[i].supported) continue;
    if (wanted.empty() ? list[i].automatic : wanted == list[i].table->name) return *list[i].table;
    available += (available.empty() ? "" : ", ") + std::string(list[i].table->name);
  }
  throw std::invalid_argument(from + ": this machine cannot run \"" + wanted +
                              "\"; it can run: " + available);
}

}  // namespace toque
