// CRC32C (Castagnoli, reflected, as iSCSI and RocksDB use it): the checksum of every KV byte that crosses a border.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spl::kernels {

// Extends `crc` (0 for none yet) by `size` bytes: Extend(Extend(0, a), b) == Extend(0, ab).
// Cost: about 1/3 cycle per byte with SSE4.2 (three interleaved streams), a table otherwise. Thread-safe.
uint32_t Crc32cExtend(uint32_t crc, const void* data, size_t size);

namespace ref {
uint32_t Crc32cExtend(uint32_t crc, const void* data, size_t size);
}

}  // namespace spl::kernels
