// The table of a decode worker's tickets by itself.
#include "services/decode/ticket_table.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "services/decode/writer_fence.h"
#include "tests/support/eventually.h"

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

// Says what a test wants; asks nobody.
class FakeProofs final : public WriterProofs {
 public:
  bool Gone(const TicketWriter& writer) const override {
    std::lock_guard lock(mutex_);
    return gone_ == writer.channel_address;
  }
  bool Ask(const TicketWriter&, const RandomId&, std::function<void()> on_quiet) override {
    std::lock_guard lock(mutex_);
    asked_.push_back(std::move(on_quiet));
    return true;
  }
  bool Cut(const TicketWriter&) override {
    ++num_cut;
    return true;
  }
  void SetGone(const std::string& address) {
    std::lock_guard lock(mutex_);
    gone_ = address;
  }
  std::function<void()> TakeAsked() {
    std::lock_guard lock(mutex_);
    if (asked_.empty()) return nullptr;
    auto first = std::move(asked_.front());
    asked_.erase(asked_.begin());
    return first;
  }

  std::atomic<int> num_cut{0};

 private:
  mutable std::mutex mutex_;  // guards all below
  std::string gone_ = "nobody";
  std::vector<std::function<void()>> asked_;
};

class QuarantineTest : public ::testing::Test {
 protected:
  void TearDown() override { table_.Stop(absl::UnavailableError("stopped")); }
  RandomId Add(std::chrono::milliseconds ttl, const std::string& channel) {
    auto ticket = MakeTicket();
    ticket->ttl = ttl;
    ticket->writer.channel_address = channel;
    const RandomId id = ticket->id;
    generation_ = table_.Add(std::move(ticket)).value();
    return id;
  }
  bool Quarantined(size_t num) {
    return test::Eventually([&] { return table_.counts().quarantined == num; });
  }

  FakeProofs proofs_;
  TicketTable table_{64, &proofs_};
  uint64_t generation_ = 0;
};

TEST_F(QuarantineTest, TimeAloneDoesNotFreeATicketWhoseWriterMayBePaused) {
  Add(std::chrono::milliseconds(1), "w:1");
  ASSERT_TRUE(Quarantined(1));
  ASSERT_TRUE(test::Eventually([&] { return proofs_.num_cut > 0; }));  // far beyond two ttl
  EXPECT_EQ(table_.counts().quarantined, 1u);
  EXPECT_EQ(table_.counts().cut_total, 1u);
  proofs_.SetGone("w:1");
  EXPECT_TRUE(Quarantined(0));
  EXPECT_EQ(proofs_.num_cut, 1);
}

TEST_F(QuarantineTest, AWriterThatIsGoneFreesItsTicketsAtOnceAndNoOthers) {
  const RandomId first = Add(std::chrono::seconds(600), "w:1");
  table_.Release(first, generation_, false, absl::CancelledError("given up"));
  const RandomId second = Add(std::chrono::seconds(600), "w:2");
  table_.Release(second, generation_, false, absl::CancelledError("given up"));
  Add(std::chrono::seconds(600), "w:1");  // reserved still: it may be committed
  EXPECT_EQ(table_.counts().quarantined, 2u);
  proofs_.SetGone("w:1");
  EXPECT_TRUE(Quarantined(1));
  EXPECT_EQ(table_.counts().reserved, 1u);
  proofs_.SetGone("w:2");
  EXPECT_TRUE(Quarantined(0));
}

TEST_F(QuarantineTest, TheWriterIsAskedFromTheTicketsEndOn) {
  Add(std::chrono::milliseconds(1), "w:1");
  std::function<void()> asked;
  ASSERT_TRUE(test::Eventually([&] { return (asked = proofs_.TakeAsked()) != nullptr; }));
  EXPECT_EQ(table_.counts().quarantined, 1u);
  asked();  // it is quiet
  EXPECT_EQ(table_.counts().quarantined, 0u);
}

// A router that has not noticed yet names a writer whose connection has ended: that is a proof, too. An address that
// was never seen is none, whatever rewrites addresses on the way.
TEST(WriterFenceTest, AWriterThatWasGoneBeforeTheReservationIsGone) {
  auto writer = transport::KvTransport::Create({}), reader = transport::KvTransport::Create({});
  ASSERT_TRUE(writer.ok() && reader.ok());
  auto memory = (*reader)->Allocate(4096);
  ASSERT_TRUE(memory.ok()) << memory.status();
  auto channel = (*writer)->Connect({(*reader)->listen_address(), (*memory)->packed_rkey(),
                                     reinterpret_cast<uint64_t>((*memory)->data()), 4096, transport::HostId()},
                                    std::chrono::seconds(10));
  ASSERT_TRUE(channel.ok()) << channel.status();
  WriterFence fence(reader->get(), {});
  v1::KvWriter named;
  named.set_grpc_address("127.0.0.1:1");
  named.set_channel_address((*channel)->local_address());
  EXPECT_FALSE(fence.Gone(fence.Note(named, std::chrono::seconds(60))));
  ASSERT_TRUE((*channel)->Close(std::chrono::seconds(10)).ok());
  EXPECT_TRUE(test::Eventually([&] { return fence.Gone(fence.Note(named, std::chrono::seconds(60))); }));
  named.set_channel_address("127.0.0.1:2");
  EXPECT_FALSE(fence.Gone(fence.Note(named, std::chrono::seconds(60))));
  fence.Stop();
  (*writer)->Stop();
  memory->reset();
  (*reader)->Stop();
}

// A short answer may be complete before the router's call for its tokens arrives.
TEST(TicketTableTest, TheStreamOfATicketThatIsGoneWaitsForItsReader) {
  TicketTable table(64);
  const auto add = [&] {
    auto ticket = MakeTicket();
    const RandomId id = ticket->id;
    const auto stream = ticket->stream;
    return std::tuple(id, *table.Add(std::move(ticket)), stream);
  };
  const auto [id, generation, stream] = add();
  table.Drop(id, absl::OkStatus());
  EXPECT_EQ(table.counts().reserved, 0u);
  EXPECT_EQ(table.FindStream(id, generation + 1).status().code(), absl::StatusCode::kNotFound);
  const auto found = table.FindStream(id, generation);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*found, stream);
  EXPECT_EQ(table.FindStream(id, generation).status().code(), absl::StatusCode::kNotFound) << "one reader";

  const auto [released, its_generation, unused] = add();
  table.Drop(released, absl::OkStatus());
  table.Release(released, its_generation, true, absl::CancelledError("given up"));
  EXPECT_EQ(table.FindStream(released, its_generation).status().code(), absl::StatusCode::kNotFound);

  auto given_up = MakeTicket();
  given_up->cancelled->store(true);
  const RandomId its_id = given_up->id;
  const uint64_t last = *table.Add(std::move(given_up));
  table.Drop(its_id, absl::CancelledError("given up"));
  EXPECT_EQ(table.FindStream(its_id, last).status().code(), absl::StatusCode::kNotFound);
  table.Stop(absl::UnavailableError("stopped"));
}

TEST(TicketTableTest, StreamsThatNobodyReadsGo) {
  TicketTable table(2, nullptr, std::chrono::milliseconds(0));
  std::weak_ptr<TokenStream> left;
  {
    auto ticket = MakeTicket();
    left = ticket->stream;
    const RandomId id = ticket->id;
    ASSERT_TRUE(table.Add(std::move(ticket)).ok());
    table.Drop(id, absl::OkStatus());
  }
  EXPECT_TRUE(test::Eventually([&] { return left.expired(); }));
  table.Stop(absl::UnavailableError("stopped"));
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
