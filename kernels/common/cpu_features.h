// Which CPU variant runs. Detected once; tests and --cpu-isa may ask for a lower one.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace spl::kernels {

enum class CpuIsa : uint8_t { kPortable, kAvx2, kAvx512 };  // ordered: each includes the ones before it

CpuIsa DetectCpuIsa();  // what this machine (and its operating system) can run
bool CpuHasBf16Gemm();  // AVX512-BF16 or AMX-BF16: oneDNN has a fast bf16 path
std::string_view CpuIsaName(CpuIsa isa);
std::optional<CpuIsa> ParseCpuIsa(std::string_view name);

}  // namespace spl::kernels
