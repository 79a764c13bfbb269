// Any bytes are a header that encodes back to themselves, or DataLoss. The second pass repairs magic, version, size and
// checksum, so that the fuzzer reaches the fields behind them.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/kv_copy/crc32c.h"
#include "services/chunk/chunk_header.h"

namespace {

using spl::chunk::kEncodedHeaderBytes;

void Require(bool condition) {
  if (!condition) std::abort();
}

void CheckDecode(std::span<const std::byte> bytes) {
  const auto header = spl::chunk::DecodeHeader(bytes);
  if (!header.ok()) {
    Require(header.status().code() == absl::StatusCode::kDataLoss);
    return;
  }
  Require(spl::chunk::CheckHeaderFields(*header).ok());
  const auto encoded = spl::chunk::EncodeHeader(*header);
  const auto again = spl::chunk::DecodeHeader(encoded);
  Require(again.ok() && again->key == header->key && again->payload_bytes == header->payload_bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(data);
  CheckDecode({bytes, size});
  std::array<std::byte, kEncodedHeaderBytes> repaired = spl::chunk::EncodeHeader({});
  const size_t from = 16;  // behind magic, version and size
  if (size > 0) std::memcpy(repaired.data() + from, data, std::min(size, kEncodedHeaderBytes - 4 - from));
  const uint32_t crc = spl::kernels::Crc32cExtend(0, repaired.data(), kEncodedHeaderBytes - 4);
  std::memcpy(repaired.data() + kEncodedHeaderBytes - 4, &crc, sizeof(crc));
  CheckDecode(repaired);
  return 0;
}
