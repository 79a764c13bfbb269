#include "services/wire/member.h"

#include <utility>

#include "services/base/ids.h"
#include "services/wire/version.h"

namespace spl::wire {

membership::Member MemberOf(membership::Role role, std::string address, std::string worker_id, uint64_t epoch,
                            const engine::Model& model, int64_t num_pages) {
  return {.role = role,
          .address = std::move(address),
          .worker_id = std::move(worker_id),
          .epoch = epoch,
          .fingerprint = HexEncode(model.kv_fingerprint()),
          .head_map = model.head_classes() == nullptr ? std::string() : HexEncode(model.head_classes()->digest()),
          .capacity = static_cast<uint64_t>(num_pages),
          .wire_min = kVersionMin,
          .wire_max = kVersionMax};
}

}  // namespace spl::wire
