// The checksums that a commit of a ticket must have while nobody writes its pages: of whatever lies there.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/kv_copy/crc32c_shifter.h"
#include "services/base/status.h"
#include "services/engine/cache/page_pool.h"
#include "spl/v1/decode.pb.h"

namespace spl::test {

// REQUIRES: a ticket without holes.
inline absl::StatusOr<v1::CommitRequest> CommitOf(const v1::Ticket& ticket, const engine::PagePool& pool,
                                                  int64_t num_tokens) {
  const std::vector<int32_t> pages(ticket.page_ids().begin(), ticket.page_ids().end());
  std::vector<uint32_t> of_page(pages.size());
  SPLICE_RETURN_IF_ERROR(pool.ChecksumPages(pages, of_page.data()));
  const kernels::Crc32cShifter over_a_page(pool.view().page_bytes());
  v1::CommitRequest commit;
  commit.set_ticket_id(ticket.ticket_id());
  commit.set_generation(ticket.generation());
  commit.set_num_tokens(static_cast<uint32_t>(num_tokens));
  const size_t of_stream = ticket.num_pages_per_stream();
  for (size_t at = 0; at < pages.size(); at += of_stream) {
    uint32_t crc = 0;
    for (const uint32_t page : std::span(of_page).subspan(at, of_stream)) crc = over_a_page(crc) ^ page;
    commit.add_crc32c(crc);
  }
  return commit;
}

}  // namespace spl::test
