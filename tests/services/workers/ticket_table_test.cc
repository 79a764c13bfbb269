// The table of a decode worker's tickets by itself.
#include "services/decode/ticket_table.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace spl::decode {
namespace {

std::unique_ptr<Ticket> MakeTicket() {
  auto ticket = std::make_unique<Ticket>();
  ticket->id = RandomId::Make();
  ticket->ttl = std::chrono::seconds(60);
  ticket->stream = std::make_shared<TokenStream>([] {});
  return ticket;
}

// Whoever adds a ticket knows its generation although somebody else ends it at once.
TEST(TicketTableTest, TheGenerationIsKnownOfATicketThatIsGone) {
  TicketTable table(64);
  std::atomic<bool> stop{false};
  std::mutex mutex;  // guards latest
  RandomId latest;
  std::thread ender([&] {
    while (!stop.load()) {
      RandomId id;
      {
        std::lock_guard lock(mutex);
        id = latest;
      }
      table.Drop(id, absl::CancelledError("gone"));
    }
  });
  uint64_t last = 0;
  for (int i = 0; i < 5000; ++i) {
    auto ticket = MakeTicket();
    const RandomId id = ticket->id;
    {
      std::lock_guard lock(mutex);
      latest = id;
    }
    const auto generation = table.Add(std::move(ticket));
    ASSERT_TRUE(generation.ok()) << generation.status();
    EXPECT_GT(*generation, last);
    last = *generation;
    table.Drop(id, absl::CancelledError("gone"));
  }
  stop = true;
  ender.join();
  EXPECT_EQ(table.counts().reserved, 0u);
  table.Stop(absl::UnavailableError("stopped"));
  EXPECT_EQ(table.Add(MakeTicket()).status().code(), absl::StatusCode::kUnavailable);
}

TEST(TicketTableTest, AFullTableRefuses) {
  TicketTable table(2);
  ASSERT_TRUE(table.Add(MakeTicket()).ok());
  ASSERT_TRUE(table.Add(MakeTicket()).ok());
  EXPECT_EQ(table.Add(MakeTicket()).status().code(), absl::StatusCode::kResourceExhausted);
  table.Stop(absl::UnavailableError("stopped"));
}

}  // namespace
}  // namespace spl::decode
