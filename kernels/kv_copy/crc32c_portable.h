// The table variant, for machines without SSE4.2. Its own name lets a test run it on a machine that has it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spl::kernels::portable {

uint32_t Crc32cExtend(uint32_t crc, const void* data, size_t size);

}  // namespace spl::kernels::portable
