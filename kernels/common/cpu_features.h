// Which CPU variant runs. Detected once; the environment's SPLICE_CPU_ISA may ask for a lower one, for tests and for
// comparing machines.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace spl::kernels {

// Ordered: each includes the ones before it. The last two differ from kAvx512 in products of bf16 alone.
enum class CpuIsa : uint8_t { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmx };
inline constexpr CpuIsa kCpuIsas[] = {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16,
                                      CpuIsa::kAmx};

// The best that this machine and its operating system can run, at most SPLICE_CPU_ISA. A value that is no name counts
// as not set. kAmx: the process has asked for the use of tile data, which its threads inherit.
CpuIsa DetectCpuIsa();
bool CpuHasBf16Gemm();  // DetectCpuIsa() multiplies bf16
std::string_view CpuIsaName(CpuIsa isa);
std::optional<CpuIsa> ParseCpuIsa(std::string_view name);

}  // namespace spl::kernels
