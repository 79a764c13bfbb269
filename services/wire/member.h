// The entry of a worker in the list of members.
#pragma once

#include <cstdint>
#include <string>

#include "services/engine/model/model.h"
#include "services/membership/membership.h"

namespace spl::wire {

// `num_pages`: size of its KV pool.
membership::Member MemberOf(membership::Role role, std::string address, std::string worker_id, uint64_t epoch,
                            const engine::Model& model, int64_t num_pages);

}  // namespace spl::wire
