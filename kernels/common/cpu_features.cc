#include "kernels/common/cpu_features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace spl::kernels {
namespace {

struct CpuidLeaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidLeaf Cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidLeaf r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// AMX tile data is off until the process asks the operating system for it; asking twice is harmless.
bool RequestAmx() {
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kTileDataFeature = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileDataFeature) == 0;
}

// The __builtin checks include the operating system's promise to save the registers (XCR0); cpuid bits alone do not.
CpuIsa DetectMachine() {
  __builtin_cpu_init();
  const bool f16c = (Cpuid(1, 0).ecx >> 29 & 1) != 0;
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c)) return CpuIsa::kPortable;
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))) {
    return CpuIsa::kAvx2;
  }
  if ((Cpuid(7, 1).eax >> 5 & 1) == 0) return CpuIsa::kAvx512;  // AVX512-BF16
  const uint32_t edx = Cpuid(7, 0).edx;
  const bool amx = (edx >> 22 & 1) != 0 && (edx >> 24 & 1) != 0;  // AMX-BF16, AMX-TILE
  return amx ? CpuIsa::kAmx : CpuIsa::kAvx512Bf16;
}

CpuIsa Detect() {
  CpuIsa isa = DetectMachine();
  if (const char* name = std::getenv("SPLICE_CPU_ISA")) isa = std::min(isa, ParseCpuIsa(name).value_or(isa));
  if (isa == CpuIsa::kAmx && !RequestAmx()) isa = CpuIsa::kAvx512Bf16;
  return isa;
}

}  // namespace

CpuIsa DetectCpuIsa() {
  static const CpuIsa isa = Detect();
  return isa;
}

bool CpuHasBf16Gemm() { return DetectCpuIsa() >= CpuIsa::kAvx512Bf16; }

std::string_view CpuIsaName(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPortable:
      return "portable";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
    case CpuIsa::kAvx512Bf16:
      return "avx512_bf16";
    case CpuIsa::kAmx:
      return "amx";
  }
  return "?";
}

std::optional<CpuIsa> ParseCpuIsa(std::string_view name) {
  for (const CpuIsa isa : kCpuIsas) {
    if (name == CpuIsaName(isa)) return isa;
  }
  return std::nullopt;
}

}  // namespace spl::kernels
