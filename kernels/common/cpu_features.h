// Choice of the CPU variant that runs. Detected once. The environment variable SPLICE_CPU_ISA may ask for a lower one,
// for tests and for comparing machines.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace spl::kernels {

// Ordered: each includes the ones before it. The last two differ from kAvx512 only in products of bf16.
enum class CpuIsa : uint8_t { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmx };
inline constexpr CpuIsa kCpuIsas[] = {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16,
                                      CpuIsa::kAmx};

// Returns the best variant that this machine and its operating system can run, at most SPLICE_CPU_ISA; an unknown name
// there counts as not set. kAmx: the process has asked for the use of tile data, and its threads inherit that.
CpuIsa DetectCpuIsa();
bool CpuHasBf16Gemm();  // DetectCpuIsa() multiplies bf16
std::string_view CpuIsaName(CpuIsa isa);
std::optional<CpuIsa> ParseCpuIsa(std::string_view name);

}  // namespace spl::kernels
