#include "services/decode/leave_out.h"

namespace spl::decode {

bool LeavingOutPays(const engine::StreamClasses& classes, int64_t num_tokens, size_t page_bytes,
                    const transport::WriteCost& way) {
  if (way.bytes_per_s <= 0) return true;
  int64_t pages = 0, writes = 0;
  for (const engine::HeadClass& head : classes) {
    const int64_t hole = engine::HoleOf(head, num_tokens).size();
    pages += hole;
    writes += hole > 0 ? 2 : 0;
  }
  return static_cast<double>(pages) * static_cast<double>(page_bytes) / way.bytes_per_s >
         static_cast<double>(writes) * way.write_s;
}

}  // namespace spl::decode
